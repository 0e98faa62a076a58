"""Tool calls in a model's text, by the way that its makers taught it to write them. Text that is none is content, never an error."""

from __future__ import annotations

import json
from dataclasses import dataclass

CALLS_LIMIT = 64
# <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro's form, which Qwen 2.5 and 3 use as well.
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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
    """The calls in a model's text. A block that is no call stays content, as all of the text does when there are too many.

    Takes time in proportion to the text, whatever the model wrote: a regular expression would not.
    """
    if parser != "hermes":
        return Parsed(text)
    calls: list[ToolCall] = []
    content: list[str] = []
    at = 0
    while (begin := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, begin)) >= 0:
        call = _hermes(text[begin + len(_OPEN) : end].strip())
        after = end + len(_CLOSE)
        content.append(text[at : after if call is None else begin])
        calls += [call] if call is not None else []
        at = after
    if not calls or len(calls) > CALLS_LIMIT:
        return Parsed(text)
    return Parsed("".join([*content, text[at:]]).strip(), tuple(calls))


def _hermes(block: str) -> ToolCall | None:
    try:
        call = json.loads(block)
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(arguments, str):  # some models write the object as text
            arguments = json.loads(arguments)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # half a surrogate pair is no text
    except (AttributeError, ValueError, RecursionError):
        return None
    return ToolCall(name, text) if name and isinstance(name, str) and isinstance(arguments, dict) else None
