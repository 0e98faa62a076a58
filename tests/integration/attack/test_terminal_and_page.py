"""What strangers wrote must not steer the operator's terminal or browser."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.dashboard import page
from coordinator.commands import output
from coordinator.commands.jobs import download
from coordinator.errors import CoordinatorError

ESCAPES = ("\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\r", "\x08", "\u202e", "\u2066", "\x00", "\ud800", "\x7f")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(output.console, "_file", out)  # its property reads as the stream of now: undone, it would stay
    return out


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_escape_leaves_by_words_or_tables(shown: io.StringIO, escape: str) -> None:
    output.console.print(f"job is failed: {escape}")
    output.show_table(f"name{escape}", ("prompt", "reward"), [(f"a{escape}b", 1.0), (None, 2)])
    text = shown.getvalue()
    assert escape not in text
    assert text.encode("utf-8")
    assert "\\x" in text or "\\u" in text or "\\r" in text, "it is spelled out, not dropped"


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_plain_text_is_printable_and_says_the_same(text: str) -> None:
    plain = output.plain(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", plain)
    if text.isprintable() and "\u200e" not in text:
        assert plain == text


def test_the_page_puts_strangers_text_in_as_text_only() -> None:
    """Nothing in the script makes markup of a string, and the policy would not run it."""
    script = re.search(r"<script>(.*)</script>", page().html, re.DOTALL)
    assert script is not None
    for maker in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("on',
        "srcdoc",
    ):
        assert maker not in script[1], maker
    assert "default-src 'none'" in page().policy
    assert "unsafe" not in page().policy
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]+';", page().policy)


async def test_every_answer_says_what_it_is_and_that_nobody_may_guess(bench: Any) -> None:
    """JSON with a script in it is JSON; a file of a model is a download."""
    for path in ("/api/v1/jobs", "/api/v1/nothing<script>alert(1)</script>", "/", "/healthz"):
        async with bench.client.get(path, headers=bench.headers()) as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff", path
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"], path
            if path != "/":
                assert answer.content_type in ("application/json", "application/problem+json")


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "..", ""])
def test_a_coordinator_cannot_choose_where_a_download_is_written(tmp_path: Path, name: str) -> None:
    class Pretend:
        async def get(self, _: str) -> Any:
            return {"checkpoints": [{"version": 1, "files": [{"name": "config.json"}, {"name": name}]}]}

        async def download(self, _: str, target: Path) -> int:
            raise AssertionError(f"{target} would have been written")

    class Connected:
        def run(self, action: Any) -> Any:
            import asyncio

            return asyncio.run(action(Pretend()))

    with pytest.raises(CoordinatorError, match="no plain name"):
        download(Connected(), "j-1", 1, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
