"""What both stand-ins share: requests in, replies out, each held against the schema file, with the drawn fault in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema

from tests.standin.faults import AFTER, BEFORE, WRONG_SHAPES, Faults
from tests.standin.world import World

SCHEMAS = Path(__file__).parent / "schemas"
KEY = "standin-key-0123456789"


@dataclass
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # lower-case names
    body: bytes


@dataclass
class Reply:
    """`is_lost`: nothing comes back. `is_cut`: the body ends early."""

    status: int
    content: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    text: str | None = None  # instead of `content`
    is_lost: bool = False
    is_cut: bool = False

    @property
    def body(self) -> bytes:
        if self.text is not None:
            return self.text.encode()
        return b"" if self.content is None else json.dumps(self.content).encode()


class Language(Protocol):
    """One provider's shapes."""

    schema: str

    def operation(self, request: Request) -> tuple[str, str] | None:
        """Its name and the id in its path."""
        ...

    def carry_out(self, name: str, subject: str, request: Request, body: Any, fault: str | None) -> Reply: ...

    def too_many(self) -> Any: ...

    def refusal(self, status: int, words: str) -> Reply: ...

    def request_schema(self, name: str) -> tuple[str | None, str | None]:
        """Of the query, of the body."""
        ...

    def reply_schema(self, name: str, status: int) -> str | None: ...


class StandIn:
    """A provider that answers. It keeps no clock of its own: `world.now` is its time."""

    def __init__(self, world: World, faults: Faults, language: Language) -> None:
        self.world = world
        self.faults = faults
        self.language = language
        self.asked: list[str] = []
        document = json.loads((SCHEMAS / f"{language.schema}.json").read_text())
        self._defs = document["$defs"]
        self._checks: dict[str, jsonschema.Draft202012Validator] = {}

    def answer(self, request: Request) -> Reply:
        """The reply to one request, with its fault."""
        found = self.language.operation(request)
        if found is None:
            self.world.violations.append(f"{request.method} {request.path} is no documented operation")
            return self.language.refusal(404, "no such route")
        name, subject = found
        self.asked.append(name)
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return self.language.refusal(401, "the key is missing or wrong")
        fault = self.faults.draw(name, self.world.now)
        if fault in BEFORE:
            return self._spoilt_before(fault)
        body = self._checked_request(name, request)
        if isinstance(body, Reply):
            return body
        reply = self.language.carry_out(name, subject, request, body, fault)
        self._check_reply(name, reply, fault)
        return self._spoilt_after(fault, reply) if fault in AFTER else reply

    def _checked_request(self, name: str, request: Request) -> Any:
        query, wanted = self.language.request_schema(name)
        try:
            body = json.loads(request.body) if request.body else None
        except ValueError:
            return self._violation(name, "the body is not JSON")
        for schema, value in ((query, dict(request.query)), (wanted, body)):
            if schema is not None:
                error = next(self._validator(schema).iter_errors(value), None)
                if error is not None:
                    return self._violation(name, f"{error.json_path}: {error.message}")
        if wanted is None and body is not None:
            return self._violation(name, "a body where none is documented")
        return body

    def _violation(self, name: str, words: str) -> Reply:
        self.world.violations.append(f"{name}: {words}")
        return self.language.refusal(422, words)

    def _check_reply(self, name: str, reply: Reply, fault: str | None) -> None:
        """The stand-in holds itself to the documents, too; a fault that is a wrong shape is the exception."""
        schema = self.language.reply_schema(name, reply.status)
        if schema is not None and reply.text is None and fault not in WRONG_SHAPES:
            self._validator(schema).validate(reply.content)

    def _validator(self, name: str) -> jsonschema.Draft202012Validator:
        if name not in self._checks:
            self._checks[name] = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": self._defs})
        return self._checks[name]

    def _spoilt_before(self, fault: str) -> Reply:
        match fault:
            case "429 with Retry-After":
                return Reply(429, self.language.too_many(), {"Retry-After": str(self.world.rng.randint(1, 60))})
            case "429 without":
                return Reply(429, self.language.too_many())
            case "500 as text":
                return Reply(500, text="Internal Server Error")
            case "502 as HTML":
                return Reply(502, text="<html><body><h1>502 Bad Gateway</h1></body></html>")
            case _:
                return Reply(0, is_lost=True)

    def _spoilt_after(self, fault: str, reply: Reply) -> Reply:
        match fault:
            case "timeout, carried out":
                return Reply(0, is_lost=True)
            case "truncated body":
                return Reply(reply.status, reply.content, reply.headers, reply.text, is_cut=True)
            case "500, carried out":
                return Reply(500, text="Internal Server Error")
            case "empty body":
                return Reply(reply.status, text="")
            case _:
                return Reply(200, text="OK")
