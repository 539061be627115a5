"""Opens the stores that the options name."""

from __future__ import annotations

from pathlib import Path

from fxlib.errors import FxlibError
from fxlib_service.blobs.base import BlobStore
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.clock import Clock
from fxlib_service.config import Config
from fxlib_service.stores.postgres import PostgresJobStore
from fxlib_service.stores.sql import SqlJobStore


def is_shared(config: Config) -> bool:
    """Return whether several services may share the database; they may if it is PostgreSQL, and not SQLite."""
    return config.database_url.startswith("postgresql")


def sqlite_url(config: Config) -> str:
    """Return the URL of the database if it is SQLite."""
    return config.database_url or f"sqlite:///{config.data / 'service.sqlite'}"


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
    return FolderBlobStore(folder, clock)
