"""The first tables: jobs, groups, rollouts, leases, batches, publications, workers, access, events, metrics."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_pre_spine"
down_revision = None
branch_labels = None
depends_on = None

TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    _jobs()
    _groups()
    _rollouts()
    _leases()
    _refusals()
    _batches()
    _publications()
    _checkpoints()
    _workers()
    _worker_sessions()
    _holdings()
    _invites()
    _api_tokens()
    _uploads()
    _idempotency_records()
    _events()
    _metrics()


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("state_since", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("model_dir", TEXT, nullable=False),
        sa.Column("committed_steps", sa.BigInteger(), nullable=False),
        sa.Column("no_signal_streak", sa.BigInteger(), nullable=False),
        sa.Column("learner_fence", sa.BigInteger(), nullable=False),
        sa.Column("learner_restarts", sa.BigInteger(), nullable=False),
        sa.Column("vocab_size", sa.BigInteger(), nullable=False),
        sa.Column("stop_token_ids", sa.JSON(), nullable=False),
        sa.Column("resume_state", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_owner", "jobs", ["owner"])
    op.create_index("ix_jobs_state", "jobs", ["state"])


def _groups() -> None:
    op.create_table(
        "groups",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("prompt_index", sa.BigInteger(), nullable=False),
        sa.Column("prompt_ids", sa.JSON(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.Column("prompt_text", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_groups"),
        sa.UniqueConstraint("job_id", "number", name="uq_groups_job_id_number"),
    )
    op.create_index("ix_groups_job_id_state_number", "groups", ["job_id", "state", "number"])
    op.create_index("ix_groups_job_id_step", "groups", ["job_id", "step"])


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("group_id", TEXT, nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("group_number", sa.BigInteger(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("lease_id", TEXT, nullable=True),
        sa.Column("worker_id", TEXT, nullable=True),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("blob", TEXT, nullable=True),
        sa.Column("blob_start", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("newest_version", sa.BigInteger(), nullable=True),
        sa.Column("digests", sa.JSON(), nullable=False),
        sa.Column("stop_reason", TEXT, nullable=False),
        sa.Column("generate_s", sa.Double(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("text", TEXT, nullable=False),
        sa.Column("detail", TEXT, nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=True),
        sa.Column("graded_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("group_id", "slot", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_job_id_accepted_at", "rollouts", ["job_id", "accepted_at"])
    op.create_index("ix_rollouts_job_id_group_number", "rollouts", ["job_id", "group_number"])
    op.create_index("ix_rollouts_job_id_state_group_number", "rollouts", ["job_id", "state", "group_number"])
    op.create_index("ix_rollouts_lease_id", "rollouts", ["lease_id"])
    op.create_index("ix_rollouts_worker_id_state", "rollouts", ["worker_id", "state"])


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("group_id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("session_epoch", sa.BigInteger(), nullable=False),
        sa.Column("slots", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
    )
    op.create_index("ix_leases_group_id", "leases", ["group_id"])
    op.create_index("ix_leases_job_id_state", "leases", ["job_id", "state"])
    op.create_index("ix_leases_state_deadline", "leases", ["state", "deadline"])
    op.create_index("ix_leases_worker_id_state", "leases", ["worker_id", "state"])


def _refusals() -> None:
    op.create_table(
        "refusals",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("lease_id", TEXT, nullable=False),
        sa.Column("group_id", TEXT, nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("code", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("blame", TEXT, nullable=False),
        sa.Column("paid", sa.Boolean(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_refusals"),
    )
    op.create_index("ix_refusals_job_id_code", "refusals", ["job_id", "code"])
    op.create_index("ix_refusals_worker_id_at", "refusals", ["worker_id", "at"])


def _batches() -> None:
    op.create_table(
        "batches",
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("path", TEXT, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("rollouts", sa.BigInteger(), nullable=False),
        sa.Column("no_signal", sa.Boolean(), nullable=False),
        sa.Column("staleness", sa.JSON(), nullable=False),
        sa.Column("sealed_at", sa.Double(), nullable=False),
        sa.Column("waited_s", sa.Double(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=True),
        sa.Column("train_s", sa.Double(), nullable=False),
        sa.Column("bound", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_batches"),
    )


def _publications() -> None:
    op.create_table(
        "publications",
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("manifest", TEXT, nullable=False),
        sa.Column("signature", TEXT, nullable=False),
        sa.Column("directory", TEXT, nullable=False),
        sa.Column("canary_logprobs", sa.JSON(), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.Column("encode_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "version", "digest", name="pk_publications"),
    )
    op.create_index("ix_publications_job_id_state", "publications", ["job_id", "state"])


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("directory", TEXT, nullable=False),
        sa.Column("durable_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_checkpoints"),
    )


def _workers() -> None:
    op.create_table(
        "workers",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("public_key", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("invite_id", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("state_since", sa.Double(), nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("session_epoch", sa.BigInteger(), nullable=False),
        sa.Column("engine", sa.JSON(), nullable=False),
        sa.Column("price_uusd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("max_slots", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("peer", sa.JSON(), nullable=True),
        sa.Column("strikes", sa.BigInteger(), nullable=False),
        sa.Column("activity", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
        sa.UniqueConstraint("public_key", name="uq_workers_public_key"),
    )
    op.create_index("ix_workers_invite_id", "workers", ["invite_id"])
    op.create_index("ix_workers_state", "workers", ["state"])


def _worker_sessions() -> None:
    op.create_table(
        "worker_sessions",
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("price_uusd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("worker_id", "epoch", name="pk_worker_sessions"),
    )
    op.create_index("ix_worker_sessions_last_seen_at", "worker_sessions", ["last_seen_at"])


def _holdings() -> None:
    op.create_table(
        "holdings",
        sa.Column("worker_id", TEXT, nullable=False),
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("canary_logprobs", sa.JSON(), nullable=False),
        sa.Column("confirmed_at", sa.Double(), nullable=False),
        sa.Column("fetched_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fetched_from_peers_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fetch_s", sa.Double(), nullable=False),
        sa.Column("apply_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "job_id", "version", "digest", name="pk_holdings"),
    )
    op.create_index("ix_holdings_job_id_version", "holdings", ["job_id", "version"])


def _invites() -> None:
    op.create_table(
        "invites",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("code_hash", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("max_uses", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("price_ceiling_uusd_per_hour", sa.BigInteger(), nullable=True),
        sa.Column("jobs", sa.JSON(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_invites"),
        sa.UniqueConstraint("code_hash", name="uq_invites_code_hash"),
    )


def _api_tokens() -> None:
    op.create_table(
        "api_tokens",
        sa.Column("id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("role", TEXT, nullable=False),
        sa.Column("secret_hash", TEXT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("rights", sa.JSON(), nullable=False),
        sa.Column("spend_limit_uusd", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_tokens"),
        sa.UniqueConstraint("secret_hash", name="uq_api_tokens_secret_hash"),
    )


def _uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_uploads"),
    )
    op.create_index("ix_uploads_owner", "uploads", ["owner"])


def _idempotency_records() -> None:
    op.create_table(
        "idempotency_records",
        sa.Column("token_id", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("route", TEXT, nullable=False),
        sa.Column("body_hash", TEXT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("response", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name="pk_idempotency_records"),
    )
    op.create_index("ix_idempotency_records_created_at", "idempotency_records", ["created_at"])


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_events"),
    )


def _metrics() -> None:
    op.create_table(
        "metrics",
        sa.Column("job_id", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", "step", name="pk_metrics"),
    )


def downgrade() -> None:
    raise RuntimeError("there is nothing older to go back to: restore a backup")
