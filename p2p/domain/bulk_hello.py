"""How a dialler shows on a bulk connection that a ticket is its own: it signs the server's challenge.

The signature covers the challenge (so a replay is worthless), the certificate the dialler sees (so nobody between can pass it on) and
the ticket's id. Specified in PROTOCOL.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p.domain import strict_json as js
from p2p.domain.bulk_frames import MAX_HELLO
from p2p.domain.tickets import Ticket
from p2p.errors import FrameRefused, TicketError

PROOF_PREFIX = b"echo2-bulk\n"
_TICKET = re.compile(r"[A-Za-z0-9_=-]+\.[0-9a-f]{128}")
_PROOF = re.compile(r"[0-9a-f]{128}")
_KEYS = frozenset({"ticket", "proof"})


@dataclass(frozen=True, slots=True)
class Hello:
    """A ticket as the coordinator wrote it, and the holder's signature (hex)."""

    ticket: str
    proof: str

    def to_bytes(self) -> bytes:
        """The payload of a HELLO frame."""
        return js.canonical({"ticket": self.ticket, "proof": self.proof}).encode()

    @classmethod
    def from_bytes(cls, payload: bytes | bytearray) -> Hello:
        """Read a payload. Raises FrameRefused."""
        try:
            fields = js.record(js.parse(bytes(payload).decode("ascii"), limit=MAX_HELLO), "hello", _KEYS)
            return cls(js.text(fields["ticket"], "ticket", _TICKET), js.text(fields["proof"], "proof", _PROOF))
        except (js.JsonRefused, UnicodeDecodeError) as error:
            raise FrameRefused(f"the HELLO is refused: {error}") from error


def prove_dialler(key: Ed25519PrivateKey, challenge: bytes, certificate_sha256: str, ticket: Ticket) -> str:
    """The dialler's signature (hex)."""
    return key.sign(_message(challenge, certificate_sha256, ticket)).hex()


def check_dialler(ticket: Ticket, challenge: bytes, certificate_sha256: str, proof: str) -> None:
    """Return if `proof` is by the ticket's holder for this very connection; raise TicketError if not."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(ticket.fetcher_key))
        key.verify(bytes.fromhex(proof), _message(challenge, certificate_sha256, ticket))
    except (InvalidSignature, ValueError) as error:
        raise TicketError(
            f"the proof is not the signature of {ticket.fetcher} over this challenge, this certificate and ticket {ticket.id}"
        ) from error


def _message(challenge: bytes, certificate_sha256: str, ticket: Ticket) -> bytes:
    """Fields cannot contain the separator: hex, hex, and an id without line breaks."""
    return PROOF_PREFIX + f"{challenge.hex()}\n{certificate_sha256}\n{ticket.id}".encode()
