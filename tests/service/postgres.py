"""A PostgreSQL server for tests, in a folder of its own, as its own user, on a Unix socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Final, Literal

import psycopg
import pytest

_USER: Final = "postgres"
_OPTIONS: Final = "-c listen_addresses= -c max_connections=60 -c unix_socket_directories="


def _programs() -> Path:
    """Return the folder of the server's programs, which Debian keeps off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    program = found[-1] if found else shutil.which("initdb")
    if program is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    return Path(program).parent


class Postgres:
    """A server with a database `postgres`, whose user `fxlib` may do everything, with any password.

    So may its user `guarded`, with the password `s3cret` alone. Unless it is `durable`, it does not wait for the disk.
    """

    def __init__(self, *, durable: bool = False) -> None:
        self._options = _OPTIONS if durable else f"-c fsync=off {_OPTIONS}"
        self._programs = _programs()
        self._as_root = os.geteuid() == 0  # as which PostgreSQL does not run
        self.folder = Path(tempfile.mkdtemp(prefix="fxlib-postgres-"))
        if self._as_root:
            shutil.chown(self.folder, _USER)
        self._run("initdb", "--no-sync", "-A", "trust", "-U", "fxlib", "-E", "UTF8", "--locale=C.UTF-8")
        rules = self.folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all guarded scram-sha-256\n{rules.read_text()}")
        self.start()
        with psycopg.connect(user="fxlib", host=str(self.folder), dbname="postgres") as connection:
            connection.execute("CREATE USER guarded SUPERUSER PASSWORD 's3cret'")

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", f"{self._options}{self.folder}")

    def stop(self, mode: Literal["fast", "immediate"] = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-m", mode)

    def close(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder)

    def url(self, schema: str | None = None, *, user: str = "fxlib") -> str:
        """Return the URL of a schema, by default of a new and empty one, for a user."""
        schema = schema or f"s{uuid.uuid4().hex}"
        with psycopg.connect(user="fxlib", host=str(self.folder), dbname="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
        return f"postgresql://{user}:s3cret@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def _run(self, program: str, *options: str) -> None:
        command = [str(self._programs / program), "-D", str(self.folder / "data"), *options]
        with tempfile.TemporaryFile() as said:  # a pipe would be held open by the server
            as_whom = {"user": _USER, "group": _USER, "extra_groups": []} if self._as_root else {}
            done = subprocess.run(command, cwd=self.folder, stdout=said, stderr=said, check=False, **as_whom)  # type: ignore[call-overload]
            said.seek(0)
            assert done.returncode == 0, said.read().decode()
