"""Indices for the next job in turn and for the last answer."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0006", "0005"


def upgrade() -> None:
    """Make them, and drop the one that they replace; services of before made the same at each start."""
    not_cached = ~sa.column("cached", sa.Boolean)
    op.create_index(
        "jobs_by_turn",
        "jobs",
        ["namespace", "started_at"],
        sqlite_where=not_cached,
        postgresql_where=not_cached,
        if_not_exists=True,
    )
    op.create_index("jobs_by_answer", "jobs", ["cache_key", "state", "finished_at"], if_not_exists=True)
    op.drop_index("jobs_by_key", "jobs", if_exists=True)
