"""Forwards per second of networks that nobody here wrote, and how far results are from the exact ones.

Arms, each in a process of its own, their short blocks in random order, round by round: `eager`; `stock_fuse`, which is
torch's own torch.fx.experimental.optimization.fuse; `stock_int8`, its quantize_fx, calibrated on the very inputs;
`openvino` and `onnxruntime`, given the whole model; `inference`: the recipe, or the variant of it that a short choice
before the run finds faster, as a worker does; `bfloat16` and `int8`: the same of these recipes, `int8` calibrated on
the very inputs, without a bound; `auto`: the same of that recipe with all compilers of parts, the model itself among
them, within 0.05 of its results; `auto_rounding`: within 0.0001, where int8 has no place; `compile` and
`compile_freezing`: torch.compile with its defaults, and with weights compiled in, where that does not take too long
(Inductor keeps what an earlier run has compiled). `--quick` leaves out what is slow to get ready: the last four, and
`onnxruntime`. An arm that does not run has a row `left_out`, whose unit is the reason.
Metrics: `qps`, samples per second (batches times their size); `max_relative_error` of the output (see `utils.compare`)
beside the model in float64, so that `eager` has one, too; `ready_s`, seconds from the model to the first output;
`peak_mib` of the arm's process; and `ratio` of the medians of qps, with the interval of a bootstrap over rounds: `best`
is the fastest arm within the bound of `auto`. Models: pytorchcv's, at 224 by 224 pixels; DeepRecommender's autoencoder
(17,768 items); transformers' BertModel with four layers of 256, on 128 tokens, and one step of its LlamaModel of the
same size, behind 127 tokens; and the renderer of LearningToPaint; all with random weights and statistics of norms. On a
machine with a GPU the same rows are there for `device` cuda; `gpus` tells how many there are. `tera_ops` of the model
`matrix` is what the processor does in products of matrices of 2048 by 2048: no network gains more from a dtype than
that one's part of it over float32's, but for what it spends on other things. At batch 8, ResNet50 is 62e9 operations;
DeepRecommender at batch 256 is 10e9, beside 4.5 million numbers to round and as many results, each with an exponential.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from resource import RUSAGE_SELF, getrusage
from statistics import median
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
from pytorchcv.model_provider import get_model
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx
from torch.fx.experimental.optimization import fuse
from torch.nn import functional
from transformers.cache_utils import DynamicCache
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

import fxlib
from benchmarks.report import RESAMPLES, Case, Measure, Row, main, row
from fxlib.capture.coerce import as_graph
from fxlib.recipes import recipes
from fxlib.recipes.alternatives import candidates
from fxlib.runtime.backends import BACKENDS, installed
from fxlib.utils.compare import relative_error
from tests.models.zoo import randomize

Forward = Callable[[torch.Tensor], torch.Tensor]

_SIDE: Final = 224
_CHOICE_ROUNDS: Final = 5
_CHOICE_BLOCK_S: Final = 0.1
"""The seconds of a block in a choice: threads of one backend wait in a loop for some while after it has computed, and
would take the cores from the next one for all of a shorter block."""
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Variables by which glibc keeps the memory that arms free: otherwise chance decides which of them ask the kernel for
it anew at each forward."""


class DeepRecommender(nn.Module):
    """The autoencoder of O. Kuchaiev and B. Ginsburg, "Training Deep AutoEncoders for Collaborative Filtering" (2017).

    Layers of 512, 512 and 1024 and the same back again, each with SELU, and dropout of the code. It calls `F.linear`
    with keywords on lists of parameters, as the published program does.
    """

    _SIZES: Final = (17_768, 512, 512, 1024)

    def __init__(self) -> None:
        super().__init__()
        inwards = list(itertools.pairwise(self._SIZES))
        outwards = [(to, of) for of, to in reversed(inwards)]
        self.encode_w, self.encode_b = _layers(inwards)
        self.decode_w, self.decode_b = _layers(outwards)
        self.drop = nn.Dropout(0.8)

    def forward(self, ratings: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, items), to as many ratings."""
        x = ratings
        for weight, bias in zip(self.encode_w, self.encode_b, strict=True):
            x = functional.selu(functional.linear(input=x, weight=weight, bias=bias))
        x = self.drop(x)
        for weight, bias in zip(self.decode_w, self.decode_b, strict=True):
            x = functional.selu(functional.linear(input=x, weight=weight, bias=bias))
        return x


def _layers(sizes: Sequence[tuple[int, int]]) -> tuple[nn.ParameterList, nn.ParameterList]:
    weights = [nn.init.xavier_uniform_(torch.empty(to, of)) for of, to in sizes]
    return nn.ParameterList(weights), nn.ParameterList(torch.zeros(to) for _, to in sizes)


class Encoder(nn.Module):
    """A small BERT; the last hidden state alone is its result."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        self.bert = BertModel(BertConfig(**sizes), add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length), to (batch, length, 256)."""
        found: torch.Tensor = self.bert(tokens).last_hidden_state
        return found


class DecoderStep(nn.Module):
    """One step of a small Llama: the next token of each text, of which 127 are in the cache of keys and values."""

    _LAYERS: Final = 4
    _HEADS: Final = 4
    _PAST: Final = 127
    past: torch.Tensor
    """Keys and values, [layers, 2, 1, heads, tokens, size of a head]."""

    def __init__(self) -> None:
        super().__init__()
        heads = {"num_attention_heads": self._HEADS, "num_key_value_heads": self._HEADS}
        sizes = {"hidden_size": 256, "num_hidden_layers": self._LAYERS, "intermediate_size": 1024}
        self.llama = LlamaModel(LlamaConfig(**sizes, **heads))
        self.register_buffer("past", torch.randn(self._LAYERS, 2, 1, self._HEADS, self._PAST, 256 // self._HEADS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 1), to (batch, 1, 256)."""
        past = self.past.expand(-1, -1, tokens.shape[0], -1, -1, -1)
        cache = DynamicCache()
        for layer in range(self._LAYERS):
            cache.update(past[layer, 0], past[layer, 1], layer)
        found: torch.Tensor = self.llama(tokens, past_key_values=cache).last_hidden_state
        return found


class Painter(nn.Module):
    """The neural renderer of LearningToPaint: from the ten numbers of a stroke to its picture.

    Source: Z. Huang, W. Heng and S. Zhou, "Learning to Paint with Model-based Deep Reinforcement Learning" (ICCV 2019).
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = itertools.pairwise((10, 512, 1024, 2048, 4096))
        self.dense = nn.ModuleList(nn.Linear(of, to) for of, to in sizes)
        channels = ((16, 32), (32, 32), (8, 16), (16, 16), (4, 8), (8, 4))
        self.convolutions = nn.ModuleList(nn.Conv2d(of, to, 3, padding=1) for of, to in channels)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, strokes: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 10), to (batch, 128, 128)."""
        x = strokes
        for dense in self.dense:
            x = functional.relu(dense(x))
        x = x.view(-1, 16, 16, 16)
        for first, second in zip(self.convolutions[::2], self.convolutions[1::2], strict=True):
            x = self.shuffle(second(functional.relu(first(x))))
        return 1 - torch.sigmoid(x).view(-1, 128, 128)


_OTHERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "deep_recommender": DeepRecommender,
    "bert": Encoder,
    "llama_step": DecoderStep,
    "painter": Painter,
}
_TOKENS: Final = {"bert": 128, "llama_step": 1}


def model_of(name: str, device: str) -> nn.Module:
    """Return a model in eval mode, with weights and statistics of norms drawn from one seed."""
    torch.manual_seed(0)
    if name in _OTHERS:
        return _OTHERS[name]().eval().to(device)
    model: nn.Module = get_model(name, pretrained=False)
    randomize(model)
    return model.eval().to(device)


def inputs_of(name: str, batch: int, device: str) -> torch.Tensor:
    """Return the same inputs in every process: images, ratings of one item in a hundred, tokens, or strokes."""
    generator = torch.Generator().manual_seed(1)
    if name in _TOKENS:
        return torch.randint(5, 30_000, (batch, _TOKENS[name]), generator=generator).to(device)
    if name == "painter":
        return torch.rand(batch, 10, generator=generator).to(device)
    if name == "deep_recommender":
        shape = (batch, DeepRecommender._SIZES[0])
        rated = torch.rand(shape, generator=generator) < 0.01
        return (rated * torch.randint(1, 6, shape, generator=generator)).float().to(device)
    return torch.randn(batch, 3, _SIDE, _SIDE, generator=generator).to(device)


def ours(recipe: str, bound: float | None, model: nn.Module, x: torch.Tensor) -> Forward:
    """Return the fastest of what a worker tries for a recipe, by a choice of its own before the run."""
    workload = fxlib.Workload(batches=[x], mode="forward", optimizer="none")
    captured = as_graph(model, workload.samples)
    request = recipes.PlanningRequest(workload=workload, max_relative_error=bound)
    backends = [name for name in BACKENDS if installed(name)]
    expected = model(x)
    made: list[nn.Module] = [] if bound is None else [captured]
    for each in candidates(recipes.get(recipe), has_calls=False, backends=backends):
        if each.preserves == "lossy" and bound == _ROUNDING:
            continue
        rewritten = each.run(captured, request).module
        rewritten(x)  # compiles
        if bound is None or relative_error(rewritten(x), expected) <= bound:
            made.append(rewritten)
    taken_s: list[list[float]] = [[] for _ in made]
    runs = [1 + int(_CHOICE_BLOCK_S / seconds(module, x, 1)) for module in made]
    for _ in range(_CHOICE_ROUNDS):
        for module, samples, count in zip(made, taken_s, runs, strict=True):
            seconds(module, x, 1)
            samples.append(seconds(module, x, count) / count)
    return made[min(range(len(made)), key=lambda index: median(taken_s[index]))]


def stock_int8(model: nn.Module, x: torch.Tensor) -> Forward:
    """Return a model as torch's own FX quantization has it, static and calibrated on the very inputs."""
    prepared = quantize_fx.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    quantized: Forward = quantize_fx.convert_fx(prepared)
    return quantized


def whole(backend: str, model: nn.Module, x: torch.Tensor) -> Forward:
    """Return a model as a backend computes it, without a graph of ours.

    Raises:
        ModuleNotFoundError: the backend is not installed.
    """
    compiled = BACKENDS[backend].compile(model, (x,))
    return lambda x: compiled(x)[0]


def frozen(model: nn.Module, _: torch.Tensor) -> Forward:
    """Return a model as torch.compile computes it with the weights compiled in."""
    return torch.compile(model, dynamic=False, options={"freezing": True})


_BOUND: Final = 0.05
_MATRIX: Final = 2048
"""Rows and columns of the matrices whose products tell what the processor can do."""
_ROUNDING: Final = 1e-4

ARMS: Mapping[str, Callable[[nn.Module, torch.Tensor], Forward]] = {
    "eager": lambda model, _: model,
    "stock_fuse": lambda model, _: fuse(model),
    "openvino": partial(whole, "openvino"),
    "onnxruntime": partial(whole, "onnxruntime"),
    "stock_int8": stock_int8,
    "inference": partial(ours, "inference", None),
    "bfloat16": partial(ours, "bfloat16", None),
    "int8": partial(ours, "int8", None),
    "auto": partial(ours, "auto", _BOUND),
    "auto_rounding": partial(ours, "auto", _ROUNDING),
    "compile": lambda model, _: torch.compile(model, dynamic=False),
    "compile_freezing": frozen,
}
"""Makes of a model what each arm runs."""
_SLOW_TO_COMPILE: Final = ("compile", "compile_freezing")
_SLOW_TO_CHOOSE: Final = ("onnxruntime", "auto", "auto_rounding")


def seconds(forward: Forward, x: torch.Tensor, runs: int) -> float:
    """Time so many forwards, until their results are there."""
    start = time.perf_counter()
    for _ in range(runs):
        forward(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Output:
    """What an arm makes of a batch, in float64, when it is ready, and what that took."""

    value: torch.Tensor
    ready_s: float
    peak_mib: float


class LeftOutError(Exception):
    """An arm cannot run, or was not ready when its time was over. It has ended."""


class Process:
    """One arm in a process of its own, which does nothing while others are timed.

    Args:
        arm: of `ARMS`; or "reference", the model itself in float64.
        name: the architecture.
        threads: of one forward.
        device: "cpu" or "cuda".
    """

    def __init__(self, arm: str, name: str, threads: int, device: str) -> None:
        os.environ.update(_MALLOC)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, arm, name, threads, device), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.join()

    def output(self, batch: int, *, cap_s: float | None = None) -> Output:
        """Get ready for batches of a size, and return the output for one.

        Args:
            batch: samples in one.
            cap_s: how long it may take; None for as long as it takes.

        Raises:
            LeftOutError: it takes longer, or fails; the error says how.
        """
        self._connection.send(("output", batch))
        if not self._connection.poll(cap_s):
            self._process.kill()
            raise LeftOutError(f"not compiled within {cap_s:g} s")
        try:
            found: Output | str = self._connection.recv()
        except EOFError as error:
            raise LeftOutError("its process ended") from error
        if isinstance(found, str):
            self._process.kill()
            raise LeftOutError(found)
        return found

    def seconds(self, runs: int) -> float:
        """Time so many forwards of the last size, after one that is not counted: others have used the caches."""
        self._connection.send(("seconds", runs))
        taken_s: float = self._connection.recv()
        return taken_s


def _serve(connection: Connection, arm: str, name: str, threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    model = model_of(name, device)
    forward: Forward = model
    x = torch.empty(0)
    with torch.no_grad():
        while True:
            try:
                asked, number = connection.recv()
            except EOFError:
                return
            if asked == "seconds":
                seconds(forward, x, 1)
                connection.send(seconds(forward, x, number))
                continue
            x = inputs_of(name, number, device)
            start = time.perf_counter()
            try:
                if arm == "reference":
                    forward, x = model.double(), x.double() if x.is_floating_point() else x
                else:
                    forward = ARMS[arm](model, x)
                found = forward(x).double().cpu()
            except Exception as error:  # noqa: BLE001 - whatever an arm cannot do is a row of its own
                connection.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}")
                return
            ready_s, peak_mib = time.perf_counter() - start, getrusage(RUSAGE_SELF).ru_maxrss / 1024
            connection.send(Output(found, ready_s, peak_mib))


CONVNETS: Final = ("resnet50", "mobilenetv2_w1", "densenet121", "efficientnet_b0", "resnext50_32x4d")
MODELS: Final = (*CONVNETS, *_OTHERS)
BATCHES: Final = {"deep_recommender": (1, 32, 256), "painter": (1, 64)}
IMAGES: Final = (1, 8)
THREADS: Final = (2, 1)
ROUNDS: Final = 30
QUICK_ROUNDS: Final = 9
BLOCK_S: Final = 0.2
BUDGET_S: Final = 25.0
"""No further round of a case begins after so long, but for the least number."""
LEAST_ROUNDS: Final = 9
COMPILATION_S: Final = 150.0
"""Seconds that `compile` may take for one size of batches."""
RATIOS: Final = (
    *(("inference", each) for each in ("eager", "stock_fuse")),
    *((each, "eager") for each in ("bfloat16", "int8", "auto", "auto_rounding")),
    ("int8", "stock_int8"),
    ("auto", "best"),
)


def part(name: str, threads: int) -> Measure:
    """Return what measures one model; a quick run has no arm that is slow to get ready."""

    def measure(quick: bool) -> Sequence[Row]:
        rounds = QUICK_ROUNDS if quick else ROUNDS
        arms = [arm for arm in ARMS if not (quick and arm in (*_SLOW_TO_COMPILE, *_SLOW_TO_CHOOSE))]
        found = list(compare(name, threads, "cpu", arms, rounds))
        on_gpu = torch.cuda.is_available() and threads == THREADS[0]
        return [*found, *(compare(name, 1, "cuda", arms, rounds) if on_gpu else ())]

    return measure


def machine(_: bool) -> Sequence[Row]:
    """Tell how many GPUs there are, and how fast the processor multiplies matrices."""
    case: Case = {"model": "any", "batch": 0, "threads": 0, "device": "cuda"}
    gpus = torch.cuda.device_count()
    found = [row(benchmark="inference", case=case, arm="machine", metric="gpus", unit="", samples=[gpus])]
    default = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        case = {"model": "matrix", "batch": _MATRIX, "threads": threads, "device": "cpu"}
        fields = {"benchmark": "inference", "metric": "tera_ops", "unit": "1e12/s"}
        found += [row(case=case, arm=arm, samples=samples, **fields) for arm, samples in products().items()]
    torch.set_num_threads(default)
    return found


def products() -> dict[str, list[float]]:
    """Return how many operations (1e12 of them) a second are done in products of square matrices, by their dtype."""
    left, right = torch.randn(_MATRIX, _MATRIX), torch.randn(_MATRIX, _MATRIX)
    levels = torch.randint(256, (_MATRIX, _MATRIX), dtype=torch.uint8)
    weight, scales = torch.randint(-64, 65, (_MATRIX, _MATRIX), dtype=torch.int8), torch.ones(_MATRIX)
    narrow = left.bfloat16(), right.bfloat16()
    work: dict[str, Callable[[], torch.Tensor]] = {
        "float32": lambda: left @ right,
        "bfloat16": lambda: narrow[0] @ narrow[1],
        "int8": lambda: torch.ops.fxlib.int8_linear(levels, 1.0, 0, weight, scales, None, 1e4, 0, "none"),
    }
    found: dict[str, list[float]] = {arm: [] for arm in work}
    for _ in range(QUICK_ROUNDS + 1):
        for arm, multiply in work.items():
            start = time.perf_counter()
            multiply()
            found[arm].append(2e-12 * _MATRIX**3 / (time.perf_counter() - start))
    return {arm: samples[1:] for arm, samples in found.items()}  # the first one packs


def compare(name: str, threads: int, device: str, arms: Sequence[str], rounds: int) -> Iterator[Row]:
    """Measure all arms of one model at all sizes of batches."""
    with ExitStack() as running:
        exact = running.enter_context(Process("reference", name, threads, device))
        processes = {arm: running.enter_context(Process(arm, name, threads, device)) for arm in arms}
        left_out: dict[str, str] = {}
        for batch in BATCHES.get(name, IMAGES):
            case: Case = {"model": name, "batch": batch, "threads": threads, "device": device}
            reference, outputs = exact.output(batch).value, dict[str, Output]()
            for arm in list(processes):
                cap_s = COMPILATION_S if arm in _SLOW_TO_COMPILE else None
                try:
                    outputs[arm] = processes[arm].output(batch, cap_s=cap_s)
                except LeftOutError as error:
                    del processes[arm]
                    left_out[arm] = str(error)
            errors = {arm: relative_error(each.value, reference) for arm, each in outputs.items()}
            yield from figures(case, errors, blocks(processes, batch, rounds))
            for arm, each in outputs.items():
                for metric, unit, value in (("ready_s", "s", each.ready_s), ("peak_mib", "MiB", each.peak_mib)):
                    yield row(benchmark="inference", case=case, arm=arm, metric=metric, unit=unit, samples=[value])
            for arm, why in left_out.items():
                yield row(benchmark="inference", case=case, arm=arm, metric="left_out", unit=why, samples=[1.0])


def blocks(processes: dict[str, Process], batch: int, rounds: int) -> dict[str, list[float]]:
    """Return samples per second of each arm, round by round."""
    runs = {arm: max(1, round(BLOCK_S / each.seconds(1))) for arm, each in processes.items()}
    found: dict[str, list[float]] = {arm: [] for arm in processes}
    order, chance, end = list(processes), random.Random(0), time.monotonic() + BUDGET_S
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.monotonic() > end:
            break
        chance.shuffle(order)
        for arm in order:
            found[arm].append(runs[arm] * batch / processes[arm].seconds(runs[arm]))
    return found


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two arms' medians, and its 95% interval over resampled rounds, which keep their pairs."""
    values = np.asarray([above, below])
    picks = np.random.default_rng(0).integers(0, len(above), size=(RESAMPLES, len(above)))
    medians = np.median(values[:, picks], axis=2)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return float(np.median(above) / np.median(below)), float(low), float(high)


def figures(case: Case, errors: dict[str, float], qps: dict[str, list[float]]) -> Iterator[Row]:
    """Return what was measured, and arms of ours beside others."""
    for arm, samples in qps.items():
        yield row(benchmark="inference", case=case, arm=arm, metric="qps", unit="1/s", samples=samples)
        error = [errors[arm]]
        yield row(benchmark="inference", case=case, arm=arm, metric="max_relative_error", unit="", samples=error)
    within = [arm for arm in qps if errors[arm] <= _BOUND and not arm.startswith("auto")]
    best = max(within, key=lambda arm: median(qps[arm]), default="")
    for own, other in RATIOS:
        baseline = best if other == "best" else other
        if own not in qps or baseline not in qps:
            continue
        value, low, high = ratio_of_medians(qps[own], qps[baseline])
        fields = {"arm": f"{own}/{other}", "metric": "ratio", "unit": ""}
        yield Row(
            benchmark="inference", case=case, value=value, low=low, high=high, runs=len(qps[own]), **fields
        )  # fmt: skip


if __name__ == "__main__":
    parts = {"machine": machine, **{f"{name}-{count}": part(name, count) for name in MODELS for count in THREADS}}
    main(
        "inference",
        parts,
        quick=("machine", f"resnet50-{THREADS[0]}"),
        about="Forwards per second of networks, for inference.",
    )
