"""Applies the steps when Alembic runs it, on the connection that `migrations` passes and in its transaction."""

from alembic import context

from fxlib_service.stores import schema

context.configure(connection=context.config.attributes["connection"], version_table=schema.version.name)
context.run_migrations()
