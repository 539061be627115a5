"""Are two modules the same program? Run both from the same state on the same inputs, and compare all they leave behind.

Compared are outputs, errors, what became of the inputs, gradients of parameters and inputs, parameters and buffers
after the run, and the random generator. Servers are not: a module that calls some needs them to answer alike, and a
trial of the service compares their state, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxlib.errors import PassError


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same: where ("output[0]", "grad of bottom.0.weight", ...), and how."""

    where: str
    how: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.where}: {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of a comparison; true if nothing differs."""

    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    """All that was compared, by name."""

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        """One line per difference."""
        return "\n".join(map(str, self.differences)) or f"the same in {len(self.compared)} respects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far apart two figures may be: `|a - b| <= atol + rtol * |b|`. Both zero asks for the same bits."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether only the same bits will do."""
        return self.rtol == 0 and self.atol == 0


def verify(
    a: nn.Module,
    b: nn.Module,
    inputs: Sequence[object],
    *,
    kwargs: Mapping[str, object] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    grad: bool = True,
) -> Verification:
    """Run `a` and `b` on copies of `inputs` and compare bit for bit, or within a tolerance.

    Both start from the parameters, buffers and generator state of now, and these are put back at the end. `grad` also
    compares gradients, of all outputs that take one, with respect to parameters and to inputs that require it.

    Raises:
        PassError: `inputs` is a lone tensor, or a tolerance is negative.
    """
    if isinstance(inputs, torch.Tensor):
        raise PassError("inputs is one tensor", where="verify", hint="Pass a sequence of the arguments: [x].")
    if rtol < 0 or atol < 0:
        raise PassError("a tolerance is not negative", where="verify")
    given = (tuple(inputs), dict(kwargs or {}))
    first, second = (_run(module, given, grad=grad) for module in (a, b))
    differences = tuple(_compare(first, second, Tolerance(rtol=rtol, atol=atol)))
    return Verification(differences=differences, compared=tuple(first | second))


Given = tuple[tuple[object, ...], dict[str, object]]


def _run(module: nn.Module, given: Given, *, grad: bool) -> dict[str, object]:
    """Run once, and return copies of all that can be told apart, by name."""
    with _state_kept(module):
        args, kwargs = inputs = _copy_of(given)
        found: dict[str, object] = {}
        try:
            with torch.set_grad_enabled(grad):
                output = module(*args, **kwargs)
                found |= _named("output", output)
                _backward(output)
        except Exception as error:  # noqa: BLE001 - an error is a result like another
            found["error"] = f"{type(error).__name__}: {error}"
        found |= _named("input", inputs)
        found |= {f"after the run, {name}": _copied(each) for name, each in module.state_dict(keep_vars=True).items()}
        found |= {f"grad of {name}": _copied(each.grad) for name, each in module.named_parameters()}
        found["random generator"] = torch.get_rng_state()
        return found


def _copy_of(given: Given) -> Given:
    """Copy all tensors, so that those that share memory still do; other values are passed as they are."""
    leaves, structure = pytree.tree_flatten(given)
    tensors = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    copies = copy.deepcopy(tensors)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            copies[id(leaf)].requires_grad_(leaf.requires_grad)
    return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], structure)


def _backward(output: object) -> None:
    """Run backward from every output that takes a gradient, with cotangents that tell elements apart."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.rand(leaf.shape, generator=generator).to(leaf) for leaf in leaves]
    if leaves:
        torch.autograd.backward(leaves, cotangents)


@contextmanager
def _state_kept(module: nn.Module) -> Iterator[None]:
    """Let a block run from the module's state without gradients, and put state, gradients and generator back."""
    tensors = list(module.state_dict(keep_vars=True).values())
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    random = torch.get_rng_state()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        torch.set_rng_state(random)


def _named(name: str, value: object) -> dict[str, object]:
    """Name every leaf of a nest by its path; a tensor's gradient goes beside it."""
    found: dict[str, object] = {}
    for path, leaf in pytree.tree_leaves_with_path(value):
        where = f"{name}{pytree.keystr(path)}"
        found[where] = _copied(leaf)
        if name == "input" and isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            found[f"grad of {where}"] = _copied(leaf.grad)
    return found


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _compare(first: dict[str, object], second: dict[str, object], tolerance: Tolerance) -> Iterator[Difference]:
    for where in first | second:
        if where not in first or where not in second:
            yield Difference(where=where, how=f"only the {'first' if where in first else 'second'} module has it")
        elif how := _difference(first[where], second[where], tolerance):
            yield Difference(where=where, how=how)


def _difference(one: object, other: object, tolerance: Tolerance) -> str:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        same = one is other or (type(one) is type(other) and one == other)
        return "" if same else f"{one!r} and {other!r}"
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return f"{_kind(one)} and {_kind(other)}"
    if _same_bits(one, other) or (not tolerance.is_exact and _close(one, other, tolerance)):
        return ""
    wrong = int((one != other).sum())
    return f"{wrong} of {one.numel()} elements differ, by {_distance(one, other):.3g} at most"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided or one.numel() == 0:
        return one.layout == other.layout and bool(torch.equal(one.to_dense(), other.to_dense()))
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> bool:
    return bool(torch.allclose(one.double(), other.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.to_dense().to(torch.complex128) - other.to_dense().to(torch.complex128)).abs().max())


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
