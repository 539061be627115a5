"""Runs statements composed by SQLAlchemy on the driver's own cursor.

Executing a short statement through SQLAlchemy costs several times what the database takes for it. The writes for every
new job go this way; everything else goes through SQLAlchemy's connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import PoolProxiedConnection
from sqlalchemy.engine.interfaces import DBAPICursor

Statement = sa.Insert | sa.Delete | sa.TextClause | sa.Select[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """A statement in the driver's form.

    Attributes:
        text: the statement.
        order: the names of the parameters in the driver's order, each with the function that converts its value for the
            driver, if there is one.
        by_name: whether the driver expects them by name.
    """

    text: str
    order: Sequence[tuple[str, Callable[[Any], Any] | None]]
    by_name: bool

    def bound(self, parameters: Mapping[str, object]) -> Any:
        """Return the parameters as the driver expects them."""
        values = [make(parameters[name]) if make else parameters[name] for name, make in self.order]
        return dict(zip((name for name, _ in self.order), values, strict=True)) if self.by_name else values


class Direct:
    """A transaction on the driver's own cursor. Of the methods of an SQLAlchemy connection, it has `execute`."""

    def __init__(self, cursor: DBAPICursor, composer: Composer) -> None:
        self._cursor = cursor
        self._composer = composer

    def execute(self, statement: Statement, parameters: Mapping[str, object] | list[dict[str, object]]) -> Any:
        """Run a statement, once or for several rows, and return the cursor; rows come in the driver's form."""
        if isinstance(parameters, list):
            composed = self._composer.composed(statement, parameters[0])
            self._cursor.executemany(composed.text, [composed.bound(each) for each in parameters])
        else:
            composed = self._composer.composed(statement, parameters)
            self._cursor.execute(composed.text, composed.bound(parameters))
        return self._cursor


class Composer:
    """Composes the statements of one engine, each only once, since they are objects that live as long as their module.

    Transactions run one after another, on a connection that is kept.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._begin: Final = "BEGIN IMMEDIATE" if engine.dialect.name == "sqlite" else ""
        self._composed: dict[Statement, _Composed] = {}
        self._turn = Lock()
        self._kept: PoolProxiedConnection | None = None

    @contextmanager
    def transaction(self) -> Iterator[Direct]:
        """Run the block in a transaction, which is committed at its end.

        Raises:
            DBAPIError: SQLAlchemy's error of the same kind as the driver's.
        """
        driver = self._engine.dialect.loaded_dbapi
        with self._turn:
            connection, self._kept = self._kept, None
            try:
                connection = connection or self._engine.raw_connection()
                cursor = connection.cursor()
                if self._begin:  # the other drivers begin transactions themselves
                    cursor.execute(self._begin)
                yield Direct(cursor, self)
                connection.commit()
                self._kept = connection
            except driver.Error as error:
                if connection is not None:
                    connection.invalidate(error)  # it may be lost, and a new one costs little
                raise sa.exc.DBAPIError.instance(
                    None, None, error, driver.Error, dialect=self._engine.dialect
                ) from error
            finally:
                if self._kept is None and connection is not None:
                    connection.close()  # which rolls back what was not committed

    def close(self) -> None:
        """Return the kept connection to the pool."""
        with self._turn:
            if self._kept is not None:
                self._kept.close()
                self._kept = None

    def composed(self, statement: Statement, parameters: Mapping[str, object]) -> _Composed:
        """Return a statement composed for parameters of these names."""
        found = self._composed.get(statement)
        if found is None:
            found = self._composed[statement] = self._compose(statement, parameters)
        return found

    def _compose(self, statement: Statement, parameters: Mapping[str, object]) -> _Composed:
        dialect = self._engine.dialect
        columns = list(parameters) if isinstance(statement, sa.Insert) else None
        compiled: Any = statement.compile(dialect=dialect, column_keys=columns)
        names = compiled.binds if compiled.positiontup is None else compiled.positiontup
        processors = [compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect) for name in names]
        return _Composed(
            text=compiled.string,
            order=tuple(zip(names, processors, strict=True)),
            by_name=compiled.positiontup is None,
        )
