"""How a bulk connection begins: TLS, then challenge, ticket and proof. Both ends run here, each against a deadline."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.pipe import TlsPipe
from p2p.domain import bulk_frames as frames
from p2p.domain.bulk_hello import Hello, check_dialler, prove_dialler
from p2p.domain.tickets import Ticket, peek_ticket, read_ticket
from p2p.errors import FrameRefused, PeerLost, TicketError


@dataclass(frozen=True, slots=True)
class Door:
    """What a listener checks against: its own id and certificate, its coordinator's key (hex), the time in Unix seconds."""

    peer_id: str
    certificate_sha256: str
    coordinator_public_key: str
    unix: Callable[[], float]


def admit(pipe: TlsPipe, door: Door, deadline: float) -> tuple[Ticket, float]:
    """The listener's side: the dialler's ticket, checked, and the uplink it claims. Raises PeerLost, FrameRefused, TicketError.

    The dialler is told why it is refused; it is not yet welcome when this returns (`welcome`).
    """
    pipe.handshake(deadline)
    challenge = secrets.token_bytes(frames.CHALLENGE_BYTES)
    _say(pipe, frames.frame(frames.CHALLENGE, challenge, a=frames.VERSION), deadline)
    head, payload = _hear(pipe, frames.HELLO, deadline)
    try:
        if head.a != frames.VERSION:
            raise FrameRefused(f"the dialler speaks version {head.a} of the bulk protocol, this peer version {frames.VERSION}")
        hello = Hello.from_bytes(payload)
        ticket = read_ticket(hello.ticket, public_key=door.coordinator_public_key, server=door.peer_id, now=door.unix())
        check_dialler(ticket, challenge, door.certificate_sha256, hello.proof)
    except (FrameRefused, TicketError) as error:
        refuse(pipe, str(error), deadline)
        raise
    return ticket, float(head.b)


def welcome(pipe: TlsPipe, uplink: float, deadline: float) -> None:
    """The listener's last word of the handshake."""
    _say(pipe, frames.frame(frames.WELCOME, b=_u32(uplink)), deadline)


def refuse(pipe: TlsPipe, reason: str, deadline: float) -> None:
    """Say why there is no connection."""
    try:
        _say(pipe, frames.bye(reason), deadline)
    except PeerLost:
        return  # it did not stay to hear it


def introduce(
    pipe: TlsPipe, certificate_sha256: str, ticket_text: str, key: Ed25519PrivateKey, uplink: float, deadline: float
) -> tuple[Ticket, float]:
    """The dialler's side: its own ticket, and the uplink that the listener claims. Raises PeerLost, FrameRefused, TicketError."""
    ticket = peek_ticket(ticket_text)
    pipe.handshake(deadline)
    shown = hashlib.sha256(pipe.peer_certificate()).hexdigest()
    if shown != certificate_sha256:
        raise PeerLost(
            f"peer {ticket.server} shows the certificate {shown[:16]}..., not {certificate_sha256[:16]}...: "
            "ask the coordinator for its address again"
        )
    head, challenge = _hear(pipe, frames.CHALLENGE, deadline)
    if head.a < frames.VERSION:
        raise FrameRefused(f"the listener speaks version {head.a} of the bulk protocol, this peer version {frames.VERSION}")
    hello = Hello(ticket_text, prove_dialler(key, challenge, certificate_sha256, ticket))
    _say(pipe, frames.frame(frames.HELLO, hello.to_bytes(), a=frames.VERSION, b=_u32(uplink)), deadline)
    head, _ = _hear(pipe, frames.WELCOME, deadline)
    return ticket, float(head.b)


def _hear(pipe: TlsPipe, kind: int, deadline: float) -> tuple[frames.Head, bytes]:
    """The next frame, which must be of this kind, or a BYE."""
    head = frames.read_head(pipe.read_exactly(frames.HEAD_BYTES, deadline))
    if head.kind not in (kind, frames.BYE):
        raise FrameRefused(f"a {frames.name_of(head.kind)} frame came where {frames.name_of(kind)} is due")
    payload = pipe.read_exactly(head.length, deadline)
    if head.kind == frames.BYE:
        raise PeerLost(f"the other side refused: {frames.reason_of(payload)}")
    return head, payload


def _say(pipe: TlsPipe, frame: bytes, deadline: float) -> None:
    pipe.write(frame)
    pipe.flush_by(deadline)


def _u32(rate: float) -> int:
    return min(max(int(rate), 0), 2**32 - 1)
