"""Assembles a module from the tables in its package. Every package has a copy of this file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


def assemble(
    root: nn.Module,
    folder: Path,
    *,
    parts: Mapping[str, tuple[type[nn.Module], bool, Mapping[str, Any]]],
    same: Mapping[str, str],
    tensors: Mapping[str, Sequence[tuple[str, str]]],
    strides: Mapping[str, tuple[int, ...]],
    missing: Mapping[str, str],
    complex_: Collection[str],
    tracked: Collection[str],
) -> None:
    """Give an empty module its parts and its tensors.

    Args:
        root: the module.
        folder: where `weights.safetensors` is.
        parts: modules below it by path, parents first: class, training flag and plain attributes.
        same: paths of modules that are identical with the module at another path.
        tensors: all paths of each tensor of the file, by its name, with what it is there: "parameter", "frozen",
            "buffer", "transient" or "attribute".
        strides: strides of the tensors that are not laid out row by row.
        missing: paths of parameters and buffers that are None, with which of the two they are.
        complex_: names of tensors that are stored as their real and imaginary parts.
        tracked: names of tensors that take a gradient without being parameters.
    """
    for path, (kind, training, attributes) in parts.items():
        part = kind.__new__(kind)
        nn.Module.__init__(part)
        vars(part).update(attributes)
        part.training = training
        _put(root, path, part)
    for path, other in same.items():
        _put(root, path, root.get_submodule(other))
    # Torch allocates the memory, as for the model's own: the last bits of matrix products may depend on its alignment.
    stored = {name: value.clone() for name, value in load_file(folder / "weights.safetensors").items()}
    for name, dotted_names in tensors.items():
        value = torch.view_as_complex(stored[name]) if name in complex_ else stored[name]
        if name in strides:
            value = _laid_out(value, strides[name])
        if dotted_names[0][1] in ("parameter", "frozen"):
            value = nn.Parameter(value, requires_grad=dotted_names[0][1] == "parameter")
        if name in tracked:
            value.requires_grad_()
        for dotted, role in dotted_names:
            _hold(root, dotted, role, value)
    for dotted, role in missing.items():
        _hold(root, dotted, role, None)
    for part in root.modules():
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()


def only_for(root: nn.Module, misfit: Callable[[Sequence[Any], Mapping[str, Any]], str]) -> None:
    """Make a module reject arguments that its graph was not made for; `misfit` returns what is wrong with them."""

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if problem := misfit(args, kwargs):
            raise ValueError(f"{type(root).__name__}: {problem}")

    root.register_forward_pre_hook(check, with_kwargs=True)


def of_ranks(names: Sequence[str], ranks: Mapping[str, int]) -> Callable[[Sequence[Any], Mapping[str, Any]], str]:
    """Return a function that says which argument does not have the rank that a graph was rewritten for."""

    def misfit(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, rank in ranks.items():
            value = given.get(name)
            if not isinstance(value, torch.Tensor) or value.dim() != rank:
                return f"the argument {name} is not a tensor of {rank} dimensions"
        return ""

    return misfit


def _laid_out(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    laid = torch.empty_strided(value.shape, strides, dtype=value.dtype)
    index = tuple(slice(0, 1 if step == 0 else None) for step in strides)  # an expanded dimension is one element
    laid[index].copy_(value[index])
    return laid


def _put(root: nn.Module, path: str, part: nn.Module) -> None:
    above, _, name = path.rpartition(".")
    root.get_submodule(above)._modules[name] = part


def _hold(root: nn.Module, dotted: str, role: str, value: torch.Tensor | None) -> None:
    above, _, name = dotted.rpartition(".")
    owner = root.get_submodule(above)
    if role in ("parameter", "frozen"):
        owner._parameters[name] = value  # type: ignore[assignment]
    elif role == "attribute":
        vars(owner)[name] = value
    else:
        owner.register_buffer(name, value, persistent=role == "buffer")
