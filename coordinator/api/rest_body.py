"""Reads and decodes what clients send: sizes, time, nesting and encodings are limited before anything is parsed."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from coordinator.api.problems import from_validation
from coordinator.api.rest_table import RestLimits
from coordinator.service.operator_errors import Kind, RequestRefused, invalid

Model = TypeVar("Model", bound=BaseModel)
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NOT_BRACKETS = re.compile(rb"[^\[\]{}]+")


def check_headers(request: web.Request, *, media: str) -> None:
    """Refuse encodings and media types that are not taken, before the body is read."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestRefused(
            Kind.UNSUPPORTED,
            "content_encoding_not_taken",
            f"Content-Encoding is {encoding[:100]!r}; bodies are taken as they are",
            field="Content-Encoding",
            fix="send the body uncompressed, without Content-Encoding",
        )
    if request.can_read_body and request.content_type != media:
        raise RequestRefused(
            Kind.UNSUPPORTED,
            "media_type_not_taken",
            f"Content-Type is {request.content_type[:100]!r}; this route takes {media}",
            field="Content-Type",
            fix=f"send `Content-Type: {media}`",
        )


async def read_json_bytes(request: web.Request, limits: RestLimits) -> bytes:
    """The body as sent. Raises RequestRefused when it is too long or too slow."""
    check_headers(request, media="application/json")
    declared = request.content_length
    if declared is not None and declared > limits.json_bytes:
        raise _too_large(limits.json_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(limits.json_read_s):
            async for block in request.content.iter_any():
                data += block
                if len(data) > limits.json_bytes:
                    raise _too_large(limits.json_bytes)
    except TimeoutError as error:
        raise too_slow(f"the body did not arrive within {limits.json_read_s:g} s") from error
    return bytes(data)


def _too_large(limit: int) -> RequestRefused:
    words = f"a JSON body holds at most {limit} bytes"
    return RequestRefused(Kind.TOO_LARGE, "body_too_large", words, field="body", fix="upload files with POST /api/v1/files")


def too_slow(words: str) -> RequestRefused:
    """The refusal of a body that trickles in."""
    return RequestRefused(Kind.SLOW, "body_too_slow", words, field="body", fix="send the body without pauses")


def decode_json(data: bytes, kind: type[Model], *, depth: int) -> Model:
    """The model in a JSON body. Raises RequestRefused, naming the field."""
    check_depth(data, depth)
    try:
        check_values(from_json(data, allow_inf_nan=True, allow_partial=False))
        return kind.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise from_validation(error, kind=kind, place="body") from error
    except ValueError as error:
        words = f"the body is not JSON: {error}"
        raise RequestRefused(Kind.MALFORMED, "json_syntax", words, field="body", fix="send one JSON document") from error


def check_depth(data: bytes, limit: int) -> None:
    """Refuse arrays and objects nested deeper than `limit`, without parsing."""
    level = 0
    for bracket in _NOT_BRACKETS.sub(b"", _STRING.sub(b"", data)):
        level += 1 if bracket in b"[{" else -1
        if level > limit:
            raise RequestRefused(
                Kind.MALFORMED,
                "json_too_deep",
                f"the body nests arrays and objects deeper than {limit}",
                field="body",
                fix="send a flatter document",
            )


def check_values(value: object, path: str = "") -> None:
    """Refuse what JSON parsers take and no field can hold: numbers that overflow, NUL in text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_values(name, path or "body")
            check_values(inner, f"{path}.{name}"[-200:] if path else str(name)[:200] or "body")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            check_values(inner, f"{path}.{place}" if path else str(place))
    elif isinstance(value, float) and not math.isfinite(value):
        raise invalid("number_not_finite", f"{path or 'body'} is not a finite number", field=path or "body", fix="send a number")
    elif isinstance(value, str) and "\x00" in value:
        raise invalid("nul_in_text", f"{path or 'body'} holds a NUL character", field=path or "body", fix="remove it")


def decode_query(request: web.Request, kind: type[Model]) -> Model:
    """The model in a query string. Raises RequestRefused, naming the parameter."""
    values: dict[str, str] = {}
    for name, text in request.query.items():
        if name in values:
            words = f"query parameter {name[:100]!r} is given twice"
            raise invalid("query_repeated", words, field=name[:100] or "query", fix="give it once")
        values[name] = text
    check_values(values)
    try:
        return kind.model_validate_strings(values)
    except ValidationError as error:
        raise from_validation(error, kind=kind, place="query") from error


async def blocks(request: web.Request, limits: RestLimits) -> AsyncIterator[bytes]:
    """The body of an upload, block by block, each in time. Raises RequestRefused."""
    loop = asyncio.get_running_loop()
    until = loop.time() + limits.upload_s
    while True:
        wait_s = min(limits.block_s, until - loop.time())
        try:
            async with asyncio.timeout(wait_s):
                block = await request.content.readany()
        except TimeoutError as error:
            raise too_slow(
                f"no byte of the upload arrived for {limits.block_s:g} s, or it took over {limits.upload_s:g} s"
            ) from error
        if not block:
            return
        yield block
