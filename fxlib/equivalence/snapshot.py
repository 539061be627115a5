"""The effects of one run of a module: outputs, inputs, gradients, parameters, buffers, the random generator.

Besides the values of an output, they include its containers, layouts and flags, and what shares its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxlib.runtime.preserve_state import copied, state_kept
from fxlib.runtime.push_gradients import gradients_left_out
from fxlib.runtime.submodules import local_modules, local_parameters, local_tensors, remote_modules
from fxlib.utils.compare import is_freed, kind, same_bits, wraps
from fxlib.utils.pytree import leaves, structure

RANDOM_GENERATOR = "random generator"
CallArguments = tuple[tuple[object, ...], Mapping[str, object]]
"""Arguments of one call, positional and by keyword."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Copies of everything that a run left behind, by name, and the error that ended it."""

    found: dict[str, object]
    error: Exception | None = None
    calls: int = 0
    """How many calls ended without an error."""

    @property
    def failure(self) -> tuple[int, str] | None:
        """The number of the call that raised, and the error's class and text; None if none did."""
        return None if self.error is None else (self.calls, f"{type(self.error).__name__}: {self.error}")


def left_behind(module: nn.Module, batches: Sequence[CallArguments], *, grad: bool) -> Left:
    """Run a module on copies of the batches, one after another, and restore its state and the generators.

    Args:
        module: the module to run, from its present parameters, buffers and generator state.
        batches: the batches to run it on, up to the first that fails.
        grad: whether to run backward, too, from every output that takes a gradient; gradients add up over the batches.
    """
    found: dict[str, object] = {}
    failed, calls = None, 0
    with state_kept(module), gradients_left_out(module):
        flags = _flags(module)
        passing = {name: _copied(each) for name, each in _unsaved(module)}
        for number, batch in enumerate(batches):
            failed = _run(module, batch, found, f"batch {number}, " if len(batches) > 1 else "", grad=grad)
            if failed is not None:
                break
            calls += 1
        written = {name: each for name, each in _unsaved(module) if _written(each, passing.get(name))}
        state = _saved(module) | written
        for name, each in state.items():
            found |= _named(f"after the run, {name}", each)
        found |= {f"grad of {name}": _copied(each.grad) for name, each in local_parameters(module).items()}
        if _flags(module) != flags:
            found["flags of modules and parameters"] = _flags(module)
        found[RANDOM_GENERATOR] = torch.get_rng_state()
    return Left(found=found, error=failed, calls=calls)


def _run(
    module: nn.Module, batch: CallArguments, found: dict[str, object], label: str, *, grad: bool
) -> Exception | None:
    """Run one batch, record what can be observed of it, and return the error that ended it."""
    args, kwargs = inputs = copied(batch)
    failed: Exception | None = None
    try:
        with torch.set_grad_enabled(grad):
            output = module(*args, **kwargs)
            found |= _named(f"{label}output", output) | formed(f"{label}output", output)
            found[f"memory that {label}output shares"] = _shared(module, inputs, output)
            if grad:
                backward(output)
    except Exception as error:  # noqa: BLE001 - an error is a result like another
        failed, found[f"{label}error"] = error, f"{type(error).__name__}: {error}"
    found |= _named(f"{label}input", inputs, gradients=True)
    return failed


def backward(output: object) -> None:
    """Run backward from every tensor of a nested value that takes a gradient, with distinct cotangents per element."""
    ends = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(0)
    drawn = [_cotangent(leaf, generator) for leaf in ends]
    if ends:
        torch.autograd.backward(ends, drawn)


def _cotangent(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw numbers that every floating-point dtype of 16 bits or more represents exactly, so that all get the same."""
    if wraps(leaf) or leaf.is_nested or leaf.layout is not torch.strided:
        return torch.ones_like(leaf)
    with torch._C.DisableTorchFunction():
        drawn = [torch.randint(1, 129, leaf.shape, generator=generator) / 128 for _ in range(1 + leaf.is_complex())]
        return (torch.complex(*drawn) if leaf.is_complex() else drawn[0]).to(leaf)


def _named(name: str, value: object, *, gradients: bool = False) -> dict[str, object]:
    """Name every leaf of a nested value by its path; a tensor's gradient goes beside it."""
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
    if isinstance(value, torch.Tensor):
        return kind(value) if is_freed(value) else value.detach().clone()
    return value


def formed(name: str, value: object) -> dict[str, str]:
    """Describe what a caller sees of a nested value besides values: containers, class, layout and flags of tensors."""
    tensors = {where: leaf for where, leaf in leaves(value, name) if isinstance(leaf, torch.Tensor)}
    return {f"structure of {name}": structure(value)} | {
        f"form of {where}": _form(each) for where, each in tensors.items()
    }


def _flags(module: nn.Module) -> tuple[str, ...]:
    """Return which modules are in train mode, and which parameters take no gradient."""
    training = [f"{path} in train mode" for path, each in local_modules(module) if each.training]
    return (*training, *(f"{name} frozen" for name, each in local_parameters(module).items() if not each.requires_grad))


def _form(tensor: torch.Tensor) -> str:
    words = [type(tensor).__name__]
    if tensor.layout is torch.strided and not tensor.is_nested and not wraps(tensor):
        # The stride of a dimension with one element, or none, means nothing.
        shown = zip(tensor.shape, tensor.stride(), strict=True)
        words.append(f"strides {tuple(step if size > 1 and tensor.numel() else 0 for size, step in shown)}")
    return ", ".join([*words, *(["takes a gradient"] if tensor.requires_grad else [])])


def _shared(module: nn.Module, inputs: object, output: object) -> tuple[str, ...]:
    """Return which tensors of the output share memory with one another, with inputs or with the module's state."""
    holders: dict[int, str] = {}
    known = [*leaves(inputs, "input"), *_saved(module).items(), *_unsaved(module)]
    for where, leaf in known:
        if (memory := _memory(leaf)) is not None:
            holders.setdefault(memory, where)
    found = []
    for where, leaf in leaves(output, "output"):
        if (memory := _memory(leaf)) is not None and holders.setdefault(memory, where) != where:
            found.append(f"{where} with {holders[memory]}")
    return tuple(found)


def _memory(leaf: object) -> int | None:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or wraps(leaf):
        return None
    return leaf.untyped_storage()._cdata if leaf.numel() else None


def _saved(module: nn.Module) -> dict[str, Any]:
    """Return the tensors that `state_dict` saves, uncopied; a `RemoteModule` makes that fail, and has none here."""
    if next(remote_modules(module), None) is None:
        return module.state_dict(keep_vars=True)
    return local_tensors(module)


def _unsaved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers and the plain tensors of a module that `state_dict` leaves out."""
    for path, each in local_modules(module):
        transient = ((name, each._buffers.get(name)) for name in sorted(each._non_persistent_buffers_set))
        for name, value in (*transient, *vars(each).items()):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value
