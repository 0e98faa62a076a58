"""Reading what providers send: sizes before parsing, every number with its unit and range, and words for what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from pricing.feeds.contract import MOST_BODY_BYTES, MOST_WORDS, Answer, Failed, Handle, Shown, Trouble
from pricing.money import usd_to_uusd

MOST_USD_PER_HOUR = 1_000.0  # of one machine; above it something else was meant
MOST_MBPS = 400_000.0
MOST_TEXT = 200
MOST_REMARK = 120
MOST_RETRY_S = 3_600.0
_INVITE = re.compile(r"echo2-invite-1\.\S+")  # a provider may repeat the request in its error
_BLANK = re.compile(r"[^\x20-\x7e]+")


class Unreadable(ValueError):
    """A field has no value that it may have; the message names field, value and what was expected."""


def document(answer: Answer) -> Any | Failed:
    """The JSON of a reply, or what is wrong with it."""
    if len(answer.body) > MOST_BODY_BYTES:
        return Failed(Trouble.MALFORMED, f"the reply has {len(answer.body)} bytes, more than {MOST_BODY_BYTES}")
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return Failed(Trouble.MALFORMED, f"the reply is not JSON: {words_of(answer.body)}")


def words_of(body: bytes | str) -> str:
    """The first printable words of a reply, for people."""
    text = body[: 4 * MOST_WORDS].decode("utf-8", "replace") if isinstance(body, bytes) else body
    return _BLANK.sub(" ", _INVITE.sub("[invite]", text)).strip()[:MOST_WORDS] or "(empty)"


def error_words(answer: Answer, *names: str) -> str:
    """The first of the named texts in a JSON error, otherwise the body's first words."""
    parsed = document(answer)
    if isinstance(parsed, Mapping):
        for name in names:
            if isinstance(parsed.get(name), str):
                return words_of(parsed[name])
    return words_of(answer.body)


def retry_after_s(answer: Answer) -> float | None:
    """Seconds to wait, if the reply says so and means something possible."""
    try:
        seconds = float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(seconds, 0.0), MOST_RETRY_S) if isfinite(seconds) else None


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise Unreadable(f"{name} is {shown(value)}: expected an object")
    return value


def number(record: Mapping[str, Any], name: str, unit: str, *, least: float = 0.0, most: float) -> float | None:
    """A number in its range; None when it is absent or null. Raises Unreadable."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:  # NaN is in no range
        raise Unreadable(f"{name} is {shown(value)}: expected {unit}, {least:g} to {most:g}")
    return float(value)


def needed(record: Mapping[str, Any], name: str, unit: str, *, least: float = 0.0, most: float) -> float:
    """A number that must be there. Raises Unreadable."""
    value = number(record, name, unit, least=least, most=most)
    if value is None:
        raise Unreadable(f"{name} is missing: expected {unit}")
    return value


def price(record: Mapping[str, Any], name: str, *, least_usd: float = 0.0) -> int | None:
    """USD per hour as micro-USD, rounded up; None when absent. Raises Unreadable."""
    usd = number(record, name, "USD per hour", least=least_usd, most=MOST_USD_PER_HOUR)
    return None if usd is None else uusd_up(usd)


def uusd_up(usd: float) -> int:
    """Micro-USD that cover an amount: what we owe is never taken for less."""
    whole = usd_to_uusd(usd)
    return whole + (usd > whole / 1_000_000)


def text(record: Mapping[str, Any], name: str) -> str:
    """A short text; "" when absent or null. Raises Unreadable."""
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise Unreadable(f"{name} is {shown(value)}: expected a text of at most {MOST_TEXT} characters")
    return _BLANK.sub(" ", value)


def remark(record: Mapping[str, Any], name: str) -> str:
    """Free text for people, which decides nothing: cut, and without invites. "" for what is no text."""
    value = record.get(name)
    return words_of(value)[:MOST_REMARK] if isinstance(value, str) and value else ""


def identifier(record: Mapping[str, Any], name: str) -> str:
    """The name of a thing at the provider: it becomes part of a path. Raises Unreadable."""
    value = record.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return str(value)
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", value):
        return value
    raise Unreadable(f"{name} is {shown(value)}: expected an identifier")


def ours(
    records: Iterable[object], label: str, prefix: str, read: Callable[[Mapping[str, Any]], Handle]
) -> tuple[tuple[Handle, ...], tuple[str, ...]]:
    """The machines of a list whose label starts with `prefix`, and words for each of them that cannot be told apart.

    One that has a bad field elsewhere is shown as unknown: to leave it out would say that it is gone.
    """
    handles, skipped = [], []
    for record in records:
        found = record.get(label) if isinstance(record, Mapping) else None
        if not isinstance(record, Mapping) or not isinstance(found, str) or not found.startswith(prefix):
            continue
        try:
            handles.append(read(record))
        except Unreadable as error:
            try:
                handles.append(Handle(identifier(record, "id"), text(record, label), Shown.UNKNOWN, words=str(error)))
            except Unreadable as worse:
                skipped.append(str(worse))
    return tuple(handles), tuple(skipped)


def timestamp(value: object) -> float | None:
    """RFC 3339 as Unix seconds; None when it is none."""
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        return None
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def shown(value: object) -> str:
    """A value in words, cut."""
    text_ = _INVITE.sub("[invite]", repr(value))
    return text_ if len(text_) <= 80 else f"{text_[:80]}…"
