"""A backup is whole or refused, whenever it is killed, and a service restored from it has every job with its answer."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest
from torch import nn
from torch.fx import symbolic_trace

from fxlib import wire
from fxlib.errors import FxlibError
from fxlib.v1 import blobs_pb2, jobs_pb2
from fxlib_service import backup
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.config import Config
from fxlib_service.errors import Code, ServiceError
from fxlib_service.server import Server
from fxlib_service.stores.sql import SqlJobStore
from tests.service.client import Client, running
from tests.service.postgres import Postgres
from tests.service.support import Process, answer, graph_bytes, ref, request
from tests.shared.forked import Module

KINDS = ["sqlite", "postgres"]


def fill(client: Client, jobs: int) -> dict[str, jobs_pb2.Job]:
    """Have jobs in all states, one of them with weights; return them all as they are told, by id."""
    encoded = wire.encode(symbolic_trace(nn.Linear(3, 3)), weights=True)
    weighty = encoded.graph.SerializeToString(deterministic=True)
    for data in (graph_bytes(), weighty, *encoded.blobs.values()):
        client.put(data)
    client.submit(graph=weighty, torch_version="1.0")  # nobody claims it
    for number in range(jobs):
        data = graph_bytes(3 + number)
        client.put(data)
        told = client.submit(graph=data, name=f"model-{number}", labels={"n": str(number)})
        if number % 4 == 3:
            client.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=told.id))
        elif number % 4 < 2:
            lease = client.claim()
            assert lease is not None
            client.complete(lease, answer(gain=0.5 + number))
    return listed(client)


def listed(client: Client) -> dict[str, jobs_pb2.Job]:
    page = client.jobs.ListJobs(jobs_pb2.ListJobsRequest(page_size=500), timeout=60)
    return {job.id: client.get(job.id) for job in page.jobs}


def read(client: Client, blob: object) -> bytes:
    asked = blobs_pb2.ReadRequest(blob=blob)  # type: ignore[arg-type]
    return b"".join(piece.data for piece in client.blobs.Read(asked, timeout=60))


def check_answers(client: Client, jobs: dict[str, jobs_pb2.Job]) -> None:
    """Check that a service has these jobs, their histories and graphs, and answers from them."""
    assert listed(client) == jobs
    for job in jobs.values():
        assert client.watch(job.id, 0)[0] == 1 if job.state == jobs_pb2.JOB_STATE_SUCCEEDED else True
        if job.HasField("result"):
            assert read(client, job.result.graph) == graph_bytes()
    done = next(job for job in jobs.values() if job.state == jobs_pb2.JOB_STATE_SUCCEEDED)
    number = int(done.labels["n"])
    again = client.jobs.Optimize(request(graph=graph_bytes(3 + number), name=done.name), timeout=60).job
    assert (again.cached, again.result) == (True, done.result)


def ran(command: str, log: Path, *arguments: str) -> str:
    """Run the command to its end, and return what it says; it fails with what it says of that."""
    out = log.with_suffix(".out")
    out.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    status = Module("fxlib_service", command, *arguments, log=log, out=out).wait()
    assert status in (0, 1), log.read_text()
    if status:
        raise AssertionError(log.read_text())
    return out.read_text()


class Place:
    """Where a service has its data: a folder, and a database if that is not in it."""

    def __init__(self, folder: Path, postgres: Postgres | None, schema: str = "") -> None:
        self.folder, self._postgres, self._schema = folder, postgres, schema or f"s{uuid.uuid4().hex}"
        self.options = ["--data", str(folder)]
        if postgres is not None:
            self.database = f"d{uuid.uuid4().hex}"
            with psycopg.connect(user="fxlib", host=str(postgres.folder), dbname="postgres", autocommit=True) as db:
                db.execute(f"CREATE DATABASE {self.database}".encode())
            with psycopg.connect(user="fxlib", host=str(postgres.folder), dbname=self.database) as db:
                db.execute(f"CREATE SCHEMA {self._schema}".encode())
            url = postgres.url(self._schema, user="guarded").replace("@/postgres?", f"@/{self.database}?")
            self.options += ["--database", url]

    def running(self) -> AbstractContextManager[tuple[Process, Client]]:
        return running(self.folder, *self.options[2:])

    def other(self, name: str) -> Place:
        """Return another, for what is restored."""
        return Place(self.folder.parent / name, self._postgres, self._schema)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    shared = request.param == "postgres"
    return Place(tmp_path / "data", request.getfixturevalue("postgres") if shared else None)


@pytest.mark.slow
def test_a_backup_of_a_running_service_is_restored_with_every_job(place: Place, tmp_path: Path) -> None:
    to, log = tmp_path / "backup", tmp_path / "log"
    with place.running() as (_, client):
        jobs = fill(client, 8)
        told = json.loads(ran("backup", log, str(to), *place.options, "--json"))
        client.submit(name="later")
    graphs, weights = 8 + 1 + 1, 2  # those of the jobs, that of the answers, and one with weights
    assert (told["jobs"], told["blobs"], told["missing"]) == (9, graphs + weights, [])
    with pytest.raises(AssertionError, match="it exists"):
        ran("backup", log, str(to), *place.options)
    new = place.other("new")
    assert "9 jobs" in ran("restore", log, str(to), *new.options)
    with new.running() as (_, client):
        check_answers(client, jobs)
        with pytest.raises(AssertionError, match="another service uses"):
            ran("restore", log, str(to), *new.options)
    with pytest.raises(AssertionError, match="not empty"):
        ran("restore", log, str(to), *new.options)


@pytest.mark.slow
def test_a_backup_that_is_killed_is_no_backup_and_the_next_one_is_whole(place: Place, tmp_path: Path) -> None:
    choose, log = random.Random(1), tmp_path / "log"
    with place.running() as (_, client):
        jobs = fill(client, 40)
        began = time.monotonic()
        ran("backup", log, str(tmp_path / "first"), *place.options)
        took_s, halves = time.monotonic() - began, 0
        for number in range(6):
            to = tmp_path / f"backup-{number}"
            unfinished = to.with_name(f"{to.name}.unfinished")
            killed(choose, took_s, "backup", log, str(to), *place.options, once=unfinished if number % 2 else None)
            halves += unfinished.exists()
            client.submit(name=f"meanwhile-{number}")
            for folder in (to, unfinished):
                if folder != to or not folder.exists():
                    with pytest.raises(FxlibError, match="it is no backup, or one that was not finished"):
                        backup.restore(Config(data=tmp_path / "nothing"), folder)
            if not to.exists():
                ran("backup", log, str(to), *place.options)
    assert halves > 0
    new = place.other("new")
    ran("restore", log, str(to), *new.options)
    with new.running() as (_, client):
        assert listed(client).items() >= jobs.items()


@pytest.mark.slow
def test_a_restore_that_is_killed_is_no_service_s_and_is_run_again(place: Place, tmp_path: Path) -> None:
    choose, log, to = random.Random(2), tmp_path / "log", tmp_path / "backup"
    with place.running() as (_, client):
        jobs = fill(client, 40)
    ran("backup", log, str(to), *place.options)
    began = time.monotonic()
    ran("restore", log, str(to), *place.other("first").options)
    took_s, halves = time.monotonic() - began, 0
    for number in range(4):
        new = place.other(f"new-{number}")
        for restoring in (None, new.folder / "restoring"):
            killed(choose, took_s, "restore", log, str(to), *new.options, once=restoring)
            if (new.folder / "restoring").exists():
                halves += 1
                with pytest.raises(FxlibError, match="was being restored"):
                    Server(Config(data=new.folder))
        if (new.folder / "restoring").exists() or not new.folder.exists():
            ran("restore", log, str(to), *new.options)
    assert halves > 0
    with new.running() as (_, client):
        check_answers(client, jobs)


def killed(
    choose: random.Random, took_s: float, command: str, log: Path, *arguments: str, once: Path | None = None
) -> None:
    """Start a command, and kill it after a random part of the time that it takes, or soon after `once` is there."""
    process = Module("fxlib_service", command, *arguments, log=log)
    if once is None:
        time.sleep(choose.uniform(0.0, took_s))
    else:
        while process.is_running() and not once.exists():
            time.sleep(0.001)
        time.sleep(choose.uniform(0.0, took_s / 100))
    process.end(signal.SIGKILL)


@pytest.fixture
def made(tmp_path: Path) -> tuple[Config, Path]:
    """A service's folder, and a backup of it."""
    config, to = Config(data=tmp_path / "data"), tmp_path / "backup"
    with running(config.data) as (_, client):
        fill(client, 4)
    backup.make(config, to)
    return config, to


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def damage_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def come_from_the_future(folder: Path) -> None:
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**told, "format": 2}))


def damage_the_database(folder: Path) -> None:
    with (folder / "service.sqlite").open("r+b") as file:
        file.seek(5000)
        file.write(b"?")


def lose_a_blob(folder: Path) -> None:
    next((folder / "blobs").glob("??/*")).unlink()


def damage_a_blob(folder: Path) -> None:
    next((folder / "blobs").glob("??/*")).write_bytes(b"?")


@pytest.mark.slow
def test_a_backup_that_is_not_whole_is_refused(made: tuple[Config, Path], tmp_path: Path) -> None:
    told: dict[Callable[[Path], None], str] = {
        lose_the_manifest: "it is no backup, or one that was not finished",
        damage_the_manifest: r"manifest\.json is damaged",
        come_from_the_future: "of format 2, and this release reads 1",
        damage_the_database: r"service\.sqlite is damaged",
        lose_a_blob: "missing or damaged",
        damage_a_blob: "missing or damaged",
    }
    for number, (spoil, says) in enumerate(told.items()):
        bad, new = tmp_path / f"bad-{number}", Config(data=tmp_path / f"new-{number}")
        shutil.copytree(made[1], bad)
        spoil(bad)
        with pytest.raises(FxlibError, match=says):
            backup.restore(new, bad)
        assert not (new.data / "service.sqlite").exists()
        if new.data.exists():
            with pytest.raises(FxlibError, match="was being restored"):
                Server(new)
    with pytest.raises(FxlibError, match="has a database of SQLite"):
        backup.restore(Config(data=tmp_path / "n", database_url="postgresql://localhost/none"), made[1])


@pytest.mark.slow
def test_a_blob_that_the_service_has_lost_is_told_and_keeps_nothing_back(
    made: tuple[Config, Path], tmp_path: Path
) -> None:
    config, _ = made
    lost = ref(graph_bytes()).sha256
    (config.data / "blobs" / lost[:2] / lost).unlink()
    damaged = ref(graph_bytes(3)).sha256
    (config.data / "blobs" / damaged[:2] / damaged).write_bytes(b"?")
    told = backup.make(config, tmp_path / "another")
    assert told.missing == sorted([lost, damaged])
    assert (config.data / "blobs" / damaged[:2] / damaged).exists()
    assert backup.restore(Config(data=tmp_path / "new"), tmp_path / "another").jobs == 5


@pytest.mark.slow
def test_a_blob_that_is_damaged_where_it_is_restored_is_replaced(made: tuple[Config, Path], tmp_path: Path) -> None:
    config, to = made
    sha256 = ref(graph_bytes()).sha256
    path = config.data / "blobs" / sha256[:2] / sha256
    path.write_bytes(bytes(path.stat().st_size))
    backup.restore(Config(data=tmp_path / "new", blobs=str(config.data)), to)
    assert path.read_bytes() == graph_bytes()


@pytest.mark.slow
def test_a_graph_that_cannot_be_read_now_fails_the_backup(
    made: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, faults = FolderBlobStore.read, iter([ServiceError(Code.STORAGE_UNAVAILABLE)])

    def fails_once(store: FolderBlobStore, sha256: str, *, offset: int, length: int) -> bytes:
        for fault in faults:
            raise fault
        return read(store, sha256, offset=offset, length=length)

    config, _ = made
    monkeypatch.setattr(FolderBlobStore, "read", fails_once)
    assert backup.main("backup", [str(tmp_path / "another"), f"--data={config.data}"]) == 1
    assert not (tmp_path / "another").exists()


@pytest.fixture
def doctored(tmp_path: Path) -> Path:
    """A backup of a service without jobs, to be changed by whoever can write into it."""
    config, to = Config(data=tmp_path / "data"), tmp_path / "backup"
    config.data.mkdir()
    SqlJobStore(f"sqlite:///{config.data / 'service.sqlite'}").close()
    backup.make(config, to)
    return to


@pytest.mark.parametrize(
    "changes",
    [
        {"blobs": {"../../precious": 3}},
        {"blobs": {"\0": 3}},
        {"blobs": [["a" * 64, 3]]},
        {"blobs": {"a" * 64: "3"}},
        {"blobs": {"a" * 64: -3}},
        {"database": "../precious"},
        {"missing": 3},
        {"id": {}},
        {"jobs": "many"},
    ],
)
def test_a_manifest_that_names_anything_but_its_own_files_is_refused(
    doctored: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    precious, new = tmp_path / "precious", tmp_path / "new"
    precious.write_text("precious")
    manifest = json.loads((doctored / "manifest.json").read_text())
    (doctored / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    with pytest.raises(FxlibError, match=r"manifest\.json is damaged"):
        backup.restore(Config(data=new), doctored)
    assert (precious.read_text(), new.exists()) == ("precious", False)


def test_a_manifest_of_many_brackets_is_refused(doctored: Path, tmp_path: Path) -> None:
    (doctored / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(FxlibError, match=r"manifest\.json is damaged"):
        backup.restore(Config(data=tmp_path / "new"), doctored)


@pytest.mark.timeout(20)
def test_a_backup_with_something_endless_in_it_is_refused(doctored: Path, tmp_path: Path) -> None:
    name, manifest = "ab" * 32, json.loads((doctored / "manifest.json").read_text())
    (doctored / "manifest.json").write_text(json.dumps({**manifest, "blobs": {name: 3}}))
    blob = doctored / "blobs" / name[:2] / name
    blob.parent.mkdir()
    os.mkfifo(blob)
    with pytest.raises(FxlibError, match="missing or damaged"):
        backup.restore(Config(data=tmp_path / "pipe"), doctored)
    blob.unlink()
    blob.symlink_to("/dev/zero")
    with pytest.raises(FxlibError, match="missing or damaged"):
        backup.restore(Config(data=tmp_path / "zeros"), doctored)
    (doctored / "service.sqlite").unlink()
    os.mkfifo(doctored / "service.sqlite")
    with pytest.raises(FxlibError, match=r"service\.sqlite is damaged"):
        backup.restore(Config(data=tmp_path / "database"), doctored)


def test_a_backup_is_put_together_in_no_folder_of_another_s(doctored: Path, tmp_path: Path) -> None:
    config, to, others = Config(data=tmp_path / "data"), tmp_path / "to", tmp_path / "others"
    others.mkdir(mode=0o700)
    (others / "precious").write_text("precious")
    unfinished = tmp_path / "to.unfinished"
    unfinished.symlink_to(others)
    with pytest.raises(FxlibError, match="no backup that this user began"):
        backup.make(config, to)
    assert (others / "precious").exists()
    unfinished.unlink()
    unfinished.mkdir()
    unfinished.chmod(0o777)
    with pytest.raises(FxlibError, match="no backup that this user began"):
        backup.make(config, to)
    unfinished.chmod(0o700)
    assert backup.make(config, to).jobs == 0


@pytest.mark.parametrize(
    "url, told",
    [
        ("postgresql://fxlib:s3cret@db/fxlib", "host=db dbname=fxlib user=fxlib"),
        ("postgres://fxlib@db/fxlib?password=s3cret", "host=db dbname=fxlib user=fxlib"),
        ("postgresql:///fxlib?user=fxlib&password=s3cret&host=/run/pg", "dbname=fxlib user=fxlib host=/run/pg"),
        ("postgresql://fxlib:s3cret@db/x?options=-c%20a%3Db", "host=db dbname=x user=fxlib options='-c a=b'"),
    ],
)
def test_a_password_is_on_no_command_line(url: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pg_dump"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" "$PGPASSWORD" > {tmp_path}/seen\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    backup._run(Config(database_url=url), "pg_dump", "--format=custom")
    assert (tmp_path / "seen").read_text().splitlines() == [f"--dbname={told}", "--format=custom", "s3cret"]


def test_a_password_that_no_variable_holds_is_refused(tmp_path: Path) -> None:
    config = Config(data=tmp_path, database_url="postgresql://fxlib@db/fxlib?sslpassword=s3cret")
    with pytest.raises(FxlibError, match=r"sslpassword would be seen.* service file") as refused:
        backup.make(config, tmp_path / "backup")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("kind", ["wal", "journal"])
def test_what_another_database_has_left_beside_its_place_keeps_a_database_from_being_restored(
    doctored: Path, tmp_path: Path, kind: str
) -> None:
    left = tmp_path / f"jobs.sqlite-{kind}"
    left.write_bytes(b"?")
    config = Config(data=tmp_path / "new", database_url=f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    with pytest.raises(FxlibError, match=f"there is .*jobs.sqlite-{kind}, of another database"):
        backup.restore(config, doctored)
    left.unlink()
    assert backup.restore(config, doctored).jobs == 0


@pytest.mark.parametrize("url", ["nonsense", "postgresql://fxlib@localhost:port/fxlib"])
def test_a_database_whose_url_is_none_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert backup.main("backup", [str(tmp_path / "to"), f"--data={tmp_path}", f"--database={url}"]) == 1
    assert capsys.readouterr().err.startswith("fxlib backup: --database: the database cannot be used: ")


def test_a_folder_without_a_service_is_not_backed_up(tmp_path: Path) -> None:
    with pytest.raises(FxlibError, match="there is no database"):
        backup.make(Config(data=tmp_path / "nothing"), tmp_path / "backup")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_command_line_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--no-such"], []):
        with pytest.raises(SystemExit):
            backup.main("backup", wrong)
        assert capsys.readouterr().err.startswith("usage: fxlib backup")
