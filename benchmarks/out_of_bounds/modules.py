"""Modules of torch.nn as calls: of inputs, attributes, and parameters and buffers, as a message may give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.out_of_bounds.samples import Call
from fxlib.wire import modules
from tests.wire.zoo import CASES

PREFIX = "torch.nn.modules."


def names() -> list[str]:
    """Return the names of the classes that are tried: those that compute something of their own."""
    return [PREFIX + name for name in modules.candidates() if name in CASES]


def samples(name: str) -> list[Call]:
    """Return calls of a module in training and in evaluation, with what its constructor left in it."""
    name = name.removeprefix(PREFIX)
    found: list[Call] = []
    for training in (False, True):
        module = _made(name)
        tensors = {
            key: each.detach()
            for key, each in (*module._parameters.items(), *module._buffers.items())
            if each is not None
        }
        found.append(((tuple(CASES[name][1]), dict(modules.attributes(module)) | {"training": training}, tensors), {}))
    return found


def call(name: str) -> Callable[..., Any]:
    """Return a function that rebuilds a module and calls it."""
    name = name.removeprefix(PREFIX)
    like = _made(name)

    def run(inputs: Any, attributes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        module = modules.new(name)
        vars(module).update(attributes)
        module._modules.update(like._modules)
        for table in (module._parameters, module._buffers):
            table.update(dict.fromkeys(like._parameters if table is module._parameters else like._buffers))
        for key, tensor in tensors.items():
            if key in like._parameters:
                module._parameters[key] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
            else:
                module._buffers[key] = tensor.detach()
        modules.finish(module)
        return module(*inputs)

    return run


@cache
def _made(name: str) -> nn.Module:
    return CASES[name][0]()
