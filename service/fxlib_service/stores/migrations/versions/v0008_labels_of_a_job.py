"""An index for the labels of a job, which are deleted with it."""

from alembic import op

revision, down_revision = "0008", "0007"


def upgrade() -> None:
    """Make it."""
    op.create_index("labels_by_job", "labels", ["job_id"], if_not_exists=True)
