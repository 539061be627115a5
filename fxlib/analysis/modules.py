"""What one leaf module does when it is called: the facts of `operators.py`, for `torch.nn`.

Training flags are not looked at, since they may be set at any time: a dropout may draw and a batch norm may update its
statistics. A module that torch did not write, that carries hooks, or whose forward was replaced, is unknown.
"""

from __future__ import annotations

import torch
from torch import nn

from fxlib.analysis.catalogue import Operator

_FRESH = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "instancenorm", "linear", "loss", "normalization", "pooling", "rnn")
)
"""Parts of torch.nn whose modules return memory of their own (but `Identity`, and those told to work in place)."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def module_operator(module: nn.Module) -> Operator | None:
    """Return what calling the module does; None if it may do anything."""
    parts = list(module.modules())
    if not all(_is_plain(part) for part in parts):
        return None
    in_place = any(getattr(part, "inplace", False) for part in parts)
    shares = in_place or not all(_is_fresh(part) for part in parts)
    return Operator(
        name=type(module).__name__,
        shares=shares,
        same=shares,
        writes=frozenset({0, "input"}) if in_place else frozenset(),
        random=any(_draws(part) for part in parts),
        raises=any(_checks_values(part) for part in parts),
        state=tuple(tensor for part in parts for tensor in _tensors(part)),
        written_state=tuple(tensor for part in parts for tensor in _written(part)),
    )


def attribute(module: nn.Module, target: str) -> object:
    """Return the object that a `get_attr` node names."""
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def _is_plain(module: nn.Module) -> bool:
    ours = type(module).__module__.startswith("torch.nn.modules.")
    lazy = isinstance(module, (nn.modules.lazy.LazyModuleMixin, nn.SyncBatchNorm))
    return ours and not lazy and "forward" not in vars(module) and not any(getattr(module, name) for name in _HOOKS)


def _is_fresh(module: nn.Module) -> bool:
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return container or (
        type(module).__module__ in (*_FRESH, "torch.nn.modules.sparse") and not isinstance(module, nn.Identity)
    )


def _draws(module: nn.Module) -> bool:
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, _DRAWS)


def _checks_values(module: nn.Module) -> bool:
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return looks_up or isinstance(module, nn.modules.loss._Loss)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _written(module: nn.Module) -> list[torch.Tensor]:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return list(module.buffers(recurse=False))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        return [module.weight]
    return []
