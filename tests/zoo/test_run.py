"""Runs of a zoo against the real service: a hostile model is a row and no more, and nothing is measured twice."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar
from unittest import mock

import psutil
import pytest
from torch.fx import GraphModule

from fxlib import connect
from fxlib.cli import main
from fxlib.client import Endpoint
from fxlib.errors import RejectedError
from fxlib.reasons import Reason
from fxlib.spec.report import Decision, Estimate, Report
from fxlib.v1 import workers_pb2
from fxlib.zoo import Entry, Row, Run, Runs, run_zoo, runs
from fxlib.zoo.model_process import _called, _FailedError
from fxlib.zoo.report import write_site
from fxlib.zoo.run_zoo import RunOptions, _elsewhere
from tests.service.disks import MAY_MOUNT, small_disk
from tests.shared.forked import Module, forks
from tests.shared.real_service import Answer, adopt, real_service, scripted_worker

pytestmark = pytest.mark.slow

HOSTILE = {
    "exits": ("EXITED", "it called sys.exit(3)"),
    "crashes": ("CRASHED", "the process ended by SIGABRT while making the model"),
    "hangs": ("TIME", "the time for it passed while making the model"),
    "eats": ("MEMORY", "allocate"),
    "writes_nonsense": ("ANSWER", "the process wrote no answer"),
    "nests": ("ANSWER", "the process wrote no answer"),
    "answers_otherwise": ("ANSWER", "an answer of another form"),
    "answers_no_job": ("ANSWER", "an answer of another form"),
    "answers_half_a_letter": ("ANSWER", "an answer of another form"),
    "stops_answering": ("CRASHED", "the process stopped answering while making the model"),
    "raises": ("MODEL", "KeyError: 'no such weights'"),
    "needs_a_gpu": ("DEVICE", "it needs a device that this machine has not; have it made on the CPU"),
    "returns_text": ("WORKLOAD", "there is no workload"),
    "no_such": ("FACTORY", "has no attribute 'no_such'"),
}
PROGRAM = """
import signal, subprocess, sys
from unittest import mock
from fxlib.cli import main
from fxlib.client import Endpoint
from tests.zoo.test_run import Forked
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with mock.patch.object(subprocess, "Popen", Forked):
        sys.exit(main(sys.argv[1:]))
"""
"""The command, in a process whose starter may have interrupts ignored."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_service(tmp_path_factory.mktemp("service")) as address, scripted_worker(address, adopt):
        yield address


def manifest(folder: Path, *models: str, defaults: str = "") -> Path:
    path = folder / "zoo.toml"
    tables = "".join(f"[[model]]\n{each}\n" for each in models)
    path.write_text(f'[defaults]\nlabels = {{test = "{folder.name}"}}\n{defaults}\n{tables}')
    return path


def of(function: str, more: str = "") -> str:
    return f'factory = "tests.zoo.models:{function}"\n{more}'


class Forked:
    """The process of a model as `subprocess.Popen` starts it, but that it has torch imported when it begins."""

    def __init__(
        self, command: Sequence[str], *, stdout: IO[bytes], pass_fds: Sequence[int], env: Mapping[str, str], **_: object
    ) -> None:
        reading, writing = os.pipe()
        ends = [Connection(reading), *(Connection(os.dup(each)) for each in (stdout.fileno(), *pass_fds))]
        self._process = forks().Process(target=model_process, args=(env, *ends))
        self._process.start()
        for end in ends:
            end.close()
        self.stdin = os.fdopen(writing, "wb")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a model", timeout or 0.0)
        return status


def model_process(env: Mapping[str, str], questions: Connection, log: Connection, answers: Connection) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for stream, end in enumerate((questions, log, log)):
        os.dup2(end.fileno(), stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["fxlib.zoo.model_process", str(answers.fileno())]
    runpy.run_module("fxlib.zoo.model_process", run_name="__main__", alter_sys=True)


def run(path: Path, service: str, *options: str, start: type = Forked) -> tuple[int, dict[str, Row]]:
    with mock.patch.object(subprocess, "Popen", start):
        code = main(["zoo", "run", str(path), "--service", service, *options])
    return code, rows(path)


def newest(path: Path) -> Run:
    found = Runs(path.with_name("zoo.runs")).latest()
    assert found is not None
    return found


def rows(path: Path) -> dict[str, Row]:
    return {row.name: row for row in newest(path).rows()}


def jobs(service: str, folder: Path) -> list[str]:
    with connect(service) as client:
        return [job.id for job in client.jobs(labels={"test": folder.name})]


def test_hostile_models_are_rows_and_the_others_are_measured(tmp_path: Path, service: str) -> None:
    capped = 'capture_s = {}\nmemory_gib = 6\nexpect = "failed"'
    hostile = [of(each, capped.format(15 if each == "hangs" else 120)) for each in HOSTILE]
    path = manifest(tmp_path, of("clicks"), *hostile, of("prints_and_forks"))
    code, found = run(path, service, "--max-parallel", "3")
    assert code == 0
    assert found["clicks"].outcome == "adopted"
    for name, (failure, told) in HOSTILE.items():
        assert (found[name].state, found[name].failure) == ("failed", failure)
        assert told in found[name].explanation
    assert found["prints_and_forks"].state == "done"
    assert "FORGED" in newest(path).log("prints_and_forks").read_text()
    assert len(jobs(service, tmp_path)) == 2


def test_where_a_module_that_is_not_found_was_looked_for_is_told() -> None:
    with pytest.raises(_FailedError, match=f"No module named 'no_such' in {Path.cwd()}, on PYTHONPATH or installed"):
        _called("no_such:made", {})


def test_nothing_of_a_hostile_model_is_left_running(tmp_path: Path, service: str) -> None:
    models = [of("hangs", "capture_s = 8"), of("crashes"), of("leaves_a_daemon")]
    _, found = run(manifest(tmp_path, *models), service, start=subprocess.Popen)
    assert found["crashes"].explanation == "the process ended by SIGABRT while making the model"
    assert not psutil.pid_exists(int(newest(tmp_path / "zoo.toml").log("leaves_a_daemon").read_text()))
    named = [
        each for each in psutil.process_iter(["cmdline"]) if "fxlib.zoo.model_process" in (each.info["cmdline"] or ())
    ]
    mine = [each for each in named if os.getpid() in [parent.pid for parent in each.parents()]]
    assert mine == []


def test_a_hanging_model_ends_with_a_run_that_is_killed(tmp_path: Path, service: str) -> None:
    path = manifest(tmp_path, of("hangs"))
    run = Module("fxlib.cli", "zoo", "run", str(path), "--service", service, log=tmp_path / "log")
    limit = time.monotonic() + 120
    while not any("hanging" in log.read_text() for log in tmp_path.glob("zoo.runs/*/logs/*")):
        assert time.monotonic() < limit
        time.sleep(0.05)
    below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) == 2  # the model, and what reaps it
    run.end(signal.SIGKILL)
    _, left = psutil.wait_procs(below, timeout=60)
    assert left == []


def test_a_failure_that_nobody_expected_ends_with_1(tmp_path: Path, service: str) -> None:
    code, found = run(manifest(tmp_path, of("raises")), service)
    assert code == 1
    assert not found["raises"].expected


def test_a_second_run_of_an_unchanged_zoo_asks_nothing(tmp_path: Path, service: str) -> None:
    path = manifest(tmp_path, of("clicks"), of("layer"))
    run(path, service)
    asked = jobs(service, tmp_path)
    _, found = run(path, service)
    assert [each.reused for each in found.values()] == [True, True]
    assert jobs(service, tmp_path) == asked
    assert len(list(Runs(tmp_path / "zoo.runs"))) == 2


def test_an_installed_package_offers_its_models(tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site" / "ranker-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ranker\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[fxlib.models]\nranker = tests.zoo.models:clicks\n")
    monkeypatch.setenv("PYTHONPATH", str(installed.parent), prepend=os.pathsep)
    path = manifest(tmp_path, 'entry_point = "ranker"', 'entry_point = "rankr"\nexpect = "failed"')
    code, found = run(path, service, start=subprocess.Popen)
    assert code == 0
    assert found["ranker"].outcome == "adopted"
    assert found["rankr"].failure == "ENTRY_POINT"
    assert "known: ranker" in found["rankr"].explanation


def test_a_file_that_a_model_reads_is_seen_to_change(
    tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = tmp_path / "width"
    monkeypatch.setenv("FXLIB_TEST_WIDTH", str(width))
    width.write_text("4")
    path = manifest(tmp_path, of("reads_a_file"))
    _, first = run(path, service)
    assert str(width) in (dependencies.files if (dependencies := first["reads_a_file"].dependencies) else ())
    width.write_text("16")
    _, second = run(path, service)
    assert not second["reads_a_file"].reused
    assert len(jobs(service, tmp_path)) == 2


def test_what_the_service_forgot_is_asked_again(tmp_path: Path) -> None:
    path = manifest(tmp_path, of("clicks"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with real_service(tmp_path / name) as address, scripted_worker(address, adopt):
            code, found = run(path, address)
            assert code == 0
            assert not found["clicks"].reused
            assert len(jobs(address, tmp_path)) == 1


def test_a_changed_setting_is_asked_about_anew(tmp_path: Path, service: str) -> None:
    run(manifest(tmp_path, of("clicks"), of("layer")), service)
    _, found = run(manifest(tmp_path, of("clicks", 'recipe = "training"'), of("layer")), service)
    assert [each.reused for each in found.values()] == [False, True]


def test_retry_begins_again_with_failures_alone(tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width = tmp_path / "width"
    monkeypatch.setenv("FXLIB_TEST_WIDTH", str(width))
    path = manifest(tmp_path, of("clicks"), of("reads_a_file"))
    code, found = run(path, service)
    assert code == 1
    assert found["reads_a_file"].explanation.startswith("FileNotFoundError")
    width.write_text("4")
    before = newest(path).name
    assert main(["zoo", "retry", str(path), "--failed", "--service", service]) == 0
    assert newest(path).name == before
    assert rows(path)["reads_a_file"].attempt == 2
    assert rows(path)["clicks"].attempt == 1


def test_retry_leaves_models_that_the_run_does_not_have_to_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path, of("raises"))
    run(path, "127.0.0.1:9")
    manifest(tmp_path, of("raises"), of("exits"))
    with mock.patch.object(subprocess, "Popen", Forked):
        assert main(["zoo", "retry", str(path), "--service", "127.0.0.1:9"]) == 1
    assert "1 models are not in this run; fxlib zoo run measures them" in capsys.readouterr().err
    assert {name: row.attempt for name, row in rows(path).items()} == {"raises": 2}
    assert len(list((newest(path).folder / "rows").iterdir())) == 1


def test_a_model_that_another_command_measures_is_waited_for_and_not_measured_twice(tmp_path: Path) -> None:
    zoo = Runs(tmp_path).begin("zoo.toml", ["a"])
    entries = [Entry(name="a", source="factory", target="m:a")]
    options = RunOptions(service=Endpoint(address="127.0.0.1:9"))
    begun, waiting, asked = threading.Event(), threading.Event(), []

    class Model:
        """A model's process that ends once another command waits for it."""

        def __init__(self, question: dict[str, Any], log: Path) -> None:
            asked.append(question)

        def answer(self, limit: float, check: Callable[[], None]) -> dict[str, Any]:
            begun.set()
            assert waiting.wait(60)
            return {"report": {"decision": "keep_original", "reason": "NO_REMOTE_CALLS", "explanation": "x"}}

    def is_held(file: IO[bytes], found: Callable[[IO[bytes]], bool] = runs._is_held) -> bool:
        held = found(file)
        if held:
            waiting.set()
        return held

    told = list[Row]()
    with (
        mock.patch.object(run_zoo, "_ModelProcess", Model),
        mock.patch.object(runs, "_is_held", is_held),
        ThreadPoolExecutor(1) as thread,
    ):
        first = thread.submit(run_zoo.run_zoo, zoo, entries, [], options, lambda _: None)
        assert begun.wait(60)
        second = run_zoo.run_zoo(zoo, entries, [], options, told.append)
    assert first.result() == second == told == zoo.rows()
    assert [row.state for row in second] == ["done"]
    assert len(asked) == 1


def test_files_and_descriptions_of_workloads(tmp_path: Path, service: str) -> None:
    import fxlib
    from tests.zoo.models import bare

    fxlib.save(fxlib.capture(bare()), tmp_path / "bare.fxg")
    step = 'workload = {inputs = ["2x4"], mode = "forward"}'
    sizes = f'file = "bare.fxg"\nname = "bare-{{batch_size}}"\n{step}\nmatrix = {{batch_size = [3]}}'
    code, found = run(
        manifest(tmp_path, f'file = "*.fxg"\n{step}', of("bare", f'name = "made"\n{step}'), sizes),
        service,
    )
    assert code == 0
    assert [found[each].state for each in ("bare", "made", "bare-3")] == ["done", "done", "done"]


def test_a_job_that_nobody_measures_ends_at_its_deadline_and_is_cancelled(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    with real_service(tmp_path / "service") as address:  # and no worker
        code, found = run(manifest(tmp_path, of("clicks", "deadline_s = 20")), address)
        assert code == 1
        assert found["clicks"].failure == "DEADLINE"
        with connect(address) as client:
            assert client.job(found["clicks"].job_id).state == "cancelled"


class Taking:
    """A model's process that takes a second and fails; `left_s` is the time that each was given."""

    left_s: ClassVar[list[float]] = []

    def __init__(self, asked: object, log: Path) -> None: ...

    def answer(self, limit: float, check: Callable[[], None]) -> dict[str, Any]:
        self.left_s.append(limit - time.monotonic())
        time.sleep(1.0)
        return {"failed": "MODEL", "message": "it fails"}


def test_the_captures_of_other_models_take_none_of_a_model_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_zoo, "_ModelProcess", Taking)
    entries = [Entry(name=f"m{n}", source="factory", target="m:f", deadline_s=2.5) for n in range(3)]
    made = Runs(tmp_path / "zoo.runs").begin("zoo.toml", [each.name for each in entries])
    options = RunOptions(service=Endpoint(address="127.0.0.1:9"))
    found = run_zoo.run_zoo(made, entries, [], options, lambda _: None)
    assert [row.failure for row in found] == ["MODEL"] * 3
    assert min(Taking.left_s) > 2.0


@pytest.mark.parametrize("code", ["QUOTA_EXCEEDED", "SERVICE_BUSY"])
def test_a_service_that_takes_no_call_just_now_fails_no_row(code: str) -> None:
    def job(*_: object, **__: object) -> Any:
        for refusal in refusals:
            raise refusal
        return SimpleNamespace(done=True)

    refusals = iter([RejectedError("no room", code=code)])
    client: Any = SimpleNamespace(job=job)
    course = run_zoo._Course(Run(Path()), RunOptions(service=Endpoint()), client, lambda _: None)
    assert course._ended("job", time.monotonic() + 20) is not None


def test_a_service_that_is_away_fails_the_rows_and_says_so(tmp_path: Path) -> None:
    code, found = run(manifest(tmp_path, of("clicks")), "127.0.0.1:9", "--patience", "0.5")
    assert code == 1
    assert "not reached within 0.5 s" in found["clicks"].explanation


@pytest.mark.parametrize("kind, more", [(signal.SIGINT, []), (signal.SIGKILL, []), (signal.SIGKILL, ["--fresh"])])
def test_a_run_that_was_ended_goes_on_and_asks_nothing_twice(
    tmp_path: Path, kind: signal.Signals, more: list[str]
) -> None:
    (tmp_path / "service").mkdir()
    path = manifest(
        tmp_path,
        *(of("clicks", f'name = "clicks{n}"\nlabels = {{n = "{n}", test = "{tmp_path.name}"}}') for n in range(2)),
    )
    with real_service(tmp_path / "service") as address:
        asked = ["zoo", "run", str(path), "--service", address, "--max-parallel", "2", *more]
        (tmp_path / "program.py").write_text(PROGRAM)
        process = Module("program", *asked, log=tmp_path / "log", folder=tmp_path)
        limit = time.monotonic() + 120
        while not jobs(address, tmp_path):
            assert time.monotonic() < limit
            time.sleep(0.05)
        status = process.end(kind, within_s=60)
        if kind is signal.SIGINT:
            assert status == 130
            assert f"to continue: fxlib zoo run {path}" in (tmp_path / "log").read_text()
        with scripted_worker(address, adopt):
            code, found = run(path, address, *more)
        assert code == 0
        assert [each.outcome for each in found.values()] == ["adopted"] * 2
        assert len(list(Runs(tmp_path / "zoo.runs"))) == 1
        assert len(jobs(address, tmp_path)) == 2


def test_wrong_manifests_and_unknown_runs_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zoo.toml").write_text("[[models]]\n")
    assert main(["zoo", "run", str(tmp_path / "zoo.toml")]) == 2
    assert "Did you mean model?" in capsys.readouterr().err
    path = manifest(tmp_path, of("clicks"))
    assert main(["zoo", "status", str(path)]) == 2
    assert "no run is called 'latest'" in capsys.readouterr().err
    assert main(["zoo", "status", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: there is no such manifest" in capsys.readouterr().err


def test_check_ends_with_3_where_a_row_became_slower(tmp_path: Path, service: str) -> None:
    path = manifest(tmp_path, of("clicks"))
    run(path, service)
    runs = Runs(tmp_path / "zoo.runs")
    before = newest(path)
    worse = runs.begin(str(path), ["clicks"])
    told = json.loads(next((before.folder / "rows").iterdir()).read_text())
    told |= {"gain": {"value": 0.1, "low": 0.09, "high": 0.11}, "job_id": "another"}
    (worse.folder / "rows" / next((before.folder / "rows").iterdir()).name).write_text(json.dumps(told))
    assert main(["zoo", "check", str(path), "--against", before.name]) == 3
    assert main(["zoo", "check", str(path), "--against", worse.name, "--run", before.name]) == 0
    assert main(["zoo", "diff", str(path), before.name]) == 0


def test_a_row_that_cannot_be_written_ends_the_run_with_a_sentence(
    tmp_path: Path, service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path, of("clicks"))
    (tmp_path / "zoo.runs").write_text("a file")
    assert main(["zoo", "run", str(path), "--service", service]) == 2
    assert "zoo.runs" in capsys.readouterr().err


@pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a small disk")
@pytest.mark.parametrize("when", ["while a model is captured", "while it is measured"])
def test_a_run_whose_disk_is_full_ends_with_a_sentence_and_goes_on_once_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    path = manifest(tmp_path, of("clicks"), of("layer"))
    with small_disk(tmp_path / "disk") as disk, real_service(tmp_path / "service") as address:
        folder = tmp_path / "zoo.runs"
        folder.symlink_to(disk.path)

        def answered(lease: workers_pb2.Lease, graph: GraphModule) -> tuple[Report, GraphModule]:
            if when == "while it is measured":
                disk.fill()
            return adopt(lease, graph)

        class Full(Forked):
            """A model's process; the second one finds the disk full."""

            def __init__(self, *command: Any, **options: Any) -> None:
                if "layer" in str(sorted(folder.glob("*/logs/*"))) and when == "while a model is captured":
                    disk.fill()
                super().__init__(*command, **options)

        with scripted_worker(address, answered):
            code, found = run(path, address, "--max-parallel", "1", start=Full)
            said = capsys.readouterr().err
            assert code == 2
            assert "No space left on device" in said.splitlines()[-1]
            assert f"{folder}/" in said.splitlines()[-1]
            assert any(not row.over for row in found.values())
            disk.clear()
            when = ""
            code, found = run(path, address, "--max-parallel", "1")
        assert code == 0
        assert [row.outcome for row in found.values()] == ["adopted", "adopted"]
        assert len(list(Runs(folder))) == 1
        assert [row.attempt for row in found.values()] == [1, 1]
        assert len(jobs(address, tmp_path)) == 2
        assert list(folder.glob("*/rows/.*")) == []


def gains(value: float, reason: Reason = Reason.FASTER) -> Answer:
    def answered(lease: workers_pb2.Lease, graph: GraphModule) -> tuple[Report, GraphModule]:
        report, module = adopt(lease, graph)
        gain = Estimate(value=value, low=value - 0.01, high=value + 0.01)
        decision: Decision = "adopt" if reason is Reason.FASTER else "keep_original"
        return replace(report, gain=gain, decision=decision, reason=reason, explanation=reason.sentence("x")), module

    return answered


RACKS = 'replicas = [{rack = "1"}, {rack = "2"}, {rack = "3"}]'


@contextmanager
def racks(address: str, *answers: Answer) -> Iterator[None]:
    """Workers on machines of racks 1, 2 and so on."""
    with ExitStack() as workers:
        for number, each in enumerate(answers, 1):
            labels = {"rack": str(number)}
            workers.enter_context(scripted_worker(address, each, name=f"worker-{number}", labels=labels))
        yield


def test_a_model_is_measured_on_several_machines_and_adopted_by_the_interval_between_them(tmp_path: Path) -> None:
    path, other = manifest(tmp_path, of("clicks", RACKS)), tmp_path / "other"
    with real_service(tmp_path / "service") as address:
        with racks(address, gains(0.50), gains(0.52), gains(0.51)):
            code, found = run(path, address)
            _, again = run(path, address)
        assert code == 0
        row = found["clicks"]
        assert (row.decision, row.reason, row.job_id) == ("adopt", "FASTER", "")
        assert row.gain is not None
        assert 0.47 < row.gain.low < 0.51 < row.gain.high < 0.55
        assert row.explanation.endswith("(over 3 machines)")
        told = [(each.where["rack"], each.worker, round(each.gain.value, 2)) for each in row.replicas if each.gain]
        assert told == [("1", "worker-1", 0.5), ("2", "worker-2", 0.52), ("3", "worker-3", 0.51)]
        assert sorted(jobs(address, tmp_path)) == sorted(row.job_ids)
        assert again["clicks"].reused
        assert again["clicks"].job_ids == row.job_ids
        page = write_site(newest(path), [], tmp_path / "site")[2].read_text()
        assert "<bdi>rack=3</bdi></td><td><bdi>worker-3</bdi>" in page

        other.mkdir()
        path = manifest(other, of("clicks", RACKS))
        with racks(address, gains(0.50), gains(0.52), gains(0.03)):
            _, found = run(path, address)
        assert (found["clicks"].decision, found["clicks"].reason) == ("keep_original", "NOT_FASTER")
        assert found["clicks"].gain is not None
        assert found["clicks"].gain.low < 0.0
        assert found["clicks"].gain.value > 0.2


def test_what_one_machine_finds_wrong_no_figure_of_others_outweighs(tmp_path: Path) -> None:
    path = manifest(tmp_path, of("clicks", RACKS))
    with (
        real_service(tmp_path / "service") as address,
        racks(address, gains(0.5), gains(0.5), gains(0.5, Reason.NOT_SAME)),
    ):
        _, found = run(path, address)
    assert (found["clicks"].decision, found["clicks"].reason, found["clicks"].gain) == (
        "keep_original",
        "NOT_SAME",
        None,
    )
    assert found["clicks"].explanation.startswith("where rack=3: ")


def test_replicas_that_one_worker_measured_are_told_as_one_machine(tmp_path: Path) -> None:
    path = manifest(tmp_path, of("clicks", 'replicas = [{a = "1"}, {b = "2"}]'))
    with (
        real_service(tmp_path / "service") as address,
        scripted_worker(address, gains(0.5), labels={"a": "1", "b": "2"}),
    ):
        _, found = run(path, address)
    assert found["clicks"].decision == "adopt"
    assert found["clicks"].explanation.endswith("(on one machine, which measured all)")


def test_a_replica_that_nobody_measures_fails_the_row_and_says_which(tmp_path: Path) -> None:
    path = manifest(tmp_path, of("clicks", f"{RACKS}\ndeadline_s = 20"))
    with real_service(tmp_path / "service") as address, racks(address, gains(0.5), gains(0.5)):
        code, found = run(path, address)
        assert code == 1
        assert found["clicks"].failure == "DEADLINE"
        assert "no answer of a worker with rack=3" in found["clicks"].explanation
        with connect(address) as client:
            states = [client.job(each).state for each in found["clicks"].job_ids]
    assert states == ["succeeded", "succeeded", "cancelled"]


def test_files_of_credentials_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = _elsewhere(Endpoint(address="localhost:1", ca="ca.pem", token_file="token"))
    assert (found["ca"], found["token_file"], found["key"]) == (f"{tmp_path}/ca.pem", f"{tmp_path}/token", None)
    monkeypatch.setenv("FXLIB_TOKEN_FILE", "other")
    assert _elsewhere(Endpoint(address="localhost:1"))["token_file"] == f"{tmp_path}/other"
