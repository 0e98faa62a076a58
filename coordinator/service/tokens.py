"""REST credentials: made, checked, listed and revoked. The secret is shown once and stored as a hash.

A token reads `echo2_<id>_<secret>`; the id finds the row, so that nothing is looked up by a secret. SHA-256 without salt or
stretching is enough here: the secret is 256 bits from the system's generator, so there is no dictionary to try against a
stolen hash. A slow password hash would only slow down every request.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.domain.model import ApiToken
from coordinator.service.operator_errors import Kind, RequestRefused, conflict, unknown
from coordinator.service.ports import Reader, Store, Tx
from coordinator.wire.rest import NewToken, TokenCreated, TokenList, TokenView
from p2p.adapters.durable import REAL_FILES, make_directory_durably

RANKS = {"viewer": 0, "author": 1, "admin": 2}
PREFIX = "echo2"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. The secret is kept for the time of one request: stored answers are sealed with it."""

    token: ApiToken
    secret: str = field(repr=False)

    @property
    def is_author(self) -> bool:
        """Authors see and change their own jobs only."""
        return self.token.role == "author"

    @property
    def may_bring_code(self) -> bool:
        """Admins may, and authors with the right `code`."""
        return self.token.role == "admin" or (self.token.role == "author" and "code" in self.token.rights)

    def has_rank(self, role: str) -> bool:
        """Whether this role includes `role`."""
        return RANKS[self.token.role] >= RANKS[role]


def secret_hash(secret: str) -> str:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


async def authenticate(reader: Reader, bearer: str) -> Caller:
    """The caller behind a bearer token. Raises RequestRefused; a wrong secret and an unknown id read the same."""
    prefix, _, rest = bearer.partition("_")
    identifier, _, secret = rest.partition("_")
    if prefix != PREFIX or not identifier.isascii() or not identifier.isalnum() or len(identifier) > 64:
        raise _unauthenticated("token_malformed", "the bearer token does not read echo2_<id>_<secret>")
    token = await reader.get(ApiToken, identifier)
    if token is None or not hmac.compare_digest(token.secret_hash, secret_hash(secret)):
        raise _unauthenticated("token_unknown", "the bearer token is not one of this coordinator")
    if token.revoked_at is not None:
        raise _unauthenticated("token_revoked", f"token {token.name!r} was revoked")
    return Caller(token, secret)


def _unauthenticated(code: str, detail: str) -> RequestRefused:
    fix = "send `Authorization: Bearer TOKEN` with a token that an admin made (POST /api/v1/tokens)"
    return RequestRefused(Kind.UNAUTHENTICATED, code, detail, field="Authorization", fix=fix)


def no_token() -> RequestRefused:
    """The refusal of a request without credentials."""
    return _unauthenticated("token_missing", "this route needs a bearer token")


def make(new: NewToken, *, now: float) -> tuple[ApiToken, str]:
    """A token row and the text that its owner keeps."""
    identifier, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    row = ApiToken(
        id=identifier,
        name=new.name,
        role=new.role,
        secret_hash=secret_hash(secret),
        created_at=now,
        rights=tuple(new.rights),
        spend_limit_uusd=new.spend_limit_uusd,
    )
    return row, f"{PREFIX}_{identifier}_{secret}"


async def create(tx: Tx, new: NewToken, *, now: float) -> TokenCreated:
    """Make a token."""
    row, text = make(new, now=now)
    await tx.put(row)
    return TokenCreated(**view(row).model_dump(), token=text)


async def listed(reader: Reader, limit: int) -> TokenList:
    """The newest tokens."""
    rows = await reader.select(ApiToken, order_by="-created_at", limit=limit)
    return TokenList(tokens=tuple(view(row) for row in rows))


async def revoke(tx: Tx, token_id: str, *, now: float) -> TokenView:
    """Revoke a token; one that is revoked stays so. The last admin token is refused: nobody could make another."""
    row = await tx.get(ApiToken, token_id)
    if row is None:
        raise unknown("token", token_id)
    if row.revoked_at is not None:
        return view(row)
    if row.role == "admin" and await tx.count(ApiToken, role="admin", revoked_at=None) == 1:
        words = f"token {row.name!r} is the last admin token"
        raise conflict("last_admin", words, field="token_id", fix="make another admin token first")
    revoked = replace(row, revoked_at=now)
    await tx.put(revoked)
    return view(revoked)


def view(row: ApiToken) -> TokenView:
    """What may be shown of a token."""
    return TokenView.model_validate(
        {
            "id": row.id,
            "name": row.name,
            "role": row.role,
            "rights": row.rights,
            "spend_limit_uusd": row.spend_limit_uusd,
            "created_at": row.created_at,
            "revoked_at": row.revoked_at,
        }
    )


async def first_admin(store: Store, path: Path, *, now: float) -> bool:
    """On a store without tokens, write a first admin token to `path` (mode 0600, durable); whether one was made.

    The file is written before the row: after a crash in between the store is still empty, and the next start writes both anew.
    """
    if await store.read(lambda reader: reader.count(ApiToken)):
        return False
    row, text = make(NewToken(name="first-admin", role="admin", rights=("code",)), now=now)
    write_secret(path, text + "\n")
    await store.write(lambda tx: tx.put(row))
    return True


def write_secret(path: Path, text: str) -> None:
    """Put `text` at `path`, never readable by others, not even for a moment; durable on return."""
    make_directory_durably(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
    REAL_FILES.fsync_dir(path.parent)
