"""A SQLAlchemy engine whose commits are durable."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from fxlib.errors import FxlibError

_PRAGMAS: Final = (
    "journal_mode = WAL",  # readers do not wait for the writer
    "synchronous = FULL",  # a commit is on the disk when it returns
    "foreign_keys = ON",
    "busy_timeout = 10000",
)


def make_engine(url: str) -> sa.Engine:
    """Return an engine for a database URL; `sqlite:///FILE` gets write-ahead logging and synced commits.

    Raises:
        FxlibError: it is no URL, or names a driver that is not installed.
    """
    try:
        engine = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
        raise FxlibError(f"the database cannot be used: {error}", where="--database") from error
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _configure_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # Transactions are begun by `_begin_sqlite`, not by Python's driver, which begins them only at the first write.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    read_only = connection.get_execution_options().get("read_only", False)
    # A writer takes its lock at once: one that reads first and locks later can fail on another's write.
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
