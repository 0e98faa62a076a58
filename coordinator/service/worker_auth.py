"""Who sent a request: time, key, signature, nonce and session, in the order that costs the coordinator least.

The time is checked before the body is read, the signature before anything in the body is parsed (join excepted: its key is
in its body), the nonce only after the signature, so that a stranger cannot use up a worker's nonces.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.domain.model import Worker, WorkerState
from coordinator.service.worker_limits import NonceMemory
from coordinator.service.worker_refusals import ProtocolRefusal, busy
from coordinator.wire import signing
from coordinator.wire.signing import MAX_SKEW_S, SignedFields

CLOCK_FIX = "take server_time of this reply, compute the offset of your clock, and sign again with the corrected time"


@dataclass(frozen=True, slots=True)
class Proof:
    """A request's signed fields, its signature and its body as sent."""

    fields: SignedFields
    signature: str
    body: bytes


def check_time(fields: SignedFields, *, now: float, started_at: float) -> None:
    """Refuse a time too far from the coordinator's, or before this coordinator ran (its nonce memory starts empty)."""
    sent = float(fields.time)
    if abs(sent - now) > MAX_SKEW_S:
        words = f"Echo2-Time is {fields.time}, {abs(sent - now):.1f} s off; at most {MAX_SKEW_S:.0f} s are allowed"
        raise ProtocolRefusal(401, "clock_skew", words, field="Echo2-Time", fix=CLOCK_FIX)
    if sent < started_at:
        words = f"Echo2-Time is {fields.time}, before this coordinator started at {started_at:.3f}"
        raise ProtocolRefusal(401, "before_restart", words, field="Echo2-Time", fix=CLOCK_FIX)


def check_signature(public_key: str, proof: Proof) -> None:
    """Refuse a request that the key did not sign for this coordinator."""
    if signing.worker_id(public_key) != proof.fields.worker:
        words = f"Echo2-Worker is {proof.fields.worker}, the key's id is {signing.worker_id(public_key)}"
        raise ProtocolRefusal(401, "wrong_worker_id", words, field="Echo2-Worker", fix="send the id derived from your public key")
    if not signing.verify(public_key, proof.signature, proof.fields.message(proof.body)):
        words = (
            f"the signature is not that of worker {proof.fields.worker} over this request to coordinator {proof.fields.coordinator}"
        )
        fix = (
            "sign method, path with query, this coordinator's key id, worker id, epoch, time, nonce and BLAKE3 of the body as sent"
        )
        raise ProtocolRefusal(401, "bad_signature", words, field="Echo2-Signature", fix=fix)


def check_nonce(memory: NonceMemory, fields: SignedFields, *, now: float) -> None:
    """Refuse a request that was sent before."""
    if memory.is_full(now):
        raise busy("busy", "the coordinator's nonce memory is full", retry_after_s=5.0)
    if not memory.remember(fields.worker, fields.nonce, now):
        words = f"nonce {fields.nonce} was used before by worker {fields.worker}"
        raise ProtocolRefusal(401, "replayed", words, field="Echo2-Nonce", fix="draw a fresh random nonce for every request")


def unknown_worker(fields: SignedFields) -> ProtocolRefusal:
    """No row has this id."""
    words = f"no worker {fields.worker} is enrolled here"
    return ProtocolRefusal(401, "unknown_worker", words, field="Echo2-Worker", fix="join with an invite first")


def check_session(worker: Worker, epoch: int) -> None:
    """Refuse an old session, and a worker that is gone."""
    if epoch < worker.session_epoch:
        raise ProtocolRefusal(
            409,
            "old_session",
            f"a newer session with this key is active: this is session {epoch}, the newest is {worker.session_epoch}",
            field="session_epoch",
            fix="stop this process, or join again if the other one is not yours to keep (keys must not be shared)",
        )
    if epoch > worker.session_epoch:
        words = f"session {epoch} was never opened; the newest is {worker.session_epoch}"
        raise ProtocolRefusal(409, "unknown_session", words, field="session_epoch", fix="join again")
    if worker.state is WorkerState.GONE:
        raise ProtocolRefusal(409, "worker_gone", f"worker {worker.id} is gone: {worker.reason}", fix="join again to work")


def check_body_epoch(sent: int, signed: int) -> None:
    """The epoch inside a message must be the signed one."""
    if sent != signed:
        words = f"session_epoch is {sent} in the body and {signed} in Echo2-Epoch"
        raise ProtocolRefusal(422, "invalid_message", words, field="session_epoch", fix="send the same epoch in both")
