"""Rentals: machines rented from providers, from the wish to the end of the bill."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_rentals"
down_revision = "0004_ledger"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "rentals",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("provider", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("offer_id", TEXT, nullable=False),
        sa.Column("machine", TEXT, nullable=False),
        sa.Column("label", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("state_since", sa.Double(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("uusd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("shown_uusd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("invite_id", TEXT, nullable=False),
        sa.Column("instance_id", TEXT, nullable=True),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("called_at", sa.Double(), nullable=True),
        sa.Column("absent_looks", sa.BigInteger(), nullable=False),
        sa.Column("paid_until", sa.Double(), nullable=True),
        sa.Column("cost_uusd", sa.BigInteger(), nullable=False),
        sa.Column("ending", TEXT, nullable=False),
        sa.Column("ending_since", sa.Double(), nullable=True),
        sa.Column("destroys", sa.BigInteger(), nullable=False),
        sa.Column("worker_seen_at", sa.Double(), nullable=True),
        sa.Column("offer", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rentals"),
    )
    op.create_index("ix_rentals_provider_state", "rentals", ["provider", "state"])
    op.create_index("ix_rentals_job_id_state", "rentals", ["job_id", "state"])
    op.create_index("ix_rentals_label", "rentals", ["label"])
