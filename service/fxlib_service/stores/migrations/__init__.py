"""The steps from the tables of earlier services to today's, which Alembic takes in order: `versions/`, one file each.

A step only adds, with defaults for rows that are there: services of the version before go on beside it. What it makes
superfluous is dropped by a step of a later release. `schema` has the tables as they are after all steps, which a test
holds against them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from fxlib.errors import FxlibError
from fxlib_service.stores import schema

HEAD: Final = "0007"
"""The last step, and so the version of the tables in `schema`."""

_FOLDER: Final = Path(__file__).parent


def prepare(db: sa.Connection) -> None:
    """Make the tables, or bring those of an earlier service up to date, within the transaction of `db`.

    Raises:
        FxlibError: the tables are a later service's, or lack what every service writes into them.
    """
    if not sa.inspect(db).has_table(schema.about.name):
        schema.metadata.create_all(db)
        db.execute(schema.about.insert())
        db.execute(schema.version.insert().values(version_num=HEAD))
        return
    _check_about(db)
    if (version := _version(db)) != HEAD:
        _upgrade(db, version)


def _check_about(db: sa.Connection) -> None:
    """Refuse a database whose one row of `fxlib_about` was deleted: leases would never expire there."""
    count = db.execute(sa.select(sa.func.count()).select_from(schema.about)).scalar_one()
    if count != 1:
        raise FxlibError(
            f"the table {schema.about.name} of the database {db.engine.url.database} has {count} rows and not its one",
            where="--database",
            hint="Something else than the service wrote there. Restore the database from a backup, or use a new one.",
        )


def _version(db: sa.Connection) -> str:
    """Return the last step that was taken. Services before Alembic numbered the same steps themselves."""
    schema.version.create(db, checkfirst=True)
    if (version := db.execute(sa.select(schema.version.c.version_num)).scalar()) is None:
        version = f"{db.execute(sa.select(schema.about.c.schema_version)).scalar_one():04}"
        db.execute(schema.version.insert().values(version_num=version))
    return version


def _upgrade(db: sa.Connection, version: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": db})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise FxlibError(
            f"the database has schema version {version}, this service needs {HEAD}",
            where="--database",
            hint="Start the service that made it, or use a new database.",
        ) from error
