"""The board: where the coordinator keeps the latest published values for those who come by HTTPS, and what they say to it.

State, like everything published: a topic holds the latest value of each (author, slot), each with a number of its own that only grows.
A reader asks for what is newer than the number it has; it may miss values that newer ones replaced, never the last ones.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from p2p.domain import strict_json as js
from p2p.domain.control_frames import MAX_MESSAGE
from p2p.errors import ControlRefused

MAX_TEXT = 512 << 10  # characters of a poll's answer
MAX_POLLED = 64  # topics in one poll
MAX_NUMBER = 2**53
TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,191}")
SLOT = re.compile(r"[A-Za-z0-9._:/-]{0,191}")
PROTOCOL = re.compile(r"/echo2/[a-z0-9./-]{1,64}")
_AUTHOR = re.compile(r"[0-9a-f]{64}")
_BASE64 = re.compile(r"[A-Za-z0-9+/=]*")


@dataclass(frozen=True, slots=True)
class Posted:
    """A value on the board: who (Ed25519 key, hex) said what under which topic."""

    number: int
    topic: str
    author: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """What is newer than a poll's number, oldest first; `after` is the number for the next poll."""

    after: int
    values: tuple[Posted, ...]


class Board:
    """The latest values of all topics, at most `most_bytes` in all, `most_of_author` of one author, `most_slots` of one author and topic.

    The oldest go first. `keeper` is the author (key, hex) whose board it is: the last two bounds are not for its values, and they are the last to go.
    """

    def __init__(self, *, keeper: str = "", most_bytes: int = 64 << 20, most_of_author: int = 128, most_slots: int = 64) -> None:
        self._keeper = keeper
        self._most_bytes = most_bytes
        self._most_of_author = most_of_author
        self._most_slots = most_slots
        self._bytes = 0
        self._number = 0
        self._values: OrderedDict[tuple[str, str, str], Posted] = OrderedDict()  # by number, ascending
        self._of_author: dict[str, OrderedDict[tuple[str, str, str], None]] = {}

    def put(self, topic: str, author: str, slot: str, payload: bytes) -> None:
        """Make `payload` the author's value of the slot."""
        place = (topic, author, slot)
        if place in self._values:
            self._drop(place)
        self._number += 1
        self._values[place] = Posted(self._number, topic, author, payload)
        self._bytes += len(payload)
        own = self._of_author.setdefault(author, OrderedDict())
        own[place] = None
        if author != self._keeper:
            self._bound_author(own, topic)
        while self._bytes > self._most_bytes:
            self._drop(next((one for one in self._values if one[1] != self._keeper), next(iter(self._values))))

    def clear(self, topic: str) -> None:
        """Take down all that was said under the topic; the numbers go on."""
        for place in [place for place in self._values if place[0] == topic]:
            self._drop(place)

    def page(self, topics: frozenset[str], after: int, *, most_bytes: int = 256 << 10) -> Page:
        """Values of the topics newer than `after`, oldest first, about `most_bytes` of them. A number from before a restart starts over."""
        if after > self._number:
            after = 0
        found: list[Posted] = []
        size, reached = 0, self._number
        for posted in self._values.values():
            if posted.number <= after or posted.topic not in topics:
                continue
            if found and size + len(posted.payload) > most_bytes:
                reached = found[-1].number
                break
            found.append(posted)
            size += len(posted.payload)
        return Page(reached, tuple(found))

    def _bound_author(self, own: OrderedDict[tuple[str, str, str], None], topic: str) -> None:
        slots = [place for place in own if place[0] == topic]
        if len(slots) > self._most_slots:
            self._drop(slots[0])
        if len(own) > self._most_of_author:
            self._drop(next(iter(own)))

    def _drop(self, place: tuple[str, str, str]) -> None:
        posted = self._values.pop(place)
        self._bytes -= len(posted.payload)
        own = self._of_author[posted.author]
        del own[place]
        if not own:
            del self._of_author[posted.author]


@dataclass(frozen=True, slots=True)
class Publication:
    """Body of a publish call: put this on the board for me."""

    topic: str
    slot: str
    payload: bytes

    def to_bytes(self) -> bytes:
        return js.canonical({"topic": self.topic, "slot": self.slot, "payload": _text(self.payload)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Publication:
        """Raises ControlRefused."""
        fields = _fields(data, "publication", {"topic", "slot", "payload"}, limit=2 * MAX_MESSAGE)
        try:
            return cls(
                js.text(fields["topic"], "topic", TOPIC),
                js.text(fields["slot"], "slot", SLOT),
                _bytes(fields["payload"], "payload"),
            )
        except js.JsonRefused as error:
            raise ControlRefused(f"the publication is refused: {error}") from error


@dataclass(frozen=True, slots=True)
class Poll:
    """Body of a poll: what is newer than `after` on these topics?"""

    topics: tuple[str, ...]
    after: int

    def to_bytes(self) -> bytes:
        return js.canonical({"topics": list(self.topics), "after": self.after}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Poll:
        """Raises ControlRefused."""
        fields = _fields(data, "poll", {"topics", "after"}, limit=MAX_MESSAGE)
        try:
            topics = js.array(fields["topics"], "topics", most=MAX_POLLED)
            return cls(
                js.each(topics, "topics", lambda value, place: js.text(value, place, TOPIC)),
                js.integer(fields["after"], "after", least=0, most=MAX_NUMBER),
            )
        except js.JsonRefused as error:
            raise ControlRefused(f"the poll is refused: {error}") from error


@dataclass(frozen=True, slots=True)
class Ask:
    """Body of a request to the coordinator: the protocol and what is asked. The answer is the body of the reply."""

    protocol: str
    payload: bytes

    def to_bytes(self) -> bytes:
        return js.canonical({"protocol": self.protocol, "payload": _text(self.payload)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ask:
        """Raises ControlRefused."""
        fields = _fields(data, "request", {"protocol", "payload"}, limit=2 * MAX_MESSAGE)
        try:
            return cls(js.text(fields["protocol"], "protocol", PROTOCOL), _bytes(fields["payload"], "payload"))
        except js.JsonRefused as error:
            raise ControlRefused(f"the request is refused: {error}") from error


def page_to_bytes(page: Page) -> bytes:
    """The answer to a poll."""
    values = [[one.number, one.topic, one.author, _text(one.payload)] for one in page.values]
    return js.canonical({"after": page.after, "values": values}).encode()


def page_from_bytes(data: bytes) -> Page:
    """Read the answer to a poll. Raises ControlRefused."""
    fields = _fields(data, "page", {"after", "values"}, limit=MAX_TEXT)
    try:
        values = js.each(js.array(fields["values"], "values", most=MAX_TEXT), "values", _posted)
        return Page(js.integer(fields["after"], "after", least=0, most=MAX_NUMBER), values)
    except js.JsonRefused as error:
        raise ControlRefused(f"the page is refused: {error}") from error


def _posted(value: object, place: str) -> Posted:
    row = js.array(value, place, most=4)
    if len(row) != 4:
        js.refuse(place, value, "[number, topic, author, payload]")
    return Posted(
        js.integer(row[0], f"{place}[0]", least=0, most=MAX_NUMBER),
        js.text(row[1], f"{place}[1]", TOPIC),
        js.text(row[2], f"{place}[2]", _AUTHOR),
        _bytes(row[3], f"{place}[3]"),
    )


def _fields(data: bytes, kind: str, keys: set[str], *, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise ControlRefused(f"the {kind} holds {len(data)} bytes, above the limit of {limit}")
    try:
        return js.record(js.parse(data.decode("ascii"), limit=limit), kind, frozenset(keys))
    except (js.JsonRefused, UnicodeDecodeError) as error:
        raise ControlRefused(f"the {kind} is refused: {error}") from error


def _text(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def _bytes(value: object, place: str) -> bytes:
    text = js.text(value, place, _BASE64)
    try:
        payload = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise js.JsonRefused(f"{place} is not base64: {error}") from error
    if len(payload) > MAX_MESSAGE:
        raise js.JsonRefused(f"{place} holds {len(payload)} bytes, above the limit of {MAX_MESSAGE}")
    return payload
