"""What Alembic runs to take the steps: on the connection that `migrations` hands it, in the transaction at hand."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
