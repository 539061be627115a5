"""Opens what a service keeps: its folder and its SQLite database, for one process at a time, and all its stores.

No process uses a data folder while its restore is incomplete.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from fxlib.errors import FxlibError, of_system
from fxlib_service.blobs.base import BlobStore
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.clock import Clock
from fxlib_service.config import Config
from fxlib_service.errors import ServiceError
from fxlib_service.stores.postgres import PostgresJobStore
from fxlib_service.stores.sql import SqlJobStore

RESTORING: Final = "restoring"
"""The file that names the backup being restored into the folder; it is deleted when the restore is done."""
LOCK: Final = "lock"


class Lock:
    """An exclusive lock. The kernel releases it when the process ends, however it ends.

    Args:
        file: the file to lock, which is created if it does not exist.
        what: the folder or the database that it stands for.
        option: the option that names it.

    Raises:
        FxlibError: another process holds the lock, or its file cannot be made or written.
    """

    def __init__(self, file: Path, what: Path, option: str) -> None:
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FxlibError(f"cannot use {what}: {error.strerror}", where=option) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise FxlibError(f"another service uses {what}", where=option, hint="Give each its own.") from None

    def release(self) -> None:
        """Release the lock, so that another service can use what it stands for."""
        os.close(self._descriptor)


class DataLock(Lock):
    """The lock on the data folder.

    Args:
        folder: the data folder, which is created if it does not exist.
        restores: whether it is for a restore, which may find the folder partly restored.

    Raises:
        FxlibError: as for every lock, or a restore into the folder was not finished.
    """

    def __init__(self, folder: Path, *, restores: bool = False) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise FxlibError(f"cannot use {folder}: {error.strerror}", where="--data") from error
        super().__init__(folder / LOCK, folder, "--data")
        if (folder / RESTORING).exists() and not restores:
            self.release()
            raise FxlibError(
                f"a backup was being restored into {folder}, which was not finished",
                where="--data",
                hint="Run the restore again, or delete the folder.",
            )


class DatabaseLock(Lock):
    """The lock on an SQLite database, which services with data folders of their own may name all the same.

    It is a file beside the database, since SQLite loses its own locks when any descriptor of the database is closed.
    """

    def __init__(self, path: Path) -> None:
        found = path.resolve()  # links lead to one database
        super().__init__(found.with_name(f"{found.name}.{LOCK}"), path, "--database")


def is_shared(config: Config) -> bool:
    """Return whether several services may share the database; they may if it is PostgreSQL, and not SQLite."""
    return config.database_url.startswith(("postgresql", "postgres:"))


def sqlite_url(config: Config) -> str:
    """Return the URL of the database if it is SQLite."""
    return config.database_url or f"sqlite:///{config.data / 'service.sqlite'}"


def sqlite_path(config: Config) -> Path:
    """Return the file of the database if it is SQLite; raises the error of `url_of`."""
    return Path(url_of(sqlite_url(config)).database or "")


def url_of(text: str) -> sa.URL:
    """Return the URL of a database.

    Raises:
        FxlibError: it is none.
    """
    try:
        return sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise FxlibError(f"the database cannot be used: {error}", where="--database") from error


def job_store(config: Config) -> SqlJobStore:
    """Open the store of the jobs, creating missing tables.

    Raises:
        FxlibError: the store cannot be used.
    """
    return PostgresJobStore(config.database_url) if is_shared(config) else SqlJobStore(sqlite_url(config))


def blob_store(config: Config, clock: Clock) -> BlobStore:
    """Open the store of the blobs, which must respond now.

    Raises:
        FxlibError: the store does not respond, or no store has that name.
    """
    scheme, is_url, path = config.blobs.partition("://")
    if is_url and scheme != "file":
        from fxlib_service.blobs.url import UrlBlobStore  # here: it imports the drivers of fsspec

        store = UrlBlobStore(config.blobs, config.data, clock)
        store.check()
        return store
    folder = Path(path if is_url else config.blobs) if config.blobs else config.data
    if is_url and not folder.is_absolute():
        raise FxlibError(f"{config.blobs} names no folder", where="--blobs", hint="Write file:///FOLDER.")
    try:
        return FolderBlobStore(folder, clock)
    except ServiceError as error:
        why = of_system(error.__cause__) if isinstance(error.__cause__, OSError) else error
        raise FxlibError(f"cannot use {why}", where="--blobs" if config.blobs else "--data") from error
