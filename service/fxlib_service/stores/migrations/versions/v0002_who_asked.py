"""Who asked for a job and who measured it, and which tenant holds which blob."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Add the columns and the table."""
    op.add_column("jobs", sa.Column("asked_by", sa.String(64), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("asked_from", sa.String(256), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("measured_by", sa.String(64), nullable=False, server_default=""))
    op.create_table(
        "holdings",
        sa.Column("namespace", sa.String(64), primary_key=True),
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_index("holdings_by_blob", "holdings", ["sha256"], if_not_exists=True)
