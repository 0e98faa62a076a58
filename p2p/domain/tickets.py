"""Tickets: the coordinator's word that one worker may exchange a job's pieces with one peer, for a while.

A ticket is useless without its holder's key: each connection begins with a proof of it (`bulk_hello.py`). Both are specified in PROTOCOL.md.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import asdict, dataclass, fields

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p.domain import strict_json as js
from p2p.errors import TicketError

SEEDER = "seeder"  # the peer beside the coordinator: tickets name it so, and no worker id looks like it
MAX_TEXT = 4096
TICKET_PREFIX = b"echo2-ticket\n"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """`fetcher`, who holds the key `fetcher_key` (Ed25519, hex), may dial `server` and exchange pieces of `job_id` with it.

    `expires_at` is in whole Unix seconds; the ticket is refused from then on.
    """

    id: str
    fetcher: str
    fetcher_key: str
    server: str
    job_id: str
    expires_at: int


_KEYS = frozenset(field.name for field in fields(Ticket))


def sign_ticket(key: Ed25519PrivateKey, ticket: Ticket) -> str:
    """The ticket as text: base64url of its canonical JSON, a dot, the coordinator's signature in hex."""
    body = js.canonical(asdict(ticket)).encode()
    return f"{base64.urlsafe_b64encode(body).decode()}.{key.sign(TICKET_PREFIX + body).hex()}"


def read_ticket(text: str, *, public_key: str, server: str, now: float) -> Ticket:
    """The ticket, if `public_key` (hex, the coordinator's) signed it for `server` and it is still valid. Raises TicketError."""
    body, signature = _parts(text)
    if not _signed(public_key, signature, TICKET_PREFIX + body):
        raise TicketError("the ticket is not signed by this peer's coordinator: ask the coordinator for a new one")
    ticket = _ticket(body)
    if ticket.server != server:
        raise TicketError(
            f"ticket {ticket.id} is for peer {ticket.server}, this is {server}: use the ticket that came with this address"
        )
    if now >= ticket.expires_at:
        raise TicketError(f"ticket {ticket.id} expired {now - ticket.expires_at:.0f} s ago: ask the coordinator for a new one")
    return ticket


def peek_ticket(text: str) -> Ticket:
    """What a ticket says, its signature unread: for the fetcher, to whom it names the peer and the job. Raises TicketError."""
    return _ticket(_parts(text)[0])


def _parts(text: str) -> tuple[bytes, str]:
    if len(text) > MAX_TEXT:
        raise TicketError(f"the ticket has {len(text)} characters; at most {MAX_TEXT} are allowed")
    encoded, _, signature = text.partition(".")
    try:
        return base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True), signature
    except (ValueError, binascii.Error) as error:
        raise TicketError(f"the ticket is not base64url and a signature with a dot between: {error}") from error


def _ticket(body: bytes) -> Ticket:
    try:
        values = js.record(js.parse(body.decode(), limit=MAX_TEXT), "ticket", _KEYS)
        names = {name: js.text(values[name], name, _NAME) for name in ("id", "fetcher", "server", "job_id")}
        fetcher_key = js.text(values["fetcher_key"], "fetcher_key", _KEY)
        expires_at = js.integer(values["expires_at"], "expires_at", least=0, most=2**53)
    except (js.JsonRefused, UnicodeDecodeError) as error:
        raise TicketError(f"the ticket is refused: {error}") from error
    return Ticket(**names, fetcher_key=fetcher_key, expires_at=expires_at)


def _signed(public_key: str, signature: str, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
