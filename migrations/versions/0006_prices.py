"""Prices: what each worker asked, from when on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_prices"
down_revision = "0005_rentals"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "prices",
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("uusd_per_hour", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "at", name="pk_prices"),
    )
