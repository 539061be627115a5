"""Labels of workers, and those that a job asks for."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("jobs", sa.Column("labels_asked", sa.Text, nullable=False, server_default=""))
    op.add_column("workers", sa.Column("labels", sa.Text, nullable=False, server_default=""))
