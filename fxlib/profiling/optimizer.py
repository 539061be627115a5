"""What an optimizer's step takes, measured on copies: the parameters stay as they are."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from fxlib.runtime.submodules import local_modules
from fxlib.spec.optimizers import build
from fxlib.spec.workload import Optimizer

_REPEATS = 5


def optimizer_s(module: nn.Module, described: Optimizer) -> float:
    """Return the seconds of one optimizer step over copies of the parameters that hold a gradient."""
    copies = []
    for parameter in parameters_in(module):
        if parameter.grad is not None:
            copies.append(nn.Parameter(parameter.detach().clone()))
            copies[-1].grad = parameter.grad.detach().clone()
    optimizer = build(described, copies)
    if optimizer is None:
        return 0.0
    optimizer.step()  # the first one makes the optimizer's own state
    return median(_step_s(optimizer) for _ in range(_REPEATS))


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that live in this process, each once."""
    found = [each for _, part in local_modules(module) for each in part._parameters.values() if each is not None]
    return list(dict.fromkeys(found))


def _step_s(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start
