"""Quotes: which workers are active for which job, and what they are paid."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003_quotes"
down_revision = "0002_edges"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "quotes",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("session_epoch", sa.BigInteger(), nullable=False),
        sa.Column("role", TEXT, nullable=False),
        sa.Column("uusd_per_million_tokens", sa.BigInteger(), nullable=True),
        sa.Column("uusd_per_idle_hour", sa.BigInteger(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("ended_because", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_quotes"),
    )
    op.create_index("ix_quotes_job_id_ended_at", "quotes", ["job_id", "ended_at"])
    op.create_index("ix_quotes_worker_id_ended_at", "quotes", ["worker_id", "ended_at"])
