"""Tool calls in a model's text: Hermes' form, as its authors and Qwen's chat template write it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.environments.tool_calls import CALLS_LIMIT, Parsed, ToolCall, parse


def test_calls_are_taken_out_of_the_text() -> None:
    text = 'Let me look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    assert parse(text, "hermes") == Parsed("Let me look.", (ToolCall("add", '{"a": 1, "b": [2]}'), ToolCall("now", "{}")))


def test_arguments_written_as_text_are_the_same_call() -> None:
    assert parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "hermes").calls == (
        ToolCall("f", '{"a": 1}'),
    )


@pytest.mark.parametrize(
    "block",
    [
        "not json",
        '{"name": ',
        "[1]",
        '{"arguments": {}}',
        '{"name": ""}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": "x"}',
        "[" * 100_000,
        '{"name": "f\\ud800"}',
        '{"name": "f", "arguments": {"a": "\\udfff"}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": NaN}}',
    ],
)
def test_what_is_no_call_is_content(block: str) -> None:
    text = f"a <tool_call>{block}</tool_call> b"
    assert parse(text, "hermes") == Parsed(text)


def test_good_calls_stand_beside_bad_ones() -> None:
    parsed = parse('<tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call>', "hermes")
    assert parsed == Parsed("<tool_call>{</tool_call>", (ToolCall("f", "{}"),))


def test_without_a_parser_and_beyond_the_limit_all_is_content() -> None:
    one = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(one, "none") == Parsed(one)
    many = one * (CALLS_LIMIT + 1)
    assert parse(many, "hermes") == Parsed(many)


class Counted(str):
    """A text that counts the characters it is searched for."""

    searched = 0

    def find(self, word: str, start: int = 0) -> int:  # type: ignore[override]
        place = str.find(self, word, start)
        self.searched += (len(self) if place < 0 else place) - start
        return place


@pytest.mark.parametrize("text", ["<tool_call>" * 20_000, "<tool_call>" + " " * 200_000, "<tool_call>{}</tool_call>" * 9_000])
def test_text_of_any_kind_is_read_once_or_twice(text: str) -> None:
    """A model that repeats itself costs no more than its length: a pattern that tries every end of every start would not end here."""
    counted = Counted(text)
    assert parse(counted, "hermes") == Parsed(text)
    assert 0 < counted.searched <= 2 * len(text)


@given(st.text(alphabet='<>/tool_ca{}":name fx', max_size=80))
def test_any_text_is_parsed(text: str) -> None:
    """No text is an error, and arguments are always a JSON object."""
    for call in parse(text, "hermes").calls:
        assert isinstance(json.loads(call.arguments), dict)
