"""Counts against quotas that several services share."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0007", "0006"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "calls_in_flight",
        sa.Column("namespace", sa.String(64), primary_key=True),
        sa.Column("service", sa.String(64), primary_key=True),
        sa.Column("calls", sa.Integer, nullable=False),
        sa.Column("told_at", sa.Double, nullable=False),
    )
    op.create_table(
        "live_reports",
        sa.Column("tenant", sa.String(256), primary_key=True),
        sa.Column("due_at", sa.Double, nullable=False),
    )
