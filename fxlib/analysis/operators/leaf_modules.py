"""What one leaf module does when it is called: the facts of `schemas.py`, for `torch.nn`.

Training flags are not looked at, since they may be set at any time: a dropout may draw and a batch norm may update its
statistics. A module that torch did not write, that carries hooks, or whose forward was replaced, is unknown.
"""

from __future__ import annotations

import functools
from itertools import chain
from operator import itemgetter
from typing import cast

import torch
from torch import nn

from fxlib.analysis.operators.schemas import Operator
from fxlib.runtime.submodules import submodule

_FRESH = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "instancenorm", "linear", "loss", "normalization", "pooling", "rnn")
)
"""Parts of torch.nn whose modules return memory of their own (but `Identity`, and those told to work in place)."""

_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def module_operator(module: nn.Module) -> Operator | None:
    """Return what calling the module does; None if it may do anything."""
    if not is_known(module):
        return None
    parts = _parts(module)
    in_place = any(map(_works_in_place, parts))
    shares = in_place or not all(map(_is_fresh, map(type, parts)))
    return Operator(
        name=type(module).__name__,
        shares=shares,
        same=shares,
        writes=frozenset({0, "input"}) if in_place else frozenset(),
        random=any(map(_draws, parts)),
        raises=any(map(_checks_values, parts)),
        state=tuple(chain.from_iterable(map(_tensors, parts))),
        written_state=tuple(chain.from_iterable(map(_written, parts))),
    )


def is_known(module: nn.Module) -> bool:
    """Whether it is known what calling the module does."""
    return all(map(_is_plain, _parts(module)))


def attribute(module: nn.Module, target: str) -> object:
    """Return the object that a `get_attr` node names."""
    path, _, name = target.rpartition(".")
    return getattr(submodule(module, path) if path else module, name)


def _parts(module: nn.Module) -> list[nn.Module]:
    return list(module.modules()) if module._modules else [module]


def _is_plain(module: nn.Module) -> bool:
    held, kind = vars(module), cast("type", type(module))
    return _is_torchs(kind) and "forward" not in held and not any(_hooks(held))


def _works_in_place(module: nn.Module) -> bool:
    return bool(vars(module).get("inplace"))


@functools.cache
def _is_torchs(kind: type) -> bool:
    lazy = issubclass(kind, (nn.modules.lazy.LazyModuleMixin, nn.SyncBatchNorm))
    return kind.__module__.startswith("torch.nn.modules.") and not lazy


@functools.cache
def _is_fresh(kind: type) -> bool:
    if issubclass(kind, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return True
    return kind.__module__ in (*_FRESH, "torch.nn.modules.sparse") and not issubclass(kind, nn.Identity)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, _DRAWS)


def _checks_values(module: nn.Module) -> bool:
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return looks_up or isinstance(module, nn.modules.loss._Loss)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None]


def _written(module: nn.Module) -> list[torch.Tensor]:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return [each for each in module._buffers.values() if each is not None]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return [module.weight]
    return []
