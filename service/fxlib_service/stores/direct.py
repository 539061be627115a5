"""Statements that SQLAlchemy has composed, run on the driver's own cursor.

To take a short statement through SQLAlchemy's execution costs several times what the database takes for it. What is
stored for every new job goes this way; everything else goes through SQLAlchemy's connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPICursor

Statement = sa.Insert | sa.Delete | sa.TextClause | sa.Select[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """A statement in the driver's words.

    Attributes:
        text: the statement.
        names: the parameters in the order in which the driver wants them; None if it wants them by name.
        convert: what makes the driver's value of a parameter, for those that have another form there.
    """

    text: str
    names: tuple[str, ...] | None
    convert: Mapping[str, Callable[[Any], Any]]

    def bound(self, parameters: Mapping[str, object]) -> Any:
        """Return the parameters as the driver wants them."""
        if self.convert:
            parameters = {**parameters, **{name: make(parameters[name]) for name, make in self.convert.items()}}
        return parameters if self.names is None else [parameters[name] for name in self.names]


class Direct:
    """A transaction on the driver's own cursor: of what a connection of SQLAlchemy's can do, it can `execute`."""

    def __init__(self, cursor: DBAPICursor, composer: Composer) -> None:
        self._cursor = cursor
        self._composer = composer

    def execute(self, statement: Statement, parameters: Mapping[str, object] | Sequence[Mapping[str, object]]) -> Any:
        """Run a statement, once or for several rows, and return the cursor; rows come as the driver has them."""
        if isinstance(parameters, Mapping):
            composed = self._composer.composed(statement, parameters)
            self._cursor.execute(composed.text, composed.bound(parameters))
        else:
            composed = self._composer.composed(statement, parameters[0])
            self._cursor.executemany(composed.text, [composed.bound(each) for each in parameters])
        return self._cursor


class Composer:
    """Composes the statements of one engine, each once: they are objects that live as long as their module."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._begin: Final = "BEGIN IMMEDIATE" if engine.dialect.name == "sqlite" else ""
        self._composed: dict[Statement, _Composed] = {}

    @contextmanager
    def transaction(self) -> Iterator[Direct]:
        """Run the block in a transaction, which is committed at its end.

        Raises:
            DBAPIError: SQLAlchemy's, of the same kind as the driver's error.
        """
        driver = self._engine.dialect.loaded_dbapi
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            if self._begin:  # the other drivers begin by themselves
                cursor.execute(self._begin)
            yield Direct(cursor, self)
            connection.commit()
        except driver.Error as error:
            connection.invalidate(error)  # it may be lost; another one costs little
            raise sa.exc.DBAPIError.instance(None, None, error, driver.Error, dialect=self._engine.dialect) from error
        finally:
            connection.close()  # and what was not committed is rolled back

    def composed(self, statement: Statement, parameters: Mapping[str, object]) -> _Composed:
        """Return a statement, composed for such parameters."""
        found = self._composed.get(statement)
        if found is None:
            found = self._composed[statement] = self._compose(statement, parameters)
        return found

    def _compose(self, statement: Statement, parameters: Mapping[str, object]) -> _Composed:
        dialect = self._engine.dialect
        columns = list(parameters) if isinstance(statement, sa.Insert) else None
        compiled: Any = statement.compile(dialect=dialect, column_keys=columns)
        processors = {
            name: bind.type.dialect_impl(dialect).bind_processor(dialect) for name, bind in compiled.binds.items()
        }
        return _Composed(
            text=compiled.string,
            names=None if compiled.positiontup is None else tuple(compiled.positiontup),
            convert={name: make for name, make in processors.items() if make is not None},
        )
