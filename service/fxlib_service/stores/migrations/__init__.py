"""The migration steps from the tables of earlier services to the current ones, one file each in `versions/`.

Alembic applies them in order. A step only adds, with defaults for existing rows, so that services of the previous
version can keep running beside it. A step of a later release drops whatever has become superfluous. `schema` has the
tables as they are after all steps, and a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from fxlib.errors import FxlibError
from fxlib_service.stores import schema

HEAD: Final = "0008"
"""The last step, which is the version of the tables in `schema`."""

_FOLDER: Final = Path(__file__).parent


def prepare(db: sa.Connection) -> None:
    """Create the tables, or migrate those of an earlier service, within the transaction of `db`.

    Raises:
        FxlibError: the tables belong to a later service, or lack the row that every service writes.
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
    """Refuse a database in which the only row of `fxlib_about` was deleted, since leases would never expire there."""
    count = db.execute(sa.select(sa.func.count()).select_from(schema.about)).scalar_one()
    if count != 1:
        raise FxlibError(
            f"the table {schema.about.name} of the database {db.engine.url.database} has {count} rows and not its one",
            where="--database",
            hint="Something else than the service wrote there. Restore the database from a backup, or use a new one.",
        )


def _version(db: sa.Connection) -> str:
    """Return the last step that was applied. Services before Alembic numbered the same steps themselves."""
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
