"""Keep and restore what a run may change in this process: tensors of a module, gradients, random generators."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import setitem
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

from fxlib.errors import PassError
from fxlib.runtime.submodules import local_modules
from fxlib.utils.compare import bytes_viewed, is_freed, same_bits, unwrapped, wraps
from fxlib.utils.pytree import is_open, is_plain, leaves, mapped

T = TypeVar("T")
_MODULES_OWN = frozenset(vars(nn.Module())) | {"_graph", "_fxlib", STATE_KEY, REGISTRY_KEY}
"""Attributes of every module (tables of parameters, buffers, submodules and hooks), of captured modules, and of those
that functions such as `fully_shard` were called on, whose state is theirs."""


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Let a block run from the module's state without gradients, and put everything back.

    This puts back the bits and the identities of all parameters, buffers and other tensors that a module holds, also in
    lists, tuples, dicts and plain objects; the contents of these lists and dicts; gradients, and whether tensors take
    one; training flags; and the random generators of torch, Python and NumPy, and those that a module holds. It takes
    memory for one copy of the tensors.
    """
    flags = [(each, each.training) for _, each in local_modules(module)]
    held = _held([each for each, _ in flags])
    tables = [table for each, _ in flags for table in (each._parameters, each._buffers, vars(each))]
    tables += [vars(each) for each in held if is_plain(each)]
    locations = [
        (table, name, tensor) for table in tables for name, tensor in table.items() if isinstance(tensor, torch.Tensor)
    ]
    found = [tensor for _, _, tensor in locations] + [each for each in held if isinstance(each, torch.Tensor)]
    tensors = list({id(tensor): tensor for tensor in found}.values())
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors if not is_freed(tensor)]
    trained = [tensor for tensor in tensors if tensor.is_leaf]
    with ExitStack() as stack:  # it calls all of these, the last one first, even if one raises
        for tensor in tensors:
            if not tensor.is_inference():
                stack.callback(_set_version, tensor, tensor._version)
        for tensor, bits in kept:
            stack.callback(_set_bits, tensor, bits)
        for tensor in trained:
            stack.callback(_set_requires_grad, tensor, tensor.requires_grad)
            stack.callback(setattr, tensor, "grad", tensor.grad)
        for each in (*held, *map(vars, filter(wraps, tensors))):
            if type(each) in (list, dict):
                stack.callback(_refill, each, each.copy())
        for table, name, tensor in locations:
            stack.callback(setitem, table, name, tensor)
        for each, training in flags:
            stack.callback(setattr, each, "training", training)
        for put in _states_of_generators(held):
            stack.callback(put)
        for tensor in trained:
            tensor.grad = None
        yield


def _states_of_generators(held: Iterable[Any]) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the random generators of torch, Python and NumPy, and those among some objects."""
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    yield functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())
    yield from (put for each in held if (put := _state_of_generator(each)) is not None)


def put_back(tensor: torch.Tensor, bits: torch.Tensor) -> None:
    """Write values into a tensor of the same shape: a parameter, expanded, made in inference mode, or freed since."""
    for part in unwrapped(tensor):
        if is_freed(part):
            part.untyped_storage().resize_(bytes_viewed(part))
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    # An expansion repeats one element, and torch refuses to write that many times.
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        (tensor[index] if 0 in strides else tensor).copy_(bits[index] if 0 in strides else bits)


def copied(value: T) -> T:
    """Copy all tensors and generators in nested values; tensors that share memory still do; the rest is passed on.

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


def _state_of_generator(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a generator of torch, Python or NumPy to its present state; None for others."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return None
    bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
    return functools.partial(setattr, bits, "state", bits.state)


def _held(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the objects in attributes of modules, and in the lists, tuples, dicts and plain objects found there."""
    found: dict[int, Any] = {}
    tables = [vars(each) for each in modules]
    originals = [table["_fxlib"].original for table in tables if "_fxlib" in table]
    tables += [vars(each) for each in originals if each is not None]
    waiting = [value for table in tables for name, value in table.items() if name not in _MODULES_OWN]
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif is_open(value):
            waiting.extend(getattr(value, each.name, None) for each in dataclasses.fields(value))
        elif is_plain(value):
            waiting.extend(vars(value).values())
    return list(found.values())


def _refill(container: Any, parts: Any) -> None:
    """Put the former contents of a list or a dict back, in the same order."""
    if isinstance(container, list):
        if [*map(id, container)] != [*map(id, parts)]:
            container[:] = parts
    elif [(name, id(each)) for name, each in container.items()] != [(name, id(each)) for name, each in parts.items()]:
        container.clear()
        container.update(parts)


def _set_requires_grad(tensor: torch.Tensor, requires_grad: bool) -> None:
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _set_bits(tensor: torch.Tensor, bits: torch.Tensor) -> None:
    if not same_bits(tensor.detach(), bits):
        put_back(tensor, bits)


def _set_version(tensor: torch.Tensor, version: int) -> None:
    """Make what autograd has saved of a tensor for a later backward valid again, once its bits are restored."""
    if tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
