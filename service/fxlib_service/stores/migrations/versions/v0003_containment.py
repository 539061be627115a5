"""How a worker contains its trials."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Add the column."""
    op.add_column("workers", sa.Column("containment", sa.String(64), nullable=False, server_default=""))
