"""Edges: the ways to the bits of published versions, one row each."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_edges"
down_revision = "0001_pre_spine"
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "edges",
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("encoding", TEXT, nullable=False),
        sa.Column("base_version", sa.BigInteger(), nullable=True),
        sa.Column("base_digest", TEXT, nullable=True),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("document", TEXT, nullable=False),
        sa.Column("signature", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "id", name="pk_edges"),
    )
    op.create_index("ix_edges_job_id_digest", "edges", ["job_id", "digest"])
