"""Turns: slots that an environment continues, turn by turn."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008_turns"
down_revision = "0007_funds"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "turns",
        sa.Column("group_id", TEXT, nullable=False),
        sa.Column("slot", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("turn", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("lease_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("blob", TEXT, nullable=False),
        sa.Column("blob_start", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("stop_reason", TEXT, nullable=False),
        sa.Column("generate_s", sa.Double(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("token_ids", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "slot", "turn", name="pk_turns"),
    )
    op.create_index("ix_turns_lease_id", "turns", ["lease_id"])
    op.create_index("ix_turns_job_id_accepted_at", "turns", ["job_id", "accepted_at"])
    op.create_index("ix_turns_worker_id", "turns", ["worker_id"])
    op.add_column("rollouts", sa.Column("turn", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("rollouts", sa.Column("preceding", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("rollouts", sa.Column("continued_at", sa.Double(), nullable=True))
    op.add_column("leases", sa.Column("max_new_tokens", sa.BigInteger(), nullable=True))
