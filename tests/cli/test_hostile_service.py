"""A service that answers every command with escape sequences and with characters that turn the direction of text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typing_extensions import override

from fxlib.spec.report import Estimate
from fxlib.utils.text import PlainFormatter, plain, plain_lines
from fxlib.v1 import blobs_pb2, jobs_pb2
from fxlib.zoo import Entry, Row, Runs, read_manifest
from tests.cli.conftest import Run
from tests.client.models import made
from tests.client.scripted import SUCCEEDED, Context, Scripted, serving

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\r\u202eright to left\u2066\x9b1A\x08\x7f\u2028end[red]\\[/\nforged"
"""It names the window, clears the screen, turns the text red and around, goes up a line, and begins one."""

DIGEST = hashlib.sha256(b"x").hexdigest()


def harmless(text: str) -> str:
    """Check that what was written is nothing but printable characters and line ends of our own, and return it."""
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert [line for line in text.splitlines() if line.startswith("forged")] == []
    return text


def fill(message: Any, depth: int = 3) -> None:
    """Put the text into every field that holds text, and one element into each list, down to a depth."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].type == field.TYPE_STRING:
                getattr(message, field.name)[EVIL] = EVIL
        elif field.type == field.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(EVIL)
            else:
                setattr(message, field.name, DIGEST if field.name == "sha256" else EVIL)
        elif field.type == field.TYPE_MESSAGE and depth and not field.message_type.full_name.startswith("google."):
            value = getattr(message, field.name)
            fill(value.add() if field.is_repeated else value, depth - 1)


class Hostile(Scripted):
    """Answers as it is told, in evil words; with `refuses`, it refuses everything in evil words."""

    def __init__(self, state: jobs_pb2.JobState = SUCCEEDED) -> None:
        super().__init__()
        self.refuses = False
        self.job = jobs_pb2.Job(id="job-1", state=state)
        if state == SUCCEEDED:
            self.job.result.decision = jobs_pb2.DECISION_KEEP_ORIGINAL
            self.job.result.reason_code = EVIL
            result = self.job.result
            result.calls.add(
                node=EVIL, function=EVIL, to=EVIL, action="moved", reason_code=EVIL, reason=EVIL, source=EVIL
            )
            result.passes.add(name=EVIL, diff=EVIL.replace("\n", " "))  # which has lines of its own
            result.candidates.add(name=EVIL)
            result.reason = result.hardware = EVIL
            result.notes.append(EVIL)
        else:
            self.job.failure.code = self.job.failure.message = EVIL
        for name in ("name", "namespace", "phase", "worker_id", "asked_by", "measured_by"):
            setattr(self.job, name, EVIL)
        self.job.labels[EVIL] = EVIL
        self.job.attempts = 3
        self.events = [
            jobs_pb2.JobEvent(sequence=number, state=now, phase=f"{number}{EVIL}", message=EVIL, progress=0.5)
            for number, now in ((1, jobs_pb2.JOB_STATE_RUNNING), (2, state))
        ]
        fill(self.capabilities)

    @override
    def _enter(self, method: str, context: Context) -> None:
        if self.refuses and method != "GetCapabilities":
            info, shown = error_details_pb2.ErrorInfo(reason=EVIL, domain=EVIL, metadata={EVIL: EVIL}), any_pb2.Any()
            shown.Pack(info)
            number = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            status = status_pb2.Status(code=number, message=EVIL, details=[shown])
            context.abort_with_status(rpc_status.to_status(status))

    @override
    def ListPasses(self, request: Any, context: Context) -> jobs_pb2.ListPassesResponse:
        self._enter("ListPasses", context)
        answer = jobs_pb2.ListPassesResponse()
        fill(answer)
        return answer

    @override
    def ListJobs(self, request: Any, context: Context) -> jobs_pb2.ListJobsResponse:
        self._enter("ListJobs", context)
        return jobs_pb2.ListJobsResponse(jobs=[self.job])

    @override
    def CancelJob(self, request: Any, context: Context) -> jobs_pb2.CancelJobResponse:
        self._enter("CancelJob", context)
        return jobs_pb2.CancelJobResponse(job=self.job)

    @override
    def FindMissing(self, request: Any, context: Context) -> blobs_pb2.FindMissingResponse:
        self._enter("FindMissing", context)
        return blobs_pb2.FindMissingResponse()


COMMANDS = (
    ["jobs"],
    ["jobs", "list", "--name", "x"],
    ["jobs", "show", "job-1"],
    ["jobs", "watch", "job-1"],
    ["jobs", "cancel", "job-1"],
    ["passes"],
    ["capabilities"],
    ["optimize", "tests.client.models:made"],
)


@contextmanager
def hostile(*, state: jobs_pb2.JobState = SUCCEEDED, refuses: bool = False) -> Iterator[str]:
    service = Hostile(state)
    service.refuses = refuses
    with serving(service) as address:
        yield address


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_a_service_says_steers_no_terminal(fxlib: Run, command: list[str]) -> None:
    made()  # the factory works, so that what fails is the service's doing
    with hostile() as address:
        told = fxlib(*command, "--service", address, "--patience", "60")
        said = harmless(told.out) + harmless(told.err)
        assert "red" in said or "cancel" in command  # the words are there, and nothing else of them
        assert "Traceback" not in said


@pytest.mark.parametrize("command", [*COMMANDS[:1], *COMMANDS[2:]], ids=" ".join)
def test_json_of_it_is_json(fxlib: Run, command: list[str]) -> None:
    with hostile() as address:
        told = fxlib(*command, "--json", "--service", address, "--patience", "60")
        harmless(told.err)
        assert json.loads(harmless(told.out))


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != ["capabilities"]], ids=" ".join)
def test_what_a_service_refuses_with_steers_no_terminal(fxlib: Run, command: list[str]) -> None:
    with hostile(refuses=True) as address:
        told = fxlib(*command, "--service", address, "--patience", "60")
        said = harmless(told.out) + harmless(told.err)
        assert "red" in said
        assert "Traceback" not in said
        assert told.code == 1


def test_a_failure_steers_no_terminal(fxlib: Run) -> None:
    with hostile(state=jobs_pb2.JOB_STATE_FAILED) as address:
        for command in COMMANDS[2:4]:
            told = fxlib(*command, "--service", address, "--patience", "60")
            assert "red" in harmless(told.out) + harmless(told.err)


def zoo(folder: Path) -> tuple[Path, list[Entry]]:
    """A manifest of two models with evil names, one run of them that is over, and one whose first job is followed."""
    path = folder / "zoo.toml"
    name = json.dumps(EVIL)  # as TOML writes it, too, but for the one character that JSON lets stand
    models = f'[[model]]\nfactory = "m:f"\nname = {name}\n[[model]]\nfactory = "m:g"\nname = "other"\n'
    path.write_text(models.replace("\x7f", "\\u007f"))
    entries = list(read_manifest(path).entries)
    gains = [Estimate(value=gain, low=gain - 0.01, high=gain + 0.01) for gain in (0.5, 0.2)]
    for gain in gains:
        run = Runs(folder / "zoo.runs").begin(EVIL, [each.name for each in entries])
        told = Row(name=EVIL, asked=entries[0].digest, state="failed", failure=EVIL, reason=EVIL, explanation=EVIL)
        run.write(replace(told, recipe=EVIL, hardware=EVIL))
        other = Row(name="other", asked=entries[1].digest, state="done", gain=gain, decision="adopt")
        run.write(replace(other, reason=EVIL, explanation=EVIL))
    run.write(Row(name=EVIL, asked=entries[0].digest, state="asked", job_id="job-1"))
    return path, entries


@pytest.mark.parametrize("state", [SUCCEEDED, jobs_pb2.JOB_STATE_FAILED])
def test_a_run_of_a_zoo_steers_no_terminal(fxlib: Run, tmp_path: Path, state: jobs_pb2.JobState) -> None:
    path, _ = zoo(tmp_path)
    with hostile(state=state) as address:
        told = fxlib("zoo", "run", str(path), "--service", address, "--patience", "60")
    assert "red" in harmless(told.out)
    assert "red" in harmless(told.err)
    assert Runs(tmp_path / "zoo.runs").named("latest").over


@pytest.mark.parametrize("command", ["status", "diff", "check", "report"])
def test_what_is_told_of_runs_of_a_zoo_steers_no_terminal(fxlib: Run, tmp_path: Path, command: str) -> None:
    path, _ = zoo(tmp_path)
    first, _ = Runs(tmp_path / "zoo.runs")
    options = {"diff": [first.name], "check": ["--against", first.name], "report": ["-o", str(tmp_path / "site")]}
    asked = ["zoo", command, str(path), *options.get(command, [])]
    told = fxlib(*asked)
    assert ("red" in harmless(told.out)) == (command != "report")
    assert harmless(told.err) == ""
    assert json.loads(harmless(fxlib(*asked, "--json").out))
    wrong = fxlib("zoo", command, str(tmp_path / EVIL), *options.get(command, []))
    assert "red" in harmless(wrong.err)


def test_text_of_strangers_becomes_blank_where_it_steers() -> None:
    assert plain(EVIL).isprintable()
    assert len(plain(EVIL)) == len(EVIL)
    assert plain("naïve 中文 🙂") == "naïve 中文 🙂"
    assert plain_lines(f"one\n{EVIL}\nthree").split("\n")[::3] == ["one", "three"]


def test_log_lines_steer_no_terminal() -> None:
    record = logging.LogRecord("name", logging.WARNING, __file__, 1, "worker %s was silent", (EVIL,), None)
    line = PlainFormatter("%(levelname)s %(message)s").format(record)
    assert line.startswith("WARNING worker ")
    assert line.isprintable()
