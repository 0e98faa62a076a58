"""Routes on files, workers, invites and tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from coordinator.api.rest_call import received_file
from coordinator.api.rest_table import Call, Route, Write
from coordinator.service import files, invites, operator_workers, tokens
from coordinator.service.operator_done import Done
from coordinator.service.ports import Tx
from coordinator.service.tokens import Caller
from coordinator.wire import rest
from coordinator.wire.signing import public_hex

FILES = "/api/v1/files"
WORKERS = "/api/v1/workers"
WORKER = WORKERS + "/{worker_id}"
INVITES = "/api/v1/invites"
TOKENS = "/api/v1/tokens"


class WorkerCommand(Protocol):
    """drain, quarantine or release."""

    def __call__(self, tx: Tx, caller: Caller, worker_id: str, reason: str, *, now: float) -> Awaitable[Done]: ...


async def upload(call: Call) -> Write:
    """POST /files."""
    received, query = received_file(call), call.query_as(rest.FilesQuery)
    await files.place(call.deps, received, query)

    async def action(tx: Tx) -> Done:
        return Done(await files.record(tx, received, query, owner=call.caller.token.id, now=call.now))

    return Write(action)


async def workers(call: Call) -> rest.WorkerList:
    """GET /workers."""
    query = call.query_as(rest.WorkersQuery)
    return await call.deps.store.read(lambda reader: operator_workers.listed(reader, query))


async def worker(call: Call) -> rest.WorkerView:
    """GET /workers/{worker_id}."""
    view = await call.deps.store.read(lambda reader: operator_workers.one(reader, call.path["worker_id"]))
    heard = call.deps.presence.get(view.id)
    return view if heard is None else view.model_copy(update={"control": heard.control})


def worker_command(command: WorkerCommand) -> Callable[[Call], Awaitable[Write]]:
    """POST /workers/{worker_id}/{drain,quarantine,release}."""

    async def handler(call: Call) -> Write:
        reason = call.body_as(rest.Reason).reason
        return Write(lambda tx: command(tx, call.caller, call.path["worker_id"], reason, now=call.now))

    return handler


async def make_invite(call: Call) -> Write:
    """POST /invites."""
    new = call.body_as(rest.NewInvite)

    async def action(tx: Tx) -> Done:
        return Done(await invites.create(tx, new, public_key=public_hex(call.deps.key), now=call.now))

    return Write(action)


async def list_invites(call: Call) -> rest.InviteList:
    """GET /invites."""
    limit = call.query_as(rest.ListQuery).limit
    return await call.deps.store.read(lambda reader: invites.listed(reader, limit))


async def revoke_invite(call: Call) -> Write:
    """DELETE /invites/{invite_id}."""

    async def action(tx: Tx) -> Done:
        return Done(await invites.revoke(tx, call.path["invite_id"], now=call.now))

    return Write(action)


async def make_token(call: Call) -> Write:
    """POST /tokens."""
    new = call.body_as(rest.NewToken)

    async def action(tx: Tx) -> Done:
        return Done(await tokens.create(tx, new, now=call.now))

    return Write(action)


async def list_tokens(call: Call) -> rest.TokenList:
    """GET /tokens."""
    limit = call.query_as(rest.ListQuery).limit
    return await call.deps.store.read(lambda reader: tokens.listed(reader, limit))


async def revoke_token(call: Call) -> Write:
    """DELETE /tokens/{token_id}."""

    async def action(tx: Tx) -> Done:
        return Done(await tokens.revoke(tx, call.path["token_id"], now=call.now))

    return Write(action)


def _worker_route(verb: str, summary: str, command: WorkerCommand) -> Route:
    return Route(
        "POST",
        f"{WORKER}/{verb}",
        "admin",
        "workers",
        summary,
        worker_command(command),
        rest.WorkerView,
        body=rest.Reason,
        body_kind="optional_json",
    )


ROUTES = (
    Route(
        "POST",
        FILES,
        "author",
        "files",
        "Upload a dataset, reward code or a small model",
        upload,
        rest.FileView,
        body_kind="stream",
        query=rest.FilesQuery,
        status=201,
    ),
    Route("GET", WORKERS, "viewer", "workers", "The pool", workers, rest.WorkerList, query=rest.WorkersQuery),
    Route("GET", WORKER, "viewer", "workers", "One worker", worker, rest.WorkerView),
    _worker_route("drain", "Let a worker finish its leases and leave", operator_workers.drain),
    _worker_route("quarantine", "Give a worker no work", operator_workers.quarantine),
    _worker_route("release", "End a drain or a quarantine", operator_workers.release),
    Route(
        "POST", INVITES, "admin", "invites", "Make an invite", make_invite, rest.InviteCreated, rest.NewInvite, "json", status=201
    ),
    Route("GET", INVITES, "admin", "invites", "List invites", list_invites, rest.InviteList, query=rest.ListQuery),
    Route("DELETE", INVITES + "/{invite_id}", "admin", "invites", "Revoke an invite", revoke_invite, rest.InviteView),
    Route("POST", TOKENS, "admin", "tokens", "Make a token", make_token, rest.TokenCreated, rest.NewToken, "json", status=201),
    Route("GET", TOKENS, "admin", "tokens", "List tokens", list_tokens, rest.TokenList, query=rest.ListQuery),
    Route("DELETE", TOKENS + "/{token_id}", "admin", "tokens", "Revoke a token", revoke_token, rest.TokenView),
)
