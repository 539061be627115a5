"""Backups and their restore. A backup is a folder with the database and its blobs, made while the service runs.

A backup first copies the database as of one moment, and then the blobs, since no blob is deleted before the jobs that
name it. It is assembled under a temporary name, its manifest is written last, and it is renamed when it is complete. A
restore requires a manifest and checks every byte against it. A folder that is being restored is marked until the
restore is done, and no service starts there. A restore that was killed can be run again.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from fxlib import __version__
from fxlib.errors import FxlibError, OptionError, of_system
from fxlib_service.blobs.base import BlobStore, CheckedBlob
from fxlib_service.blobs.folder import FolderBlobStore, sync_folder
from fxlib_service.clock import Clock
from fxlib_service.config import APPLICATION, Config
from fxlib_service.errors import LOST, ServiceError
from fxlib_service.named_blobs import NamedBlobs
from fxlib_service.open_stores import LOCK, RESTORING, DataLock, blob_store, is_shared, sqlite_path, url_of
from fxlib_service.storage_faults import in_full
from fxlib_service.stores import schema

_FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"
_UNFINISHED: Final = ".unfinished"
_STORES: Final = ("data", "database", "blobs")
"""The options of the service that locate its database and blobs."""
_SQLITE, _POSTGRES = "service.sqlite", "service.pgdump"
_FOREIGN: Final = frozenset({LOCK, f"{_SQLITE}.{LOCK}", "lost+found"})
"""The names that an empty data folder may hold: the lock of this process, that of a service that was here, and a file
system's own folder at its root."""
_OF_ANOTHER: Final = ("-wal", "-journal")
"""The ends of the names of files beside an SQLite database that hold a part of it."""
_PIECE: Final = 8 << 20
_BACKUP_DESCRIPTION: Final = "Back a service up, which may run meanwhile: its database, and the blobs that jobs name."
_RESTORE_DESCRIPTION: Final = """Restore a backup, where no service runs, into an empty data folder and, with
PostgreSQL, an empty database. A restore that was interrupted is run again."""
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a backup.

    Attributes:
        id: id of the backup.
        made_at: when it was made, in seconds since the epoch.
        fxlib_version: the version of the service's code that made it.
        database: the name of the database's file in it.
        sha256: the digest of that file.
        schema: the schema of a PostgreSQL database that the tables are in.
        jobs: number of jobs.
        blobs: sizes in bytes of its blobs, by SHA-256.
        missing: blobs that jobs name, and that the service has lost, or holds only damaged.
        format: version of this layout.
    """

    id: str
    made_at: float
    fxlib_version: str
    database: str
    sha256: str
    jobs: int
    schema: str = ""
    blobs: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    format: int = _FORMAT

    @staticmethod
    def of(folder: Path) -> Manifest:
        """Read the manifest of a backup.

        Raises:
            FxlibError: the folder is not a backup, or holds one that was not finished or is of a later release.
        """
        try:
            fields = json.loads((folder / _MANIFEST).read_text())
            if fields["format"] != _FORMAT:
                raise FxlibError(
                    f"it is of format {fields['format']}, and this release reads {_FORMAT}", where=str(folder)
                )
            _check_manifest(fields)
            return Manifest(**fields)
        except FileNotFoundError:
            raise FxlibError("it is no backup, or one that was not finished", where=str(folder)) from None
        except (ValueError, TypeError, KeyError, RecursionError, ServiceError) as error:
            raise FxlibError(f"its {_MANIFEST} is damaged", where=str(folder)) from error


def _check_manifest(fields: Mapping[str, Any]) -> None:
    """Check whatever becomes a path or is counted: whoever can write into a backup may have changed it.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, or is not of its kind.
        ServiceError: a blob is not named by its digest.
    """
    missing, blobs = fields["missing"], fields["blobs"]
    texts = (*missing, *(fields[name] for name in ("id", "fxlib_version", "sha256", "schema")))
    if not (isinstance(fields["jobs"], int) and isinstance(blobs, dict) and isinstance(missing, list)):
        raise TypeError("a field is of another type")
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a field is no text")
    if fields["database"] not in (_SQLITE, _POSTGRES):
        raise ValueError("the database is another file")
    for sha256, size in blobs.items():
        CheckedBlob(sha256=sha256, size=size)


def main(command: str, arguments: Sequence[str]) -> int:
    """Make a backup, or restore one; return the exit status: 0 success, 1 failure, 2 wrong command line."""
    try:
        options = _parser(command).parse_args(arguments)
        stores = [f"--{name}={getattr(options, name)}" for name in _STORES if getattr(options, name) is not None]
        file = ["--config", options.config] if options.config else []
        config = APPLICATION.read([*stores, *file, "--insecure"])  # nothing listens here: any address will do
        done = (make if command == "backup" else restore)(config, options.folder)
    except OptionError as error:
        sys.stderr.write(f"fxlib {command}: {error}\n")
        return 2
    except FxlibError as error:
        sys.stderr.write(f"fxlib {command}: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"fxlib {command}: {of_system(error)}\n")
        return 1
    size, lost = sum(done.blobs.values()), len(done.missing)
    if options.json:
        figures = {"id": done.id, "folder": str(options.folder), "jobs": done.jobs, "blobs": len(done.blobs)}
        line = json.dumps({**figures, "blob_bytes": size, "missing": done.missing})
    else:
        verb = "is in" if command == "backup" else "was restored from"
        line = f"fxlib: a database of {done.jobs} jobs, with {len(done.blobs)} blobs ({size:,} bytes), {verb} "
        line += str(options.folder)
    sys.stdout.write(f"{line}\n")
    if lost:
        sys.stderr.write(
            f"fxlib {command}: {lost} blobs that jobs name were lost or damaged before: --json names them\n"
        )
    return 0


def make(config: Config, folder: Path) -> Manifest:
    """Back up a service into a folder that does not exist yet, and return its manifest. The service may be running.

    Raises:
        FxlibError: the folder exists, another process is making it, or something cannot be read or written.
    """
    if folder.exists():
        raise FxlibError("it exists", where=str(folder), hint="Name a folder that does not.")
    if not (is_shared(config) or sqlite_path(config).exists()):
        hint = "Is it another folder?"
        raise FxlibError(f"there is no database {sqlite_path(config)}", where="--data", hint=hint)
    whole = folder.absolute()
    unfinished = whole.with_name(f"{whole.name}{_UNFINISHED}")
    blobs = blob_store(config, Clock())
    _make_own(unfinished)
    with _alone(unfinished), _deleted_if_it_fails(unfinished):
        _clear(unfinished)
        target = FolderBlobStore(unfinished)
        with _snapshot(config, unfinished) as (database, db):
            jobs = db.execute(sa.select(sa.func.count()).select_from(schema.jobs)).scalar_one()
            kept, missing = _collect(db, blobs, target)
            where = db.execute(sa.text("SELECT current_schema()")).scalar_one() if is_shared(config) else ""
        shutil.rmtree(unfinished / "partial")
        _sync(database)
        manifest = Manifest(
            id=uuid.uuid4().hex,
            made_at=time.time(),
            fxlib_version=__version__,
            database=database.name,
            sha256=_digest(database),
            schema=where,
            jobs=jobs,
            blobs=kept,
            missing=sorted(missing),
        )
        (unfinished / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
        _sync(unfinished / _MANIFEST)
        sync_folder(unfinished)
        unfinished.rename(whole)  # fails if such a folder was made in the meantime and is not empty
        sync_folder(whole.parent)
    return manifest


def restore(config: Config, folder: Path) -> Manifest:
    """Restore a backup into an empty data folder where no service runs, and into an empty database if it is elsewhere.

    A restore that was killed can be run again.

    Raises:
        FxlibError: the backup is not complete, the data folder or the database is not empty or of another kind, or
            something cannot be read or written.
    """
    manifest = Manifest.of(folder)
    if (manifest.database == _POSTGRES) != is_shared(config):
        kind = "PostgreSQL" if manifest.database == _POSTGRES else "SQLite"
        raise FxlibError(f"{folder} has a database of {kind}, and this is none", where="--database")
    database = folder / manifest.database
    if not database.is_file() or _digest(database) != manifest.sha256:
        raise FxlibError(f"its {manifest.database} is damaged", where=str(folder))
    lock = DataLock(config.data, restores=True)
    try:
        again = _mark(config.data, manifest.id)
        bring = (_restored_postgres if is_shared(config) else _restored_sqlite)(config, manifest, again=again)
        _bring_back(folder, manifest, blob_store(config, Clock()))
        if bring is not None:
            bring(database)
        (config.data / RESTORING).unlink()
        sync_folder(config.data)
    finally:
        lock.release()
    return manifest


def _parser(command: str) -> argparse.ArgumentParser:
    backs_up = command == "backup"
    parser = argparse.ArgumentParser(
        prog=f"fxlib {command}",
        description=_BACKUP_DESCRIPTION if backs_up else _RESTORE_DESCRIPTION,
        epilog="Where these are is said by the options, variables and files of the service, too: fxlib serve --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="folder to be made, with the backup in it" if backs_up else "folder with the backup",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options of the service")
    for declared, _, default in APPLICATION.options():
        if declared.name in _STORES and declared.kind is not None:
            meaning = f"{declared.meaning} (default: {default})".replace("%", "%%")
            parser.add_argument(f"--{declared.name}", metavar=declared.kind.metavar, help=meaning)
    parser.add_argument("--json", action="store_true", help="print as JSON what the backup holds")
    return parser


# ---------------------------------------------------------------------------------------------------------- the backup


@contextmanager
def _deleted_if_it_fails(folder: Path) -> Iterator[None]:
    """Delete a folder if the block raises."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _snapshot(config: Config, folder: Path) -> Iterator[tuple[Path, sa.Connection]]:
    """Copy the database into a file in the folder; yield the file, and a connection that reads the same state."""
    path = folder / (_POSTGRES if is_shared(config) else _SQLITE)
    if is_shared(config):
        with _postgres(config, isolation="REPEATABLE READ") as db:
            name = db.execute(sa.text("SELECT pg_export_snapshot()")).scalar_one()
            where = db.execute(sa.text("SELECT current_schema()")).scalar_one()
            found = set(sa.inspect(db).get_table_names()) & schema.metadata.tables.keys()
            if schema.jobs.name not in found:
                raise FxlibError("there are no jobs of a service in this database", where="--database")
            tables = [f'--table="{where}"."{table}"' for table in sorted(found)]
            _run(config, "pg_dump", "--format=custom", f"--snapshot={name}", *tables, f"--file={path}")
            yield path, db
        return
    original = sqlite_path(config)
    try:
        # Not read-only, since a database whose service was killed has to be recovered first.
        with (
            closing(sqlite3.connect(f"file:{original}?mode=rw", uri=True)) as db_,
            closing(sqlite3.connect(path)) as to,
        ):
            db_.execute("PRAGMA busy_timeout = 10000")
            db_.execute("PRAGMA schema_version").fetchone()  # reads the file
            try:
                db_.backup(to)  # all pages at once, so that the copy is consistent whatever is written in the meantime
                to.execute("PRAGMA journal_mode = DELETE")  # one file
            except sqlite3.Error as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                raise FxlibError(f"the database cannot be copied here: {in_full(error)}", where=str(folder)) from error
        engine = sa.create_engine(f"sqlite:///{path}")
        with engine.connect() as db:
            yield path, db
        engine.dispose()
    except (sqlite3.Error, sa.exc.SQLAlchemyError) as error:
        raise FxlibError(f"the database cannot be read: {in_full(error)}", where=str(original)) from error


def _collect(db: sa.Connection, source: BlobStore, target: BlobStore) -> tuple[dict[str, int], set[str]]:
    """Copy the blobs that the jobs of a database name; return their sizes, and the blobs that are missing."""
    named = NamedBlobs(lambda blob: source.read(blob.sha256, offset=0, length=blob.size))
    readers = {"request": named.in_request, "result": named.in_result}
    kept, missing = dict[str, int](), set[str]()
    table = schema.payloads
    rows = db.execution_options(yield_per=50).execute(
        sa.select(table.c.kind, table.c.body).where(table.c.kind.in_(readers))
    )
    for kind, body in rows:
        for sha256 in readers[kind](body) - kept.keys() - missing:
            size = _copy(partial(source.read, sha256, length=_PIECE), sha256, target)
            if size is None:
                missing.add(sha256)
            else:
                kept[sha256] = size
    return kept, missing


def _copy(read: Callable[..., bytes], sha256: str, target: BlobStore) -> int | None:
    """Copy a blob and return its size, or None if it is missing or damaged."""
    try:
        at = target.append(sha256, b"")
        while piece := read(offset=at):
            at = target.append(sha256, piece)
        target.commit(CheckedBlob(sha256=sha256, size=at))
    except ServiceError as error:
        if error.code not in LOST:
            raise
        target.drop(sha256)
        return None
    return at


def _make_own(folder: Path) -> None:
    """Make a folder that only this user may enter, unless a backup that was killed left it.

    Raises:
        FxlibError: there is something else of this name, which whoever made it may have meant to be cleared or filled.
    """
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            hint = "Delete it, or name another folder."
            raise FxlibError("it is no backup that this user began", where=str(folder), hint=hint) from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder while it is being made."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FxlibError("another process makes this backup", where=str(folder)) from None
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    """Delete the remains of a backup that was killed."""
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()


# --------------------------------------------------------------------------------------------------------- the restore


def _mark(data: Path, backup: str) -> bool:
    """Mark a data folder as being restored from a backup; return whether it was marked already.

    Raises:
        FxlibError: the folder holds something else.
    """
    mark = data / RESTORING
    if mark.exists() and mark.read_text().strip() == backup:
        return True
    if mark.exists():
        raise FxlibError(f"another backup was being restored into {data}", where="--data", hint="Delete the folder.")
    if {each.name for each in data.iterdir()} - _FOREIGN:
        raise FxlibError(
            f"{data} is not empty", where="--data", hint="A backup is restored into an empty folder alone."
        )
    unfinished = mark.with_suffix(".part")
    unfinished.write_text(f"{backup}\n")
    _sync(unfinished)
    unfinished.rename(mark)
    sync_folder(data)
    return False


def _bring_back(folder: Path, manifest: Manifest, target: BlobStore) -> None:
    for sha256, size in manifest.blobs.items():
        # An earlier run may have restored it, or it was there from the start; what is damaged is deleted here.
        if target.size(sha256) == size and target.verify(sha256):
            continue
        target.drop(sha256)
        path = folder / "blobs" / sha256[:2] / sha256
        # What is no file, such as a pipe or a device, may have no end.
        whole = path.is_file() and path.stat().st_size == size
        if not whole or _copy(partial(_piece_of, path), sha256, target) != size:
            raise FxlibError(f"its blob {sha256} is missing or damaged", where=str(folder))


def _piece_of(path: Path, *, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_PIECE)


def _restored_sqlite(config: Config, manifest: Manifest, *, again: bool) -> Callable[[Path], None] | None:
    """Return a function that restores an SQLite database; None if it is restored already."""
    target = sqlite_path(config)
    if target.exists():
        if again and _digest(target) == manifest.sha256:
            return None
        raise FxlibError(f"there is a database {target}", where="--database")

    for beside in (target.with_name(f"{target.name}{suffix}") for suffix in _OF_ANOTHER):
        if beside.exists():  # SQLite would take what it holds for changes of the restored database
            hint = "Move it to where the database is that it belongs to."
            raise FxlibError(f"there is {beside}, of another database", where="--database", hint=hint)

    def bring(file: Path) -> None:
        unfinished = target.with_name(f"{target.name}{_UNFINISHED}")
        shutil.copyfile(file, unfinished)
        _sync(unfinished)
        unfinished.rename(target)
        sync_folder(target.parent)

    return bring


def _restored_postgres(config: Config, manifest: Manifest, *, again: bool) -> Callable[[Path], None] | None:
    """Return a function that restores the tables of a PostgreSQL database at once; None if that is done already."""
    with _postgres(config) as db:
        if (where := db.execute(sa.text("SELECT current_schema()")).scalar()) != manifest.schema:
            raise FxlibError(
                f"the tables were in the schema {manifest.schema}, and would be in {where} here",
                where="--database",
                hint=f'Have the database, or "options=-csearch_path%3D{manifest.schema}" in its URL, name that.',
            )
        found = set(sa.inspect(db).get_table_names()) & schema.metadata.tables.keys()
        if found:
            jobs = sa.select(sa.func.count()).select_from(schema.jobs)
            if again and schema.jobs.name in found and db.execute(jobs).scalar_one() == manifest.jobs:
                return None
            raise FxlibError("the database has tables of a service", where="--database", hint="Restore into a new one.")

    def bring(file: Path) -> None:
        _run(
            config, "pg_restore", "--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges", str(file)
        )

    return bring


# ------------------------------------------------------------------------------------------------- databases and files


@contextmanager
def _postgres(config: Config, *, isolation: str = "READ COMMITTED") -> Iterator[sa.Connection]:
    try:
        engine = sa.create_engine(_postgres_url(config), isolation_level=isolation)
        try:
            with engine.connect() as db:
                yield db
        finally:
            engine.dispose()
    except (sa.exc.SQLAlchemyError, ModuleNotFoundError) as error:
        raise FxlibError(f"the database cannot be used: {in_full(error)}", where="--database") from error


def _run(config: Config, program: str, *options: str) -> None:
    """Run one of PostgreSQL's programs on the database. It ends with this process."""
    target, secrets = _connection(config)
    try:
        done = subprocess.run(
            [program, f"--dbname={target}", *options],
            env={**os.environ, **secrets},
            check=False,
            capture_output=True,
            text=True,
            preexec_fn=_die_with_parent,
        )
    except FileNotFoundError:
        hint = "Install PostgreSQL's client programs (apt-get install postgresql-client)."
        raise FxlibError(f"there is no {program} here", where="--database", hint=hint) from None
    if done.returncode:
        problem = " ".join(done.stderr.split()) or f"it ended with exit code {done.returncode}"
        raise FxlibError(f"{program}: {problem}", where="--database")


def _postgres_url(config: Config) -> sa.URL:
    """Return the URL of a PostgreSQL database.

    Raises:
        FxlibError: it is none, or holds what cannot be handed to PostgreSQL's programs without being seen.
    """
    url = url_of(config.database_url).set(drivername="postgresql+psycopg")
    if "sslpassword" in url.query:
        hint = "Put it into a service file of libpq (~/.pg_service.conf), and name that: postgresql:///?service=NAME."
        raise FxlibError("its sslpassword would be seen in the list of processes", where="--database", hint=hint)
    return url


def _connection(config: Config) -> tuple[str, dict[str, str]]:
    """Return how the service connects to its PostgreSQL database, in libpq's form and without the password.

    The password is returned as an environment variable: command lines are seen by all.
    """
    from psycopg.conninfo import make_conninfo  # here: it is installed for PostgreSQL alone

    url = _postgres_url(config)
    settings = sa.create_engine(url).dialect.create_connect_args(url)[1]
    password = settings.pop("password", "")
    settings.pop("context", None)  # of psycopg, not of libpq
    return make_conninfo(**settings), {"PGPASSWORD": password} if password else {}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
