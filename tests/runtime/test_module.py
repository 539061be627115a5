"""A captured module is a drop-in for the model it was captured from."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.fx import Graph, symbolic_trace
from torch.utils import _pytree as pytree

import fxlib
from fxlib.errors import CaptureError, WireError
from fxlib.runtime import CapturedModule
from tests.shared.process_group import process_group
from tests.wire.support import over_the_wire

X = torch.randn(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.linear.bias = self.unused.bias  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.shift = torch.ones(4)
        self.temperature = 2.0
        self.eager_forwards = 0

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.eager_forwards += 1
        return self.dropout(self.block(x)) * self.scale + self.mean + self.shift

    def describe(self) -> str:
        return f"at {self.temperature}"


def captured(model: nn.Module | None = None) -> CapturedModule:
    model = model or Model()
    return CapturedModule(model, symbolic_trace(model).graph, original=model)


def original_of(module: CapturedModule) -> Model:
    model = module._fxlib.original
    assert isinstance(model, Model)
    return model


def test_it_computes_what_the_model_computes() -> None:
    module = captured().eval()
    assert torch.equal(module(X), original_of(module)(X))


def test_it_has_the_models_own_tensors_under_the_models_own_keys() -> None:
    module = captured()
    model = original_of(module)
    assert list(module.state_dict()) == list(model.state_dict())
    assert [id(p) for p in module.parameters()] == [id(p) for p in model.parameters()]
    assert [id(b) for b in module.buffers()] == [id(b) for b in model.buffers()]
    assert module.shift is model.shift
    assert [name for name, _ in module.named_modules()] == [name for name, _ in model.named_modules()]


def test_what_the_graph_does_not_know_the_original_answers() -> None:
    module = captured()
    assert module.describe() == "at 2.0"
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = module.nothing_such


class Defaults(nn.Module):
    head: nn.Module
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.doubled = nn.Linear(4, 4), 1.0

    @property
    def gain(self) -> float:
        return self.doubled

    @gain.setter
    def gain(self, value: float) -> None:
        self.doubled = value * 2

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x) * self.scale * self.gain
        return self.head(x) if hasattr(self, "head") else x + getattr(self, "shift", 0.0)


@pytest.mark.parametrize(
    "name, value", [("scale", 3.0), ("gain", 3.0), ("shift", 3.0), ("head", nn.Linear(4, 2)), ("linear", nn.Identity())]
)
def test_what_is_set_on_it_reaches_the_model_and_what_is_deleted_too(name: str, value: Any) -> None:
    model = Defaults()
    module = fxlib.capture(model)
    before = module(X)
    setattr(module, name, value)
    assert getattr(model, name) == getattr(module, name)
    assert torch.equal(module(X), model(X))
    assert module(X).shape != before.shape or not torch.equal(module(X), before)
    if name != "gain":
        delattr(module, name)
        assert not any(name in table for each in (model, module) for table in (each.__dict__, each._modules))


def test_what_is_replaced_on_the_model_is_seen_though_something_is_set_on_it_next() -> None:
    model = Defaults()
    module = fxlib.capture(model)
    model.linear = nn.Linear(4, 3)
    module.doubled = 4.0
    assert module.linear is model.linear
    assert torch.equal(module(X), model(X))


class Behind(nn.Module):
    """Has a parameter that a setter replaces."""

    def __init__(self) -> None:
        super().__init__()
        self._weight = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)

    @property
    def weight(self) -> torch.Tensor:
        return self._weight

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        self._weight = nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self._weight


def test_what_a_setter_of_the_model_replaces_is_seen() -> None:
    model: Any = Behind()
    module: Any = fxlib.capture(model)
    module.weight = torch.zeros(4)
    assert module._weight is model._weight
    assert torch.equal(module(X), torch.zeros(3, 4))


def test_a_new_attribute_is_on_both_and_a_new_buffer_too_but_a_method_of_its_own_is_not() -> None:
    model: Any = Behind()
    module: Any = fxlib.capture(model)
    module.mask, module.tag = nn.Buffer(torch.ones(4)), "a"
    module.tag = "b"
    module.kept = module.forward
    assert dict(module.named_buffers())["mask"] is model.mask
    assert module.__dict__["tag"] == model.tag == "b"
    assert module.kept.__self__ is module
    assert not hasattr(model, "kept")
    copied = copy.deepcopy(model)
    assert copied.tag == "b"


class Masked(nn.Module):
    """A part of each kind at its root."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale * self.mask


def test_parts_that_the_model_replaces_are_taken_over_in_their_own_tables() -> None:
    model: Any = Masked()
    module = fxlib.capture(model)
    for _ in range(2):
        assert torch.equal(module(X), model(X))
        assert list(module.state_dict()) == list(model.state_dict())
        for kind in ("named_parameters", "named_buffers", "named_children"):
            assert dict(getattr(module, kind)()) == dict(getattr(model, kind)())
        model.linear, model.mask, model.scale = nn.Linear(4, 4), torch.zeros(4), nn.Parameter(torch.zeros(4))


REPLACED: dict[str, Callable[[Any], object]] = {
    "a parameter": lambda model: setattr(model, "scale", nn.Parameter(torch.zeros(4))),
    "a layer": lambda model: setattr(model, "linear", nn.Linear(4, 4)),
    "a new parameter": lambda model: setattr(model, "gain", nn.Parameter(torch.zeros(4))),
    "no buffer": lambda model: delattr(model, "mask"),
    "loaded weights": lambda model: model.load_state_dict(Masked().state_dict(), assign=True),
    "another type": nn.Module.double,
    "sharded": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
}
SEEN: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda module: dict(module.named_parameters()),
    "the root's parameters": lambda module: dict(module.named_parameters(recurse=False)),
    "buffers": lambda module: dict(module.named_buffers()),
    "children": lambda module: dict(module.named_children()),
    "modules": lambda module: list(module.modules())[1:],
    "attributes": lambda module: [getattr(module, name, None) for name in ("scale", "linear", "mask", "gain")],
    "parameters within another": lambda module: list(nn.Sequential(module).parameters()),
}


@pytest.mark.parametrize("rewritten", [False, True], ids=["captured", "rewritten"])
@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_what_is_replaced_on_the_model_is_seen_before_the_next_forward(
    change: Callable[[Any], object], seen: Callable[[Any], Any], tmp_path: Path, *, rewritten: bool
) -> None:
    model = Masked()
    module = fxlib.optimize(fxlib.capture(model)) if rewritten else fxlib.capture(model)
    with process_group(tmp_path) if change is REPLACED["sharded"] else nullcontext():
        change(model)
        found, expected = pytree.tree_leaves(seen(module)), pytree.tree_leaves(seen(model))
        assert all(each is one for each, one in zip(found, expected, strict=True))


def test_gradients_of_what_the_model_has_now_are_reset_and_asked_for() -> None:
    model, plain = Masked(), Masked()
    module = fxlib.capture(model)
    for each in (model, plain):
        each.scale = nn.Parameter(torch.ones(4))
        each.scale.grad = torch.ones(4)
    for changed in (module, plain):
        changed.zero_grad()
        changed.requires_grad_(False)
    assert model.scale.grad is plain.scale.grad is None
    assert not any(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("kind", [nn.Parameter, lambda _: nn.Identity()], ids=["parameter", "module"])
def test_a_part_takes_the_place_of_a_plain_tensor_on_both(kind: Callable[[torch.Tensor], Any]) -> None:
    module: Any = captured()
    model = original_of(module)
    module.shift = part = kind(torch.zeros(4))
    assert module.shift is model.shift is part
    assert not any("shift" in each.__dict__ for each in (module, model))


def test_a_part_that_is_deleted_from_the_graphs_module_stays_the_models() -> None:
    model: Any = Behind()
    module = fxlib.capture(model)
    assert module.delete_submodule("linear")
    assert "linear" not in module._modules
    assert isinstance(model.linear, nn.Linear)


def test_a_replica_for_data_parallel_takes_nothing_from_the_model() -> None:
    model = Defaults()
    before = model.linear
    replica = fxlib.capture(model)._replicate_for_data_parallel()
    replica.linear = nn.Linear(4, 4)
    assert model.linear is before
    assert torch.equal(replica(X), replica.linear(X) * 2)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(x))


class Evaluated(Model):
    def eval(self) -> Evaluated:
        super().eval()
        self.temperature = 1.0
        return self


def test_the_models_own_train_and_eval_run() -> None:
    module = fxlib.capture(Frozen())
    for mode in (False, True):
        assert module.train(mode) is module
        assert [each.training for each in module.modules()] == [mode, False, mode]
    evaluated = captured(Evaluated())
    assert evaluated.eval() is evaluated
    assert (evaluated.training, evaluated.temperature) == (False, 1.0)


def test_the_training_flag_is_the_models() -> None:
    module = captured()
    model = original_of(module)
    module.eval()
    assert not model.training
    model.train()
    module(X)
    assert module.training
    model.eval()
    assert torch.equal(module(X), module(X))
    assert not module.training


@pytest.mark.parametrize("change", ["eval", "one module", "no grad", "inference"])
def test_the_originals_forward_runs_where_the_capture_does_not_hold(change: str) -> None:
    module = captured()
    before = original_of(module).eager_forwards
    if change == "eval":
        module.eval()
    elif change == "one module":
        module.block.eval()
    grad_modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    with grad_modes.get(change, torch.enable_grad)():
        module(X)
    assert original_of(module).eager_forwards == before + 1


def test_the_graph_runs_again_once_the_capture_holds_again() -> None:
    module = captured()
    before = original_of(module).eager_forwards
    module.eval()(X)
    module.train()(X)
    assert original_of(module).eager_forwards == before + 1


def test_dropout_is_off_in_evaluation_although_it_was_captured_in_training() -> None:
    module = captured().eval()
    assert torch.equal(module(X), module(X))


def test_without_an_original_the_graph_always_runs() -> None:
    model = Model()
    module = CapturedModule(model, symbolic_trace(model).graph)
    before = model.eager_forwards
    with torch.no_grad():
        module.eval()(X)
    assert model.eager_forwards == before


class Modes(nn.Module):
    def __init__(self, *, inner: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.inner):
            x = x * 2
        return x * self.weight


@pytest.mark.parametrize("how", ["trace", "export"])
def test_without_an_original_the_callers_grad_mode_comes_back(how: Literal["trace", "export"]) -> None:
    module = fxlib.capture(Modes(inner=False), sample_inputs=[X], how=how)
    with torch.no_grad():
        alone = over_the_wire(module, weights=True)
        alone(X)
        assert not torch.is_grad_enabled()
    assert alone(X).requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("how", ["trace", "export"])
def test_without_an_original_no_gradients_are_lost_in_silence(how: Literal["trace", "export"]) -> None:
    with torch.no_grad():
        alone = over_the_wire(fxlib.capture(Modes(inner=True), sample_inputs=[X], how=how), weights=True)
        assert torch.equal(alone(X), X * 2)
        assert not torch.is_grad_enabled()
    with pytest.raises(CaptureError, match="captured without gradients"):
        alone(X)


def test_conversion_reaches_the_fallback_too() -> None:
    module = captured().double().eval()
    assert module(X.double()).dtype == torch.float64
    assert original_of(module).mean.dtype == torch.float64


def test_weights_loaded_into_it_are_the_models() -> None:
    module, state = captured(), Model().state_dict()
    for assign in (False, True):
        module.load_state_dict(state, assign=assign)
        assert torch.equal(original_of(module).scale, state["scale"])
        assert torch.equal(module.eval()(X), original_of(module)(X))


def test_extra_state_of_the_model_is_saved_and_loaded() -> None:
    class Counting(Model):
        def get_extra_state(self) -> int:
            return 7

        def set_extra_state(self, state: int) -> None:
            self.temperature = state

    module = captured(Counting())
    state = module.state_dict()
    assert state["_extra_state"] == 7
    module.load_state_dict(state)
    assert original_of(module).temperature == 7


def test_hooks_of_the_model_run_once() -> None:
    model, seen = Model().eval(), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    module = captured(model)
    module(X)
    with torch.no_grad():
        module(X)
    assert seen == ["forward", "forward"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_who_reads_parameters_while_the_original_runs_for_other_ones_changes_nothing() -> None:
    norms: list[float] = []
    model = Scaled()
    module = fxlib.capture(model)
    model.linear.register_forward_hook(lambda *_: norms.append(sum(float(p.norm()) for p in module.parameters())))
    doubled = {name: value.detach() * 2 for name, value in model.named_parameters()}
    x = torch.randn(2, 3)

    class Twice(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) + self.net(x + 1)

    given = {f"net.{name}": value for name, value in doubled.items()}
    assert torch.equal(functional_call(Twice(module), given, x), functional_call(Twice(model), given, x))
    assert norms[0] == norms[1]


def test_a_deep_copy_shares_nothing_and_is_complete() -> None:
    module = captured()
    copied = copy.deepcopy(module)
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    assert not own & {id(tensor) for tensor in [*copied.parameters(), *copied.buffers()]}
    assert copied.block.linear.bias is copied.block.unused.bias
    assert original_of(copied).block is copied.block
    assert torch.equal(copied.eval()(X), module.eval()(X))
    assert original_of(copied).eager_forwards == original_of(module).eager_forwards


def test_a_sibling_runs_another_graph_over_the_same_state() -> None:
    module = captured()
    module.eval()  # the conditions of the capture are those of the sibling, whatever holds now
    graph = Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    sibling = module.with_graph(graph)
    assert sibling.scale is module.scale
    assert list(sibling.state_dict()) == list(module.state_dict())
    assert torch.equal(sibling.train()(X), -X)
    assert not torch.equal(sibling.eval()(X), -X)


def test_editing_and_recompiling_keeps_the_guard() -> None:
    module = captured()
    module.recompile()
    before = original_of(module).eager_forwards
    module.eval()(X)
    assert original_of(module).eager_forwards == before + 1


def test_a_model_may_use_any_attribute_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.original = nn.Linear(4, 4)
            self.tape = nn.Linear(4, 4)
            self.conditions = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conditions(self.tape(self.original(x)))

    model = Odd()
    assert torch.equal(captured(model)(X), model(X))


def test_pickling_is_refused_with_the_way_out() -> None:
    with pytest.raises(WireError, match=r"fxlib\.save"):
        pickle.dumps(captured())


def test_the_signature_is_the_models() -> None:
    assert list(inspect.signature(captured().forward).parameters) == ["x", "bias"]


def test_data_parallel_training_accepts_it(tmp_path: Path) -> None:
    module = captured()
    for parameter in module.block.unused.parameters():
        parameter.requires_grad_(False)
    with process_group(tmp_path):
        parallel = nn.parallel.DistributedDataParallel(module)
        parallel(X).sum().backward()
    assert module.scale.grad is not None
