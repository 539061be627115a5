"""Leases of several services on one database. Those with steps of their own, before Alembic, end here."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    """Add the columns, and tell the services of before that these are there."""
    op.add_column("jobs", sa.Column("leased_until", sa.Double, nullable=False, server_default="0"))
    op.add_column("fxlib_about", sa.Column("swept_at", sa.Double, nullable=False, server_default="0"))
    op.execute("UPDATE fxlib_about SET schema_version = 5")
