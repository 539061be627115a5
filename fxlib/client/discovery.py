"""Discover calls in training that no graph fits: the original runs them, and the service is asked about them."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock, Thread
from typing import Any

import torch
from torch import nn

from fxlib.capture.capture_variant import capture_variant
from fxlib.client.request import Prepared, Question, prepare
from fxlib.client.result import Result
from fxlib.client.session import Outcome
from fxlib.client.variant_exchange import collectives_of, profile_of
from fxlib.errors import FxlibError
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.submodules import local_modules
from fxlib.spec.inputs import Batch, BatchSpec, describe
from fxlib.spec.workload import MAX_VARIANTS, Variant, Workload

_LOG = logging.getLogger(__name__)

_SINGLETONS = (None, True, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """A way in which the model was called: grad mode, training flags, and inputs without their values."""

    name: str
    grad: bool
    flags: Mapping[nn.Module, bool]
    batches: BatchSpec


class Discovery:
    """Notes calls that no graph of a module fits, and asks about each kind once, one after another.

    `meet` runs within the program's forwards; `step` runs between two of its steps, while the model does not run.

    Args:
        ask: a function that asks the service and does not raise.
        question: the options of the question, the same for each kind of call.
        workload: how the job's own step runs.

    Attributes:
        results: the answer about each kind of call, by its name: "met 1", "met 2", ...
    """

    def __init__(self, ask: Callable[[Prepared], Outcome], question: Question, workload: Workload) -> None:
        self._ask = ask
        self._question = question
        self._workload = workload
        self._lock = Lock()
        self._seen: set[Hashable] = set()
        self._met: deque[_Met] = deque()
        self._pending: tuple[str, Future[Outcome]] | None = None
        self._graphs: dict[str, CapturedModule] = {}
        self._on: CapturedModule | None = None
        self.results: dict[str, Result] = {}

    def meet(self, main: CapturedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call, unless its kind is known. Its arguments are described, and not kept."""
        original = main._fxlib.original
        if original is None or len(self._seen) >= MAX_VARIANTS:
            return
        flags = {each: each.training for _, each in local_modules(original)}
        flags[original] = main.training
        grad = torch.is_grad_enabled()
        batch = _batch_of(original, args, kwargs)
        sizes = isinstance(main.graph._codegen, GuardedCodeGen)
        kind = (grad, tuple(flags.values()), None if batch is None else _structure(batch, sizes=sizes))
        with self._lock:
            if kind in self._seen:
                return
            self._seen.add(kind)
            name = f"met {len(self._seen)}"
        if batch is None or (grad and self._workload.mode == "forward"):
            return
        try:
            batches = self._described(batch)
        except FxlibError:  # for example, an empty tensor of indices: the next call of this kind will be no different
            return
        self._met.append(_Met(name=name, grad=grad, flags=flags, batches=batches))

    def step(self, module: nn.Module) -> None:
        """Add adopted graphs to the module in use, and ask about the next kind of call, if one was met."""
        if not isinstance(module, CapturedModule) or module._fxlib.original is None:
            return
        if module is not self._on:
            self._on, module._fxlib.graphs.unmet = module, self.meet
            for name, graph in self._graphs.items():
                module._fxlib.graphs.add(module, name, graph)
        if self._pending is not None and self._pending[1].done():
            name, answer = self._pending[0], self._pending[1].result().result
            self._pending, self.results[name] = None, answer
            if answer.adopted and isinstance(answer.module, CapturedModule):
                self._graphs[name] = answer.module
                _LOG.info("calls of the kind %r run a graph of their own from now on", name)
                module._fxlib.graphs.add(module, name, answer.module)
        if self._pending is None and self._met:
            self._begin(module, self._met.popleft())

    def _begin(self, module: CapturedModule, met: _Met) -> None:
        try:
            prepared = self._prepared(module, met)
        except Exception as error:  # noqa: BLE001 - promised: whatever cannot be rewritten trains as it is
            self.results[met.name] = Result.original(module, f"{type(error).__name__}: {error}")
            _LOG.info("calls of the kind %r run the original: %s: %s", met.name, type(error).__name__, error)
            return
        _LOG.info("asking about calls of the kind %r, which no graph fits", met.name)
        pending: Future[Outcome] = Future()
        self._pending = met.name, pending
        Thread(target=lambda: pending.set_result(self._ask(prepared)), name="fxlib-discovery", daemon=True).start()

    def _prepared(self, module: CapturedModule, met: _Met) -> Prepared:
        variant = Variant(name=met.name, grad=met.grad, batches=met.batches)
        with _flags(module, met.flags):
            captured = capture_variant(module, variant, self._workload)
            if collectives_of(captured):
                raise FxlibError("it holds collectives, and other ranks may not be in this variant at the same step")
            name = f"{self._question.name or type(captured).__name__}, {met.name}"
            known = self._question.profile
            profile = None if known is None else profile_of(known, captured, forward=not met.grad)
            question = replace(self._question, name=name, profile=profile)
            return prepare(captured, self._workload.of(variant), question)

    def _described(self, batch: Batch) -> BatchSpec:
        """Describe a batch; tensors that the workload's batches also have, and the target, get the range of those."""
        workload = self._workload
        own = workload.spec or describe(workload.real_batches, count=1, ranges={})
        ranges = {
            name: (each.low, each.high)
            for name, each in own.named.items()
            if name in batch.named and each.low is not None and each.high is not None
        }
        spec = describe([batch], count=4, ranges=ranges)
        return replace(spec, target=own.target)


def _batch_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch | None:
    """Return the tensors of a call as a batch; None if it has another argument that is not a default."""
    signature = inspect.signature(model.forward)
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in signature.parameters.values()):
        return None
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    inputs: list[torch.Tensor] = []
    named: dict[str, torch.Tensor] = {}
    gap = False
    for name, parameter in signature.parameters.items():
        value = given.get(name, parameter.default)
        if isinstance(value, torch.Tensor):
            if gap or parameter.kind is parameter.KEYWORD_ONLY:
                named[name] = value.detach()
            else:
                inputs.append(value.detach())
        elif value is parameter.default and any(value is each for each in _SINGLETONS):
            gap = True
        else:
            return None
    return Batch(inputs=tuple(inputs), kwargs=named)


def _structure(batch: Batch, *, sizes: bool) -> Hashable:
    return tuple((name, each.dtype, tuple(each.shape) if sizes else None) for name, each in batch.named.items())


@contextmanager
def _flags(module: CapturedModule, flags: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Set, within the block, the training flags that the modules had at the call."""
    original = module._fxlib.original
    wanted = {**flags, module: flags[original]} if original is not None else flags
    before = {each: each.training for each in wanted}
    try:
        for each, flag in wanted.items():
            each.training = flag
        yield
    finally:
        for each, flag in before.items():
            each.training = flag
