"""The ledger: entries and postings that are only ever added, accounts, and the meter of each quote."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_ledger"
down_revision = "0003_quotes"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
APPEND_ONLY = ("ledger_entries", "postings")


def upgrade() -> None:
    op.create_table(
        "meters",
        sa.Column("quote_id", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("looked_at", sa.Double(), nullable=False),
        sa.Column("counted_to", sa.Double(), nullable=False),
        sa.Column("tokens_before", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("paid_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_uusd", sa.BigInteger(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
        sa.Column("covered_until", sa.Double(), nullable=False),
        sa.Column("wanted", sa.BigInteger(), nullable=False),
        sa.Column("leasable", sa.BigInteger(), nullable=True),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("quote_id", name="pk_meters"),
    )
    op.create_index("ix_meters_job_id_closed_at", "meters", ["job_id", "closed_at"])
    op.create_index("ix_meters_worker_id_closed_at", "meters", ["worker_id", "closed_at"])
    op.create_table(
        "ledger_entries",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("subject", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_entries"),
        sa.UniqueConstraint("seq", name="uq_ledger_entries_seq"),
    )
    op.create_index("ix_ledger_entries_job_id_seq", "ledger_entries", ["job_id", "seq"])
    op.create_index("ix_ledger_entries_worker_id_seq", "ledger_entries", ["worker_id", "seq"])
    op.create_table(
        "postings",
        sa.Column("account", TEXT, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("entry_id", TEXT, nullable=False),
        sa.Column("uusd", sa.BigInteger(), nullable=False),
        sa.Column("balance_uusd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account", "number", name="pk_postings"),
    )
    op.create_index("ix_postings_entry_id", "postings", ["entry_id"])
    op.create_table(
        "ledger_accounts",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("uusd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_accounts"),
    )
    op.create_index("ix_ledger_accounts_job_id_kind", "ledger_accounts", ["job_id", "kind"])
    op.create_index("ix_ledger_accounts_worker_id_kind", "ledger_accounts", ["worker_id", "kind"])
    op.add_column("leases", sa.Column("quote_id", TEXT, nullable=True))
    op.add_column("leases", sa.Column("tokens", sa.BigInteger(), nullable=True))
    op.create_index("ix_leases_job_id_closed_at", "leases", ["job_id", "closed_at"])
    op.add_column("refusals", sa.Column("quote_id", TEXT, nullable=True))
    _guard()


def _guard() -> None:
    """Whoever reaches the tables, by whatever program: entries and postings stay as they were written."""
    words = "the ledger is only added to: post a compensating entry"
    if op.get_bind().dialect.name == "sqlite":
        for table in APPEND_ONLY:
            for change in ("UPDATE", "DELETE"):
                name = f"{table}_no_{change.lower()}"
                op.execute(f"CREATE TRIGGER {name} BEFORE {change} ON {table} BEGIN SELECT RAISE(ABORT, '{words}'); END")
        return
    op.execute(
        f"CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '{words}'; END $$"
    )
    for table in APPEND_ONLY:
        name = f"{table}_no_change"
        op.execute(
            f"CREATE TRIGGER {name} BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION ledger_is_append_only()"
        )
