"""Chat messages as environments write them and as OpenAI's API answers them: plain JSON on our side, objects with names on theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.environments.tool_calls import Parsed

BYTES_LIMIT = 4 << 20  # of the messages of one request, as JSON; as much of its tools
ROLES = ("system", "developer", "user", "assistant", "tool")

Plain = dict[str, Any]


class Unusable(Exception):
    """A request that the record cannot serve; the words say why."""


class Item(dict[str, Any]):
    """A JSON object whose keys are attributes too, as those of OpenAI's client are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The plain object."""
        return dict(json.loads(json.dumps(self)))


def plain(messages: object) -> list[Plain]:
    """Messages as JSON objects without nulls, text parts joined. Raises Unusable in words."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise Unusable(f"messages is {type(messages).__name__}; give a list of at least one message")
    return _within([_message(place, message) for place, message in enumerate(messages)], "messages")


def plain_tools(tools: object) -> list[Plain]:
    """Tools as JSON objects. Raises Unusable."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise Unusable(f"tools is {type(tools).__name__}; give a list of OpenAI tools")
    return _within([_json(tool, f"tool {place}") for place, tool in enumerate(tools)], "tools")


def _within(given: list[Plain], what: str) -> list[Plain]:
    size = len(json.dumps(given))
    if size > BYTES_LIMIT:
        raise Unusable(f"{what} hold {size} bytes in all, above the limit of {BYTES_LIMIT}")
    return given


def _message(place: int, message: object) -> Plain:
    given = _json(message, f"message {place}")
    if given.get("role") not in ROLES:
        raise Unusable(f"message {place} has role {given.get('role')!r}; it must be one of {', '.join(ROLES)}")
    found = {name: value for name, value in given.items() if value is not None and value != []}
    found["content"] = _text(place, given.get("content"))
    return found


def _text(place: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise Unusable(f"message {place} holds something else than text: text is all that a record holds")


def _json(value: object, what: str) -> Plain:
    if not isinstance(value, Mapping) and hasattr(value, "model_dump"):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise Unusable(f"{what} is {type(value).__name__}; give a dict")
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable(f"{what} is no JSON: {error}") from error
    if len(text) > BYTES_LIMIT:
        raise Unusable(f"{what} holds {len(text)} bytes, above the limit of {BYTES_LIMIT}")
    return dict(json.loads(text))


def answer(number: int, parsed: Parsed, *, stop_reason: str, prompt_tokens: int, completion_tokens: int) -> Item:
    """The model's turn `number` as a ChatCompletion of OpenAI's API."""
    calls = [
        Item(id=f"call_{number}_{place}", type="function", function=Item(name=call.name, arguments=call.arguments))
        for place, call in enumerate(parsed.calls)
    ]
    message = Item(role="assistant", content=parsed.content, tool_calls=calls or None)
    ending = "length" if stop_reason == "length" else "tool_calls" if calls else "stop"
    usage = Item(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens)
    choice = Item(index=0, message=message, finish_reason=ending, logprobs=None)
    return Item(id=f"turn-{number}", object="chat.completion", created=0, model="policy", choices=[choice], usage=usage)
