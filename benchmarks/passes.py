"""Passes on graphs of growing size: what they change and what they take, beside torch's own where it has the like.

Arms, each in a process of its own, their runs in turn: `fxlib`, and `stock`: torch's own pass on a copy of the same
graph. Metrics: `seconds` and `changes`, by one count for both. The copy of the graph and the code that is generated
afterwards are left out on both sides, and Python's cycle collector rests. A run of `stock` that is not over in time is
ended: `left_out` says after how many seconds, and larger graphs are not tried.

Pass `schedule` is the whole recipe (`fxlib.recipes.apply`: copy, all passes with their checks, code) beside
`symbolic_trace`, which is what it took to trace the model in the first place; their `ratio`, round by round, is below 1
where planning takes less. Its passes, which torch has nothing like, follow. Graph `calls` makes a remote call in every
hundred nodes; `unused` also has values that nobody uses; `repeats` computes values twice, `constants` from weights
alone, `convolutions` has norms, `activations` what a rule and a decomposition replace; `aten` is functional, with views
and scatters, and so are those of the models of `tests/models`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from benchmarks.report import Case, Row, main, ratio_interval, row
from benchmarks.transforms.arms import SCHEDULE, OverCapError, Process, Taken
from benchmarks.transforms.comparisons import COMPARISONS
from fxlib.passes import REGISTRY

SIZES: Final = {1_000: 15, 10_000: 7, 100_000: 3}
"""Nodes, and how often each is measured at most."""
QUICK_SIZES: Final = {1_000: 5}
BUDGET_S: Final = 20.0
"""No further round of a case begins after so long."""
IN_INFERENCE: Final = frozenset({"bfloat16", "quantize", "lower"})
"""Passes that need a processor's instructions, batches or a compiler: `benchmarks.inference` measures these."""
CAP_S: Final = 40.0
"""Seconds that one run of `stock` may take."""
QUICK_CAP_S: Final = 5.0
MODEL_ROUNDS: Final = 5
QUICK_MODELS: Final = ("resnet20_cifar10", "bert")
MODELS: Final = (
    *("resnet20_cifar10", "resnet50", "seresnet10", "mobilenetv2_wd4", "efficientnet_b0", "densenet121"),
    *("squeezenet_v1_1", "shufflenet_g1_wd4", "inceptionv3", "nasnet_4a1056", "hrnet_w18_small_v1"),
    *("bert", "gpt2", "llama", "opt", "t5", "bart", "vit", "convnext", "wav2vec2"),
)


def measure(quick: bool) -> Sequence[Row]:
    """Measure every pass at every size, and `reinplace` on models."""
    sizes, cap_s = (QUICK_SIZES, QUICK_CAP_S) if quick else (SIZES, CAP_S)
    found: list[Row] = []
    with ExitStack() as running:
        arms = {name: Process(name) for name in ("fxlib", "stock")}
        for each in arms.values():
            running.enter_context(each)
        for comparison in (SCHEDULE, *COMPARISONS):
            found += _grow(comparison, arms, sizes, cap_s)
        for model in QUICK_MODELS if quick else MODELS:
            found += _compare(f"reinplace/{model}", arms, 0, MODEL_ROUNDS, cap_s)
    missing = REGISTRY.keys() - IN_INFERENCE - {each.case["pass"] for each in found}
    assert not missing, missing
    return found


def _grow(comparison: str, arms: dict[str, Process], sizes: dict[int, int], cap_s: float) -> Iterator[Row]:
    """Measure one comparison at all sizes, without `stock` from where it takes too long."""
    for size, rounds in sizes.items():
        rows = list(_compare(comparison, arms, size, rounds, cap_s))
        yield from rows
        if any(each.metric == "left_out" for each in rows):
            arms = {"fxlib": arms["fxlib"]}


def _compare(comparison: str, arms: dict[str, Process], size: int, rounds: int, cap_s: float) -> Iterator[Row]:
    """Measure one comparison at one size, the arms in turn."""
    taken: dict[str, list[list[Taken]]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.make(comparison, size)
    nodes = {name: arm.ready() for name, arm in arms.items()}["fxlib"]
    end = time.monotonic() + BUDGET_S
    while len(taken["fxlib"]) < rounds and (not taken["fxlib"] or time.monotonic() < end):
        for name in taken:
            arms[name].copy()
        for name in taken:
            arms[name].ready()
        taken["fxlib"].append(arms["fxlib"].run())
        if "stock" in taken:
            try:
                taken["stock"].append(arms["stock"].run(cap_s=cap_s))
            except OverCapError:
                del taken["stock"]
    cases: list[Case] = [{"pass": each.name, "graph": _graph(comparison), "nodes": nodes} for each in taken["fxlib"][0]]
    for at, case in enumerate(cases):
        yield from _rows(case, "fxlib", [run[at] for run in taken["fxlib"]])
    if "stock" not in taken:
        yield row(benchmark="passes", case=cases[0], arm="stock", metric="left_out", unit="s", samples=[cap_s])
        return
    theirs = [run[0] for run in taken["stock"]]
    yield from _rows(cases[0], "symbolic_trace" if comparison == SCHEDULE else "stock", theirs)
    yield _ratio(cases[0], [run[0].seconds for run in taken["fxlib"]], [each.seconds for each in theirs])


def _graph(comparison: str) -> str:
    name, _, model = comparison.partition("/")
    return model or ("calls" if name == SCHEDULE else COMPARISONS[name].graph)


def _rows(case: Case, arm: str, taken: Sequence[Taken]) -> Iterator[Row]:
    """Return what one arm took, and what it changed; tracing changes nothing."""
    seconds = [each.seconds for each in taken]
    yield row(benchmark="passes", case=case, arm=arm, metric="seconds", unit="s", samples=seconds)
    if arm != "symbolic_trace":
        changes = [taken[0].changes]
        yield row(benchmark="passes", case=case, arm=arm, metric="changes", unit="", samples=changes)


def _ratio(case: Case, ours_s: Sequence[float], theirs_s: Sequence[float]) -> Row:
    value, low, high = ratio_interval(ours_s, theirs_s)
    arm = "fxlib/symbolic_trace" if case["pass"] == SCHEDULE else "fxlib/stock"
    fields = {"arm": arm, "metric": "ratio", "unit": ""}
    return Row(benchmark="passes", case=case, value=value, low=low, high=high, runs=len(ours_s), **fields)


if __name__ == "__main__":
    main("passes", measure, about="What passes take on graphs of growing size, beside torch's own.")
