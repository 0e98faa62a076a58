"""Invites: the right to enrol workers. The code is shown once; the store keeps a hash of its secret.

A code reads `echo2-invite-1.<coordinator public key, hex>.<secret, base64url>`: it pins the coordinator's Ed25519 identity for the
worker, and its secret proves the right. A plain hash suffices for the same reason as in `tokens.py`: 256 random bits.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from coordinator.domain.model import Invite, Worker
from coordinator.service.operator_errors import unknown
from coordinator.service.ports import Reader, Tx
from coordinator.service.tokens import secret_hash
from coordinator.wire.rest import InviteCreated, InviteList, InviteView, NewInvite

FORMAT = "echo2-invite-1"
_CODE = re.compile(r"echo2-invite-1\.([0-9a-f]{64})\.([A-Za-z0-9_-]{43})")


def invite_code(public_key: str, secret: str) -> str:
    """The text that a GPU owner is given."""
    return f"{FORMAT}.{public_key}.{secret}"


def read_code(code: str) -> tuple[str, str] | None:
    """The coordinator's public key (hex) and the secret; None when it is no invite code."""
    match = _CODE.fullmatch(code)
    return None if match is None else (match[1], match[2])


async def find(reader: Reader, code: str) -> Invite | None:
    """The invite behind a code, whatever its condition."""
    parts = read_code(code)
    if parts is None:
        return None
    rows = await reader.select(Invite, code_hash=secret_hash(parts[1]), limit=1)
    return rows[0] if rows else None


async def create(tx: Tx, new: NewInvite, *, public_key: str, now: float) -> InviteCreated:
    """Make an invite; its code is in the answer only."""
    secret = secrets.token_urlsafe(32)
    row = Invite(
        id=f"i-{secrets.token_hex(8)}",
        code_hash=secret_hash(secret),
        owner=new.owner,
        max_uses=new.max_uses,
        created_at=now,
        expires_at=now + new.expires_in_s,
        price_ceiling_uusd_per_hour=new.price_ceiling_uusd_per_hour,
        jobs=new.jobs,
    )
    await tx.put(row)
    return InviteCreated(**view(row, used=0).model_dump(), code=invite_code(public_key, secret))


async def listed(reader: Reader, limit: int) -> InviteList:
    """The newest invites, with their uses counted from the workers they enrolled."""
    rows = await reader.select(Invite, order_by="-created_at", limit=limit)
    return InviteList(invites=tuple([view(row, used=await uses(reader, row.id)) for row in rows]))


async def revoke(tx: Tx, invite_id: str, *, now: float) -> InviteView:
    """Nobody joins with it any more; workers that joined stay. Revoking twice changes nothing."""
    row = await tx.get(Invite, invite_id)
    if row is None:
        raise unknown("invite", invite_id)
    if row.revoked_at is None:
        row = replace(row, revoked_at=now)
        await tx.put(row)
    return view(row, used=await uses(tx, row.id))


async def uses(reader: Reader, invite_id: str) -> int:
    """Workers that joined with the invite."""
    return await reader.count(Worker, invite_id=invite_id)


def view(row: Invite, *, used: int) -> InviteView:
    """What may be shown of an invite."""
    return InviteView(
        id=row.id,
        owner=row.owner,
        max_uses=row.max_uses,
        used=used,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        price_ceiling_uusd_per_hour=row.price_ceiling_uusd_per_hour,
        jobs=row.jobs,
    )
