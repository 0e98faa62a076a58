"""One table per dataclass of `domain.model`: columns named like its fields, in order, plus keys and indexes.

`migrations/` makes the same tables step by step; a test holds the two together. No foreign keys: rows of one fact are
written in one transaction, and the audit proves that they agree.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from coordinator.domain import model
from coordinator.store.fields import FieldSpec, Storage, fields_of
from pricing.rentals import Rental

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# Compared and sorted by code point on both databases.
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
_COLUMN_TYPES: dict[Storage, Any] = {
    Storage.TEXT: TEXT,
    Storage.STATE: TEXT,
    Storage.INTEGER: sa.BigInteger(),
    Storage.REAL: sa.Double(),
    Storage.BOOLEAN: sa.Boolean(),
    Storage.TUPLE: sa.JSON(),
    Storage.DICT: sa.JSON(),
    Storage.MODEL: sa.JSON(),
}
Names = tuple[str, ...]
APPEND_ONLY = frozenset({model.LedgerEntry, model.Posting})
"""Rows that are only ever inserted; the database refuses to change or delete them (law 7)."""


def _column(spec: FieldSpec) -> sa.Column[Any]:
    return sa.Column(
        spec.name,
        _COLUMN_TYPES[spec.storage],
        nullable=spec.nullable,
        autoincrement=False,
    )


def _table(name: str, kind: type[Any], key: Names, *, unique: tuple[Names, ...] = (), index: tuple[Names, ...] = ()) -> sa.Table:
    """The table of a kind; the primary key's columns are in `key`'s order."""
    specs = fields_of(kind)
    table = sa.Table(
        name,
        METADATA,
        *(_column(spec) for spec in specs),
        sa.PrimaryKeyConstraint(*key),
        *(sa.UniqueConstraint(*names) for names in unique),
    )
    for names in index:
        sa.Index(None, *(table.c[column] for column in names))
    return table


TABLES: dict[type[Any], sa.Table] = {
    model.Job: _table("jobs", model.Job, ("id",), index=(("state",), ("owner",))),
    model.Group: _table(
        "groups",
        model.Group,
        ("id",),
        unique=(("job_id", "number"),),
        index=(("job_id", "state", "number"), ("job_id", "step")),
    ),
    model.Rollout: _table(
        "rollouts",
        model.Rollout,
        ("group_id", "slot"),
        index=(
            ("job_id", "state", "group_number"),
            ("job_id", "group_number"),
            ("job_id", "accepted_at"),
            ("lease_id",),
            ("worker_id", "state"),
        ),
    ),
    model.Turn: _table(
        "turns", model.Turn, ("group_id", "slot", "turn"), index=(("lease_id",), ("job_id", "accepted_at"), ("worker_id",))
    ),
    model.Lease: _table(
        "leases",
        model.Lease,
        ("id",),
        index=(("state", "deadline"), ("worker_id", "state"), ("job_id", "state"), ("group_id",), ("job_id", "closed_at")),
    ),
    model.Refusal: _table("refusals", model.Refusal, ("id",), index=(("worker_id", "at"), ("job_id", "code"))),
    model.Batch: _table("batches", model.Batch, ("job_id", "step")),
    model.Publication: _table("publications", model.Publication, ("job_id", "version", "digest"), index=(("job_id", "state"),)),
    model.EdgeRow: _table("edges", model.EdgeRow, ("job_id", "id"), index=(("job_id", "digest"),)),
    model.CheckpointRow: _table("checkpoints", model.CheckpointRow, ("job_id", "step")),
    model.Worker: _table("workers", model.Worker, ("id",), unique=(("public_key",),), index=(("state",), ("invite_id",))),
    model.WorkerSession: _table("worker_sessions", model.WorkerSession, ("worker_id", "epoch"), index=(("last_seen_at",),)),
    model.QuoteRow: _table("quotes", model.QuoteRow, ("id",), index=(("job_id", "ended_at"), ("worker_id", "ended_at"))),
    model.Meter: _table("meters", model.Meter, ("quote_id",), index=(("job_id", "closed_at"), ("worker_id", "closed_at"))),
    model.LedgerEntry: _table(
        "ledger_entries", model.LedgerEntry, ("id",), unique=(("seq",),), index=(("job_id", "seq"), ("worker_id", "seq"))
    ),
    model.Posting: _table("postings", model.Posting, ("account", "number"), index=(("entry_id",),)),
    model.LedgerAccount: _table(
        "ledger_accounts", model.LedgerAccount, ("id",), index=(("job_id", "kind"), ("worker_id", "kind"), ("kind", "uusd"))
    ),
    model.PriceRow: _table("prices", model.PriceRow, ("worker_id", "at")),
    Rental: _table("rentals", Rental, ("id",), index=(("provider", "state"), ("job_id", "state"), ("label",))),
    model.Holding: _table("holdings", model.Holding, ("worker_id", "job_id", "version", "digest"), index=(("job_id", "version"),)),
    model.Invite: _table("invites", model.Invite, ("id",), unique=(("code_hash",),)),
    model.ApiToken: _table("api_tokens", model.ApiToken, ("id",), unique=(("secret_hash",),)),
    model.Upload: _table("uploads", model.Upload, ("digest",), index=(("owner",),)),
    model.IdempotencyRecord: _table("idempotency_records", model.IdempotencyRecord, ("token_id", "key"), index=(("created_at",),)),
    model.Event: _table("events", model.Event, ("job_id", "seq")),
    model.Metric: _table("metrics", model.Metric, ("job_id", "name", "step")),
}
