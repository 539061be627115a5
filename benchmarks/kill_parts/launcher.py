"""`python -m benchmarks.kill_parts.launcher SERVICE FOLDER`: a launcher that asks one question after another.

It writes each request to its folder before it sends it, and the job's id once the service has accepted it. Killed and
started again, it sends what it has no id for once more, under the same request id, and waits for what has not ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import torch

from benchmarks.kill_parts import wall_clock

wall_clock.install()

import fxlib  # noqa: E402 - after the clock
from fxlib.client import Client  # noqa: E402
from fxlib.client.blobs import upload  # noqa: E402
from fxlib.client.connection import Deadline  # noqa: E402
from fxlib.client.request import Question, captured_of, prepare  # noqa: E402
from fxlib.errors import RemoteError  # noqa: E402
from fxlib.v1 import jobs_pb2  # noqa: E402
from tests.workers.cases import Lookups, lookup_workload  # noqa: E402

_PAUSE_S: Final = 0.5
_BUDGET_S: Final = 6.0
_ATTEMPT_S: Final = 30.0


def main(service: str, folder: Path) -> None:
    """Ask until the file `enough` is there and all that was asked has ended."""
    torch.set_num_threads(1)
    Path(os.environ["FXLIB_KILLS_UP"]).touch()
    with fxlib.connect(service, patience_s=600.0) as client:
        for request in sorted(folder.glob("*.request")):
            _follow(client, request)
        number = len(list(folder.glob("*.request")))
        while not (folder / "enough").exists():
            _follow(client, _new(folder, number))
            number += 1


def _new(folder: Path, number: int) -> Path:
    """Write a request, with its blobs, and return the file."""
    model, workload = Lookups(2), lookup_workload(2)
    question = Question(fresh=True, name=folder.name)
    prepared = prepare(captured_of(model, workload, question), workload, question)
    prepared.request.trial.budget_s = _BUDGET_S
    path = folder / f"{number:05}.request"
    blobs = {sha256: data.hex() for sha256, data in prepared.blobs.items()}
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({"request": prepared.request.SerializeToString().hex(), "blobs": blobs}))
    beside.replace(path)
    return path


def _follow(client: Client, path: Path) -> None:
    """See a request through to its end, and write down how that was."""
    ended, accepted = path.with_suffix(".ended"), path.with_suffix(".job")
    while not ended.exists():
        try:
            if not accepted.exists():
                _write(accepted, _ask(client, path))
            job = client.watch(accepted.read_text(), lambda _: None)
        except RemoteError:
            time.sleep(_PAUSE_S)
        else:
            _write(ended, json.dumps({"job": job.id, "state": job.state, "attempts": job.attempts}))


def _ask(client: Client, path: Path) -> str:
    told = json.loads(path.read_text())
    blobs = {sha256: bytes.fromhex(data) for sha256, data in told["blobs"].items()}
    request = jobs_pb2.OptimizeRequest.FromString(bytes.fromhex(told["request"]))
    upload(client._connection, blobs, Deadline(_ATTEMPT_S))
    deadline = Deadline(_ATTEMPT_S)
    return client._connection.call(
        "asking", lambda left_s: client._connection.jobs.Optimize(request, timeout=left_s), deadline
    ).job.id


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(f"{path.suffix}.part")
    beside.write_text(text)
    beside.replace(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
