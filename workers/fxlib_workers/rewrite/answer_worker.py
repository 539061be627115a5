"""Rewrites the graph of one job within limits, and writes the answer into the job's folder (`exchange`)."""

from __future__ import annotations

import errno
import resource
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from fxlib import wire
from fxlib.protocol import check_weights, recipe_from_proto, trial_from_proto
from fxlib.reasons import Reason
from fxlib.recipes.alternatives import AUTO
from fxlib.runtime import bounds, functions, is_call, is_issue
from fxlib.spec.report import Report
from fxlib_workers import logs
from fxlib_workers.config import RewriteLimits
from fxlib_workers.exchange import JobFolder
from fxlib_workers.process import linux
from fxlib_workers.process.child import Channel, ChildEndedError
from fxlib_workers.process.containment import Containment, ContainmentError, contain
from fxlib_workers.process.exceptions import HOST_FAULTS, Raised
from fxlib_workers.process.limits import limit_files, limit_processes
from fxlib_workers.rewrite.make_candidates import make_candidates


def main(connection: socket.socket, policy: Containment) -> None:
    """Contain this process, and rewrite each time that the worker asks."""
    logs.set_up()
    channel = Channel(connection)
    try:
        contain(policy)
        linux.end_with_parent(signal.SIGKILL)  # again, since the parent or the user has changed
    except ContainmentError as error:
        channel.send(failed=f"the process could not be contained: {error}")
        sys.exit(1)
    sys.exit(answer_worker(channel))


def answer_worker(channel: Channel) -> int:
    """Answer each request for a rewrite with `done`, or `failed` and the exception as text; return the exit status."""
    try:
        job = channel.receive() or {}
        bounds.install()
        path = Path(job["job"])
        folder = JobFolder(path, blobs=(path / "blobs").resolve())
        for module in job["modules"]:
            functions.allow_module(module)
        _limit(RewriteLimits(**job["limits"]))
        while channel.receive() is not None:
            rewrite(folder)
            channel.send(done=True)
    except ChildEndedError:
        return 0
    except Exception as error:  # noqa: BLE001 - a pass may fail in any way, which is then the answer
        raised = Raised.of(error)
        number = error.errno if isinstance(error, OSError) else None
        channel.send(
            failed=raised.text,
            out_of_memory=raised.out_of_memory,
            too_large=number == errno.EFBIG,
            disk=number if number in HOST_FAULTS else None,
        )
        return 1
    return 0


def rewrite(folder: JobFolder) -> None:
    """Decode the job's graph, make candidates by its recipe, and write them with the report.

    Raises:
        FxlibError: the graph, the recipe or the workload is not valid, or a pass broke its promise.
    """
    start, workload, request = time.monotonic(), folder.workload(), folder.request()
    graph, recipe = wire.parse(folder.graph()), recipe_from_proto(request.recipe)
    if devices := {each.device for each in graph.storages if each.device not in {"", "cpu", "meta"}}:
        report = Report(decision="keep_original", reason=Reason.NO_DEVICE, explanation="")
        explanation = Reason.NO_DEVICE.sentence(", ".join(sorted(devices)))
        folder.write_rewrite(replace(report, explanation=explanation))
        return
    original = wire.decode(graph, blobs=folder.blobs(), seed=workload.seed)
    check_weights(recipe, graph)  # weights that were not sent are random, and nothing may be computed from them
    trial = trial_from_proto(request.trial)
    bound = trial.max_relative_error
    found = make_candidates(
        original,
        recipe,
        workload,
        folder.profile(),
        max_relative_error=bound,
        backends=request.backends,
        check=lambda tried: check_weights(tried, graph),
        diffs=request.diffs,
    )
    phase_seconds = {"rewrite": time.monotonic() - start}
    candidates = [replace(each, report=replace(each.report, phase_seconds=phase_seconds)) for each in found.ranked]
    hopeless = found.headroom is not None and found.headroom < trial.min_gain
    if candidates and not hopeless:
        folder.write_rewrite(candidates[0].report, candidates)
        return
    if folder.candidates():  # by the profile, those of an earlier plan are hopeless, but only a trial is certain
        return
    calls = any(is_call(node) or is_issue(node) for node in original.graph.nodes)
    reason = Reason.NOTHING_TO_GAIN if candidates else Reason.NOTHING_CHANGED if calls else Reason.NO_CALLS
    explanation = reason.sentence(f"{max(found.headroom or 0.0, 0.0):.1%}" if candidates else "")
    if found.recipe.undeclared and (best := found.recipe.undeclared[0]).is_worth_it:
        explanation = f"{explanation}; {best}"
    if reason is Reason.NO_CALLS and recipe != AUTO:
        explanation = f"{explanation}; the recipe auto tries what there is for local work"
    folder.write_rewrite(replace(found.recipe, reason=reason, explanation=explanation, phase_seconds=phase_seconds))


def _limit(limits: RewriteLimits) -> None:
    """Limit the resources of this process from now on; the libraries are already loaded."""
    memory = psutil.Process().memory_info().vms + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    limit_files(limits.file_bytes)
    limit_processes()
