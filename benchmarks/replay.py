"""Whether a trial that answers from a profile finds the gain that one with the real servers finds.

The demo's DLRM on two servers, original against schedule. Arms, interleaved in one run: `real` (a trial's processes
with the reference server) and `replay` (a trial's processes that know no function of the graph, and answer from what
`fxlib.profile` measured of the real servers). Metrics: seconds per step of both modules, and the gain, with its 95%
interval. The intervals of the two gains should overlap.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch.distributed.rpc import rpc_sync
from torch.fx import GraphModule

import fxlib
from benchmarks.report import Case, Row, main, ratio_interval, row
from examples.dlrm.model import DENSE_FEATURES, DLRM, SPARSE_FEATURES, tables
from fxlib import ps, wire
from fxlib.protocol import profile_from_proto, profile_to_proto, workload_to_proto
from fxlib.ps.local import local
from fxlib.recipes import recipes
from fxlib.spec.profile import Profile
from fxlib.spec.workload import Optimizer, Server, Workload
from fxlib.v1 import profile_pb2
from fxlib_workers.config import TrialSettings
from fxlib_workers.exchange import ORIGINAL
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.nodes import Nodes, connected
from fxlib_workers.trial.trainer import EncodedProgram

ROWS, DIM, HIDDEN, BATCH = 1000, 16, 512, 256
SERVICE_MS: Final = (0.5, 2.0)
ROUNDS: Final = 15
STEPS: Final = 5
TIMEOUT_S: Final = 120.0
OPTIMIZED: Final = "optimized"
OWN, FOREIGN = b"fxlib.ps:", b"myjob.ps:"
"""Whose functions a graph calls: equally long, so that a message that names one is as valid with the other."""


def job(service_s: float) -> tuple[GraphModule, Workload]:
    """Return the demo's model and its step."""
    servers = ps.place(tables(ROWS, DIM), ("ps0", "ps1"), service_time_s=service_s)
    torch.manual_seed(0)
    batch = fxlib.Batch(
        inputs=(torch.rand(BATCH, DENSE_FEATURES), torch.randint(0, ROWS, (BATCH, SPARSE_FEATURES))),
        target=torch.randint(0, 2, (BATCH,)).float(),
    )
    workload = Workload.describe(
        [batch], loss="bce_with_logits", optimizer=Optimizer(name="adam", lr=0.001), servers=servers
    )
    return fxlib.capture(DLRM(servers, dim=DIM, hidden=HIDDEN)), workload


def profiles(services_ms: Sequence[float]) -> dict[float, Profile]:
    """Measure the job against real servers, as a user does, at each of their speeds."""
    graph, workload = job(0.0)
    found = {}
    torch.set_num_threads(workload.threads)  # as a trial's trainers do
    with local(workload.servers):
        for service_ms in services_ms:
            for server in workload.servers:
                rpc_sync(server.name, ps.set_service_time, args=(service_ms / 1e3,))
            found[service_ms] = fxlib.profile(graph, workload)
    return found


def foreign(profile: Profile) -> Profile:
    """Return a profile whose functions nobody but the job has."""
    message = profile_to_proto(profile).SerializeToString()
    return profile_from_proto(profile_pb2.Profile.FromString(message.replace(OWN, FOREIGN)))


@contextmanager
def world(
    nodes: Nodes, graph: bytes, candidate: bytes, workload: Workload, profile: Profile | None
) -> Iterator[ClusterRun]:
    """Start a trial's processes with both modules loaded."""
    encoded = workload_to_proto(workload)
    program = EncodedProgram(original=graph, workload=encoded.message.SerializeToString(), blobs=dict(encoded.blobs))
    with ClusterRun(nodes, workload, program, lambda: False, profile) as made:
        made.prepare()
        made.load_candidate(OPTIMIZED, candidate, {})
        yield made


def race(worlds: Mapping[str, ClusterRun], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds per step of each module in each world, in blocks whose order is new in each round."""
    places = [(arm, module) for arm in worlds for module in (ORIGINAL, OPTIMIZED)]
    seconds: dict[tuple[str, str], list[float]] = {place: [] for place in places}
    dice = random.Random(0)
    for turn in range(rounds + 1):
        dice.shuffle(places)
        for arm, module in places:
            trainers = worlds[arm].trainers
            block_s = worlds[arm].ask(trainers, "block", module, 0, STEPS, timeout_s=TIMEOUT_S)[0]
            if turn:  # the first warms up
                seconds[arm, module].append(block_s / STEPS)
    return seconds


def compare(nodes: Nodes, profile: Profile, service_ms: float, rounds: int) -> list[Row]:
    """Measure one case."""
    graph, workload = job(service_ms / 1e3)
    candidate = recipes.apply(graph, "schedule", profile=profile).module
    own, optimized = (wire.serialize(wire.encode(each).graph) for each in (graph, candidate))
    with ExitStack() as stack:
        bare = replace(workload, servers=[Server(name=each.name) for each in workload.servers])
        worlds = {
            "real": stack.enter_context(world(nodes, own, optimized, workload, None)),
            "replay": stack.enter_context(
                world(nodes, own.replace(OWN, FOREIGN), optimized.replace(OWN, FOREIGN), bare, foreign(profile))
            ),
        }
        seconds = race(worlds, rounds)
    return [each for arm in worlds for each in rows(arm, {"model": "dlrm", "service_ms": service_ms}, seconds)]


def rows(arm: str, case: Case, seconds: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[Row]:
    """Sum one arm up."""
    original, optimized = seconds[arm, ORIGINAL], seconds[arm, OPTIMIZED]
    for metric, samples in (("original", original), ("optimized", optimized)):
        yield row(benchmark="replay", case=case, arm=arm, metric=metric, unit="s", samples=samples)
    value, low, high = (each - 1 for each in ratio_interval(original, optimized))
    yield Row(
        benchmark="replay", case=case, arm=arm, metric="gain", value=value, unit="share", low=low, high=high,
        runs=len(original),
    )  # fmt: skip


def measurements(quick: bool) -> Sequence[Row]:
    """Return all rows."""
    services_ms = SERVICE_MS[-1:] if quick else SERVICE_MS
    found = profiles(services_ms)
    with (
        tempfile.TemporaryDirectory(prefix="fxlib-replay-") as folder,
        connected(TrialSettings(), Path(folder)) as nodes,
    ):
        return [each for ms in services_ms for each in compare(nodes, found[ms], ms, 7 if quick else ROUNDS)]


if __name__ == "__main__":
    main("replay", measurements, about=__doc__.partition("\n")[0])
