"""Leases of several services on one database."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("jobs", sa.Column("leased_until", sa.Double, nullable=False, server_default="0"))
    op.add_column("fxlib_about", sa.Column("swept_at", sa.Double, nullable=False, server_default="0"))
