"""The worker protocol's routes under /worker/v1; `wire/PROTOCOL.md` specifies them."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.worker_calls import Call, Desk, Route, guarded
from coordinator.api.worker_http import FRAME_TYPE, JSON_TYPE, answer, plain
from coordinator.api.worker_routes import (
    account,
    batches,
    confirm,
    control,
    heartbeat,
    join,
    lease,
    leave,
    manifest,
    piece,
    submit,
)
from coordinator.service.control_desk import control_desk
from coordinator.service.deps import Deps
from coordinator.service.seeding import NoSeeder
from coordinator.service.worker_limits import ProtocolLimits
from coordinator.wire.messages import PROTOCOL_VERSION
from coordinator.wire.signing import certificate_message, public_hex
from p2p.adapters.control.desk import Desk as ControlAnswers
from p2p.adapters.control.https import PATHS as CONTROL_PATHS

PREFIX = "/worker/v1"
FRAME_BODY_BYTES = 32 << 20
CONTROL_BODY_BYTES = 128 << 10

__all__ = ["FRAME_TYPE", "PREFIX", "Call", "add_worker_routes", "answer"]


def add_worker_routes(
    app: web.Application,
    deps: Deps,
    *,
    certificate_sha256: str | None,
    limits: ProtocolLimits | None = None,
    trusts_proxy: bool = False,
    answers: ControlAnswers | None = None,
) -> None:
    """Add the protocol to `app`. `certificate_sha256` is that of the TLS certificate served (hex); None behind a proxy.

    `trusts_proxy`: every request comes through a proxy that appends the client's address to X-Forwarded-For.
    Run the app with `auto_decompress=False`: an encoded body must be refused, not expanded.
    """
    answers = answers or control_desk(deps, NoSeeder())
    desk = Desk(deps, limits or ProtocolLimits(), answers, trusts_proxy=trusts_proxy)
    app.on_shutdown.append(desk.close)

    async def identity(_request: web.Request) -> web.Response:
        return plain(_identity(deps, certificate_sha256))

    json_routes: tuple[tuple[str, Route, int], ...] = (
        ("join", join, 16 << 10),
        ("heartbeat", heartbeat, 1 << 20),
        ("lease", lease, 4 << 10),
        ("confirm", confirm, 256 << 10),
        ("account", account, 1 << 10),
        ("leave", leave, 8 << 10),
        *((path, control, CONTROL_BODY_BYTES) for path in CONTROL_PATHS),
    )
    app.router.add_get(f"{PREFIX}/identity", identity)
    for name, handler, body_limit in json_routes:
        app.router.add_post(f"{PREFIX}/{name}", guarded(desk, handler, limit=body_limit, content_type=JSON_TYPE))
    app.router.add_post(f"{PREFIX}/submit", guarded(desk, submit, limit=FRAME_BODY_BYTES, content_type=FRAME_TYPE))
    app.router.add_get(f"{PREFIX}/jobs/{{job}}/manifests/{{version}}", guarded(desk, manifest, limit=0, content_type=""))
    app.router.add_get(f"{PREFIX}/jobs/{{job}}/transfers/{{transfer}}", guarded(desk, batches, limit=0, content_type=""))
    app.router.add_get(f"{PREFIX}/pieces/{{digest}}", guarded(desk, piece, limit=0, content_type=""))


def _identity(deps: Deps, certificate_sha256: str | None) -> dict[str, object]:
    """What a stranger may know: the key an invite pins, and its word for the TLS certificate."""
    statement = deps.key.sign(certificate_message(certificate_sha256)).hex() if certificate_sha256 else ""
    return {
        "public_key": public_hex(deps.key),
        "certificate_sha256": certificate_sha256,
        "statement": statement,
        "protocol_min": PROTOCOL_VERSION,
        "protocol_max": PROTOCOL_VERSION,
        "server_time": deps.clock.now(),
    }
