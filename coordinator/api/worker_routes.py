"""What each route of the worker protocol does with an authenticated request."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from aiohttp import web

from coordinator.api.worker_calls import Call
from coordinator.api.worker_http import JSON_TYPE, signed
from coordinator.service import confirming, enrolment, worker_account, worker_submissions, worker_weights
from coordinator.service.leasing import Ask
from coordinator.service.worker_auth import check_body_epoch
from coordinator.service.worker_bulletin import notice
from coordinator.service.worker_messages import parse
from coordinator.service.worker_refusals import ProtocolRefusal
from coordinator.wire.messages import (
    Account,
    BatchesReply,
    Confirm,
    ConfirmReply,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Leave,
    ManifestReply,
    SubmitReply,
    Welcome,
)
from p2p.adapters.piece_store import PieceStore

SessionMessage = TypeVar("SessionMessage", Heartbeat, LeaseRequest, Confirm, Leave)
DIGESTS_MOST = 32  # of one list in a query
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"0|[1-9][0-9]{0,8}")


async def join(call: Call) -> Welcome:
    """Open a session."""
    if call.joining is None:
        raise RuntimeError("join was not parsed")
    if call.fields.epoch != 0:
        raise ProtocolRefusal(
            422, "invalid_message", f"Echo2-Epoch is {call.fields.epoch}", field="Echo2-Epoch", fix="send 0 to join"
        )
    return await enrolment.join(call.desk.deps, call.joining)


async def heartbeat(call: Call) -> HeartbeatReply:
    """A sign of life; orders in the reply."""
    return await call.desk.beats.heartbeat(call.caller, _in_session(Heartbeat, call))


async def lease(call: Call) -> LeaseReply:
    """Work, or why there is none."""
    message = _in_session(LeaseRequest, call)
    transport = call.request.transport
    deps = call.desk.deps
    deps.presence.asks(call.caller.id, message.job_id, message.version, at=deps.clock.now())
    ask = Ask(call.caller.id, call.caller.session_epoch, message)
    outcome = await call.desk.leases.ask(ask, is_open=lambda: transport is not None and not transport.is_closing())
    if outcome.final:
        deps.presence.asked_in_vain(call.caller.id, message.job_id)
    newer = await call.desk.bulletin.newer(message.job_id, outcome.newest, message.version)
    return LeaseReply(
        leases=outcome.leases,
        reason=outcome.reason,
        retry_after_s=outcome.retry_after_s,
        newer=None if newer is None else notice(newer),
    )


async def submit(call: Call) -> SubmitReply:
    """Settle completions."""
    if worker_submissions.is_large(call.body):
        async with call.desk.large_frames:
            submission = await asyncio.to_thread(worker_submissions.decode, call.body)
    else:
        submission = worker_submissions.decode(call.body)
    check_body_epoch(submission.head.session_epoch, call.fields.epoch)
    return await call.desk.submissions.submit(call.caller, submission)


async def confirm(call: Call) -> ConfirmReply:
    """Judge a canary."""
    message = _in_session(Confirm, call)
    reply = await confirming.confirm(call.desk.deps, call.caller, message)
    if reply.accepted:
        call.desk.leases.hasten(message.job_id, call.caller.id)
    return reply


async def account(call: Call) -> Account:
    """What the worker did and earned."""
    if call.body.strip() not in (b"", b"{}"):
        raise ProtocolRefusal(422, "invalid_message", "account takes no message", field="body", fix="send {} or nothing")
    return await worker_account.account(call.desk.deps, call.caller.id)


async def leave(call: Call) -> Account:
    """The worker goes; the reply is its last account."""
    message = _in_session(Leave, call)
    await enrolment.leave(call.desk.deps, call.caller.id, message.reason)
    return await worker_account.account(call.desk.deps, call.caller.id)


async def manifest(call: Call) -> ManifestReply:
    """The signed manifest of a version, and a path to it."""
    version = call.request.match_info["version"]
    if not _VERSION.fullmatch(version):
        raise ProtocolRefusal(422, "invalid_message", f"version is {version[:40]!r}", field="version", fix="send a version number")
    query = call.request.query
    wanted = worker_weights.Wanted(
        job_id=call.request.match_info["job"],
        version=int(version),
        digest=_digest(query.get("digest", "")),
        held=_digests(query.get("held", "")),
        doubted=_digests(query.get("doubted", "")),
    )
    return await worker_weights.manifest(call.desk.deps, call.desk.edges, call.caller, wanted)


async def batches(call: Call) -> BatchesReply:
    """Batches of an edge that is being encoded."""
    since = call.request.query.get("since", "0")
    if not _VERSION.fullmatch(since):
        raise ProtocolRefusal(422, "invalid_message", f"since is {since[:40]!r}", field="since", fix="send a batch number")
    match = call.request.match_info
    return await worker_weights.batches(call.desk.deps, call.caller, match["job"], _digest(match["transfer"]), since=int(since))


async def piece(call: Call) -> web.StreamResponse:
    """The bytes of a piece. Not signed: a piece is verified by its digest."""
    digest = _digest(call.request.match_info["digest"])
    deps = call.desk.deps
    await call.desk.pieces.check(deps, call.caller, call.request.query.get("job", ""), digest)
    path = PieceStore(deps.settings.data_dir / "pieces").path(digest)
    if not await asyncio.to_thread(path.is_file):
        words = f"piece {digest} is not on the coordinator's disk"
        raise ProtocolRefusal(404, "unknown_piece", words, field="digest", fix="fetch the manifest again; versions retire")
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


async def control(call: Call) -> web.Response:
    """The control plane, as libp2p would carry it: a request to the coordinator, or its board."""
    path = call.request.path.partition("/worker/v1/")[2]
    body = await call.desk.control.post(call.caller.public_key, path, call.body)
    return signed(body, status=200, content_type=JSON_TYPE, key=call.desk.deps.key, nonce=call.fields.nonce)


def _in_session(kind: type[SessionMessage], call: Call) -> SessionMessage:
    message = parse(kind, call.body)
    check_body_epoch(message.session_epoch, call.fields.epoch)
    return message


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        words = f"digest is {text[:80]!r}"
        raise ProtocolRefusal(422, "invalid_message", words, field="digest", fix="send 64 lower-case hex digits")
    return text


def _digests(text: str) -> frozenset[str]:
    """A list of digests with commas between, or nothing."""
    names = text.split(",") if text else []
    if len(names) > DIGESTS_MOST:
        words = f"{len(names)} digests are named"
        raise ProtocolRefusal(422, "invalid_message", words, field="query", fix=f"name at most {DIGESTS_MOST}")
    return frozenset(_digest(name) for name in names)
