"""Parts that a compiler computes do what their nodes do, and whatever goes wrong with one runs the nodes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn import functional as F

import fxlib
from fxlib import wire
from fxlib.capture.coerce import as_graph
from fxlib.client.answer_policy import screen
from fxlib.config import CACHE
from fxlib.errors import FxlibWarning, PassError, WireError
from fxlib.passes import Lower, SplitCalls
from fxlib.recipes.recipes import Recipe
from fxlib.runtime import backends
from fxlib.runtime.lowering import parts_of
from fxlib.utils.compare import relative_error
from tests.passes.local.copies import Copies, lowered
from tests.random_programs.programs import random_program
from tests.random_programs.running import differences, outcome
from tests.random_programs.simulation import count, simulated

pytestmark = pytest.mark.slow


class Tower(nn.Module):
    """Layers with an activation in place, a norm, a dropout that rests, and a shape that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.rectify, self.drop = nn.ReLU(inplace=True), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.rectify(self.norm(self.first(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.second(self.drop(x)) * x.shape[1]


@pytest.fixture
def tower() -> Iterator[Tower]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        yield Tower().eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_local_work_is_one_part_which_is_compiled_once_for_each_kind_of_inputs(tower: Tower, copies: Copies) -> None:
    module = lowered(tower)
    assert len(list(parts_of(module.graph))) == 1
    for batch, compiled, runs in ((2, 1, 1), (2, 1, 2), (3, 2, 3), (2, 2, 4)):
        assert torch.equal(module(images(batch)), tower(images(batch)))
        assert (len(copies.compiled), copies.runs) == (compiled, runs)


class Shuffles(nn.Module):
    """Norms that rest around a sum, and sizes that are asked for and computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)) for _ in range(2))
        self.rectify, self.last = nn.ReLU(inplace=True), nn.Linear(8 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.size()
        x = self.rectify(x + self.second(self.rectify(self.first(x))))
        x = x.view(batch, channels // 2, 2, height, width).transpose(1, 2).reshape(x.shape)
        return self.last(x.view(x.size(0), -1)) / 2


def test_norms_that_rest_and_sizes_that_are_computed_with_do_not_divide_a_part(copies: Copies) -> None:
    net, x = Shuffles().eval(), torch.randn(2, 8, 8, 8)
    with torch.no_grad():
        module = lowered(net)
        assert [len(part) for part in parts_of(module.graph)] == [len(module.graph.nodes) - 2]
        assert all(torch.equal(module(x), net(x)) for _ in range(2))


class Attends(nn.Module):
    """Attention without dropout, and selections by numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        x = F.scaled_dot_product_attention(x, x.cos(), x)
        return (x.select(1, 2) + x.narrow(1, 0, 1).squeeze(1)).tanh()


@pytest.mark.usefixtures("copies")
def test_attention_without_dropout_and_selections_by_numbers_do_not_divide_a_part() -> None:
    net, x = Attends().eval(), torch.randn(2, 4, 8)
    with torch.no_grad():
        module = lowered(net)
        assert [len(part) for part in parts_of(module.graph)] == [len(module.graph.nodes) - 2]
        assert all(torch.equal(module(x), net(x)) for _ in range(2))
        with pytest.raises(IndexError, match="index 2 out of range"):
            module(x[:, :2])
        assert torch.equal(module(x), net(x))


class Counts(nn.Module):
    """Divides whole numbers, by two and by others, which may be 0."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = (torch.div(x + 1, 2, rounding_mode="floor") * 3 - 1).abs()
        x //= 2
        x = x * y + 1
        x //= y
        return (torch.div(x - 1, y, rounding_mode="floor") + 1).abs() * 2


@pytest.mark.usefixtures("copies")
def test_divisions_of_whole_numbers_divide_a_part_unless_they_are_by_a_literal() -> None:
    net, x, y = Counts().eval(), torch.arange(4), torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        module = lowered(net)
        parts = [[node.name for node in part] for part in parts_of(module.graph)]
        assert parts == [["add", "div", "mul", "sub", "abs_1", "ifloordiv", "mul_1"], ["add_2", "abs_2", "mul_2"]]
        assert all(torch.equal(module(x, y), net(x, y)) for _ in range(2))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            module(x, y - 1)


def test_assertions_of_an_export_do_not_divide_a_part_and_are_not_compiled(copies: Copies) -> None:
    class Converts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sin().to(torch.float64) * 2.0).to(torch.float32).cos()

    x = torch.randn(4)
    with torch.no_grad():
        exported = torch.export.export(Converts().eval(), (x,))
        names = [str(node.target) for node in exported.graph.nodes]
        module = lowered(as_graph(exported, ()))
        assert "aten._assert_tensor_metadata.default" in names
        assert len(list(parts_of(module.graph))) == 1
        assert all(torch.equal(module(x), Converts()(x)) for _ in range(2))
    assert len(copies.compiled) == 1


def test_the_graph_and_the_state_look_as_they_did(tower: Tower, copies: Copies) -> None:
    captured = fxlib.capture(tower)
    module = lowered(captured)
    module(images())
    assert module.code == captured.code
    assert list(module.state_dict()) == list(tower.state_dict())
    assert dict(module.named_parameters())["first.weight"] is tower.first.weight


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = rpc.rpc_sync("ps0", count, args=(x,))
        y = self.dense(x).relu().sin().cos()
        return (found + y).tanh().exp().sigmoid()


def test_no_part_reaches_over_a_call(copies: Copies) -> None:
    captured = fxlib.capture(Waits())
    module = Recipe(name="both", passes=(SplitCalls(), Lower(backend="copies"))).run(captured).module
    parts = [[node.name for node in part] for part in parts_of(module.graph)]
    assert all("wait" not in name and "issue" not in name for part in parts for name in part)
    assert len(parts) >= 1
    x = torch.randn(2, 4)
    for _ in range(3):
        with simulated(0):
            expected = captured(x)
        with simulated(0):
            assert torch.equal(module(x), expected)
    assert copies.runs >= 2


def check(seed: int) -> int:
    """Compare a program with its parts compiled; return how many parts it has."""
    program = random_program(seed)
    module = lowered(program.module, least_nodes=1)
    outcome(program, module, simulated(7))  # compiles
    for _ in range(2):
        found = differences(outcome(program, program.module, simulated(7)), outcome(program, module, simulated(7)))
        assert not found, f"seed {seed}: {found}\n{program.module.code}"
    return len(list(parts_of(module.graph)))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_program_whose_parts_have_results_of_their_own_does_what_it_did(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "copies", Copies())
        check(seed)


def test_random_programs_have_parts(copies: Copies) -> None:
    assert sum(map(check, range(40))) > 40
    assert copies.runs > 40


class Views(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = x.sin().exp()
        return x.view(-1), z, z.t()


class Writes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        F.rrelu(y.add_(1), training=False, inplace=True)
        return (x.sin() * y).exp().neg()


class Draws(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.dropout(x.sin().exp().neg() * y).cos().tanh().neg()


@pytest.mark.parametrize("model", [Views(), Writes(), Draws()])
def test_views_of_inputs_writes_to_them_and_random_numbers_are_in_no_part(model: nn.Module, copies: Copies) -> None:
    captured = fxlib.capture(model)
    module = lowered(captured, least_nodes=1)
    held = {node.name for part in parts_of(module.graph) for node in part}
    assert held
    assert not held & {"view", "add_", "rrelu", "dropout"}
    for _ in range(2):
        outcomes = []
        for run in (captured, module):
            torch.manual_seed(0)
            x, y = torch.ones(2, 3), torch.full((2, 3), 2.0)
            results = run(x, y)
            if isinstance(results, tuple):
                results[0].mul_(3)  # a view of the input is one afterwards, too
                results[1].add_(1)
            outcomes.append((x, y, results))
        (one, other) = (torch.utils._pytree.tree_leaves(each) for each in outcomes)
        assert all(map(torch.equal, one, other))
    assert copies.runs


class Raises(Copies):
    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise RuntimeError("out of registers")


class Breaks(Copies):
    def results(self, found: tuple[Tensor, ...]) -> Any:
        if self.runs > 1:
            raise RuntimeError("a bus error")
        return found


class Reshapes(Copies):
    def results(self, found: tuple[Tensor, ...]) -> Any:
        return tuple(each[:1] for each in found)


class Loses(Copies):
    def results(self, found: tuple[Tensor, ...]) -> Any:
        return ()


class Strays(Copies):
    def results(self, found: tuple[Tensor, ...]) -> Any:
        return tuple(each + 0.1 * each.abs().max() for each in found)


class Blanks(Copies):
    def results(self, found: tuple[Tensor, ...]) -> Any:
        return tuple(torch.full_like(each, torch.nan) for each in found)


FAILURES = [
    (Raises, "out of registers"),
    (Breaks, "a bus error"),
    (Reshapes, "another form"),
    (Loses, "another number"),
    (Strays, r"computes other numbers than torch: of result 0, 8 of 8 elements differ, by "),
    (Blanks, r"of result 0, 8 of 8 elements differ, by inf"),
]


@pytest.mark.parametrize("backend, told", FAILURES)
def test_a_part_that_cannot_be_compiled_runs_as_it_is(
    tower: Tower, monkeypatch: pytest.MonkeyPatch, backend: type[Copies], told: str
) -> None:
    monkeypatch.setitem(backends.BACKENDS, "copies", backend())
    module = lowered(tower)
    with pytest.warns(FxlibWarning, match=told):
        results = [module(images()) for _ in range(3)]
    assert all(torch.equal(each, tower(images())) for each in results)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(images())


def test_a_compiler_that_hangs_is_left_behind_and_the_program_goes_on(tower: Tower, copies: Copies) -> None:
    compiles, released = copies.compile, threading.Event()

    def compile_late(part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        released.wait(30.0)
        return compiles(part, inputs)

    copies.compile = compile_late  # type: ignore[method-assign]
    module, x = lowered(tower), images()
    assert module._fxlib.lowered.of(module) is not None
    (part,) = module._fxlib.lowered.parts
    part.limit_s = 0.1
    with pytest.warns(FxlibWarning, match=r"copies==.* could not compile it: TimeoutError: it took more than 0.1 s"):
        assert torch.equal(module(x), tower(x))
    released.set()
    assert torch.equal(module(x), tower(x))
    assert copies.runs <= 1  # by the thread that was left behind


def test_other_threads_run_a_part_as_it_is_while_it_is_compiled(tower: Tower, copies: Copies) -> None:
    compiles, begun, released = copies.compile, threading.Event(), threading.Event()

    def compile_late(part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        begun.set()
        assert released.wait(30.0)
        return compiles(part, inputs)

    copies.compile = compile_late  # type: ignore[method-assign]
    module, x = lowered(tower), images()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: torch.no_grad()(module)(x))
        assert begun.wait(30.0)
        assert torch.equal(module(x), tower(x))
        released.set()
        assert torch.equal(first.result(30.0), tower(x))
    assert torch.equal(module(x), tower(x))
    assert len(copies.compiled) == 1


def test_what_was_interrupted_while_it_was_compiled_is_compiled_later(tower: Tower, copies: Copies) -> None:
    compiles = copies.compile

    def interrupted(part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise KeyboardInterrupt

    copies.compile = interrupted  # type: ignore[method-assign]
    module, x = lowered(tower), images()
    with pytest.raises(KeyboardInterrupt):
        module(x)
    copies.compile = compiles  # type: ignore[method-assign]
    for _ in range(2):
        assert torch.equal(module(x), tower(x))
    assert copies.runs == 2


def test_what_another_thread_reads_while_a_part_is_exported_is_the_model_itself() -> None:
    pytest.importorskip("onnxruntime", reason="the extra fxlib[onnxruntime] is not installed")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).eval()
    x, done = torch.ones(2, 8), threading.Event()

    def original() -> set[type]:
        kinds = set[type]()
        while not done.is_set():
            kinds.add(type(torch.no_grad()(model)(x)))
        return kinds

    with torch.no_grad(), ThreadPoolExecutor(5) as pool:
        module, expected = lowered(model, "onnxruntime"), model(x)
        watched = pool.submit(original)
        found = list(pool.map(lambda _: torch.no_grad()(module)(x), range(4)))
        done.set()
        assert watched.result() == {Tensor}
    assert all(relative_error(each, expected) < 1e-5 for each in found)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert all(not part.problem for part in module._fxlib.lowered.parts)


def test_a_compiler_that_may_not_be_started_is_not_waited_for(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    module = Recipe(name="lowered", passes=(Lower(backend="inductor"),)).run(fxlib.capture(tower)).module
    monkeypatch.setattr("os.posix_spawn", refuse)
    with pytest.warns(
        FxlibWarning, match=r"inductor==.* could not compile it: PermissionError: a contained trial starts no"
    ):
        assert torch.equal(module(images()), tower(images()))


def test_an_error_of_the_program_is_its_own(tower: Tower, copies: Copies) -> None:
    module = lowered(tower)
    module(images())
    with pytest.raises(RuntimeError, match="channels") as expected:
        tower(torch.ones(2, 5, 8, 8))
    with pytest.raises(RuntimeError, match="channels") as found:
        module(torch.ones(2, 5, 8, 8))
    assert str(found.value) == str(expected.value)


def test_results_are_laid_out_as_the_program_has_them(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dense(Copies):
        def results(self, found: tuple[Tensor, ...]) -> Any:
            return tuple(each.clone(memory_format=torch.contiguous_format) for each in found)

    class Transposes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.sin().exp().neg()
            return x.t(), x.cos().unsqueeze(1).expand(3, 5, 4)

    monkeypatch.setitem(backends.BACKENDS, "copies", Dense())
    module = lowered(Transposes())
    x = torch.randn(3, 4)
    found = [module(x) for _ in range(2)]
    for each in found:
        assert [result.stride() for result in each] == [(1, 4), (4, 0, 1)]
        assert all(map(torch.equal, each, found[0]))


def test_another_version_of_the_compiler_computes_nothing(tower: Tower, copies: Copies) -> None:
    module = lowered(tower)
    for node in module.graph.nodes:
        if "backend" in node.meta:
            node.meta["backend"] = "copies==0.1"
    module._fxlib.lowered.forget()
    with pytest.warns(FxlibWarning, match=r"measured with copies==0\.1"):
        assert torch.equal(module(images()), tower(images()))
    assert not copies.compiled


def test_where_weights_are_compiled_in_the_original_runs_once_they_change(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeps(Copies):
        keeps_weights = True

    keeping = Keeps()
    monkeypatch.setitem(backends.BACKENDS, "copies", keeping)
    module = lowered(tower)
    for _ in range(2):
        module(images())
    runs = keeping.runs
    with torch.enable_grad():
        module(images()).sum().backward()
    assert tower.second.weight.grad is not None
    tower.second.weight.mul_(2)
    with pytest.warns(FxlibWarning, match="weights from which it was computed have changed"):
        assert torch.equal(module(images()), tower(images()))
    assert keeping.runs == runs


def test_a_part_travels_as_a_name_which_only_a_recipe_that_lowers_may_bring(tower: Tower) -> None:
    captured = fxlib.capture(tower)
    module = lowered(captured, "inductor")
    encoded = wire.encode(module, weights=True)
    received = wire.decode(encoded.graph, blobs=encoded.blobs)
    assert [len(part) for part in parts_of(received.graph)] == [len(part) for part in parts_of(module.graph)]
    bound = wire.decode(wire.encode(module).graph, root=captured)
    with pytest.raises(WireError, match="names a compiler"):
        screen(bound, captured)
    screen(bound, captured, passes=[Lower(backend="inductor")])
    for name in ("gcc==1", "inductor", "inductor==", "inductor==1 2", "inductor==" + "1" * 61):
        encoded.graph.modules[-1].graph.nodes[1].backend = name
        with pytest.raises(WireError, match="not a backend that this version knows"):
            wire.decode(encoded.graph, blobs=encoded.blobs)


def test_what_is_not_there_is_said_before_anything_is_rewritten(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(Copies):
        package = "no-such-distribution"

    monkeypatch.setitem(backends.BACKENDS, "copies", Absent())
    with pytest.raises(PassError, match="not installed"):
        lowered(tower)
    with pytest.raises(ValueError, match="no backend is called 'gcc'; there are openvino, "):
        Lower(backend="gcc")
    with pytest.raises(PassError, match="eval mode"):
        lowered(Tower(), "inductor_freezing")


def test_a_training_step_compiled_by_inductor_has_the_gradients_of_the_original() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    module = lowered(model, "inductor")
    x = torch.randn(5, 8)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxlibWarning)
        for run in (model, module, module):
            model.zero_grad()
            run(x).square().sum().backward()
            found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    for each in found[1:]:
        assert all(relative_error(one, other) < 1e-5 for one, other in zip(each, found[0], strict=True))


def test_where_a_backward_makes_a_graph_the_original_runs_in_place_of_compiled_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    module = lowered(model, "inductor")

    def penalty(run: nn.Module) -> Tensor:
        x = torch.ones(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        model.zero_grad()
        slope.square().sum().backward()
        assert isinstance(model[0].weight.grad, Tensor)
        return model[0].weight.grad.clone()

    expected = penalty(model)
    with pytest.warns(FxlibWarning, match="makes a graph"):
        found = [penalty(module) for _ in range(3)]
    assert all(relative_error(each, expected) < 1e-5 for each in found)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_backend_of_an_extra_computes_a_net(tower: Tower, backend: str) -> None:
    pytest.importorskip(backend, reason=f"the extra fxlib[{backend}] is not installed")
    module = lowered(tower, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxlibWarning)
        found = [module(images()) for _ in range(3)]
    assert all(relative_error(each, tower(images())) < 1e-5 for each in found)


def test_limits_on_one_side_and_logarithms_of_sigmoids_are_right_for_extreme_values() -> None:
    pytest.importorskip("onnxruntime", reason="the extra fxlib[onnxruntime] is not installed")

    class Limits(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
            limits = x.clamp(max=1.0), x.clamp_min(-0.5), x.clamp(-1, 1), (x * 2).clamp(min=0.1).clamp(max=0.5)
            return *limits, F.normalize(x, dim=0), F.logsigmoid(x), i.clamp(min=2), i.clamp_max(3)

    x, i = torch.tensor([-torch.inf, torch.inf, -200.0, 200.0, 1e-3, -0.7]), torch.arange(-3, 9)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FxlibWarning)
        module = lowered(Limits().eval(), "onnxruntime")
        found = [module(x, i) for _ in range(2)]
    for each in found:
        for one, other in zip(each, Limits()(x, i), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_second_start_is_served_from_what_the_first_one_kept(
    tower: Tower, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend, reason=f"the extra fxlib[{backend}] is not installed")
    monkeypatch.setenv(CACHE, str(tmp_path / "compiled"))
    lowered(tower, backend)(images())
    assert len(list((tmp_path / "compiled").iterdir())) == 1
    for converter in ("fxlib.runtime.backends._converted", "torch.onnx.export"):
        monkeypatch.setattr(converter, lambda *_, **__: pytest.fail("it is converted again"))
    module = lowered(tower, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxlibWarning)
        found = [module(images()) for _ in range(2)]
    assert all(relative_error(each, tower(images())) < 1e-5 for each in found)
