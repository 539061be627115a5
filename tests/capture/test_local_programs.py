"""What a forward does besides remote calls stays what it is: mutations, random numbers, constants, modes."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, zeros
from torch.nn import functional as F
from torch.nn.modules._functions import CrossMapLRN2d

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError
from tests.capture.checks import assert_same, same
from tests.shared.many import many

X = torch.zeros(4, 3)
CONSTANT = torch.arange(3.0)


def writes_to_its_input(x: torch.Tensor) -> Any:
    x += 1
    x[0] = 7
    x[1:, :2] *= 3
    x.mul_(2)
    return x @ x.T


def powers_of_negative_numbers(x: torch.Tensor) -> Any:
    number = torch.tensor(2)
    return x + (-1) ** number + (-2.0) ** number + (-1) ** x.sign() * 3 + (-0.0) ** number + (2j).conjugate() ** number


def writes_through_a_view(x: torch.Tensor) -> Any:
    view = x.view(-1)
    view[2:5] -= 1
    y = x.T
    y /= 3
    return x + 1


def counts_with_numbers(x: torch.Tensor) -> Any:
    offset = x.shape[0]
    start = offset
    offset += 2
    offset *= x.size(1)
    return x.sum() * offset + start


def counts_with_what_may_be_a_number(x: torch.Tensor, n: Any = 3) -> Any:
    start = n
    n += 2
    y = x
    y += n
    return x * start + n + y


def reuses_a_fresh_tensor_of_zeros(x: torch.Tensor) -> Any:
    total = torch.zeros(3)
    total += x.sum(0)
    total[0] = 1
    return total, torch.full((2,), 3.0).add_(1), torch.arange(4) + 1


def makes_tensors_of_sizes(x: torch.Tensor) -> Any:
    rows, columns = x.size()
    shape = [rows, columns]
    ahead = torch.triu(torch.ones([columns, columns]), diagonal=1) == 1
    state = torch.zeros(1, x.size(0), 3).to(x.device)
    state[0] += torch.full(size=shape, fill_value=2.0, dtype=x.dtype)
    places = zeros(x.size()) + torch.arange(columns).unsqueeze(0) * torch.tensor([rows, 1, columns])
    kept = torch.rand((x.shape[0],) + (1,) * 1) > 0.5
    return (x + state[0] + places) @ ahead.float() * kept, x[torch.randperm(rows)]


def decides_on_numbers_in_fresh_tensors(x: torch.Tensor) -> Any:
    for index in torch.arange(3).tolist():
        x = x + index
    steps = [step * 2 for step in torch.arange(2)]
    grid = torch.ones(2, 3)
    if torch.tensor([1]) and grid.shape[0] == 2 and len(grid) == grid.size(0):
        x = x * int(torch.tensor(2)) + torch.linspace(0, 1, 3)[1].item()
    return x + steps[1] + grid.mul_(3).sum()


def tidies_up(x: torch.Tensor) -> Any:
    try:
        with torch.no_grad():
            y = x * 2
    finally:
        z = x + 1
    return y + z


def draws_random_numbers(x: torch.Tensor) -> Any:
    noise = torch.randn(4, 3) * torch.rand(1)
    return x + noise + torch.rand_like(x), torch.randperm(5), F.dropout(torch.ones(9), 0.5, training=True)


def computes_on_constants(x: torch.Tensor) -> Any:
    scaled = CONSTANT * 2
    rows = [row * 2 for row in CONSTANT]
    return x * scaled + CONSTANT.shape[0] + sum(rows) + (1 if CONSTANT.dtype is torch.float32 else 0)


def switches_grad_mode(x: torch.Tensor) -> Any:
    weight = x.clone().requires_grad_()
    with torch.no_grad():
        a = weight * 2
        with torch.enable_grad():
            b = weight * 3
        c = weight * 4
    torch.set_grad_enabled(False)
    d = weight * 5
    torch.set_grad_enabled(True)
    with torch.set_grad_enabled(False):
        e = weight * 6
    return a, b, c, d, e, weight * 7


@torch.no_grad()
def without_grad(x: torch.Tensor) -> Any:
    return x.clone().requires_grad_() * 2


def calls_a_decorated_helper(x: torch.Tensor) -> Any:
    return without_grad(x), torch.enable_grad()(torch.relu)(x)


def autocasts(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ x.T
        with torch.autocast("cpu", enabled=False):
            b = x @ x.T
        c = x @ x.T
    with torch.amp.autocast("cpu"):
        d = x @ x.T
    return a, b, c, d, x @ x.T


@torch.autocast("cpu")
def autocasts_all(x: torch.Tensor) -> Any:
    return x @ x.T


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = 100
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.scale


def calls_a_function_with_a_backward_of_its_own(x: torch.Tensor) -> Any:
    weight = x.clone().requires_grad_()
    doubled: torch.Tensor = Doubled.apply(weight)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(doubled.sum(), weight)[0]


def calls_a_function_of_torchs_with_a_backward_of_its_own(x: torch.Tensor) -> Any:
    weight = x.reshape(1, -1, 1, 1).clone().requires_grad_()
    normed: torch.Tensor = CrossMapLRN2d.apply(weight, 3)
    return torch.autograd.grad(normed.sum(), weight)[0]


PROGRAMS: list[Callable[..., Any]] = [
    value
    for value in list(globals().values())
    if getattr(value, "__module__", "") == __name__ and callable(value) and not isinstance(value, type)
]


@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda forward: forward.__name__)
def test_a_captured_program_is_the_program(forward: Callable[..., Any]) -> None:
    same(forward, X)


def test_tensors_made_of_sizes_follow_the_sizes_of_each_run() -> None:
    captured = fxlib.capture(makes_tensors_of_sizes)
    for rows in (1, 4, 7):
        x = torch.randn(rows, 3)
        torch.manual_seed(rows)
        expected = makes_tensors_of_sizes(x)
        torch.manual_seed(rows)
        assert_same(captured(x), expected)
    assert fxlib.usage(captured).original == {}


class Counter(nn.Module):
    """Buffers that the forward reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))
        self.history = nn.Buffer(torch.zeros(3), persistent=False)
        self.scale = torch.full((3,), 2.0)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1  # type: ignore[misc]
        self.history.mul_(0.5).add_(x.sum(0))
        return self.norm(x * self.scale) + self.count + self.history


def test_buffers_are_read_and_written_when_the_module_runs() -> None:
    model, copied = Counter(), Counter()
    captured = fxlib.capture(model)
    assert model.count.item() == 0

    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(captured(x), copied(x))
    copied.scale.fill_(3.0)
    model.scale.fill_(3.0)
    assert torch.equal(captured(x), copied(x))
    assert all(torch.equal(a, b) for a, b in zip(captured.buffers(), copied.buffers(), strict=True))
    assert captured.state_dict().keys() == copied.state_dict().keys()


def test_grad_mode_outlives_neither_capture_nor_an_error() -> None:
    def leaves_it_off(x: torch.Tensor) -> Any:
        torch.set_grad_enabled(False)
        raise KeyError("oh")

    with pytest.raises(CaptureError):
        fxlib.capture(leaves_it_off)
    assert torch.is_grad_enabled()


def test_backward_hooks_keep_their_module_whole() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.inner.register_full_backward_hook(lambda module, inputs, outputs: (cast(Any, inputs)[0] * 10,))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x

    captured = fxlib.capture(Outer())
    x = torch.ones(2, requires_grad=True)
    captured(x).sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [21.0, 21.0]


@pytest.mark.slow
def test_forward_hooks_of_submodules_are_part_of_the_program() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    model.register_forward_hook(lambda module, inputs, output: output * 3)

    same(model, X)


def test_hooks_of_a_captured_module_within_a_model_are_part_of_the_program() -> None:
    hooked: dict[str, Callable[[nn.Module], object]] = {
        "forward": lambda inner: inner.register_forward_hook(lambda module, inputs, output: output + 1),
        "forward pre": lambda inner: inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,)),
        "backward": lambda inner: inner.register_full_backward_hook(lambda _, given, __: (cast(Any, given)[0] * 5,)),
    }
    for register in hooked.values():
        inner = fxlib.capture(nn.Sequential(nn.Linear(3, 3)))
        register(inner)
        model = nn.Sequential(inner, nn.Linear(3, 3))
        found = []
        for module in (model, fxlib.capture(model)):
            x = torch.ones(2, 3, requires_grad=True)
            output = module(x)
            output.sum().backward()
            found.append((output.tolist(), cast(Any, x.grad).tolist()))
        assert found[0] == found[1]


def test_a_captured_module_within_a_model_may_have_methods_that_run_it() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def score(self, x: torch.Tensor) -> Any:
            return self(x).sum()

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = fxlib.capture(Scored())

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner.score(x) + self.inner(x)

    same(Scores(), X)


class Program(nn.Module):
    """A program drawn at random: each step makes a value, or writes to one through some of its names."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.state = nn.Buffer(torch.ones(4, 4))
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))

    def forward(self, x: torch.Tensor) -> Any:
        values = [x, self.state, self.weight * 1]
        for kind, left, right in self.steps:
            a, b = values[left % len(values)], values[right % len(values)]
            STEPS[kind % len(STEPS)](values, a, b)
        return values[-1] * 1, x


def writes(operation: Callable[[Any, Any], Any]) -> Callable[[list[Any], Any, Any], None]:
    def step(values: list[Any], a: Any, b: Any) -> None:
        with torch.no_grad():
            values.append(operation(a, b * 0.5))

    return step


def iadd(a: Any, b: Any) -> Any:
    a += b
    return a


def assign(a: Any, b: Any) -> Any:
    a[1:3, ::2] = b[0:2, 1::2]
    return a


STEPS: list[Callable[[list[Any], Any, Any], None]] = [
    lambda values, a, b: values.append(torch.tanh(a) + b),
    lambda values, a, b: values.append(a.T),
    lambda values, a, b: values.append(torch.randn(4, 4) * a),
    lambda values, a, b: values.append(torch.zeros(4, 4) - b),
    writes(iadd),
    writes(assign),
    writes(lambda a, b: a.mul_(b)),
    writes(lambda a, b: torch.add(a, b, out=torch.empty(4, 4))),
]


@pytest.mark.slow
@settings(max_examples=many(30))
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_random_programs_are_captured_as_they_are(steps: list[tuple[int, int, int]]) -> None:
    model = Program(steps)
    copied = copy.deepcopy(model)
    captured = fxlib.capture(model)

    for seed in range(2):
        results = []
        for each in (captured, copied):
            torch.manual_seed(seed)
            results.append((each(torch.randn(4, 4)), each.state.clone()))
        assert_same(*results)


class Ordered(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(left=x + 1, both=OrderedDict(x=x * 2))


class Mine(dict[str, Any]):
    """A dict of the program's own."""


class OfMine(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Mine(left=x + 1)


def test_an_ordered_dict_stays_one_and_other_classes_of_dicts_are_not_made_plain() -> None:
    model, x = Ordered(), torch.randn(2)
    captured = fxlib.capture(model)
    for module in (captured, wire.decode(wire.encode(captured).graph), fxlib.optimize(captured, recipe="training")):
        found = module(x)
        assert type(found) is OrderedDict
        assert type(found["both"]) is OrderedDict
        assert torch.equal(found["both"]["x"], x * 2)
    assert fxlib.verify(model, captured, [x])
    with pytest.raises(CaptureError, match="hands on a Mine, which tracing would turn into a dict"):
        fxlib.capture(OfMine())
