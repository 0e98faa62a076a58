"""Tool calls in a model's text, by the way that its makers taught it to write them. Text that is none is content, never an error."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

CALLS_LIMIT = 64
# <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro's form, which Qwen 2.5 and 3 use as well.
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is a JSON object as text, as in OpenAI's API."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A model's turn: what it says, and the tools that it calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def parse(text: str, parser: str) -> Parsed:
    """The calls in a model's text. A block that is no call stays content, as all of the text does when there are too many."""
    if parser != "hermes":
        return Parsed(text)
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        call = _hermes(found[1])
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    content = _HERMES.sub(take, text)
    if not calls or len(calls) > CALLS_LIMIT:
        return Parsed(text)
    return Parsed(content.strip(), tuple(calls))


def _hermes(block: str) -> ToolCall | None:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
