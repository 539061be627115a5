"""Drives trials: connected to Ray once, it runs one trial after another for its worker.

It receives the folder of each job (see `exchange`), sends lines of progress, and writes `report.pb` there.
If a profile is wanted, it reports when the profile is written, and continues when the candidates are planned by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from fxlib.errors import FxlibError
from fxlib.protocol import recipe_from_proto
from fxlib.recipes.alternatives import AUTO
from fxlib.spec.profile import Profile
from fxlib.spec.report import Report
from fxlib.spec.workload import MAIN
from fxlib_workers.config import TrialSettings
from fxlib_workers.exchange import Candidate, JobFolder
from fxlib_workers.process.child import FOLDER, Channel, ChildEndedError
from fxlib_workers.process.containment import HOST_NETWORK, Network
from fxlib_workers.process.exceptions import HOST_FAULTS, shorten
from fxlib_workers.trial.failures import InterruptedTrialError
from fxlib_workers.trial.nodes import Nodes, connected
from fxlib_workers.trial.replay.named_calls import with_remote_calls
from fxlib_workers.trial.run_trial import TrialRequest, run_trial
from fxlib_workers.trial.trainer import EncodedProgram

_ALIVE_S: Final = 5.0
"""The interval in seconds of messages that say that this process is alive."""

_IDLE_S: Final = 60.0
"""Seconds without a trial after which the nodes of a cluster are released, so that its autoscaler may remove them."""


def drive(settings: TrialSettings, channel: Channel, network: Network = HOST_NETWORK) -> int:
    """Run trials until the worker ends; return the exit status.

    Args:
        settings: where trials run.
        channel: the channel over which the worker asks for them.
        network: the host's network, for processes of trials that have to join it.
    """
    try:
        with connected(settings, Path(os.environ.pop(FOLDER)), network) as nodes:
            if not settings.ray_address:  # a cluster has many nodes, and there may be no trial on them
                nodes.warm_up()
            channel.send(ready=True)
            while True:
                if (message := channel.receive(_IDLE_S if settings.ray_address else None)) is None:
                    nodes.leave()  # these are a cluster's
                elif "folder" in message:
                    _run(JobFolder(Path(message["folder"])), nodes, channel, profile=message["profile"])
    except ChildEndedError:
        return 0
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        disk = number if number in HOST_FAULTS else None
        channel.send(failed=shorten(f"{type(error).__name__}: {error}"), disk=disk)
        return 1


def _run(job: JobFolder, nodes: Nodes, channel: Channel, *, profile: Collection[str]) -> None:
    def report_progress(phase: str, message: str, progress: float | None = None) -> None:
        channel.send(phase=phase, message=message, progress=progress)

    sent_at = time.monotonic()

    def interrupted() -> bool:
        nonlocal sent_at
        if time.monotonic() - sent_at > _ALIVE_S:
            sent_at = time.monotonic()
            channel.send(alive=True)
        return channel.receive(timeout_s=0.0) is not None

    def plan_anew(name: str, folder: JobFolder, measured: Profile) -> Sequence[Candidate]:
        try:
            folder.write_profile(measured)
        except FxlibError as error:
            report_progress("profile", f"planned without a profile: {error}")
            return folder.candidates()
        channel.send(profiled=name)
        if "planned" not in (channel.receive() or {}):
            raise InterruptedTrialError
        return folder.candidates()

    try:
        folders = {MAIN: job, **job.variants}
        reports = {name: folder.read_rewrite() for name, folder in folders.items()}
        results = run_trial(_requests(folders, reports, plan_anew, profile), nodes, report_progress, interrupted)
    except InterruptedTrialError:
        channel.send(interrupted=True)
        return
    except FxlibError as error:  # a file of the job is not valid, although the service accepted it
        channel.send(refused=shorten(str(error)))
        return
    for name, result in results.items():
        folders[name].choose(result.chosen)
        reports[name] = result.report
    job.write_report(replace(reports.pop(MAIN), variants=reports))
    channel.send(done=True)


def _requests(
    folders: Mapping[str, JobFolder],
    reports: Mapping[str, Report],
    plan_anew: Callable[[str, JobFolder, Profile], Sequence[Candidate]],
    profile: Collection[str],
) -> dict[str, TrialRequest]:
    """Return the trials of the programs whose rewrite has produced something to try.

    Raises:
        FxlibError: a file of the job cannot be read.
    """
    return {
        name: TrialRequest(
            workload=folder.workload(),
            options=folder.options(),
            program=EncodedProgram(
                original=folder.graph(),
                workload=folder.request().workload.SerializeToString(),
                blobs=folder.blobs(),
            ),
            candidates=folder.candidates(),
            plan_anew=partial(plan_anew, name, folder) if name in profile and folder.profile() is None else None,
            profile=with_remote_calls(folder.profile(), folder.graph()),
            threads=_fewer_threads(folder) if len(folders) == 1 else (),
        )
        for name, folder in folders.items()
        if reports[name].reason is None
    }


def _fewer_threads(folder: JobFolder) -> tuple[int, ...]:
    """Return the numbers of threads that `auto` tries in addition to the workload's, which is the maximum."""
    threads = folder.workload().threads if recipe_from_proto(folder.request().recipe) == AUTO else 1
    return tuple(dict.fromkeys(each for each in (threads // 2, 1) if 0 < each < threads))
