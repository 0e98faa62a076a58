"""Turns what pydantic found wrong with a message into one refusal that names field, value and fix."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from coordinator.service.worker_refusals import ProtocolRefusal
from coordinator.wire.messages import Message

M = TypeVar("M", bound=Message)
_SHOWN = 60


def parse(kind: type[M], body: bytes) -> M:
    """The message in a JSON body. Raises ProtocolRefusal."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_message(error) from error


def invalid_message(error: ValidationError) -> ProtocolRefusal:
    """The first thing that is wrong, in words."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    shown = repr(first["input"])
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    detail = f"{field} is {shown}: {first['msg']}{more}"
    return ProtocolRefusal(
        422, "invalid_message", detail, field=field[:200], fix=f"send {field[:200]} as PROTOCOL.md says: {first['msg']}"
    )
