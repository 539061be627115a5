"""What a run may change in this process, kept and put back: tensors of a module, gradients, random generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from fxlib.comparison import same_bits
from fxlib.errors import PassError
from fxlib.nests import leaves, mapped
from fxlib.runtime.walk import local_modules

T = TypeVar("T")


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Let a block run from the module's state without gradients, and put everything back.

    That is the bits of all parameters, buffers and plain tensor attributes, and which tensors these are; gradients, and
    whether they take one; training flags; and the random generators of torch and of Python. It takes one copy of the
    tensors.
    """
    flags = [(each, each.training) for _, each in local_modules(module)]
    places = [
        (table, name, tensor, tensor.detach().clone())
        for each, _ in flags
        for table in (each._parameters, each._buffers, vars(each))
        for name, tensor in table.items()
        if isinstance(tensor, torch.Tensor)
    ]
    gradients = [(tensor, tensor.grad) for _, _, tensor, _ in places if tensor.is_leaf]
    frozen = [(tensor, tensor.requires_grad) for tensor, _ in gradients]
    generators = random.getstate(), torch.get_rng_state(), torch.cuda.get_rng_state_all()
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        yield
    finally:
        for table, name, tensor, bits in places:
            if not same_bits(tensor.detach(), bits):  # a write, even of the same bits, counts as a change of weights
                put_back(tensor, bits)
            _put(table, name, tensor)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for tensor, requires_grad in frozen:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        for each, training in flags:
            each.training = training
        random.setstate(generators[0])
        torch.set_rng_state(generators[1])
        torch.cuda.set_rng_state_all(generators[2])


def put_back(tensor: torch.Tensor, bits: torch.Tensor) -> None:
    """Write values into a tensor of the same shape, whatever it is: a parameter, expanded, made in inference mode."""
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    # What an expansion repeats is one element, which torch refuses to write many times.
    place = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        (tensor[place] if 0 in strides else tensor).copy_(bits[place] if 0 in strides else bits)


def copied(value: T) -> T:
    """Copy all tensors and generators of a nest, so that tensors that share memory still do; the rest is passed on.

    Raises:
        PassError: a tensor is of a class that cannot be copied.
    """
    found = [leaf for _, leaf in leaves(value)]
    tensors = {id(leaf): leaf.detach() for leaf in found if isinstance(leaf, torch.Tensor)}
    try:
        copies: dict[int, Any] = dict(copy.deepcopy(tensors))
    except RuntimeError as error:
        raise PassError(f"an argument cannot be copied: {error}", where="inputs") from error
    for leaf in found:
        if isinstance(leaf, torch.Tensor):
            copies[id(leaf)].requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, torch.Generator):
            copies[id(leaf)] = leaf.clone_state()
    return mapped(lambda leaf: copies.get(id(leaf), leaf), value)


def _put(table: Any, name: str, tensor: torch.Tensor) -> None:
    table[name] = tensor
