"""Between the session's values and the wire's messages: pure translations."""

from __future__ import annotations

import numpy as np

from coordinator.wire import messages as wire
from coordinator.wire.frames import encode_frame
from worker_node.config import WorkerSettings
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.weights import Forthcoming, Version


def join_request(
    settings: WorkerSettings, public_key: str, engine: wire.EngineInfo, peer: wire.PeerAddress | None
) -> wire.JoinRequest:
    """Who we are and what we offer."""
    return wire.JoinRequest(
        invite_code=settings.invite_code,
        public_key=public_key,
        name=settings.name,
        engine=engine,
        price_uusd_per_hour=settings.price_uusd_per_hour,
        max_slots=settings.engine.slots,
        tokens_per_s=settings.engine.tokens_per_s,
        memory_bytes=0,
        peer=peer,
    )


def beat_message(
    beat: do.SendBeat, *, tokens_per_s: float, uplink: float, control: str = "", price: int | None = None
) -> wire.Heartbeat:
    """A sign of life; at most as many versions as a beat may carry. `price`: asked from now on, micro-USD an hour; None: as before."""
    return wire.Heartbeat(
        session_epoch=beat.epoch,
        held=tuple(wire.Held(job_id=v.job_id, version=v.number, digest=v.digest) for v in beat.held[-64:]),
        live_leases=beat.live_leases[:4096],
        free_slots=min(beat.free_slots, 4096),
        tokens_per_s=tokens_per_s,
        uplink_bytes_per_s=uplink,
        draining=beat.draining,
        price_uusd_per_hour=price,
        control=control[:1000],
        activity=beat.activity[:1000],
    )


def orders(reply: wire.HeartbeatReply) -> ev.BeatAnswered:
    """The orders of a beat's answer."""
    return ev.BeatAnswered(
        state=reply.state,
        reason=reply.reason,
        heartbeat_s=reply.heartbeat_s,
        versions=tuple(Version(notice.job_id, notice.version, notice.digest) for notice in reply.versions),
        cancelled=tuple(ev.CancelledLease(order.lease_id, order.reason) for order in reply.cancel),
        drain=reply.drain,
        forthcoming=tuple(Forthcoming(one.job_id, one.version, one.base_digest, one.transfer) for one in reply.forthcoming),
    )


def granted(reply: wire.LeaseReply, epoch: int, *, offset_s: float) -> ev.LeaseAnswered:
    """Leases with their ends on the machine's clock, which is `offset_s` ahead of the coordinator's."""
    leases = tuple(ev.GrantedLease(lease, lease.deadline + offset_s) for lease in reply.leases)
    newer = Version(reply.newer.job_id, reply.newer.version, reply.newer.digest) if reply.newer else None
    return ev.LeaseAnswered(epoch, leases, reply.reason, reply.retry_after_s, newer)


def confirm_message(confirm: do.SendConfirm) -> wire.Confirm:
    """A version is in the engine, and this is what it says to the canary."""
    return wire.Confirm(
        session_epoch=confirm.epoch,
        job_id=confirm.version.job_id,
        version=confirm.version.number,
        digest=confirm.version.digest,
        canary_logprobs=confirm.canary_logprobs,
        fetched_bytes=confirm.fetched_bytes,
        fetched_from_peers_bytes=confirm.from_peers_bytes,
        fetch_s=confirm.fetch_s,
        assemble_s=confirm.assemble_s,
        apply_s=confirm.apply_s,
        skipped=confirm.skipped,
    )


def frame_of(submission: do.SubmitCompletions) -> bytes:
    """The body of a submission: head, then the completions' arrays end to end."""
    completions = [completion for _, completion in submission.completions]
    head = wire.SubmitHead(
        session_epoch=submission.epoch,
        lease_id=submission.lease_id,
        fence=submission.fence,
        digests={str(version): digest for version, digest in submission.digests},
        completions=tuple(
            wire.CompletionHead(slot=slot, length=done.length, stop_reason=done.stop_reason, generate_s=done.generate_s)
            for slot, done in submission.completions
        ),
    )
    arrays = {
        "token_ids": np.concatenate([done.token_ids for done in completions]),
        "logprobs": np.concatenate([done.logprobs for done in completions]),
        "versions": np.concatenate([done.versions for done in completions]),
    }
    return encode_frame(head.model_dump_json().encode(), arrays)


def settled_by(submission: do.SubmitCompletions, reply: wire.SubmitReply) -> ev.SubmitAnswered:
    """What a submission's answer settles."""
    return ev.SubmitAnswered(submission.lease_id, (*reply.accepted, *reply.duplicates), reply.refused)
