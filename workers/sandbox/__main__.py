"""Rewrites the graph of one job, within limits, and leaves the answer in the job's folder (see `workers.folder`)."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import psutil

from fxlib import recipes, wire
from fxlib.protocol import recipe_from_proto
from fxlib.reasons import Reason
from fxlib.result import Report
from fxlib.runtime import is_call, is_issue
from workers.child import Channel
from workers.config import REWRITE_JOB, REWRITE_LIMITS, RewriteLimits
from workers.folder import JobFolder
from workers.trial.failures import Raised


def main() -> int:
    """Rewrite, and say how it went: `done`, or `failed` with the exception in words."""
    channel = Channel.inherited()
    folder = JobFolder(Path(os.environ.pop(REWRITE_JOB)))
    _limit(RewriteLimits(**json.loads(os.environ.pop(REWRITE_LIMITS))))
    try:
        rewrite(folder)
    except Exception as error:  # noqa: BLE001 - a pass may fail in any way, and that is the answer
        raised = Raised.of(error)
        channel.send(failed=raised.text, out_of_memory=raised.out_of_memory)
        return 1
    channel.send(done=True)
    return 0


def rewrite(folder: JobFolder) -> None:
    """Decode the job's graph, apply its recipe, and write the rewritten graph, if it differs, and the report.

    Raises:
        FxlibError: the graph, the recipe or the workload are not valid, or a pass broke its promise.
    """
    start, workload, request = time.monotonic(), folder.workload(), folder.request()
    original = wire.decode(wire.parse(folder.original.read_bytes()), blobs=folder.blobs(), seed=workload.seed)
    recipe = recipe_from_proto(request.recipe)
    done = recipes.apply(original, recipe, contracts=workload.contracts, assume=workload.assume)
    if done.changed:
        folder.rewritten.write_bytes(wire.serialize(wire.encode(done.module).graph))
    calls = any(is_call(node) or is_issue(node) for node in original.graph.nodes)
    unchanged = Reason.NOTHING_CHANGED if calls else Reason.NO_CALLS
    folder.write_rewrite(
        Report(
            decision="keep_original",
            reason=None if done.changed else unchanged,
            explanation="" if done.changed else unchanged.sentence(),
            calls=done.calls,
            passes=done.passes,
            preserves=done.preserves,
            assumptions=done.assumptions,
            phase_seconds={"rewrite": time.monotonic() - start},
        )
    )


def _limit(limits: RewriteLimits) -> None:
    """Bound what this process may take from now on; the libraries are loaded already."""
    memory = psutil.Process().memory_info().vms + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
