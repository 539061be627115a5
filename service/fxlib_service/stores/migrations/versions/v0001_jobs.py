"""Jobs with their labels, payloads and events, and workers."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    """Make the tables."""
    op.create_table("fxlib_about", sa.Column("schema_version", sa.Integer, nullable=False))
    op.create_table(
        "jobs",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("torch_version", sa.String(64), nullable=False),
        sa.Column("cache_key", sa.String(64), nullable=False),
        sa.Column("fresh", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("phase", sa.String(64), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("worker_id", sa.String(256), nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("hardware", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("failure_code", sa.String(64)),
        sa.Column("failure_message", sa.Text),
        sa.Column("cached", sa.Boolean, nullable=False),
        sa.Column("reusable", sa.Boolean, nullable=False),
        sa.Column("last_sequence", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("namespace", "request_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_state", "jobs", ["state", "torch_version", "namespace", "number"])
    op.create_index("jobs_by_key", "jobs", ["cache_key", "state"])
    op.create_index("jobs_by_finish", "jobs", ["state", "finished_at"])
    op.create_index("jobs_by_namespace", "jobs", ["namespace", "number"])
    op.create_table(
        "labels",
        sa.Column("key", sa.String(256), primary_key=True),
        sa.Column("value", sa.String(256), primary_key=True),
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    )
    op.create_table(
        "payloads",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("phase", sa.String(64), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("progress", sa.Double, nullable=False),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(256), primary_key=True),
        sa.Column("torch_version", sa.String(64), nullable=False),
        sa.Column("hardware", sa.Text, nullable=False),
        sa.Column("fxlib_version", sa.String(64), nullable=False),
        sa.Column("allowed_modules", sa.JSON, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
    )
