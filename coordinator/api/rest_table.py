"""The shape of a REST route. One table of these drives registration, authorisation, OpenAPI and the role tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from aiohttp import web
from pydantic import BaseModel

from coordinator.service.deps import Deps
from coordinator.service.operator_done import Done
from coordinator.service.ports import Tx
from coordinator.service.tokens import Caller, no_token
from coordinator.wire.rest import NoQuery

Model = TypeVar("Model", bound=BaseModel)
Role = Literal["public", "viewer", "author", "admin"]
BodyKind = Literal["none", "json", "optional_json", "stream"]


@dataclass(frozen=True, slots=True)
class RestLimits:
    """Bounds of the REST API; tests shrink them."""

    json_bytes: int = 1 << 20
    json_depth: int = 32
    json_read_s: float = 15.0  # a whole JSON body
    block_s: float = 30.0  # between two blocks of an upload
    upload_s: float = 3600.0
    uploads_at_once: int = 4
    streams_at_once: int = 256
    heartbeat_s: float = 15.0
    send_s: float = 30.0  # a client that takes no event for this long is let go
    same_key_wait_s: float = 30.0
    ready_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Write:
    """A command to run in one transaction, together with its idempotency record."""

    action: Callable[[Tx], Awaitable[Done]]


Outcome: TypeAlias = BaseModel | Write | web.StreamResponse


@dataclass(frozen=True, slots=True)
class Call:
    """A decoded and authorised request."""

    deps: Deps
    limits: RestLimits
    request: web.Request
    path: Mapping[str, str]
    signed_in: Caller | None  # None on public routes only
    query: BaseModel
    body: object  # the decoded model, or files.Received; None without a body

    @property
    def caller(self) -> Caller:
        """Who asks, on a route that needs a token."""
        if self.signed_in is None:
            raise no_token()
        return self.signed_in

    @property
    def now(self) -> float:
        """The coordinator's time."""
        return self.deps.clock.now()

    def query_as(self, kind: type[Model]) -> Model:
        """The decoded query; `kind` is what the route's table row names."""
        assert isinstance(self.query, kind)
        return self.query

    def body_as(self, kind: type[Model]) -> Model:
        """The decoded body; `kind` is what the route's table row names."""
        assert isinstance(self.body, kind)
        return self.body


Handler: TypeAlias = Callable[[Call], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table. `answer` None: the response is not JSON, and `media` says what it is."""

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    role: Role  # the least that may call it
    tag: str
    summary: str
    handler: Handler
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    body_kind: BodyKind = "none"
    query: type[BaseModel] = NoQuery
    status: int = 200
    media: str = "application/json"

    @property
    def is_idempotent_post(self) -> bool:
        """Whether the route takes Idempotency-Key."""
        return self.method == "POST"
