"""Random modules that only export takes: captured, sent, and rewritten, they are the programs that they were."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxlib
from fxlib.recipes import recipes
from fxlib.runtime.preserve_state import state_kept
from tests.capture.random_modules import Program, Step, programs
from tests.shared.many import many
from tests.wire.support import over_the_wire

_REINPLACED = recipes.from_passes([("common_subexpressions", {}), ("reinplace", {})])


def _shared(model: nn.Module, inputs: list[Tensor]) -> list[object]:
    """Layouts of outputs, whether they take gradients, and what of outputs, inputs and state share memory."""
    torch.manual_seed(0)
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    with state_kept(model):
        outputs = [each for each in tree_leaves(model(*inputs)) if isinstance(each, Tensor)]
    state = [getattr(model, name) for name in ("vector", "count", "memory")]
    memory = [each.untyped_storage().data_ptr() for each in (*outputs, *inputs, *state)]
    shared = [[one == other for other in memory] for one in memory]
    # Of a view made without gradients, whose base was written since, torch refuses to tell whether it takes one.
    tracked = [(each.requires_grad, each.is_leaf) for each in outputs] if torch.is_grad_enabled() else []
    return [*(each.stride() for each in outputs), tracked, shared]


def _runs(model: nn.Module, inputs: list[Tensor], *, grad: bool) -> bool:
    """Whether torch itself takes the program: many write where autograd forbids it."""
    try:
        return bool(fxlib.verify(model, copy.deepcopy(model), inputs, grad=grad))
    except (fxlib.errors.PassError, RuntimeError):
        return False


def _check(program: tuple[list[Step], list[int]], *, grad: bool, train: bool, tracked: bool) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = Program(*program).train(train)
    inputs = [torch.randn(3, 4, requires_grad=tracked), torch.randn(4)]
    assume(_runs(model, inputs, grad=grad))
    with torch.set_grad_enabled(grad):
        captured = fxlib.capture(model, sample_inputs=inputs, how="export")
        note(captured.code)
        sent = over_the_wire(captured, weights=True)
        rewritten = [
            recipes.apply(captured, each).module for each in ("training", *((_REINPLACED,) if not grad else ()))
        ]
        for module in (captured, sent, *rewritten):
            note(module.code)
            same = fxlib.verify(model, module, inputs, grad=grad)
            assert same, same
            assert _shared(model, inputs) == _shared(module, inputs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=many(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.booleans(), st.booleans(), st.booleans())
def test_many_random_modules_are_themselves(
    program: tuple[list[Step], list[int]], grad: bool, train: bool, tracked: bool
) -> None:
    _check(program, grad=grad, train=train, tracked=tracked)
