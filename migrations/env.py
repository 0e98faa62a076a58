"""Run by Alembic. The connection comes from `coordinator.store.migrate`; there is no other way in, so that no URL is read twice."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations run through the program: use `echo2 migrate`")

context.configure(connection=connection, target_metadata=None, transactional_ddl=True, transaction_per_migration=False)
with context.begin_transaction():
    context.run_migrations()
