"""What one run of a module leaves behind: outputs, inputs, gradients, parameters, buffers, the random generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxlib.equivalence import visible_outputs
from fxlib.runtime.preserve_state import copied, state_kept
from fxlib.runtime.submodules import local_parameters
from fxlib.utils.compare import same_bits
from fxlib.utils.pytree import leaves
from fxlib.utils.tensors import wraps

GENERATOR = "random generator"
Batch = tuple[tuple[object, ...], Mapping[str, object]]
"""Arguments of one call, by position and by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Copies of all that a run left behind, by name, and the error that ended it."""

    found: dict[str, object]
    error: Exception | None = None


def left_behind(module: nn.Module, batches: Sequence[Batch], *, grad: bool) -> Left:
    """Run a module on copies of the batches, one after another, and put its state and the generators back.

    Args:
        module: what to run; from its parameters, buffers and generator state of now.
        batches: what to run it on. The first that fails is the last.
        grad: also run backward, from every output that takes a gradient; gradients add up over the batches.
    """
    found: dict[str, object] = {}
    failed: Exception | None = None
    with state_kept(module):
        flags = visible_outputs.flags(module)
        passing = {name: _copied(each) for name, each in visible_outputs.unsaved(module)}
        for place, batch in enumerate(batches):
            failed = _run(module, batch, found, f"batch {place}, " if len(batches) > 1 else "", grad=grad)
            if failed is not None:
                break
        written = {name: each for name, each in visible_outputs.unsaved(module) if _written(each, passing.get(name))}
        state = visible_outputs.saved(module) | written
        for name, each in state.items():
            found |= _named(f"after the run, {name}", each)
        found |= {f"grad of {name}": _copied(each.grad) for name, each in local_parameters(module).items()}
        if visible_outputs.flags(module) != flags:
            found["flags of modules and parameters"] = visible_outputs.flags(module)
        found[GENERATOR] = torch.get_rng_state()
    return Left(found=found, error=failed)


def _run(module: nn.Module, batch: Batch, found: dict[str, object], label: str, *, grad: bool) -> Exception | None:
    """Run one batch, note what there is to see of it, and return the error that ended it."""
    args, kwargs = inputs = copied(batch)
    failed: Exception | None = None
    try:
        with torch.set_grad_enabled(grad):
            output = module(*args, **kwargs)
            found |= _named(f"{label}output", output) | visible_outputs.formed(f"{label}output", output)
            found[f"memory that {label}output shares"] = visible_outputs.shared(module, inputs, output)
            if grad:
                backward(output)
    except Exception as error:  # noqa: BLE001 - an error is a result like another
        failed, found[f"{label}error"] = error, f"{type(error).__name__}: {error}"
    found |= _named(f"{label}input", inputs, gradients=True)
    return failed


def backward(output: object) -> None:
    """Run backward from every tensor of a nest that takes a gradient, with cotangents that tell elements apart."""
    ends = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(0)
    drawn = [_cotangent(leaf, generator) for leaf in ends]
    if ends:
        torch.autograd.backward(ends, drawn)


def _cotangent(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw what every floating-point dtype of 16 bits or more holds exactly, so that all of them get the same."""
    if wraps(leaf) or leaf.is_nested or leaf.layout is not torch.strided:
        return torch.ones_like(leaf)
    with torch._C.DisableTorchFunction():
        drawn = [torch.randint(1, 129, leaf.shape, generator=generator) / 128 for _ in range(1 + leaf.is_complex())]
        return (torch.complex(*drawn) if leaf.is_complex() else drawn[0]).to(leaf)


def _named(name: str, value: object, *, gradients: bool = False) -> dict[str, object]:
    """Name every leaf of a nest by its path; a tensor's gradient goes beside it."""
    found: dict[str, object] = {}
    for where, leaf in leaves(value, name):
        found[where] = _copied(leaf)
        if gradients and isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            found[f"grad of {where}"] = _copied(leaf.grad)
    return found


def _written(value: torch.Tensor, before: object) -> bool:
    return not (isinstance(before, torch.Tensor) and same_bits(value.detach(), before))


def _copied(value: object) -> object:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
