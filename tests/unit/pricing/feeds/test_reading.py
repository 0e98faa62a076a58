"""Sizes before parsing, ranges with units, words without secrets; price files; what a machine runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pricing.errors import OfferRefused
from pricing.feeds import reading
from pricing.feeds.contract import MOST_BODY_BYTES, Answer, Failed, Trouble
from pricing.feeds.start import environment, start_script
from pricing.feeds.static import MOST_FILE_BYTES, offers_of_file
from pricing.feeds.vast import Vast
from tests.unit.pricing.feeds.answers import reply


def test_a_reply_that_is_too_long_is_not_parsed() -> None:
    failed = reading.document(Answer(200, {}, b"[" * (MOST_BODY_BYTES + 1)))
    assert isinstance(failed, Failed)
    assert failed.trouble is Trouble.MALFORMED
    assert isinstance(reading.document(Answer(200, {}, b"[" * 200_000)), Failed)  # deeper than any parser goes


def test_words_are_printable_short_and_hold_no_invite() -> None:
    assert reading.words_of(b"a\x00\x1b[31m b\n") == "a [31m b"
    assert reading.words_of(b"") == "(empty)"
    assert len(reading.words_of(b"x" * 5000)) == 300
    assert reading.words_of("env: echo2-invite-1.00ff.SECRET refused") == "env: [invite] refused"
    assert reading.error_words(reply({"msg": 5, "detail": "d"}), "msg", "detail") == "d"
    assert reading.error_words(reply({"other": "o"}), "msg") == '{"other": "o"}'


@pytest.mark.parametrize(
    ("header", "seconds"), [("12", 12.0), ("-3", 0.0), ("1e9", 3600.0), ("nan", None), ("soon", None), ("", None)]
)
def test_retry_after(header: str, seconds: float | None) -> None:
    assert reading.retry_after_s(reply(None, 429, retry_after=header)) == seconds


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T00:01:00+00:01", 0.0),
        ("1970-01-01T00:01:00", 60.0),
        ("yesterday", None),
        (5, None),
        ("1" * 300, None),
    ],
)
def test_timestamps(text: object, at: float | None) -> None:
    assert reading.timestamp(text) == at


def test_values_are_shown_cut() -> None:
    assert reading.shown("x" * 200).endswith("…")
    assert reading.text({"label": None}, "label") == ""
    with pytest.raises(reading.Unreadable, match="at most 200 characters"):
        reading.text({"label": "x" * 201}, "label")
    with pytest.raises(reading.Unreadable, match="identifier"):
        reading.identifier({"id": True}, "id")


@given(st.floats(0, 1000))
def test_money_is_never_taken_for_less(usd: float) -> None:
    assert usd <= reading.uusd_up(usd) / 1e6 < usd + 2e-6


def test_a_price_file_in_both_forms() -> None:
    toml = b'[[offer]]\nid = "a"\nusd_per_hour = 0.5\ncompletions_per_second = 2.0\nup_mbps = 100\ndown_mbps = 200\n'
    text = b'[{"id": "a", "usd_per_hour": 0.5, "completions_per_second": 2.0, "up_mbps": 100, "down_mbps": 200}]'
    assert offers_of_file(toml, "toml") == offers_of_file(text, "json")
    assert offers_of_file(toml, "toml")[0].uusd_per_hour == 500_000
    assert offers_of_file(b"", "toml") == ()


@pytest.mark.parametrize(
    ("content", "form", "words"),
    [
        (b"x" * (MOST_FILE_BYTES + 1), "json", "bytes"),
        (b"{", "json", "is not JSON"),
        (b"a = ", "toml", "is not TOML"),
        (b"\xff", "toml", "is not TOML"),
        (b"[other]\n", "toml", "table 'other'"),
        (b'[[offer]]\nid = "a"\n', "toml", "usd_per_hour is missing"),
    ],
)
def test_a_bad_price_file_is_one_clear_error(content: bytes, form: str, words: str) -> None:
    with pytest.raises(OfferRefused, match=words):
        offers_of_file(content, form)  # type: ignore[arg-type]


def test_a_machine_runs_the_worker_and_then_ends_itself() -> None:
    """The dead man's switch: the worker leaves by itself, and the machine goes with it. No secret is in the script."""
    script = start_script(give_up_min=30, worker_options=("--dtype", "bfloat16", "--name", "a b"), farewell="bye")
    assert script == (
        "echo2-worker join \"$ECHO2_URL\" --price 0 --give-up-after-min 30 --dtype bfloat16 --name 'a b'; "
        "while true; do bye; sleep 60; done"
    )
    assert start_script(give_up_min=1.5, worker_options=(), farewell="").endswith("--give-up-after-min 1.5")
    assert environment(url="https://c.example:7700", invite="echo2-invite-1.a.b") == {
        "ECHO2_URL": "https://c.example:7700",
        "ECHO2_INVITE": "echo2-invite-1.a.b",
    }
    with pytest.raises(ValueError, match="address"):
        environment(url="https://c.example/$(x)", invite="")


def test_a_machine_at_vast_ends_itself_with_its_own_key(tmp_path: Path) -> None:
    """The command is run by a shell, with a library in the place of urllib that says what it was asked."""
    (tmp_path / "urllib").mkdir()
    (tmp_path / "urllib" / "__init__.py").write_text("")
    (tmp_path / "urllib" / "request.py").write_text(
        "def Request(url, method, headers): return method, url, headers\n"
        "def urlopen(asked, timeout): print(*asked[:2], asked[2]['Authorization'], timeout)\n"
    )
    own = {"CONTAINER_ID": "77", "CONTAINER_API_KEY": "own-key", "PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    said = subprocess.run(["bash", "-c", Vast.farewell], env=own, capture_output=True, text=True, check=True).stdout
    assert said == "DELETE https://console.vast.ai/api/v0/instances/77/ Bearer own-key 30\n"
