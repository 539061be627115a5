"""A graph stands in for its model only while what it was captured under holds; else the original's forward runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, Literal
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.graph_set import usage
from fxlib.runtime.guards import fact_table

X = torch.randn(3, 4)


def pure(value: torch.Tensor, model: Model) -> torch.Tensor:
    return value * model.shared


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.0)
        self.power = 2

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None, *, double: bool = False) -> torch.Tensor:
        x = x if weight is None else x * weight
        return self.dropout(self.linear(x) ** self.power) * (2 if double is True else 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = 1.0
        self.shared = 1.0
        self.steps = 0
        self.offset = torch.zeros(4)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pure(self.block(x, x) * self.scaled() * self.gain + self.mean + self.offset, self)

    def scaled(self) -> float:
        return self.scale

    def step(self) -> None:
        self.steps += 1


def captured(model: nn.Module) -> CapturedModule:
    return fxlib.capture(model)


def graph_runs(module: CapturedModule | Swapped, *args: object, **kwargs: object) -> bool:
    runs = module._fxlib.graphs.usage
    before = sum(runs().original.values())
    module(*args, **kwargs)
    return sum(runs().original.values()) == before


CHANGES: dict[str, Callable[[Model], object]] = {
    "a number that the forward reads": lambda model: setattr(model, "scale", 0.5),
    "a number that a helper function reads": lambda model: setattr(model, "shared", 0.5),
    "a number that a part reads": lambda model: setattr(model.block, "power", 3),
    "a module in a part": lambda model: setattr(model.block, "linear", nn.Linear(4, 4)),
    "a module at the root": lambda model: setattr(model, "block", Block()),
    "a hook on a part": lambda model: model.block.register_forward_hook(lambda *_: X),
    "a hook on a leaf": lambda model: model.block.linear.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a forward on an instance": lambda model: setattr(model.block, "forward", lambda *_: X),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_capture_is_seen_by_the_module_and_its_siblings(change: str) -> None:
    model = Model()
    module = captured(model)
    sibling = module.with_graph(copy.deepcopy(module.graph))
    CHANGES[change](model)
    assert torch.equal(module(X), model(X))
    assert torch.equal(sibling(X), model(X))


def test_a_leaf_made_to_write_in_place_ends_the_rewrite() -> None:
    module = captured(Model())
    module.block.dropout.inplace = True
    assert not graph_runs(module, X)


def test_what_the_forward_does_not_read_may_change() -> None:
    model = Model()
    module = captured(model)
    model.step()
    model.scale = 3.0 - 2.0  # equal, and another object
    assert graph_runs(module, X)


@pytest.mark.slow
def test_a_hook_that_was_there_may_stay_but_not_leave() -> None:
    model = Model()
    handle = model.block.linear.register_forward_hook(lambda *_: X)
    module = captured(model)
    assert graph_runs(module, X)
    handle.remove()
    assert not graph_runs(module, X)


def test_a_copy_has_conditions_of_its_own() -> None:
    module = captured(Model())
    copied = copy.deepcopy(module)
    copied.block.power = 3
    assert graph_runs(module, X)
    assert not graph_runs(copied, X)


def test_a_copy_is_compared_with_its_capture_as_fast_as_the_module_that_was_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied, made = copy.deepcopy(captured(Model())), Mock(wraps=fact_table._Columns)
    monkeypatch.setattr(fact_table, "_Columns", made)
    for _ in range(3):
        assert graph_runs(copied, X)
    assert made.call_count == 1


def test_facts_are_laid_out_once_for_a_loop_that_sets_equal_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithOptions(Model):
        options: ClassVar = {"power": 1.5}

        def scaled(self) -> float:
            return self.options["power"]

    model, made = WithOptions(), Mock(wraps=fact_table._Columns)
    module = captured(model)
    assert graph_runs(module, X)
    monkeypatch.setattr(fact_table, "_Columns", made)
    for _ in range(5):
        model.options["power"] = float("1.5")
        assert graph_runs(module, X)
    assert made.call_count <= 1
    model.options["power"] = 2.5
    assert not graph_runs(module, X)


@pytest.mark.parametrize("gone", ["set to None", "deleted"])
def test_a_parameter_that_is_gone_runs_the_original_where_the_forward_asked_for_its_gradient(gone: str) -> None:
    class Asks(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * any(each.requires_grad for each in self.parameters()) + self.block.linear(x)

    model = Asks()
    module = captured(model)
    assert graph_runs(module, X)
    if gone == "deleted":
        del model.gain
    else:
        model.block.linear.register_parameter("bias", None)
    assert not graph_runs(module, X)
    assert torch.equal(module(X), model(X))


def test_a_zero_of_the_other_sign_is_another_one() -> None:
    model = Model()
    model.scale = 0.0
    module = captured(model)
    assert graph_runs(module, X)
    model.scale = -0.0
    assert not graph_runs(module, X)


@pytest.mark.parametrize("arguments, fits", [((X, X), True), ((X,), False), ((X, None), False)])
def test_an_argument_that_is_none_where_the_code_asks_runs_the_original(arguments: tuple[object], fits: bool) -> None:
    module = captured(Block())
    with nullcontext() if fits else pytest.warns(FxlibWarning, match="argument weight is None"):
        assert graph_runs(module, *arguments, double=X) is fits
    assert graph_runs(module, *arguments, double=X) is fits  # said once


def test_a_bool_where_the_code_asks_for_true_runs_the_original_and_says_so() -> None:
    block = Block()
    with pytest.warns(FxlibWarning, match="argument double is True"):
        found = captured(block)(X, X, double=True)
    assert torch.equal(found, block(X, X, double=True))


def test_none_is_passed_on_where_no_code_asks() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
            return nn.functional.layer_norm(x, (4,), weight)

    assert graph_runs(captured(Plain()), X)


@pytest.mark.parametrize("name", ["gain", "mean", "offset"])
def test_a_tensor_replaced_on_the_model_reaches_the_graph_and_its_siblings(name: str) -> None:
    model = Model()
    module = captured(model)
    sibling = module.with_graph(copy.deepcopy(module.graph))
    setattr(model, name, nn.Parameter(torch.full((4,), 7.0)) if name == "gain" else torch.full((4,), 7.0))
    assert graph_runs(sibling, X)
    assert torch.equal(sibling(X), model(X))
    assert module.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["gain", "mean", "offset", "scale"])
def test_what_is_replaced_on_the_module_is_replaced_on_the_model_and_the_siblings(name: str) -> None:
    model = Model()
    module = captured(model)
    sibling = module.with_graph(copy.deepcopy(module.graph))
    value = {"gain": nn.Parameter(torch.full((4,), 7.0)), "scale": 7.0}.get(name, torch.full((4,), 7.0))
    setattr(module, name, value)
    assert getattr(model, name) is value
    assert torch.equal(sibling(X), model(X))


def test_a_conversion_of_the_module_reaches_its_siblings() -> None:
    module = captured(Model())
    sibling = module.with_graph(copy.deepcopy(module.graph))
    module.double()
    assert sibling(X.double()).dtype == torch.float64


def test_state_swapped_for_one_call_is_not_kept() -> None:
    model = Model()
    module = captured(model).eval()
    swapped = {"gain": torch.zeros(4), "mean": torch.ones(4)}
    torch.func.functional_call(module, swapped, (X,))
    assert torch.equal(module(X), model(X))
    assert torch.equal(model.state_dict()["mean"], torch.zeros(4))


@pytest.mark.slow
def test_a_function_captured_with_gradients_runs_as_itself_without() -> None:
    weight = torch.ones(4, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return y * weight

    module = fxlib.capture(function)
    with torch.no_grad():
        assert not module(X).requires_grad
        assert not torch.is_grad_enabled()
    assert module(X).requires_grad


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_given_to_the_model_after_the_capture_runs(register: str) -> None:
    model, seen = Model(), []
    module = captured(model)
    getattr(model, register)(lambda *_: seen.append(1))
    module(X.clone().requires_grad_()).sum().backward()
    assert seen == [1]


def test_a_rewritten_module_runs_the_original_for_one_tensor_as_two_inputs() -> None:
    def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sin() + y.exp() + x.tanh()

    captured = fxlib.capture(total)
    graph = copy.deepcopy(captured.graph)
    sine, exponential, _ = [node for node in graph.nodes if node.op == "call_method"]
    exponential.append(sine)  # as a rewrite may, which takes x and y for two tensors
    rewritten = captured.with_graph(graph)
    x, copied = (torch.linspace(-2, 2, 99).requires_grad_() for _ in range(2))
    captured(x, x).sum().backward()
    rewritten(copied, copied).sum().backward()
    assert x.grad is not None
    assert copied.grad is not None
    assert torch.equal(copied.grad, x.grad)


class Layers(nn.Module):
    """Layers whose gradients add up otherwise in another order, once they are one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.first(x), self.second(x.sin()), self.third(x.exp())
        return first * 1e3 + second + third * 1e-3


def layers(*, tied: bool = False) -> tuple[CapturedModule, CapturedModule]:
    """A capture, and a rewrite of it that calls the second layer last."""
    model = Layers()
    if tied:
        model.third.weight = model.first.weight
    captured = fxlib.capture(model)
    graph = copy.deepcopy(captured.graph)
    (second,) = (node for node in graph.nodes if node.target == "second")
    (third,) = (node for node in graph.nodes if node.target == "third")
    third.append(second)
    return captured, captured.with_graph(graph)


def tie(module: Any) -> None:
    module.second.weight = module.third.weight = module.first.weight


def untie(module: Any) -> None:
    module.third.weight = nn.Parameter(module.first.weight.detach().clone())


def replace_one(module: Any) -> None:
    module.second.weight = nn.Parameter(module.second.weight.detach().clone())


@pytest.mark.parametrize("change, tied, runs", [(tie, False, False), (untie, True, False), (replace_one, False, True)])
def test_a_rewritten_module_runs_the_original_once_other_parameters_are_one(
    change: Callable[[Any], None], tied: bool, runs: bool
) -> None:
    captured, rewritten = layers(tied=tied)
    copied = copy.deepcopy(rewritten)
    assert graph_runs(rewritten, X)
    change(rewritten)
    assert graph_runs(rewritten, X) is runs
    assert graph_runs(captured, X) is (change is not untie)  # its order is the original's; what is tied is held to that
    assert graph_runs(copied, X)  # it has parameters of its own


def test_gradients_of_layers_made_one_after_a_rewrite_add_up_as_the_original_s() -> None:
    captured, rewritten = layers()
    tie(captured)
    x, found = torch.linspace(-2, 2, 400).view(100, 4), []
    for module in (captured, rewritten):
        module.zero_grad()
        module(x).sum().backward()
        found.append(module.first.weight.grad)
    assert torch.equal(*found)


class Swapped:
    """A module called with other parameters."""

    def __init__(self, module: CapturedModule, parameters: dict[str, torch.Tensor]) -> None:
        self._fxlib = module._fxlib
        self.call = functools.partial(torch.func.functional_call, module, parameters)

    def __call__(self, *args: object) -> torch.Tensor:
        return self.call(args)


def test_one_parameter_under_several_names_for_one_call_is_noticed() -> None:
    _, rewritten = layers()
    one = {f"{name}.weight": rewritten.first.weight for name in ("first", "second", "third")}
    assert graph_runs(rewritten, X)
    assert not graph_runs(Swapped(rewritten, one), X)
    assert graph_runs(Swapped(rewritten, {"first.weight": torch.zeros(4, 4)}), X)
    assert graph_runs(rewritten, X)


class HooksMidway(TorchFunctionMode):
    """Gives the layer that comes next a hook, when it sees an activation."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "relu" and not self.layer._forward_hooks:
            self.layer.register_forward_hook(lambda _, __, output: output * 10)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trace", "export"])
def test_the_original_runs_while_a_mode_of_the_users_sees_its_operations(how: Literal["trace", "export"]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    expected = model(X) * 10
    with HooksMidway(model[2]):
        assert torch.equal(module(X), expected)
    assert list(fxlib.usage(module).original) == [
        "a HooksMidway sees every operation, in the order in which the program makes them"
    ]


class Meddling(torch.Tensor):
    """A tensor whose class gives a layer a hook between two operations."""

    layer: nn.Module | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.layer is not None and not cls.layer._forward_hooks:
            cls.layer.register_forward_hook(lambda _, __, output: output * 10)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Inert(nn.Parameter):
    """A class of the program's own that sees no operation."""

    def __repr__(self) -> str:  # type: ignore[override]
        return "inert"


@pytest.mark.filterwarnings("ignore:the original forward of Sequential runs:fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("is_weight", [False, True])
def test_the_original_runs_where_a_class_of_the_users_sees_its_operations(
    how: Literal["trace", "export"], is_weight: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    expected = model(X) * 10
    given = X if is_weight else X.as_subclass(Meddling)
    if is_weight:
        first = model.get_submodule("0")
        first.weight = nn.Parameter(first.get_parameter("weight").detach().as_subclass(Meddling))
    Meddling.layer = model[2]
    try:
        found = module(given)
    finally:
        Meddling.layer = None
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(found, expected)
    assert list(fxlib.usage(module).original) == [
        "a Meddling has methods of its own, which run between the forward's operations"
    ]


def test_tensors_of_the_users_classes_are_found_in_nests() -> None:
    module = fxlib.capture(lambda pair: pair["x"] + pair["y"][0])
    with pytest.warns(FxlibWarning, match="a Meddling has methods of its own"):
        module({"x": X, "y": [X.as_subclass(Meddling)]})
    assert fxlib.usage(module).graphs == {"main": 0}


def test_the_graph_runs_on_a_class_of_the_users_that_sees_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.get_submodule("0").weight = Inert(torch.ones(4, 4))
    assert graph_runs(fxlib.capture(model), X)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_the_original_runs_while_a_hook_of_the_users_sees_what_is_saved(how: Literal["trace", "export"]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    expected = model(X) * 10

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if not model[2]._forward_hooks:
            model[2].register_forward_hook(lambda _, __, output: output * 10)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        assert torch.equal(module(X), expected)
    assert list(fxlib.usage(module).original) == [
        "a hook sees every tensor that is saved for backward, in the order in which the program saves them"
    ]


def test_the_graph_runs_under_torchs_own_hooks_on_what_is_saved() -> None:
    module = captured(Model())
    with torch.autograd.graph.save_on_cpu():
        module(X)
    assert not fxlib.usage(module).original


def test_the_graph_runs_under_the_modes_of_torchs_own() -> None:
    module = captured(Model())
    with torch.device("cpu"):
        module(X)
    assert not fxlib.usage(module).original


OPTIONS: dict[str, tuple[Callable[[], nn.Module], str, Any]] = {
    "padding_mode": (lambda: nn.Conv2d(4, 4, 3, padding=1), "padding_mode", "circular"),
    "stride": (lambda: nn.Conv2d(4, 4, 3), "stride", (2, 2)),
    "eps": (lambda: nn.BatchNorm2d(4), "eps", 0.5),
}


@pytest.mark.parametrize("case", OPTIONS)
@torch.no_grad()
def test_an_option_of_a_module_counts_where_a_rewrite_has_it_as_a_constant(case: str) -> None:
    build, name, value = OPTIONS[case]
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), build(), nn.BatchNorm2d(4)).eval()
    captured, x = fxlib.capture(model), torch.randn(2, 4, 8, 8)
    rewritten = recipes.apply(captured, recipes.from_passes([("fold_norms", {})])).module
    assert torch.allclose(rewritten(x), model(x), atol=1e-5)
    copied = copy.deepcopy(rewritten)
    before = copied(x)
    setattr(model[2], name, value)
    assert torch.equal(rewritten(x), model(x))
    assert usage(rewritten).original == {f"{type(model[2]).__name__}.{name} is not what it was at capture": 1}
    assert torch.equal(copied(x), before), "a copy has modules of its own"
    assert torch.equal(captured(x), model(x))
    assert usage(captured).original == {}, "it calls the module, which reads the option"
    setattr(model[2], name, getattr(build(), name))
    assert torch.allclose(rewritten(x), model(x), atol=1e-5)


class Again(nn.Module):
    """Calls a convolution twice, of which one call is before a norm; and holds a criterion that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.conv(x)) + self.conv(x.relu())
        return out


@torch.no_grad()
def test_it_counts_too_where_only_one_of_two_calls_was_replaced_and_not_where_there_was_none() -> None:
    model, x = Again().eval(), torch.randn(2, 4, 8, 8)
    rewritten = recipes.apply(fxlib.capture(model), recipes.from_passes([("fold_norms", {})])).module
    model.criterion.label_smoothing = 0.2
    rewritten(x)
    assert usage(rewritten).original == {}
    model.conv.padding_mode = "circular"
    assert torch.equal(rewritten(x), model(x))
    assert usage(rewritten).original == {"Conv2d.padding_mode is not what it was at capture": 1}
