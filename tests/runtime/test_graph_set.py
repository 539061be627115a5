"""A module may have several graphs, and runs the one that fits a call; where none does, the original runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import FxlibWarning, WorkloadError
from fxlib.runtime import CapturedModule
from fxlib.runtime.graph_set import MAX_GRAPHS
from fxlib.runtime.ops.timeline import record

X, MASK = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0, 1.0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.dropout(self.linear(x)) * self.gain + self.mean
        return x if mask is None else x * mask


def with_variants() -> CapturedModule:
    """Return a module with a graph for training with a mask, without one, and for evaluation with one."""
    model = Model()
    main = fxlib.capture(model)
    add(main, "no mask", fxlib.capture(model, concrete_args={"mask": None}))
    model.eval()
    with torch.no_grad():
        add(main, "evaluation", fxlib.capture(model))
    model.train()
    return main


def add(main: CapturedModule, name: str, module: CapturedModule) -> str:
    return main._fxlib.graphs.add(main, name, module)


def bits(module: nn.Module, *args: object) -> torch.Tensor:
    torch.manual_seed(0)
    result: torch.Tensor = module(*args)
    return result.detach()


def test_each_call_runs_the_graph_that_fits_it() -> None:
    module = with_variants()
    module(X, MASK)
    module(X)
    module(X, None)
    module.eval()
    with torch.no_grad():
        module(X, MASK)
    assert fxlib.usage(module) == fxlib.Usage(graphs={"main": 1, "no mask": 2, "evaluation": 1})


def test_a_call_that_no_graph_fits_runs_the_original_and_is_counted_with_the_reason() -> None:
    module = with_variants()
    module.eval()
    with torch.no_grad(), pytest.warns(FxlibWarning, match="the argument mask is None"):
        module(X)
    module.train()
    with torch.no_grad():
        module(X, MASK)
    used = fxlib.usage(module)
    assert not any(used.graphs.values())
    assert sorted(used.original.values()) == [1, 1]
    assert any("grad mode is off" in reason for reason in used.original)


def test_every_graph_gives_the_bits_of_the_original() -> None:
    module = with_variants()
    original = module._fxlib.original
    assert original is not None
    for training in (True, False, True):
        module.train(training)
        for args in ((X, MASK), (X,), (X, None)):
            with torch.set_grad_enabled(training):
                assert torch.equal(bits(module, *args), bits(original, *args))


def test_what_is_replaced_on_the_module_all_its_graphs_see() -> None:
    module = with_variants()
    original = module._fxlib.original
    assert original is not None
    module.eval()
    with torch.no_grad():
        module(X, MASK)
        module.mean = torch.full((4,), 3.0)
        assert torch.equal(bits(module, X, MASK), bits(original, X, MASK))
        module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
        assert torch.equal(bits(module, X, MASK), bits(original, X, MASK))
        module.double()
        assert bits(module, X.double(), MASK.double()).dtype is torch.float64
        original.register_buffer("mean", torch.ones(4, dtype=torch.float64))
        assert torch.equal(bits(module, X.double(), MASK.double()), bits(original, X.double(), MASK.double()))
    assert fxlib.usage(module).graphs["evaluation"] == 5


def test_a_copy_has_graphs_of_its_own_and_counts_anew() -> None:
    module = with_variants()
    module(X)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        module.gain.add_(1.0)
    copied.eval()
    with torch.no_grad():
        expected = nn.functional.linear(X, copied.linear.weight, copied.linear.bias) * MASK
        assert torch.equal(copied(X, MASK), expected)
    assert fxlib.usage(copied).graphs == {"main": 0, "no mask": 0, "evaluation": 1}
    assert fxlib.usage(module).graphs["no mask"] == 1


def test_gradients_of_the_model_are_those_of_the_original_whichever_graph_ran() -> None:
    module = with_variants()
    original = module._fxlib.original
    assert original is not None
    found = []
    for runs in (module, original):
        module.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        (runs(X, MASK).sum() + runs(X).sum()).backward()
        found.append([each.grad.clone() for each in module.parameters() if each.grad is not None])
    assert len(found[0]) == 3
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_the_least_used_graph_makes_room_for_a_new_one() -> None:
    module = with_variants()
    module(X)  # "no mask"
    model = module._fxlib.original
    assert model is not None
    for index in range(MAX_GRAPHS - 3):
        assert not add(module, f"further {index}", fxlib.capture(model, concrete_args={"mask": None}))
    module.eval()
    with torch.no_grad():
        module(X, MASK)  # "evaluation"
    module.train()
    assert add(module, "one more", fxlib.capture(model, concrete_args={"mask": None})) == "further 0"
    assert list(fxlib.usage(module).graphs)[:3] == ["main", "no mask", "evaluation"]
    assert len(fxlib.usage(module).graphs) == MAX_GRAPHS


@pytest.mark.slow
def test_a_graph_of_another_model_is_refused() -> None:
    module = with_variants()
    with pytest.raises(WorkloadError, match="another model"):
        add(module, "other", fxlib.capture(Model()))
    with pytest.raises(WorkloadError, match="own graph"):
        add(module, "main", fxlib.capture(Model()))


def test_reasons_without_end_are_counted_together() -> None:
    module = with_variants()
    graphs = module._fxlib.graphs
    for size in range(100):
        graphs.original_runs(module, f"the size is {size}", (), {})
    counts = graphs.usage().original
    assert len(counts) == 33
    assert counts["other reasons"] == 68


def test_a_graph_for_a_fixed_argument_leaves_other_values_to_the_original() -> None:
    model = Model().eval()
    module = fxlib.capture(model, concrete_args={"mask": None})
    assert torch.equal(module(X), model(X))
    with pytest.warns(FxlibWarning, match="the argument mask is a Tensor, and was fixed to None at capture"):
        assert torch.equal(module(X, mask=MASK), model(X, MASK))
    assert torch.equal(module(X, mask=None), model(X))
    assert fxlib.usage(module).graphs["main"] == 2


def test_of_a_graph_that_gains_nothing_the_original_itself_runs_until_the_graph_is_edited() -> None:
    model = Model()
    module = fxlib.capture(model)
    expected = bits(model, X, MASK)
    module.keep_original()
    assert torch.equal(bits(module, X, MASK), expected)
    assert fxlib.usage(module) == fxlib.Usage(graphs={"main": 0}, original={"nothing was adopted": 1})

    add(module, "no mask", fxlib.capture(model, concrete_args={"mask": None}))
    module(X)  # what has several graphs runs them
    assert fxlib.usage(module).graphs == {"main": 0, "no mask": 1}

    edited = fxlib.capture(model)
    edited.keep_original()
    output = edited.graph.output_node()
    with edited.graph.inserting_before(output):
        output.args = (edited.graph.call_function(torch.neg, output.args),)
    edited.recompile()
    assert torch.equal(bits(edited, X, MASK), -expected)


class Replaces(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.seen


def test_a_kept_original_and_its_module_have_what_either_has_replaced() -> None:
    model = Replaces()
    module = fxlib.capture(model)
    module.keep_original()
    x = torch.ones(3)
    assert torch.equal(module(x), x)
    other = torch.full((3,), 2.0)
    assert torch.equal(torch.func.functional_call(module, {"weight": other}, (x,)), other)
    assert torch.equal(module(x), x)
    with torch.no_grad():
        model.seen = torch.full((3,), 5.0)
    assert torch.equal(module(x), x + 5)
    assert torch.equal(module.state_dict()["seen"], model.seen)

    def replacing(given: torch.Tensor) -> torch.Tensor:
        model.seen = given
        return given

    model.forward = replacing  # type: ignore[method-assign, assignment]
    module(x)
    assert module.seen is model.seen is x
    assert fxlib.usage(module).graphs == {"main": 0}


def test_a_graph_that_was_rewritten_is_not_passed_over_for_the_original() -> None:
    captured = fxlib.capture(Model())
    rewritten = captured.with_graph(copy.deepcopy(captured.graph))
    for each in (captured, rewritten):
        each.keep_original()
        each(X, MASK)
    assert fxlib.usage(captured).original
    assert not fxlib.usage(rewritten).original


def test_a_profile_is_of_the_graph_though_the_original_trains() -> None:
    module = fxlib.capture(Model())
    module.keep_original()
    with record():
        module(X, MASK)
    assert fxlib.usage(module) == fxlib.Usage(graphs={"main": 1}, original={})
