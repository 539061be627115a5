"""What a forward asks of Python and of torch: answered as a run would answer it, or refused."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.rpc import rpc_sync
from torch.fx import Tracer
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

import fxlib
from fxlib.errors import CaptureError
from tests.capture import servers
from tests.capture.checks import same

TENSORS: dict[str, Callable[[Any], Any]] = {
    "argument": lambda x: x,
    "arithmetic": lambda x: 2 * x + 1,
    "comparison": lambda x: x > 0,
    "element": lambda x: x[0],
    "function": lambda x: F.relu(torch.sum(x, dim=0)),
    "method": lambda x: x.view(-1).float().contiguous(),
    "attribute": lambda x: x.T * 1,
    "constant": lambda _: torch.zeros(2),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_known_for_one(make: Callable[[Any], Any]) -> None:
    def forward(x: torch.Tensor) -> Any:
        y = make(x)
        asked: Any = [isinstance(y, torch.Tensor), torch.is_tensor(y), not isinstance(y, (list, dict, Number))]
        return y * 3 if all(asked) else y

    same(forward, torch.zeros(2, 2))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        found = [self.linear(x), self.weight, self.mean]
        kinds = [nn.Parameter if isinstance(each, nn.Parameter) else torch.Tensor for each in found]
        assert kinds == [torch.Tensor, nn.Parameter, torch.Tensor]
        return [each * 2 if isinstance(each, torch.Tensor) else each for each in found]


def test_what_a_module_holds_and_makes_is_known() -> None:
    same(Layers(), torch.zeros(2, 2))


@pytest.mark.usefixtures("world")
def test_a_declared_result_is_of_its_declared_class() -> None:
    def forward(x: torch.Tensor) -> Any:
        result = rpc_sync("ps0", servers.several, (x,))
        return [isinstance(result, tuple), isinstance(result[1], list), isinstance(result[2], dict)]

    assert fxlib.capture(forward)(torch.ones(1)) == [True, True, True]


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "undeclared result": lambda x: rpc_sync("ps0", servers.pair, (x,)),
    "element of one": lambda x: rpc_sync("ps0", servers.pair, (x,))[0],
    "several": lambda x: torch.max(x, dim=0),
    "number": lambda x: x.shape[0],
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_a_class_that_only_a_run_knows_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(CaptureError, match="the class of a traced value is asked for"):
        fxlib.capture(lambda x: isinstance(make(x), (torch.Tensor, int)))


def draws(x: torch.Tensor) -> Any:
    return x if random.random() < 2 else -x


def draws_an_array(x: torch.Tensor) -> Any:
    return x * float(np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("forward", [draws, draws_an_array])
def test_random_numbers_of_pythons_and_numpys_are_refused(forward: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="was drawn from"):
        fxlib.capture(forward)


class DrawsInAnotherThread(Tracer):
    """A tracer whose first traces, so many, meet a draw of another thread."""

    left = 0
    asked = SimpleQueue[bool]()
    drawn = SimpleQueue[float]()

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        if DrawsInAnotherThread.left:
            DrawsInAnotherThread.left -= 1
            self.asked.put(True)
            self.drawn.get()
        return super().is_leaf_module(module, qualified_name)

    @classmethod
    def draw(cls) -> None:
        while cls.asked.get():
            cls.drawn.put(random.random())


@pytest.fixture
def other_thread() -> Iterator[None]:
    thread = threading.Thread(target=DrawsInAnotherThread.draw)
    thread.start()
    yield
    DrawsInAnotherThread.asked.put(False)
    thread.join()


@pytest.mark.usefixtures("other_thread")
def test_a_draw_of_another_thread_is_not_the_forwards() -> None:
    DrawsInAnotherThread.left = 1
    captured = fxlib.capture(nn.Sequential(nn.ReLU()), tracer_class=DrawsInAnotherThread)
    assert not DrawsInAnotherThread.left
    assert torch.equal(captured(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


@pytest.mark.usefixtures("other_thread")
def test_a_draw_at_each_attempt_is_taken_for_the_forwards() -> None:
    DrawsInAnotherThread.left = 2
    with pytest.raises(CaptureError, match="was drawn from"):
        fxlib.capture(nn.Sequential(nn.ReLU()), tracer_class=DrawsInAnotherThread)
    with pytest.raises(CaptureError, match="was drawn from"):
        fxlib.capture(draws)


@contextmanager
def hooks() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 0, lambda x: x):
        yield


def asks_for_autocast(x: torch.Tensor) -> Any:
    return x * 3 if torch.is_autocast_enabled("cpu") else x


def hooks_what_is_saved(x: torch.Tensor) -> Any:
    with hooks():
        return x.exp()


def sets_the_default_dtype(x: torch.Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    return x + torch.zeros(1)


def chooses_attention(x: torch.Tensor) -> Any:
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("forward", [asks_for_autocast, hooks_what_is_saved, sets_the_default_dtype, chooses_attention])
def test_modes_that_a_graph_cannot_hold_are_refused(forward: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError):
        fxlib.capture(forward)
    assert torch.get_default_dtype() is torch.float32


def test_a_forward_knows_the_autocast_that_it_enters() -> None:
    def forward(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.mm(x) * (3 if torch.is_autocast_enabled("cpu") else 1)

    same(forward, torch.zeros(2, 2))


def test_checkpoints_are_traced_through() -> None:
    same(lambda x: checkpoint(torch.exp, x, use_reentrant=False), torch.zeros(2))


@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_checkpoint_with_re_entry_is_refused(how: Literal["trace", "export"]) -> None:
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(CaptureError, match=r"with re-entry .* use_reentrant=False"):
        fxlib.capture(lambda x: checkpoint(torch.exp, x, use_reentrant=True), sample_inputs=[x], how=how)
    assert torch.is_grad_enabled()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class Counted(Checkpointed):
    @override
    def part(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1)
        return self.linear(x)


@pytest.mark.parametrize("kind", [Checkpointed, Counted])
def test_a_checkpoint_of_what_writes_to_buffers_does_it_again_in_backward_and_is_refused(
    kind: type[Checkpointed],
) -> None:
    for samples in (None, [torch.randn(3, 4)]):
        with pytest.raises(CaptureError, match="its recomputation writes to them again"):
            fxlib.capture(kind(), sample_inputs=samples)


def test_in_eval_mode_it_does_not() -> None:
    model, x = Checkpointed().eval(), torch.randn(3, 4)
    assert torch.equal(fxlib.capture(model)(x), model(x))
