"""What Alembic runs to take the steps: on the connection that `migrations` hands it, in the transaction at hand."""

from alembic import context

from fxlib_service.stores import schema

context.configure(connection=context.config.attributes["connection"], version_table=schema.version.name)
context.run_migrations()
