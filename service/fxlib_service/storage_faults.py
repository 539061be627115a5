"""The refusals for faults of a disk or a database. Only this file distinguishes those faults.

A fault passes when the disk has room again or the folder is writable again, so each refusal says when to retry.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa

from fxlib_service.errors import Code, ServiceError

_RETRY_FULL_S: Final = 60.0
_RETRY_S: Final = 2.0

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL: Final = frozenset({"SQLITE_FULL", "SQLITE_IOERR_SHMSIZE", "53100"})
"""The codes of SQLite and PostgreSQL for a full disk. SQLite gives the second one if it cannot begin to write."""

logger = logging.getLogger(__name__)


def refusal_of(error: OSError | sa.exc.SQLAlchemyError) -> ServiceError:
    """Return the refusal for a fault of the disk or of the database: STORAGE_FULL or STORAGE_UNAVAILABLE."""
    if _is_full(error):
        return ServiceError(Code.STORAGE_FULL, _words(error), retry_after_s=_RETRY_FULL_S)
    return ServiceError(Code.STORAGE_UNAVAILABLE, f"storage: {_words(error)}", retry_after_s=_RETRY_S)


@contextmanager
def translated() -> Iterator[None]:
    """Turn a fault of the disk or of the database within the block into its refusal.

    Errors of SQL itself (a constraint, a wrong statement) are the service's own and pass unchanged.

    Raises:
        ServiceError: STORAGE_FULL or STORAGE_UNAVAILABLE; INVALID_REQUEST for a value that the database cannot hold.
    """
    try:
        yield
    except (sa.exc.IntegrityError, sa.exc.ProgrammingError):
        raise
    except sa.exc.DataError as error:  # PostgreSQL has no text with a NUL in it
        raise ServiceError(Code.INVALID_REQUEST, f"the database cannot hold this: {error.orig}") from error
    except (OSError, sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
        refusal = refusal_of(error)
        logger.warning("%s: %s", refusal.code.name, in_full(error))
        raise refusal from error


def in_full(error: BaseException | None) -> str:
    """Return the error as one line for the operator, including where the database was looked for."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _is_full(error: OSError | sa.exc.SQLAlchemyError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    cause = getattr(error, "orig", None)
    named = getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None)
    return named in _FULL


def _words(error: OSError | sa.exc.SQLAlchemyError) -> str:
    """Return the error's message without the statement and its parameters, and without the database's address."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    cause = getattr(error, "orig", None)
    if diagnosis := getattr(cause, "diag", None):  # PostgreSQL's own message, if it sent one
        return diagnosis.message_primary or "the database is away"
    return str(cause or error)
