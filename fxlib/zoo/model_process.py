"""Run the process of one model, which makes the model, captures it, and hands its question in to the service.

`python -m fxlib.zoo.model_process` reads its task from standard input, and writes lines of JSON to the file descriptor
that it is given. A model's crash, its hang and its imports affect only this process.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fxlib.zoo.source_files import Observer

if TYPE_CHECKING:
    from fxlib.zoo.manifest import Entry

ENTRY_POINTS: Final = "fxlib.models"
"""The group of entry points in which a package offers its models."""

_REUSED: Final = "REQUEST_ID_REUSED"
_NO_DEVICE: Final = re.compile(
    r"not compiled with (CUDA|XPU)|not linked with support for|no NVIDIA driver|No CUDA GPUs|No XPU devices"
    r"|on a CUDA device but|CUDA unknown error|invalid device ordinal"
)
"""Phrases with which torch says that a device is missing."""


class _FailedError(Exception):
    """There is no question to ask about the model; `code` says which stage failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def main() -> int:
    """Do the task on standard input, and write the outcome."""
    asked = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    here = os.getpid()

    def tell(**message: object) -> None:
        if os.getpid() != here:  # the model forked: its copy of this process must not write
            os._exit(0)
        print(json.dumps(message), file=answers, flush=True)

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    observer = Observer()
    try:
        answer = _asked(asked, observer, tell)
    except _FailedError as error:
        answer = {"failed": error.code, "message": str(error)}
    except SystemExit as error:
        answer = {"failed": "EXITED", "message": f"it called sys.exit({error.code!r})"}
    except Exception as error:  # noqa: BLE001 - whatever a model raises belongs to its row
        traceback.print_exc()
        answer = _raised(error)
    tell(**answer)
    answers.close()
    os._exit(0)  # the model's threads and exit handlers have nothing more to do


def _asked(asked: Mapping[str, Any], observer: Observer, tell: Callable[..., None]) -> dict[str, Any]:
    from fxlib.client import Endpoint
    from fxlib.errors import FxlibWarning, RejectedError, RemoteError, WorkloadError
    from fxlib.spec.job import Job
    from fxlib.spec.report import plain
    from fxlib.zoo.manifest import Entry

    entry = Entry(**asked["entry"])
    memory = int(entry.memory_gib * (1 << 30))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start = time.monotonic()
    _seed()
    tell(phase="making the model")
    model, workload = _made(entry)
    tell(phase="capturing")
    warnings.simplefilter("ignore", FxlibWarning)
    with Endpoint(**asked["service"]).connect() as client:
        hand_in = partial(
            client.hand_in,
            model,
            workload,
            recipe=entry.steps or entry.recipe,
            name=entry.name,
            namespace=entry.namespace,
            labels=entry.labels,
            min_gain=entry.min_gain,
            confidence=entry.confidence,
            budget_s=entry.budget_s,
            max_relative_error=entry.max_relative_error,
            fresh=asked["fresh"] or bool(entry.replicas),
        )
        jobs = list[Job]()
        try:
            for where, request_id in zip(entry.wheres, asked["request_ids"], strict=True):
                try:
                    found = hand_in(where=where, request_id=request_id)
                except RejectedError as error:
                    if error.code != _REUSED:
                        raise
                    found = hand_in(where=where)  # the model is not the same as before the run was interrupted
                if not isinstance(found, Job):  # there is nothing to ask, on whichever worker
                    break
                jobs.append(found)
        except RemoteError as error:
            raise _FailedError(getattr(error, "code", "") or "SERVICE", str(error)) from error
        except WorkloadError as error:
            raise _FailedError("WORKLOAD", str(error)) from error
    noted = {"dependencies": asdict(observer.found()), "capture_s": time.monotonic() - start}
    if isinstance(found, Job):
        return {**noted, "jobs": [job.id for job in jobs], "cached": all(job.cached for job in jobs)}
    if found.reason is None:
        return {**noted, "failed": "CAPTURE", "message": found.explanation}
    return {**noted, "report": plain(found.to_dict())}


def _seed() -> None:
    """Seed all generators, so that a model with random weights is the same model in each run."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - models draw from it


def _made(entry: Entry) -> tuple[Any, Any]:
    """Return the model and its workload.

    Raises:
        _FailedError: there is no such function or file, or it returns something else.
    """
    from torch import nn

    from fxlib.spec.workload import Workload

    made = _source(entry)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Workload):
        model, workload = made
        if entry.workload:
            raise _FailedError("FACTORY", "the factory returns a workload, and the manifest has another one")
    else:
        model, workload = made, _workload(entry)
    if not isinstance(model, nn.Module) and not hasattr(model, "graph_module"):
        problem = f"it returned {type(made).__name__}, and neither a module nor (model, workload)"
        raise _FailedError("FACTORY", problem)
    if entry.threads is not None:
        workload = replace(workload, threads=entry.threads)
    return model, workload


def _source(entry: Entry) -> Any:
    import fxlib
    from fxlib.errors import FxlibError

    target = entry.target
    if entry.source == "file":
        try:
            return fxlib.load(target)
        except OSError as error:
            raise _FailedError("FILE", f"{target}: {error.strerror}") from error
        except FxlibError as error:
            raise _FailedError("FILE", str(error)) from error
    if entry.source == "entry_point":
        found = list(metadata.entry_points(group=ENTRY_POINTS, name=target))
        if len(found) != 1:
            known = ", ".join(sorted({each.name for each in metadata.entry_points(group=ENTRY_POINTS)})) or "none"
            problem = f"there are {len(found)} entry points {target!r} in the group {ENTRY_POINTS}; known: {known}"
            raise _FailedError("ENTRY_POINT", problem)
        return found[0].load()(**entry.arguments)
    return _called(target, entry.arguments)


def _called(name: str, arguments: Mapping[str, Any]) -> Any:
    module_name, _, function = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)  # the user names it in their own manifest
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        traceback.print_exc()
        searched = f" in {Path.cwd()}, on PYTHONPATH or installed" if isinstance(error, ModuleNotFoundError) else ""
        raise _FailedError("FACTORY", f"{name}: {_one_line(error)}{searched}") from error
    return found(**arguments)


def _workload(entry: Entry) -> Any:
    from fxlib.errors import FxlibError
    from fxlib.spec.workload import Workload
    from fxlib.zoo.workload_table import workload_of

    given = entry.workload
    if not given:
        raise _FailedError(
            "WORKLOAD", "there is no workload: return (model, workload), or add `workload` to the manifest"
        )
    if isinstance(given, str):
        made = _called(given, entry.arguments)
        if not isinstance(made, Workload):
            raise _FailedError("WORKLOAD", f"{given} returned {type(made).__name__}, and no Workload")
        return made
    try:
        return workload_of(given)
    except FxlibError as error:
        raise _FailedError("WORKLOAD", str(error)) from error


def _raised(error: Exception) -> dict[str, Any]:
    """Return the description of an unexpected exception."""
    message = _one_line(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return {"failed": "MEMORY", "message": message}
    if _NO_DEVICE.search(str(error)):
        message = f"it needs a device that this machine has not; have it made on the CPU ({message})"
        return {"failed": "DEVICE", "message": message}
    return {"failed": "MODEL", "message": message}


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:400]


if __name__ == "__main__":
    sys.exit(main())
