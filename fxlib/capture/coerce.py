"""Convert any form of a model to a module or a graph: a module, a graph of torch.fx, or an exported program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxlib.capture.api import capture
from fxlib.capture.samples import Given
from fxlib.spec.contract import Contract
from fxlib.spec.inputs import Batch

if TYPE_CHECKING:
    from torch.export import ExportedProgram, ShapesCollection

Model: TypeAlias = "nn.Module | ExportedProgram"
"""A module of any kind (as written, captured, or a graph of torch.fx), or a program that `torch.export` has made."""


def as_module(model: Model) -> nn.Module:
    """Return a module that can run: the given one, or the graph of an exported program.

    Raises:
        TypeError: the model is neither.
        CaptureError: the exported program holds something that a graph of fxlib cannot.
    """
    if isinstance(model, nn.Module):
        return model
    from fxlib.capture.export.export import of_program  # loads sympy

    return of_program(model)


def as_graph(
    model: Model, samples: Sequence[Batch] = (), *, contracts: Mapping[str, Contract] | None = None
) -> GraphModule:
    """Return the graph of a model: the given graph, or one captured from the model.

    Args:
        model: the model in any form. A graph is returned unchanged.
        samples: batches with which a model that cannot be traced is exported. Sizes that differ between batches may
            vary.
        contracts: contracts of remote functions that declare none, by name; they count only for models captured here.

    Raises:
        TypeError: `model` is no form of a model.
        CaptureError: the model cannot be captured.
    """
    module = as_module(model)
    if isinstance(module, GraphModule):
        return module
    if not samples:
        return capture(module, contracts=contracts)
    return capture(module, contracts=contracts, sample_inputs=samples[0], dynamic_shapes=sizes_that_differ(samples))


def samples_of(inputs: Given | None, kwargs: Mapping[str, Any] | None = None) -> tuple[Batch, ...]:
    """Return the arguments of one call as a tuple of one batch; the tuple is empty for None."""
    if inputs is None or isinstance(inputs, Batch):
        return () if inputs is None else (inputs,)
    if isinstance(inputs, Mapping):
        return (Batch(kwargs={**inputs, **(kwargs or {})}),)
    return (Batch(inputs=tuple(inputs), kwargs=kwargs or {}),)


def sizes_that_differ(samples: Sequence[Batch]) -> ShapesCollection | None:
    """Return the sizes that differ between batches, as `torch.export` takes them; None if all are equal."""
    if len(samples) == 1:
        return None
    first, *others = [pytree.tree_leaves((each.inputs, dict(each.kwargs))) for each in samples]
    found = {}
    for place, tensor in enumerate(first):
        if not isinstance(tensor, torch.Tensor):
            continue
        shapes = [each[place].shape for each in others if isinstance(each[place], torch.Tensor)]
        alike = [shape for shape in shapes if len(shape) == tensor.dim()]
        if differ := [dim for dim, size in enumerate(tensor.shape) if any(shape[dim] != size for shape in alike)]:
            found[place] = differ
    if not found:
        return None
    from torch.export import Dim, ShapesCollection  # loads sympy

    sizes = ShapesCollection()
    for place, dims in found.items():
        sizes[first[place]] = dict.fromkeys(dims, Dim.AUTO)
    return sizes
