"""Measured, random programs do what they do unmeasured, bit for bit, and raise what they raise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from fxlib.profiling.step_runs import Instrumented, Stopwatch
from fxlib.recipes import recipes
from fxlib.runtime.ops.timeline import record
from tests.profiling import remote_functions as far
from tests.random_programs.programs import Program, differentiable_program, random_program
from tests.random_programs.running import Outcome, differences, outcome, real_servers
from tests.shared.many import many

pytestmark = pytest.mark.usefixtures("servers")

SCHEDULED = recipes.from_passes([("split_calls", {}), ("overlap_calls", {})])


def measured(program: Program, module: GraphModule) -> Outcome:
    with record(Stopwatch(module, Instrumented(module))):
        return outcome(program, module, real_servers())


def check(program: Program) -> None:
    expected = outcome(program, program.module, real_servers())
    assert differences(expected, measured(program, program.module)) == []
    if expected["error"]:
        return  # which of a scheduled program's calls came before it is told by the lines of its own code
    scheduled = recipes.apply(program.module, SCHEDULED).module
    assert differences(expected, measured(program, scheduled)) == []


def test_what_is_made_on_a_server_is_made_in_steps_with_calls_alone() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = rpc.remote("ps0", far.nap_in_turn, args=(x, 0.0)).to_here()
        return made

    module, x = fxlib.capture(forward), torch.ones(2)
    counted, instrumented = rpc.rpc_sync("ps0", far.naps), Instrumented(module)
    with record(Stopwatch(module, instrumented)):
        made = module(x)
        instrumented.replays = True
        assert torch.equal(module(x), made)
    assert rpc.rpc_sync("ps0", far.naps) == counted + 1


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_any_program_with_gradients(seed: int) -> None:
    check(differentiable_program(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=many(25), deadline=None)
@given(st.integers(0, 10**9))
def test_many_programs(seed: int) -> None:
    check(random_program(seed))
