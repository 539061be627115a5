"""How often a trial adopts a candidate that is the original itself, at a least gain of 0%.

Arms: `trial` (real trainers and servers on Ray: the same graph on both sides), and `trial-choice` (the same, with three
candidates); and, on simulated blocks with different kinds of noise, `sequence` (the interval that trials use) beside
`t-test` (a 95% t-interval looked at after every pair, as one would do by hand), and `choice` (three candidates that are
all the original: one is chosen, and confirmed on fresh blocks, as in trials) beside `choice-reusing` (the blocks that
chose it count as proof, too). Metric: the share of false adoptions, which must not exceed 2.5%, with its 95% interval.

Source of that interval: C. Clopper and E. Pearson, "The use of confidence or fiducial limits", Biometrika 26, 1934.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import nn
from torch.distributed import rpc

import fxlib
from benchmarks.report import Case, Row, main
from fxlib import ps, wire
from fxlib.profiling.statistics import ConfidenceSequence
from fxlib.protocol import workload_to_proto
from fxlib.reasons import Reason
from fxlib.spec.report import CandidateReport, Report
from fxlib.spec.workload import Server, Table, Workload
from fxlib_workers.config import TrialSettings
from fxlib_workers.exchange import ORIGINAL, Arm, Candidate
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.nodes import connected
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.select import Selection, SuccessiveHalving
from fxlib_workers.trial.selection.speed import Blocks
from fxlib_workers.trial.trainer import EncodedProgram

PAIRS: Final = 100
EQUALS: Final = ("one", "two", "three")
SIMULATIONS: Final = 2000
TRIALS: Final = 60
TRIAL_S: Final = 8.0
CONFIDENCE: Final = 0.95
TIMEOUT_S: Final = 60.0

Values = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Values]


class Lookups(nn.Module):
    """Two lookups on one server, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", ps.lookup, args=("t", indices))
        second = rpc.rpc_sync("ps0", ps.lookup, args=("t", indices + 1))
        return self.layer(torch.cat([first, second], 1))


def normal(rng: np.random.Generator, pairs: int) -> Values:
    return rng.normal(0.0, 0.03, (pairs, 2))


def heavy_tailed(rng: np.random.Generator, pairs: int) -> Values:
    return 0.03 * rng.standard_t(1.5, (pairs, 2))


def autocorrelated(rng: np.random.Generator, pairs: int) -> Values:
    slots = 0.02 * rng.standard_t(3, 2 * pairs)
    for index in range(1, len(slots)):
        slots[index] += 0.9 * slots[index - 1]
    return slots.reshape(pairs, 2)


NOISES: Final[dict[str, Noise]] = {"normal": normal, "heavy-tailed": heavy_tailed, "autocorrelated": autocorrelated}


def by_sequence(values: Values) -> bool:
    """Whether the interval of trials is above zero after some pair."""
    sequence = ConfidenceSequence(CONFIDENCE)
    for value in values:
        sequence.add(float(value))
        if sequence.above(0.0):
            return True
    return False


def by_t_test(values: Values) -> bool:
    """Whether the t-interval is above zero after some pair, from the tenth on."""
    counts = np.arange(1, len(values) + 1)
    means = np.cumsum(values) / counts
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.sqrt((np.cumsum(values**2) / counts - means**2) / (counts - 1))
        scores = means / errors
    return bool((scores[9:] > stats.t.ppf((1 + CONFIDENCE) / 2, counts[9:] - 1)).any())


def of_the_chosen(rng: np.random.Generator, noise: Noise) -> tuple[Values, Values]:
    """Return log-ratios of the one chosen among equal candidates: in the rounds that chose it, and in fresh pairs."""
    halving, blocks = SuccessiveHalving(EQUALS, CONFIDENCE), iter(np.exp(noise(rng, 2 * PAIRS).ravel()))
    rounds = []
    while arms := halving.round:
        rounds.append({str(arm): next(blocks) for arm in rng.permutation(arms)})
        halving.add(rounds[-1])
    chosen = halving.ranking[0]
    pairs = [{str(arm): next(blocks) for arm in rng.permutation([ORIGINAL, chosen])} for _ in range(PAIRS)]
    choosing, fresh = (np.log([each[ORIGINAL] / each[chosen] for each in taken]) for taken in (rounds, pairs))
    return choosing, fresh


def share(arm: str, case: Case, adopted: int, runs: int) -> Row:
    """Return the share of false adoptions, with its exact interval."""
    interval = stats.binomtest(adopted, runs).proportion_ci(confidence_level=0.95)
    return Row(
        benchmark="aa",
        case=case,
        arm=arm,
        metric="false_adoptions",
        value=adopted / runs,
        unit="share",
        low=float(interval.low),
        high=float(interval.high),
        runs=runs,
    )


def simulated(runs: int) -> list[Row]:
    """Try all rules on equal arms, in random order within each pair or round."""
    rows = []
    for name, noise in NOISES.items():
        rng, adopted = np.random.default_rng(0), {"sequence": 0, "t-test": 0, "choice": 0, "choice-reusing": 0}
        for _ in range(runs):
            slots = noise(rng, PAIRS)
            values = rng.choice([-1.0, 1.0], PAIRS) * (slots[:, 0] - slots[:, 1])
            adopted["sequence"] += by_sequence(values)
            adopted["t-test"] += by_t_test(values)
            rounds, fresh = of_the_chosen(rng, noise)
            adopted["choice"] += by_sequence(fresh)
            adopted["choice-reusing"] += by_sequence(np.concatenate([rounds, fresh]))
        rows += [share(arm, {"noise": name, "pairs": PAIRS}, count, runs) for arm, count in adopted.items()]
    return rows


def real(runs: int, seconds: float, names: Sequence[Arm]) -> Row:
    """Measure a graph against itself under so many names, again and again, in the same processes."""
    servers = [Server(name="ps0", tables=(Table(name="t", rows=1001, dim=16),), service_time_s=0.0005)]
    workload = Workload.describe([torch.randint(0, 1000, (16,))], servers=servers)
    graph, encoded = wire.serialize(wire.encode(fxlib.capture(Lookups())).graph), workload_to_proto(workload)
    program = EncodedProgram(original=graph, workload=encoded.message.SerializeToString(), blobs=dict(encoded.blobs))
    options, adopted = fxlib.TrialOptions(min_gain=0.0), 0
    with (
        tempfile.TemporaryDirectory(prefix="fxlib-aa-") as folder,
        connected(TrialSettings(), Path(folder)) as nodes,
        ClusterRun(nodes, workload, program, lambda: False) as world,
    ):
        world.prepare()
        for name in names:
            world.load_candidate(name, graph, {})

        def run(arm: Arm, first: int, steps: int) -> float:
            found: float = world.ask(world.trainers, "block", arm, first, steps, timeout_s=TIMEOUT_S)[0]
            return found

        for _ in range(runs):
            outcomes = CandidateOutcomes([Candidate(graph=graph, report=named(name)) for name in names])
            race = Selection(Blocks(run, [16]), outcomes, options, deadline=time.monotonic() + seconds)
            ranking, steps = race.choose() if len(names) > 1 else (names, None)
            adopted += race.confirm(ranking, steps)[1] is Reason.FASTER
    case: Case = {"noise": "this machine's", "seconds": seconds}
    return share("trial" if len(names) == 1 else "trial-choice", case, adopted, runs)


def named(name: Arm) -> Report:
    """Return what there is to say of a candidate before a trial."""
    return Report(decision="keep_original", reason=None, explanation="", candidates=(CandidateReport(name=name),))


def measurements(quick: bool) -> Sequence[Row]:
    """Return all rows."""
    if quick:
        return [*simulated(SIMULATIONS // 10), real(6, 4.0, EQUALS[:1]), real(6, 4.0, EQUALS)]
    return [*simulated(SIMULATIONS), real(TRIALS, TRIAL_S, EQUALS[:1]), real(TRIALS, TRIAL_S, EQUALS)]


if __name__ == "__main__":
    main("aa", measurements, about=__doc__.partition("\n")[0])
