"""What a graph cannot hold is refused: where, why, and what to do."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rpc import rpc_async, rpc_sync
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

import fxlib
from fxlib.errors import CaptureError, FxlibWarning
from tests.capture import servers
from tests.capture.servers import double

POOL = ThreadPoolExecutor(1)


def decides_on_a_value(x: torch.Tensor) -> Any:
    return x if x.sum() > 0 else -x  # HERE


def decides_on_a_remote_result(x: torch.Tensor) -> Any:
    if rpc_sync("ps0", double, (x,)).any():  # HERE
        return x
    return -x


def iterates_an_undeclared_result(x: torch.Tensor) -> Any:
    return sum(value for _, value in enumerate(rpc_sync("ps0", servers.pair, (x,))))  # HERE


def counts_an_undeclared_result(x: torch.Tensor) -> Any:
    return len(rpc_sync("ps0", servers.pair, (x,)))  # HERE


def unpacks_too_many(x: torch.Tensor) -> Any:
    a, b = rpc_sync("ps0", servers.several, (x,))  # HERE
    return a + b


def indexes_beyond_the_declared(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", servers.several, (x,))[3]  # HERE


def sends_a_lambda(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", lambda y: y, (x,))  # HERE


def sends_a_local_function(x: torch.Tensor) -> Any:
    def local(y: torch.Tensor) -> torch.Tensor:
        return y

    return rpc_sync("ps0", local, (x,))  # HERE


def registers_a_callback(x: torch.Tensor) -> Any:
    return rpc_async("ps0", double, (x,)).then(lambda future: future.value() + 1).wait()  # HERE


def asks_whether_it_is_done(x: torch.Tensor) -> Any:
    future = rpc_async("ps0", double, (x,))
    return future.wait() if future.done() else x  # HERE


def takes_the_value_without_waiting(x: torch.Tensor) -> Any:
    return rpc_async("ps0", double, (x,)).value()  # HERE


def chains_collected_futures(x: torch.Tensor) -> Any:
    return torch.futures.collect_all([rpc_async("ps0", double, (x,))]).then(lambda futures: futures)  # HERE


def names_the_server_by_a_traced_value(x: torch.Tensor) -> Any:
    return rpc_sync(f"ps{x.sum()}", double, (x,))  # HERE


def sends_arguments_of_unknown_number(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", double, args=x.shape)  # HERE


def makes_an_rref_to_a_nest(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", double, args=(rpc.RRef([x]),))  # HERE


def starts_a_thread(x: torch.Tensor) -> Any:
    threading.Thread(target=rpc_sync, args=("ps0", double, (x,))).start()  # HERE
    return x


def hands_work_to_a_pool(x: torch.Tensor) -> Any:
    return POOL.submit(rpc_sync, "ps0", double, (x,)).result()  # HERE


def seeds_the_generator(x: torch.Tensor) -> Any:
    torch.manual_seed(3)  # HERE
    return torch.rand(3) + x


def forks_the_generator(x: torch.Tensor) -> Any:
    with torch.random.fork_rng():  # HERE
        return torch.rand(3) + x


def infers(x: torch.Tensor) -> Any:
    with torch.inference_mode():  # HERE
        return x * 2


def sets_the_data_of_a_tensor(x: torch.Tensor) -> Any:
    x.data = x * 2  # HERE
    return x


def captures_another(x: torch.Tensor) -> Any:
    return fxlib.capture(nn.Linear(2, 2))(x)  # HERE


def returns_a_generator(x: torch.Tensor) -> Any:
    return (rpc_sync("ps0", double, (x,)) for _ in range(2))


def catches_errors_of_a_call(x: torch.Tensor) -> Any:
    for _ in range(3):
        try:
            return rpc_sync("ps0", double, (x,))  # HERE
        except (RuntimeError, TimeoutError):
            continue
    return x


def catches_all_errors_of_a_helper(x: torch.Tensor) -> Any:
    try:
        return servers.helped(x)  # HERE
    except:  # noqa: E722
        return x


def decides_on_what_was_written(x: torch.Tensor) -> Any:
    count = torch.tensor(1)
    count += x.sum()
    return x * int(count)  # HERE


def fails_by_itself(x: torch.Tensor) -> Any:
    return {1: x}[2]  # HERE


REFUSED: list[Callable[..., Any]] = [
    value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__ and callable(value)
]


def line_of(forward: Callable[..., Any]) -> str:
    code = forward.__code__
    lines = Path(__file__).read_text().splitlines()
    marked = [n for n in range(code.co_firstlineno, len(lines)) if "# HERE" in lines[n - 1]]
    return f"{__file__}:{marked[0]}"


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_the_refusal_names_the_place_and_the_way_out(forward: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError) as refusal:
        fxlib.capture(forward)

    assert refusal.value.hint
    if forward is not returns_a_generator:
        assert refusal.value.where == line_of(forward)


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    model.forward = lambda x: x
    with pytest.raises(CaptureError, match="replaced on the instance"):
        fxlib.capture(model)


def test_a_contract_that_is_none_is_refused() -> None:
    with pytest.raises(CaptureError, match="no Contract"):
        fxlib.capture(nn.Linear(2, 2), contracts={"a:b": {"pure": True}})  # type: ignore[dict-item]


def test_a_gradient_that_cannot_be_found_is_refused() -> None:
    contract = fxlib.Contract(reads=frozenset({"t"}), gradient="nowhere.at_all:push")
    with pytest.raises(CaptureError, match=r"nowhere\.at_all:push"):
        fxlib.capture(lambda x: rpc_sync("ps0", double, (x,)), contracts={"tests.capture.servers:double": contract})


def test_out_into_a_result_whose_gradient_is_pushed_is_refused_where_torch_would_refuse_it() -> None:
    def adds(x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, 1.0, out=rpc_sync("ps0", servers.embed, (x,)).view(-1))

    with pytest.raises(CaptureError, match=r"tests\.capture\.servers:push.*copy_"):
        fxlib.capture(adds)
    with torch.no_grad():
        fxlib.capture(adds)


def test_a_batched_form_that_cannot_be_found_is_refused() -> None:
    contract = fxlib.Contract(reads=frozenset({"t"}), batched_by="nowhere.at_all:many")
    with pytest.raises(CaptureError, match=r"nowhere\.at_all:many"):
        fxlib.capture(lambda x: rpc_sync("ps0", double, (x,)), contracts={"tests.capture.servers:double": contract})


def test_a_contract_for_no_call_is_warned_of() -> None:
    stated = {"tests.capture.servers:double": fxlib.Contract(pure=True), "typo:double": fxlib.Contract(pure=True)}
    with pytest.warns(FxlibWarning, match="typo:double") as caught:
        fxlib.capture(lambda x: rpc_sync("ps0", double, (x,)), contracts=stated)
    assert len(caught) == 1


class Hides(nn.Module):
    def forward(self, x: torch.Tensor, inf: torch.Tensor) -> torch.Tensor:
        return x.clamp(max=float("inf")) + inf


class HidesNothing(nn.Module):
    def forward(self, x: torch.Tensor, slice: torch.Tensor, *, inf: float = 0.5) -> torch.Tensor:  # noqa: A002
        return x * slice + inf


def test_a_part_by_the_name_of_the_module_itself_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("self", nn.Linear(3, 3))
    with pytest.raises(CaptureError, match="the value 'self' hides the module itself"):
        fxlib.capture(model)


@pytest.mark.slow
def test_an_argument_that_hides_what_generated_code_calls_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Hides: the argument 'inf' hides what .* Rename the argument"):
        fxlib.capture(Hides())
    x = torch.randn(3)
    assert torch.equal(fxlib.capture(HidesNothing())(x, x), HidesNothing()(x, x))


def test_a_module_whose_name_cannot_stand_in_code_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("class", nn.Linear(2, 2))
    with pytest.raises(CaptureError, match=r"a name in it cannot stand in code: .*self\.class\("):
        fxlib.capture(model)


def test_a_legacy_variable_of_a_traced_value_is_refused_and_not_read_as_memory() -> None:
    with pytest.raises(CaptureError, match="calls Variable"):
        fxlib.capture(lambda x: torch.autograd.Variable(x) + 1)
    assert torch.equal(torch.autograd.Variable(torch.ones(2)), torch.ones(2))


def _by_default(x: Tensor, scale: Tensor = torch.ones(3)) -> Tensor:  # noqa: B008 - as programs have it
    return x * scale


def test_a_tensor_as_a_default_is_refused_by_tracing_and_exported() -> None:
    with pytest.raises(CaptureError, match="'scale' has a tensor as its default") as refused:
        fxlib.capture(_by_default)
    assert __file__ in refused.value.where
    captured = fxlib.capture(_by_default, sample_inputs=[torch.randn(3)])
    x = torch.randn(3)
    assert torch.equal(captured(x), x)


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x * 2


@torch.jit.script
def _noise(size: int) -> Tensor:
    return torch.rand(size)


class Doubles(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


_SCRIPTED_MODULES = [torch.jit.script(Doubles())]  # in a list it is no submodule


def _calls_torchscript(x: Tensor) -> Tensor:
    found: Tensor = _scripted(x)
    return found + 1


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    "forward, called",
    [
        (_calls_torchscript, "_scripted"),
        (lambda x: x + _noise(3), "_noise"),
        (lambda x: checkpoint(_scripted, x, use_reentrant=False), "_scripted"),
        (lambda x: _SCRIPTED_MODULES[0].forward(x) + 1, "Doubles.forward"),
    ],
)
def test_calls_of_torchscript_are_refused(forward: Callable[[Tensor], Tensor], called: str, how: Any) -> None:
    x = torch.randn(3)
    for _ in range(3):  # once it has run with gradients, TorchScript detaches what it computes in an export
        forward(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(CaptureError, match=f"calls {called}, a function of TorchScript") as refused:
        fxlib.capture(forward, sample_inputs=[x], how=how)
    assert __file__ in refused.value.where


def test_a_function_that_calls_torchscript_stays_whole() -> None:
    x = torch.randn(3, requires_grad=True)
    captured = fxlib.capture(lambda x: _calls_torchscript(x) + 1, wrap=[_calls_torchscript])
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(captured(x).sum(), x)[0], torch.full((3,), 2.0))


def test_modules_of_torchscript_are_refused() -> None:
    x = torch.randn(3)
    scripted = torch.jit.trace(nn.Linear(3, 3), x)
    with pytest.raises(CaptureError, match="0: TopLevelTracedModule is a module of TorchScript"):
        fxlib.capture(nn.Sequential(scripted), sample_inputs=[x])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_method_of_a_class_of_cpp_is_no_torchscript() -> None:
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    packed: Any = torch.ops.quantized.linear_prepack(weight, None)
    x = torch.randn(2, 2)
    assert torch.equal(fxlib.capture(lambda x: x * packed.unpack()[0].dequantize())(x), x)
