"""Funds: the accounts of a kind that hold money are found without those that hold none."""

from __future__ import annotations

from alembic import op

revision = "0007_funds"
down_revision = "0006_prices"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_ledger_accounts_kind_uusd", "ledger_accounts", ["kind", "uusd"])
