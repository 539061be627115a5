"""Objects that a forward sends: each call sends what the program sends at that place, or the capture is refused."""

import array
import collections
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.rpc import remote, rpc_async, rpc_sync

import fxlib
from fxlib.errors import CaptureError
from tests.capture.servers import NAME, double

X = torch.linspace(-1, 1, 12).view(3, 4)
CONTRACTS = {
    f"{NAME}:double": fxlib.Contract(returns=lambda x, *_, **__: torch.empty_like(x), reads=frozenset({"tables"}))
}


class Box:
    def __init__(self) -> None:
        self.v: Any = 1.0


class Slots:
    __slots__ = ("v",)

    def __init__(self) -> None:
        self.v: Any = 1.0


@dataclasses.dataclass
class Request:
    v: Any = 1.0
    inner: Box = dataclasses.field(default_factory=Box)


class Rows(list[float]):
    pass


class Kind(enum.IntEnum):
    A = 1


def put(value: Any) -> None:
    value[0] = 5.0


def attribute(value: Any) -> None:
    value.v = 5.0


def nested(value: Any) -> None:
    value[0]["a"].inner.v = 5.0


MUTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "an array": (lambda: np.ones(3), put),
    "an array of objects": (lambda: np.array([Box(), 1.0], dtype=object), lambda value: attribute(value[0])),
    "an object": (Box, attribute),
    "an object with slots": (Slots, attribute),
    "a dataclass": (Request, attribute),
    "an object in an object": (Request, lambda value: attribute(value.inner)),
    "an object in containers": (lambda: [{"a": Request()}], nested),
    "an object in a tuple": (lambda: (Box(),), lambda value: attribute(value[0])),
    "a list of a class of its own": (lambda: Rows([1.0]), put),
    "a list with attributes": (lambda: Rows([1.0]), attribute),
    "a deque": (lambda: collections.deque([1.0]), put),
    "a set": (lambda: {1.0}, lambda value: value.add(5.0)),
    "a counter": (lambda: collections.Counter("ab"), lambda value: value.update("a")),
    "bytes": (lambda: bytearray(b"a"), lambda value: value.extend(b"b")),
    "an array of numbers": (lambda: array.array("d", [1.0]), put),
    "what an iterator has left": (lambda: iter([1.0, 2.0]), next),
}
KINDS = pytest.mark.parametrize("kind", list(MUTABLE))


def get(host: str, value: Any) -> torch.Tensor:
    return torch.tensor(_number(value))


def _number(value: Any) -> float:
    if isinstance(value, (Box, Slots, Request)):
        return float(value.v) + (_number(value.inner) if isinstance(value, Request) else 0.0)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (int, float)):
        return float(value)
    return 0.0 if isinstance(value, (str, Iterator)) else float(sum(map(_number, value)))


def get_later(host: str, value: Any) -> "Future[torch.Tensor]":
    future: Future[torch.Tensor] = Future()
    future.set_result(get(host, value))
    return future


def join(future: "Future[torch.Tensor]") -> torch.Tensor:
    return future.result()


fxlib.register_call(
    name="values", blocking=get, issue=get_later, wait=join, contract=fxlib.Contract(reads=frozenset({"v"})), to="host"
)


class Changing(nn.Module):
    """Makes an object, sends it, changes it, and sends it again."""

    def __init__(self, send: Callable[..., Any], kind: str, *, between: bool = True) -> None:
        super().__init__()
        self.send, self.between = send, between
        self.make, self.change = MUTABLE[kind]

    def forward(self, x: torch.Tensor) -> Any:
        value = self.make()
        if not self.between:
            self.change(value)
        first = self.send(x, value)
        if self.between:
            self.change(value)
        return first + self.send(x, value)


def blocking(x: Any, value: Any) -> Any:
    return rpc_sync("ps0", double, args=(x, value))


def issued(x: Any, value: Any) -> Any:
    return rpc_async("ps0", double, args=(x,), kwargs={"by": value}).wait()


def through_an_rref(x: Any, value: Any) -> Any:
    return remote("ps0", double, args=(x, value)).to_here()


def by_a_method(x: Any, value: Any) -> Any:
    return remote("ps0", double, args=(x,)).rpc_sync().scaled(value)


def by_a_client(x: Any, value: Any) -> Any:
    return x * get("h", value)


def issued_by_a_client(x: Any, value: Any) -> Any:
    return x * join(get_later("h", value))


WAYS = [blocking, issued, through_an_rref, by_a_method, by_a_client, issued_by_a_client]


@KINDS
@pytest.mark.parametrize("send", WAYS, ids=lambda send: send.__name__)
def test_one_that_changes_between_two_calls_is_refused_with_the_line_that_sent_it(
    send: Callable[..., Any], kind: str
) -> None:
    line = inspect.getsourcelines(send)[1] + 1
    with pytest.raises(
        CaptureError, match=rf"test_sent_objects.py:{line}: the forward changes a \w+ after it was handed on"
    ):
        fxlib.capture(Changing(send, kind))


@pytest.mark.slow
@pytest.mark.parametrize("send", [blocking, issued], ids=lambda send: send.__name__)
def test_an_export_refuses_it_too(send: Callable[..., Any]) -> None:
    for kind in ("an array", "an object in containers"):
        with pytest.raises(CaptureError, match="after it was handed on here"):
            fxlib.capture(Changing(send, kind), sample_inputs=[X], how="export", contracts=CONTRACTS)


@KINDS
def test_one_that_was_made_and_filled_before_is_sent_as_it_is_at_each_step(kind: str) -> None:
    if kind == "what an iterator has left":
        pytest.skip("a client may take from it")
    model = Changing(by_a_client, kind, between=False)
    captured = fxlib.capture(model)
    rewritten = fxlib.optimize(captured)
    for _ in range(3):
        expected = model(X)
        assert torch.equal(captured(X), expected)
        assert torch.equal(rewritten(X), expected)
    assert fxlib.usage(captured).original == {}


class Issuing(nn.Module):
    def __init__(self, make: Callable[[], Any], change: Callable[[Any], object]) -> None:
        super().__init__()
        self.make, self.change = make, change

    def forward(self, x: torch.Tensor) -> Any:
        value = self.make()
        future = get_later("h", value)
        self.change(value)
        return x * join(future)


@pytest.mark.parametrize("make", [lambda: [1.0], lambda: {0: 1.0}, lambda: [[1.0], 2.0], lambda: np.ones(2)])
def test_what_a_client_may_still_read_may_not_change_before_the_wait(make: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match="after it was handed on here"):
        fxlib.capture(Issuing(make, put))


class PutBack(nn.Module):
    """Sends what the model holds, and leaves it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Box()

    def forward(self, x: torch.Tensor) -> Any:
        self.box.v = 5.0
        y = x * get("h", self.box)
        self.box.v = 1.0
        return y


def test_one_of_the_models_that_is_put_back_in_the_end_was_another_when_it_was_sent() -> None:
    with pytest.raises(CaptureError, match="after it was handed on here"):
        fxlib.capture(PutBack())


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box, self.rows, self.array = Box(), [1.0], np.ones(2)
        self.nested: Any = ([1.0], {"a": [1.0]}, (Box(),))
        self.named = {"value": [1.0]}

    def forward(self, x: torch.Tensor) -> Any:
        y = x * get("h", self.box) + get("h", self.rows) + get("h", self.array)
        return y + get("h", self.nested) + get("h", **self.named) + get("h", [self.box])


CHANGES: list[Callable[[Holding], object]] = [
    lambda model: attribute(model.box),
    lambda model: setattr(model, "box", Request(7.0)),
    lambda model: put(model.rows),
    lambda model: model.rows.append(3.0),
    lambda model: put(model.array),
    lambda model: put(model.nested[0]),
    lambda model: put(model.nested[1]["a"]),
    lambda model: model.nested[1].update(b=3.0),
    lambda model: attribute(model.nested[2][0]),
    lambda model: put(model.named["value"]),
    lambda model: model.named.update(value=[4.0]),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_what_the_model_holds_is_sent_as_it_is_at_each_step(number: int) -> None:
    model = Holding()
    captured = fxlib.capture(model)
    rewritten = fxlib.optimize(captured)
    before = model(X)
    assert torch.equal(rewritten(X), before)
    CHANGES[number](model)
    expected = model(X)
    assert not torch.equal(before, expected)
    for run in (captured, rewritten):
        assert torch.equal(run(X), expected)


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.args, self.kwargs = [torch.ones(1), [2.0]], {"plus": [1.0]}

    def forward(self, x: torch.Tensor) -> Any:
        return x + rpc_sync("ps0", double, args=self.args, kwargs=self.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trace", "export"])
def test_containers_that_are_taken_apart_for_a_call_are_watched(how: Any) -> None:
    changes: list[Callable[[Any], object]] = [
        lambda model: model.args.append(1.0),
        lambda model: model.args[1].append(1.0),
        lambda model: model.kwargs.update(by=3.0),
        lambda model: model.kwargs["plus"].append(3.0),
    ]
    for change in changes:
        model: Any = Calling()
        contracts = {f"{NAME}:double": fxlib.Contract(returns=lambda x, *_, **__: torch.empty_like(x))}
        samples: Any = [X] if how == "export" else None
        captured = fxlib.capture(model, how=how, sample_inputs=samples, contracts=contracts)
        assert captured._fxlib.conditions.python.broken(model) == ""
        change(model)
        assert captured._fxlib.conditions.python.broken(model)


TYPED: list[Callable[[], Any]] = [
    *[lambda: Rows([1]), lambda: collections.OrderedDict(a=1), lambda: collections.defaultdict(int, a=1)],
    *[
        lambda: Kind.A,
        lambda: np.float32(0.1),
        lambda: np.int64(3),
        lambda: (1, [2, {3: 4}]),
    ],
    *[lambda: collections.Counter("aab"), lambda: frozenset({1}), lambda: range(3), lambda: slice(1, 2)],
]
SEEN: list[str] = []


def tell(host: str, value: Any) -> torch.Tensor:
    SEEN.append(f"{type(value).__name__} {value!r}")
    return torch.ones(1)


def tell_later(host: str, value: Any) -> torch.Tensor:
    return tell(host, value)


def told(answer: torch.Tensor) -> torch.Tensor:
    return answer


fxlib.register_call(name="tell", blocking=tell, issue=tell_later, wait=told, to="host")


class Telling(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return x * tell("h", self.make())


@pytest.mark.parametrize("make", TYPED)
def test_each_argument_keeps_its_class(make: Callable[[], Any]) -> None:
    model = Telling(make)
    captured = fxlib.capture(model)
    SEEN.clear()
    for run in (model, captured, fxlib.optimize(captured)):
        run(X)
    assert len(SEEN) == 3
    assert len(set(SEEN)) == 1


def test_a_container_of_a_class_of_its_own_with_tensors_in_it_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * get("h", collections.OrderedDict(a=x))

    with pytest.raises(CaptureError, match="sends a OrderedDict with tensors"):
        fxlib.capture(Model())


def test_a_generator_that_the_forward_makes_is_not_sent() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * get("h", (each for each in [1.0]))

    with pytest.raises(CaptureError, match="makes and sends a generator"):
        fxlib.capture(Model())


def count_up(host: str, value: Any) -> torch.Tensor:
    value.v += 1
    return torch.tensor(float(value.v))


def count_up_later(host: str, value: Any) -> torch.Tensor:
    return count_up(host, value)


fxlib.register_call(name="count", blocking=count_up, issue=count_up_later, wait=told, to="host")


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * count_up("h", Box())


def test_an_object_that_a_client_writes_to_is_made_anew_at_each_step() -> None:
    model = Counting()
    captured = fxlib.capture(model)
    for _ in range(3):
        assert torch.equal(captured(X), model(X))
