"""A new ticket on an open connection: the same holder, the same job, a later end."""

from __future__ import annotations

from p2p.adapters.bulk.link import Link
from p2p.adapters.bulk.settings import BulkSettings
from p2p.domain.tickets import read_ticket
from p2p.errors import FrameRefused, TicketError


def renewed(link: Link, payload: bytes | bytearray, settings: BulkSettings) -> None:
    """Let the connection live on. Its holder proved its key when it began, so that the ticket alone is enough.

    Raises FrameRefused, TicketError.
    """
    if link.dialled_here:
        raise FrameRefused("a RENEW frame came from the listener; only the dialler has a ticket")
    try:
        text = bytes(payload).decode("ascii")
    except UnicodeDecodeError as error:
        raise FrameRefused(f"a RENEW frame's ticket is not ASCII: {error}") from error
    ticket = read_ticket(text, public_key=settings.coordinator_public_key, server=settings.peer_id, now=settings.unix())
    if (ticket.fetcher, ticket.fetcher_key, ticket.job_id) != (link.peer, link.key, link.job_id):
        raise TicketError(f"ticket {ticket.id} is not for {link.peer} and job {link.job_id}, who hold this connection")
    link.expires_at = max(link.expires_at, ticket.expires_at)
