"""A model that could not be captured, or whose own forward runs, has its gradients pushed all the same."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.errors import FxlibError, FxlibWarning
from fxlib.runtime.gradients import plain_forward
from fxlib.runtime.gradients.plain_forward import train_as_written
from fxlib.runtime.ops import remote_call
from fxlib.runtime.push_gradients import push_gradients
from fxlib.spec.contract import Contract
from tests.runtime.remote_functions import NAME, add, read

pytestmark = pytest.mark.usefixtures("servers")
ROWS = torch.tensor([1, 2])


class Weighs(nn.Module):
    """Neither tracing nor export takes it: it decides by a value that a server told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.fails: Any = False

    def forward(self, rows: torch.Tensor) -> Any:
        a = rpc.rpc_sync("ps0", read, args=("a", rows))
        if float(a.detach().sum()) > 1e6 or self.fails:
            raise ValueError("too much")
        b = rpc.rpc_sync("ps0", read, args=("b", rows))
        return self.weight * a + b * 3


def pushed() -> list[str]:
    return remote_call("ps0", f"{NAME}:read_log", (), {}, None)


def refused(model: nn.Module, **contracts: Contract) -> nn.Module:
    train_as_written(model, contracts)
    return model


def test_a_refused_model_pushes_what_the_program_would_in_its_order() -> None:
    model = refused(Weighs())
    for _ in range(2):
        model(ROWS).sum().backward()
        push_gradients(model)
        assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"]
    push_gradients(model)
    assert pushed() == []
    with torch.no_grad():
        assert not model(ROWS).requires_grad
    assert torch.equal(model(ROWS), Weighs()(ROWS))


class WeighsOne(Weighs):
    def forward(self, rows: torch.Tensor) -> Any:
        found = rpc.rpc_sync("ps0", read, args=("a", rows))
        return self.weight * found


def test_a_model_that_was_optimized_before_the_servers_were_there_says_so_and_can_be_optimized_again() -> None:
    model = WeighsOne()
    train_as_written(model, {}, calls=False)
    model(ROWS).sum().backward()
    with pytest.warns(FxlibWarning, match="before init_rpc: gradients of its lookups are not pushed"):
        push_gradients(model)
    assert pushed() == []
    refused(model)(ROWS).sum().backward()
    push_gradients(model)
    assert pushed() == ["a [2.0, 2.0]"]


def test_a_model_is_watched_as_another_one_of_its_class_is(recwarn: pytest.WarningsRecorder) -> None:
    refused(Weighs())
    model = Weighs()
    train_as_written(model, {}, calls=False)
    model(ROWS).sum().backward()
    push_gradients(model)
    assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"]
    assert not [each for each in recwarn if issubclass(each.category, FxlibWarning)]


class Cached(nn.Identity):
    forward: Any = functools.lru_cache(nn.Identity.forward)


@pytest.mark.parametrize("model", [torch.jit.script(nn.Linear(2, 2)), Cached()], ids=["script", "callable"])
def test_a_model_without_a_plain_forward_is_trained_as_written(model: nn.Module) -> None:
    x = torch.ones(2, 2)
    assert torch.equal(refused(model)(x), model(x))


@pytest.mark.slow
def test_the_client_s_refused_model_trains_on(unreachable: fxlib.Client) -> None:
    model = Weighs()
    workload = fxlib.Workload(batches=[ROWS], servers=[fxlib.Server(name="ps0")])
    with pytest.warns(FxlibWarning, match="training goes on with the original module"):
        result = unreachable.optimize(model, workload, progress=False)
    assert result.module is model
    result.module(ROWS).sum().backward()
    push_gradients(nn.Sequential(result.module))
    assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"]


@pytest.fixture
def unreachable() -> fxlib.Client:
    return fxlib.connect("localhost:1", patience_s=0.1)


def test_a_forward_that_raised_leaves_nothing_and_watches_nothing() -> None:
    model: Any = refused(Weighs())
    model.fails = True
    with pytest.raises(ValueError, match="too much"):
        model(ROWS)
    assert plain_forward._thread.watch is None
    assert not rpc.rpc_sync("ps0", read, args=("a", ROWS)).requires_grad
    push_gradients(model)
    assert pushed() == []


class Adds:
    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rref: Any = rpc.remote("ps0", Adds)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rref.rpc_sync().add(x) * 2


def test_a_method_has_the_contract_that_the_workload_states() -> None:
    model = Method()
    train_as_written(model, {".add": Contract(reads=frozenset(["weight"]), gradient=f"{NAME}:take_gradient")})
    model(torch.ones(2)).sum().backward()
    (entry,) = plain_forward._TRAINED[model].tape.take()
    assert (entry.call.gradient, entry.call.index) == (f"{NAME}:take_gradient", 0)
    assert torch.equal(entry.call.gradient_of_result(), torch.full((2,), 2.0))


class Issues(nn.Module):
    def forward(self, rows: torch.Tensor) -> Any:
        issued = rpc.rpc_async("ps0", read, args=("a", rows))
        return issued.wait() * torch.ones(1, requires_grad=True) + rpc.rpc_sync("ps0", add, args=(rows,))


class Tool:
    """Puts a function of its own over torch's, and notes what is sent."""

    def __init__(self) -> None:
        api: Any = rpc.api
        replaced, self.sent = api._invoke_rpc, list[str]()

        def noted(to: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.sent.append(function.__name__)
            return replaced(to, function, *args, **kwargs)

        api._invoke_rpc = noted


def test_a_tool_that_swaps_torch_s_function_and_restores_it_ends_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inspect.unwrap(rpc.api._invoke_rpc)
    monkeypatch.setattr(rpc.api, "_invoke_rpc", plain)  # as if nobody had trained in this process
    model = refused(Weighs())

    def train() -> None:
        for forward in (model, model.forward):
            forward(ROWS).sum().backward()
            push_gradients(model)
            assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"]

    Tool()
    train()
    monkeypatch.setattr(rpc.api, "_invoke_rpc", plain)
    train()
    tool = Tool()  # which says nothing of what is below it, where ours is
    train()
    train()
    assert tool.sent.count("read") == 8
    in_place = rpc.api._invoke_rpc
    train()
    assert rpc.api._invoke_rpc is in_place


def test_gradients_that_go_nowhere_are_a_warning_once() -> None:
    model = refused(Issues())
    model(ROWS).sum().backward()
    with pytest.warns(FxlibWarning, match=r"go nowhere: .*:read, .*:add\."):
        push_gradients(model)
    model(ROWS).sum().backward()
    push_gradients(model)
    assert pushed() == []


def test_a_forward_that_is_called_by_its_own_name_is_pushed_for(recwarn: pytest.WarningsRecorder) -> None:
    model = refused(Weighs())
    for _ in range(2):
        model.forward(ROWS).sum().backward()
        push_gradients(model)
        assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"]
    model.forward(ROWS).sum().backward()
    model(ROWS).sum().backward()
    with pytest.warns(FxlibWarning, match="the gradients of 2 forwards"):
        push_gradients(model)
    assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"] * 2
    assert not rpc.rpc_sync("ps0", read, args=("a", ROWS)).requires_grad
    assert not plain_forward._TRAINED[model].pending


class Pools(nn.Module):
    """Fetches its rows by threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, rows: torch.Tensor) -> Any:
        with ThreadPoolExecutor(2) as pool:
            a, b = pool.map(lambda name: rpc.rpc_sync("ps0", read, args=(name, rows)), "ab")
        return self.weight * a + b


def test_gradients_of_what_other_threads_fetch_are_not_silently_missing() -> None:
    model = refused(Pools())
    model(ROWS).sum().backward()
    with pytest.warns(FxlibWarning, match=r"other threads fetch while its forward runs are not pushed: [^,]*:read\. "):
        push_gradients(model)
    model(ROWS).sum().backward()
    push_gradients(model)
    assert pushed() == []
    assert not plain_forward._RUNNING


def test_a_captured_module_whose_original_runs_pushes_for_it() -> None:
    class Reads(nn.Module):
        def forward(self, rows: torch.Tensor) -> Any:
            return rpc.rpc_sync("ps0", read, args=("a", rows)) * 2

    captured = fxlib.capture(Reads())
    captured.eval()
    captured(ROWS).sum().backward()
    push_gradients(captured)
    assert pushed() == ["a [2.0, 2.0]"]


def test_what_the_original_issues_itself_is_not_silently_missing() -> None:
    captured = fxlib.capture(Issues())
    captured.eval()
    captured(ROWS)
    with pytest.raises(FxlibError, match="which does not track what it issues itself"):
        push_gradients(captured)


@pytest.mark.slow
def test_a_model_that_is_gone_is_forgotten() -> None:
    model = refused(Weighs())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class OwnLoop(nn.Module):
    """Pushes by itself: it keeps its rows, and asks for their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.rows: Any = None
        self.interrupts = False

    def forward(self, rows: torch.Tensor) -> None:
        self.rows = rpc.rpc_sync("ps0", read, args=("a", rows)).requires_grad_()
        if self.interrupts:
            raise KeyboardInterrupt
        self.loss = (self.weight * self.rows).sum()


def test_a_program_that_pushes_by_itself_finds_the_gradients_of_its_rows() -> None:
    plain: Any = OwnLoop()
    model: Any = refused(OwnLoop())
    for each in (plain, model):
        each(ROWS)
        each.loss.backward()
    assert torch.equal(model.rows.grad, plain.rows.grad)
    push_gradients(model)  # a forward that returns nothing is one, too
    assert pushed() == ["a [2.0, 2.0]"]


def test_a_copy_of_a_refused_model_is_an_ordinary_module() -> None:
    model = refused(Weighs())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert not copied(ROWS).detach().equal(torch.zeros(2))
    copied(ROWS).sum().backward()
    model(ROWS).sum().backward()
    push_gradients(model)
    assert pushed() == ["a [2.0, 2.0]", "b [3.0, 3.0]"]


def test_after_an_interrupt_nothing_is_watched() -> None:
    model: Any = refused(OwnLoop())
    model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model(ROWS)
    rows = rpc.rpc_sync("ps0", read, args=("a", ROWS))
    assert not rows.requires_grad
    model.interrupts = False
    model(ROWS)
    model.loss.backward()
    push_gradients(model)
    assert pushed() == ["a [2.0, 2.0]"]


def test_a_comparison_pushes_nothing_of_its_own_and_leaves_what_is_due() -> None:
    for module in (refused(WeighsOne()), fxlib.capture(WeighsOne())):
        module(ROWS).sum().backward()
        assert fxlib.verify(module, module, [ROWS])
        push_gradients(module)
        assert pushed() == ["a [2.0, 2.0]"]
        assert fxlib.verify(module, module, [ROWS])
        push_gradients(module)
        assert pushed() == []


class Rated(WeighsOne):
    """Has its loss in a method, as models of others often do."""

    def loss(self, rows: torch.Tensor) -> Any:
        return self(rows).sum()


@pytest.mark.parametrize("rewritten", [False, True], ids=["captured", "rewritten"])
def test_a_forward_that_a_method_of_the_model_runs_is_pushed_for(*, rewritten: bool) -> None:
    captured: Any = fxlib.capture(Rated())
    module: Any = fxlib.optimize(captured) if rewritten else captured
    with pytest.warns(FxlibWarning, match=r"a method of Rated runs the model's own forward.*call the module itself"):
        module.loss(ROWS).backward()
    push_gradients(module)
    assert pushed() == ["a [2.0, 2.0]"]
    module.loss(ROWS).backward()
    module(ROWS).sum().backward()
    with pytest.warns(FxlibWarning, match="the gradients of 2 forwards"):
        push_gradients(module)
    assert pushed() == ["a [2.0, 2.0]"] * 2
    with torch.no_grad():
        module.loss(ROWS)
    push_gradients(module)
    assert pushed() == []


class Decorated(Rated):
    @torch.autocast("cpu", enabled=False)
    def forward(self, rows: torch.Tensor) -> Any:
        found = rpc.rpc_sync("ps0", read, args=("a", rows))
        return self.weight * found


def test_a_decorated_forward_that_a_method_of_the_model_runs_is_pushed_for() -> None:
    module: Any = fxlib.capture(Decorated())
    with pytest.warns(FxlibWarning, match="a method of Decorated"):
        module.loss(ROWS).backward()
    push_gradients(module)
    assert pushed() == ["a [2.0, 2.0]"]


def test_a_comparison_with_the_model_after_one_of_its_methods_was_used_pushes_nothing_of_its_own() -> None:
    model = Rated()
    module: Any = fxlib.capture(model)
    with pytest.warns(FxlibWarning, match="a method of Rated"):
        module.loss(ROWS).backward()
    assert fxlib.verify(model, module, [ROWS])
    push_gradients(module)
    assert pushed() == ["a [2.0, 2.0]"]
    assert fxlib.verify(model, module, [ROWS])
    push_gradients(module)
    assert pushed() == []


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> Any:
        return self.inner(rows) * 3

    def loss(self, rows: torch.Tensor) -> Any:
        return self(rows).sum()


class WeighsTwo(WeighsOne):
    def forward(self, rows: torch.Tensor) -> Any:
        return super().forward(rows) + rpc.rpc_sync("ps0", read, args=("b", rows))


def test_what_a_rewritten_part_calls_is_pushed_for_by_itself_where_a_method_runs_the_model() -> None:
    module: Any = fxlib.capture(Holds(fxlib.optimize(fxlib.capture(WeighsTwo()))))
    with warnings.catch_warnings(action="error"):
        module.loss(ROWS).backward()
        push_gradients(module)
    assert pushed() == ["a [6.0, 6.0]", "b [3.0, 3.0]"]


class Surrounds(WeighsOne):
    def forward(self, rows: torch.Tensor) -> Any:
        first = rpc.rpc_sync("ps0", read, args=("first", rows))
        return first + super().forward(rows) + rpc.rpc_sync("ps0", read, args=("last", rows))


def test_a_forward_that_runs_that_of_its_base_pushes_in_program_order() -> None:
    refused(WeighsOne())
    model = refused(Surrounds())
    model.forward(ROWS).sum().backward()
    push_gradients(model)
    assert pushed() == ["first [1.0, 1.0]", "a [2.0, 2.0]", "last [1.0, 1.0]"]
