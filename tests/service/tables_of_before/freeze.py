"""Writes the tables of today's service, filled, into this folder, before a step of `migrations` makes them older.

`python -m tests.service.tables_of_before.freeze`. Those of versions 0001 to 0006 were made by the service as it was
then, on the path in place of today's, and filled by this file.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from fxlib.v1 import jobs_pb2
from fxlib_service.stores.sql import SqlJobStore
from tests.service.postgres import Postgres

HERE: Final = Path(__file__).parent
_SCHEMA: Final = "frozen"
_BEGAN: Final = 1_790_000_000.0
_STATES: Final = ("succeeded", "queued", "succeeded", "failed", "running", "cancelled")
_JOBS: Final = 50


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a table and a row of it, in an order that foreign keys allow; a version may lack tables and columns."""
    for number in range(_JOBS):
        yield from _job(number)
    for number in range(3):
        worker = {
            "id": f"worker-{number}",
            "torch_version": "2.13.0",
            "hardware": f"cpu-{number}",
            "fxlib_version": "0.1.0",
        }
        told = {
            "containment": "isolated",
            "labels": '{"rack": "3"}' if number else "",
            "allowed_modules": ["my.servers"],
        }
        yield "workers", {**worker, **told, "seen_at": _BEGAN + number}
    for number in range(20):
        yield "holdings", {"namespace": f"team-{number % 3}", "sha256": f"{number:064x}", "size": 1000 + number}


def _job(number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    state, namespace, job_id = _STATES[number % len(_STATES)], f"team-{number % 3}", f"job-{number:02}"
    done, leased = state in ("succeeded", "failed", "cancelled"), state in ("succeeded", "failed", "running")
    labels = {"commit": f"c{number % 5}", "straße": "☃ 'quoted'; --"} if number % 2 else {}
    asked = {"request_id": f"request-{number}", "request_digest": f"{number:064x}", "namespace": namespace}
    given = {"id": job_id, "name": f"model-{number % 7}", "labels": labels, "torch_version": "2.13.0"}
    keys = {"cache_key": f"{number % 11:064x}", "fresh": number % 4 == 1}
    answered = {"cached": False, "reusable": state == "succeeded"}
    lease = {"worker_id": "worker-1", "token": f"token-{number}", "hardware": "cpu-1"} if leased else {}
    times = {
        "created_at": _BEGAN + number,
        "started_at": _BEGAN + 100 + number if leased else None,
        "finished_at": _BEGAN + 200 + number if done else None,
    }
    failure = {
        "failure_code": "WORKER_LOST" if state == "failed" else None,
        "failure_message": "its workers disappeared" if state == "failed" else None,
    }
    last = 1 + leased + done
    row = {
        "worker_id": "",
        "token": "",
        "hardware": "",
        **asked,
        **given,
        **keys,
        **answered,
        **lease,
        **times,
        **failure,
    }
    row |= {"state": state, "phase": "done" if done else state, "attempts": int(leased), "last_sequence": last}
    row |= {"asked_by": "launcher", "asked_from": "ipv4:127.0.0.1:1", "measured_by": "worker" if leased else ""}
    yield "jobs", {**row, "labels_asked": '{"rack": "3"}' if number % 5 == 0 else "", "leased_until": 0.0}
    for key, value in labels.items():
        yield "labels", {"key": key, "value": value, "job_id": job_id}
    request = jobs_pb2.OptimizeRequest(request_id=f"request-{number}", name=f"model-{number % 7}", namespace=namespace)
    yield "payloads", {"job_id": job_id, "kind": "request", "body": request.SerializeToString()}
    if state == "succeeded":
        answer = jobs_pb2.JobResult(reason_code="FASTER", gain=jobs_pb2.Estimate(value=0.5, low=0.4, high=0.6))
        yield "payloads", {"job_id": job_id, "kind": "result", "body": answer.SerializeToString()}
    states = ["queued", *(["running"] if leased else []), *([state] if done else [])]
    for sequence, each in enumerate(states, start=1):
        event = {"sequence": sequence, "at": _BEGAN + 100 * sequence, "state": each, "phase": each, "progress": -1.0}
        yield "events", {"job_id": job_id, **event, "message": f"it is {each}\nnow"}


def fill(engine: sa.Engine) -> None:
    """Insert all rows, as far as there are such tables and columns."""
    known = sa.MetaData()
    known.reflect(engine)
    with engine.begin() as db:
        for name, row in rows():
            if name in known.tables:
                table = known.tables[name]
                db.execute(table.insert(), {key: value for key, value in row.items() if key in table.columns})


def sqlite_text(folder: Path) -> str:
    """Return the tables as statements for SQLite."""
    path = folder / "jobs.sqlite"
    store = SqlJobStore(f"sqlite:///{path}")
    fill(store._write)
    store.close()
    with closing(sqlite3.connect(path)) as db:
        return "\n".join(db.iterdump()) + "\n"


def postgres_text(server: Postgres) -> str:
    """Return the tables as statements for PostgreSQL, which name no schema."""
    url = server.url(_SCHEMA)
    store = SqlJobStore(url.replace("postgresql://", "postgresql+psycopg://"))
    fill(store._write)
    store.close()
    options = "--inserts", "--rows-per-insert=100", "--no-owner", "--no-comments", f"--schema={_SCHEMA}"
    dumped = subprocess.run(["pg_dump", f"--dbname={url}", *options], check=True, capture_output=True, text=True).stdout
    left_out = ("--", "\\", "SET ", "SELECT pg_catalog.set_config", "CREATE SCHEMA")
    lines = [line for line in dumped.splitlines() if line and not line.startswith(left_out)]
    return "\n".join(lines).replace(f"{_SCHEMA}.", "") + "\n"


def main(version: str) -> None:
    """Write the two files of a version."""
    server = Postgres()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind, text in (("sqlite", sqlite_text(Path(folder))), ("postgres", postgres_text(server))):
                (HERE / f"{version}.{kind}.sql").write_text(text)
    finally:
        server.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        from fxlib_service.stores.migrations import HEAD

        main(HEAD)
