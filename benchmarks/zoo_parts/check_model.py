"""Check one model in a process of its own: `python -m benchmarks.zoo_parts.check_model FAMILY NET`.

The last line of standard output is a JSON object with what was found; see `Found`.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import nn

import fxlib
from benchmarks.zoo_parts import factories, recommenders
from fxlib import Workload, wire
from fxlib.capture.coerce import as_graph
from fxlib.errors import CaptureError, PassError
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.spec.inputs import Batch
from fxlib.utils.compare import Tolerance, difference
from fxlib.utils.pytree import leaves

Make = Callable[..., tuple[nn.Module, Workload]]
FAMILIES: Final[Mapping[str, Make]] = {
    "pytorchcv": factories.pytorchcv,
    "torchvision": factories.torchvision,
    "timm": factories.timm,
    "vit_pytorch": factories.vit_pytorch,
    "transformers": factories.transformers,
    "deepctr_torch": recommenders.deepctr_torch,
    "torch_rechub": recommenders.torch_rechub,
}
"""Makers of models by the package that has them."""
MEMORY_BYTES: Final = 6 << 30
"""The memory that a model may take."""
CPU_S: Final = 120
"""The processor time that a model may take."""
BLOCKS: Final = 7
BLOCK_S: Final = 0.01
"""Seconds of forwards of one arm in a block; at least one is run."""
EPSILONS: Final = 64
"""Roundings of the result's largest element by which an inference may be off in addition."""
FACTOR: Final = 8
"""How many times as far from the result in float64 as the model's own an inference may be."""
ROUNDING: Final = 1e-4
"""Bound of the relative error of an inference beside a model that has no result in float64."""
LONGEST: Final = 200
"""Most characters of what is told of a failure."""


@dataclass
class Found:
    """What became of one model."""

    captured: str = ""
    """ "traced", "exported", "refused", or "not made"."""
    problems: list[str] = field(default_factory=list)
    """What is not as it should be, in words."""
    same_on_wire: bool = False
    """Whether the decoded graph has the bits of the captured one, and is encoded to the same bytes."""
    same_in_training: bool = False
    """Whether outputs, gradients and buffers after the recipe `training` have the model's bits."""
    within: bool = False
    """Whether results of the recipe `inference` are within the bound."""
    error: float | None = None
    """Their largest relative error, beside the model in float64 if it has a result there, else beside the model."""
    own_error: float | None = None
    """That of the model itself, beside float64."""
    eager_us: list[float] = field(default_factory=list)
    captured_us: list[float] = field(default_factory=list)
    guards_us: list[float] = field(default_factory=list)
    """What one check of all conditions takes, block by block, as for the forwards."""


def check(make: Make, net: str) -> Found:
    """Capture a model, send it, rewrite it for training and for inference, and time its guards."""
    found = Found()
    for part in (_in_evaluation, _in_training):
        with _told(found, part.__name__.strip("_").replace("_", " ")):
            part(found, make, net)
    return found


def _in_evaluation(found: Found, make: Make, net: str) -> None:
    model, batch, samples = _made(make, net, training=False)
    with torch.no_grad():
        captured = as_graph(model, samples)
        assert isinstance(captured, CapturedModule)
        found.captured = "exported" if isinstance(captured.graph._codegen, GuardedCodeGen) else "traced"
        with _told(found, "wire"):
            found.same_on_wire = _travels(captured, batch)
        with _told(found, "inference"):
            _infer(found, model, captured, batch)
        with _told(found, "guards"):
            _time(found, model, captured, batch)


def _in_training(found: Found, make: Make, net: str) -> None:
    model, batch, samples = _made(make, net, training=True)
    captured = as_graph(model, samples)
    rewritten = recipes.apply(captured, "training").module
    same = fxlib.verify(model, rewritten, batch.inputs, kwargs=batch.kwargs)
    _problem(found, "training", same)
    found.same_in_training = bool(same) and not same.notes


def _made(make: Make, net: str, *, training: bool) -> tuple[nn.Module, Batch, tuple[Batch, ...]]:
    torch.manual_seed(0)
    random.seed(0)
    model, workload = make(net, training=training)
    samples = workload.samples[:1]
    model.eval()(*samples[0].inputs, **samples[0].kwargs)  # as in a job that has begun: it has filled its caches
    return model.train(training), samples[0], samples


def _travels(captured: CapturedModule, batch: Batch) -> bool:
    """Send a graph with its weights, and compare all tensors that come out: a worker may lack the output's classes."""
    encoded = wire.encode(captured, weights=True)
    sent = wire.serialize(encoded.graph)
    there = wire.decode(wire.parse(sent), blobs=encoded.blobs)
    ours, theirs = (list(_tensors(each(*batch.inputs, **batch.kwargs))) for each in (captured, there))
    if len(ours) != len(theirs):
        raise AssertionError(f"{len(theirs)} tensors come out, and not {len(ours)}")
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        if how := difference(*pair, Tolerance()):
            raise AssertionError(f"output {number}: {how}")
    return wire.serialize(wire.encode(there, weights=True).graph) == sent


def _tensors(value: object) -> Iterator[torch.Tensor]:
    yield from (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def _infer(found: Found, model: nn.Module, captured: CapturedModule, batch: Batch) -> None:
    rewritten = recipes.apply(captured, "inference").module
    given: Any = {"kwargs": batch.kwargs, "grad": False, "atol": sys.float_info.max}  # errors are judged below
    try:
        same = fxlib.verify(model, rewritten, batch.inputs, **given, reference="float64")
    except PassError as error:
        if "float64" not in str(error):
            raise
        same = fxlib.verify(model, rewritten, batch.inputs, **given)
        found.error = same.max_relative_error
        found.within = found.error <= ROUNDING
    else:
        outputs = [each for each in same.distances if each.where.startswith("output")]
        pairs = [(each.first_from_reference, each.second_from_reference, each) for each in outputs]
        known = [(own, ours) for own, ours, _ in pairs if own is not None and ours is not None]
        found.own_error = max((own for own, _ in known), default=0.0)
        found.error = max((ours for _, ours in known), default=0.0)
        found.within = found.error <= FACTOR * found.own_error + EPSILONS * torch.finfo(torch.float32).eps
    _problem(found, "inference", same)
    found.within = found.within and bool(same) and not same.notes


def _time(found: Found, model: nn.Module, captured: CapturedModule, batch: Batch) -> None:
    assert not batch.kwargs
    state = captured._fxlib

    def check_all() -> object:
        captured._follow()
        return state.graphs.fitting(captured, batch.inputs, {}, grad_enabled=False)

    assert check_all() is captured
    arms: dict[str, tuple[Callable[[], object], list[float]]] = {
        "eager": (lambda: model(*batch.inputs), found.eager_us),
        "captured": (lambda: captured(*batch.inputs), found.captured_us),
        "guards": (check_all, found.guards_us),
    }
    runs = {name: max(1, round(BLOCK_S / min(_seconds(run, 1) for _ in range(3)))) for name, (run, _) in arms.items()}
    order = list(arms)
    for _ in range(BLOCKS):
        random.shuffle(order)
        for name in order:
            run, samples = arms[name]
            samples.append(_seconds(run, runs[name]) * 1e6)


def _seconds(run: Callable[[], object], runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs


def _problem(found: Found, part: str, same: Any) -> None:
    told = [str(each) for each in (*same.differences, *same.notes)]
    if told:
        _note(found, f"{part}: {told[0]}")


def _note(found: Found, problem: str) -> None:
    """Keep the beginning of a problem's description, with files as their packages name them."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        problem = problem.replace(f"{folder}/", "")
    found.problems.append(problem[:LONGEST])


@contextmanager
def _told(found: Found, part: str) -> Iterator[None]:
    """Have an error of one part be told in the model's row."""
    try:
        yield
    except CaptureError as error:
        found.captured = found.captured or "refused"
        _note(found, f"{part}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever a model cannot do belongs to its row
        found.captured = found.captured or "not made"
        _note(found, f"{part}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def main() -> None:
    """Check the model that the command line names, within its limits."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    family, net = sys.argv[1:]
    print(json.dumps(asdict(check(FAMILIES[family], net))), flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
