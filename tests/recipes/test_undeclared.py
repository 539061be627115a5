"""What a missing declaration is worth: the plan with it, beside the plan without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxlib
from fxlib.analysis.cost.simulate import predict
from fxlib.recipes import recipes
from fxlib.recipes.undeclared import MAX_FUNCTIONS, undeclared
from fxlib.runtime import CapturedModule
from fxlib.spec.profile import CallProfile, Opaque, Profile, ServerProfile, Spread
from tests.analysis.sketch import READ, Sketch
from tests.capture import servers
from tests.capture.servers import Table, remote_method

SERVER = ServerProfile(name="ps0", round_trip_s=4e-4, concurrency=16, bytes_per_s=1e9)


def profile(*calls: str) -> Profile:
    """Calls of 10 ms each."""
    return Profile(
        calls=tuple(
            CallProfile(
                call=each,
                function=f"shop:{each}",
                to="ps0",
                request_bytes=10,
                response_bytes=10,
                returns=Opaque(),
                issue_s=1e-5,
                wait_s=1e-5,
                service_s=Spread.of([0.01]),
            )
            for each in calls
        ),
        servers=(SERVER,),
    )


def one(contract: fxlib.Contract | None = None) -> CapturedModule:
    """A read, and then a call that does not need its answer."""
    sketch = Sketch("x")
    read = sketch.call("read", sketch.inputs[0])
    return sketch.returns(read, sketch.call("call", sketch.inputs[0], contract=contract))


def two() -> CapturedModule:
    sketch = Sketch("x")
    calls = [sketch.call(name, sketch.inputs[0], contract=None) for name in ("first", "second")]
    return sketch.returns(*calls)


def test_it_is_the_gain_that_the_cost_model_expects_of_the_declared_program() -> None:
    measured = profile("read", "call")
    without, with_it = (predict(recipes.apply(each).module, measured).step_s for each in (one(), one(READ)))

    (found,) = undeclared(one(), request=recipes.PlanningRequest(profile=measured))

    assert (found.functions, found.calls, found.measured) == (("shop:call",), 1, True)
    assert found.gain == pytest.approx(without / with_it - 1.0)
    assert found.gain > 0.9
    assert str(found).startswith("shop:call (1 call): with reads=: +9")
    assert '(declare @fxlib.remote(reads="...") on shop:call' in str(found)


def test_what_one_declaration_does_not_bring_all_of_them_may() -> None:
    together, *each = undeclared(two(), request=recipes.PlanningRequest(profile=profile("first", "second")))

    assert together.functions == ("shop:first", "shop:second")
    assert together.gain > 0.9
    assert [one.gain for one in each] == [pytest.approx(0.0, abs=0.01)] * 2
    assert str(together) == f"all 2 undeclared functions (2 calls): with reads=: {together.gain:+.0%} expected"


def test_what_is_declared_by_whomever_is_not_listed() -> None:
    assert undeclared(one(READ)) == ()
    assert undeclared(one(), request=recipes.PlanningRequest(contracts={"shop:call": READ})) == ()
    assert undeclared(one(), request=recipes.PlanningRequest(assume="reads")) == ()
    assert undeclared(one(), recipes.from_passes([("split_calls", {})])) == ()


def test_without_a_profile_it_says_that_it_is_an_estimate() -> None:
    (found,) = undeclared(one())
    assert not found.measured
    assert "estimated without a profile" in str(found)


def test_no_more_plans_are_made_than_for_a_few_functions() -> None:
    sketch = Sketch("x")
    module = sketch.returns(
        *(sketch.call(f"call{i}", sketch.inputs[0], contract=None) for i in range(MAX_FUNCTIONS + 3))
    )
    found = undeclared(module)
    assert len(found) == MAX_FUNCTIONS + 1
    assert max(len(each.functions) for each in found) == MAX_FUNCTIONS + 3


def test_the_module_is_left_as_it_is() -> None:
    module = one()
    before = module.code
    undeclared(module, request=recipes.PlanningRequest(profile=profile("read", "call")))
    assert module.code == before
    assert [node.name for node in module.graph.nodes if "contract" in node.meta] == ["read"]


def helped(rref: Any, x: torch.Tensor) -> torch.Tensor:
    return x.relu() + remote_method(Table.forward, rref, x)


@pytest.mark.slow
def test_of_a_method_called_through_a_helper_the_method_is_named() -> None:
    (found,) = undeclared(fxlib.capture(helped))
    assert found.functions == (f"{servers.NAME}:Table.forward",)
    assert f'@fxlib.remote(reads="...") on {servers.NAME}:Table.forward, or for all' in found.remedy
