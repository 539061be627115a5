"""What runs a convolutional network's forward: the arms of `benchmarks.inference`, and their processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Final, Self

import torch
from pytorchcv.model_provider import get_model
from torch import nn
from torch.fx.experimental.optimization import fuse

import fxlib
from fxlib.recipes import recipes
from fxlib.recipes.alternatives import candidates
from tests.models.zoo import randomize

Forward = Callable[[torch.Tensor], torch.Tensor]

_SIDE: Final = 224
_CHOICE_ROUNDS: Final = 9
_CHOICE_S: Final = 3.0
"""A choice has so many rounds, and further ones for so long."""


def model_of(name: str, device: str) -> nn.Module:
    """Return an architecture of pytorchcv in eval mode, with weights and statistics of norms drawn from one seed."""
    torch.manual_seed(0)
    model: nn.Module = get_model(name, pretrained=False)
    randomize(model)
    return model.eval().to(device)


def images(batch: int, device: str) -> torch.Tensor:
    """Return the same images in every process."""
    return torch.randn(batch, 3, _SIDE, _SIDE, generator=torch.Generator().manual_seed(1)).to(device)


def ours(model: nn.Module, x: torch.Tensor) -> Forward:
    """Return the fastest of what a worker tries for the recipe `inference`, by a choice of its own before the run."""
    captured = fxlib.capture(model)
    made = [recipes.apply(captured, each).module for each in candidates(recipes.get("inference"), has_calls=False)]
    for module in made:
        module(x)
    taken_s: list[list[float]] = [[] for _ in made]
    end = time.perf_counter() + _CHOICE_S
    while len(taken_s[0]) < _CHOICE_ROUNDS or time.perf_counter() < end:
        for module, samples in zip(made, taken_s, strict=True):
            samples.append(seconds(module, x, 1))
    return made[min(range(len(made)), key=lambda index: median(taken_s[index]))]


ARMS: Mapping[str, Callable[[nn.Module, torch.Tensor], Forward]] = {
    "eager": lambda model, _: model,
    "stock_fuse": lambda model, _: fuse(model),
    "inference": ours,
    "compile": lambda model, _: torch.compile(model, dynamic=False),
}
"""What each makes of a model."""


def seconds(forward: Forward, x: torch.Tensor, runs: int) -> float:
    """Time so many forwards, until their results are there."""
    start = time.perf_counter()
    for _ in range(runs):
        forward(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


class OverCapError(Exception):
    """An arm was not ready when its time was over. It has ended."""


class Process:
    """One arm in a process of its own, which does nothing while others are timed.

    Args:
        arm: of `ARMS`; or "reference", the model itself in float64.
        name: the architecture.
        threads: of one forward.
        device: "cpu" or "cuda".
    """

    def __init__(self, arm: str, name: str, threads: int, device: str) -> None:
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

    def output(self, batch: int, *, cap_s: float | None = None) -> torch.Tensor:
        """Get ready for batches of a size, and return the output for one, in float64.

        Args:
            batch: images in one.
            cap_s: how long it may take; None for as long as it takes.

        Raises:
            OverCapError: it takes longer.
        """
        self._connection.send(("output", batch))
        if not self._connection.poll(cap_s):
            self._process.kill()
            raise OverCapError
        found: torch.Tensor = self._connection.recv()
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
            elif arm == "reference":
                connection.send(model.double()(images(number, device).double()).cpu())
            else:
                x = images(number, device)
                forward = ARMS[arm](model, x)
                connection.send(forward(x).double().cpu())
