"""Random programs: graphs that mix remote calls with aliases, writes in place, random numbers and failures."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from fxlib.runtime import CapturedModule, functions, ops
from fxlib.spec.contract import contract_of
from tests.random_programs import simulation as servers


class Root(nn.Module):
    """The state that every program shares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8).view(2, 4).clone())
        self.register_buffer("buffer", torch.linspace(0, 2, 8).view(2, 4).clone())
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.4)
        self.relu = nn.ReLU(inplace=True)


NOISE = torch.zeros(2, 4)
"""What an opaque callable remembers between calls."""


def opaque(x: torch.Tensor) -> torch.Tensor:
    """Nothing is known of it: it draws, remembers, and writes its argument's memory without saying so."""
    NOISE.add_(x.detach()).add_(torch.rand(()))
    with torch.no_grad():
        x.detach().mul_(0.5)
    return x + NOISE


SECOND_INPUTS = ("own", "view of the first", "the buffer")


@dataclass(kw_only=True)
class Program:
    """A module to run, and what to run it on."""

    module: CapturedModule
    second_input: str
    """One of `SECOND_INPUTS`."""
    seed: int


def differentiable_program(seed: int, *, length: int = 14) -> Program:
    """Make a program for distributed autograd: gradients flow to the servers, and it returns all its values.

    Distributed autograd waits forever for the gradient of a result that nobody uses. No gradient flows back from the
    servers: it would be added to others in whatever order it comes.
    """
    writer = _Writer(random.Random(seed), smooth=True)
    writer.reads, writer.tracks, writer.unsafe = servers.DIFFERENTIABLE, False, {}
    writer.returns_all = writer.sends_detached = True
    for _ in range(length):
        writer.step()
    return Program(module=CapturedModule(_root(seed), writer.finish()), second_input="own", seed=seed)


def _root(seed: int) -> Root:
    torch.manual_seed(seed)
    return Root()


def random_program(seed: int, *, length: int = 18) -> Program:
    """Make the program that belongs to a seed."""
    rng = random.Random(seed)
    smooth = rng.random() < 0.4
    writer = _Writer(rng, smooth=smooth)
    for _ in range(length * 2 if smooth else length):
        writer.step()
    module = CapturedModule(_root(seed), writer.finish())
    second = rng.choices(SECOND_INPUTS, (8, 2, 2))[0]
    return Program(module=module, second_input=second, seed=seed)


class _Writer:
    """Writes a graph node by node; every value is a float tensor [2, 4].

    A smooth program writes nothing in place, so that backward runs through, and uses few values often.
    """

    def __init__(self, rng: random.Random, *, smooth: bool) -> None:
        self.rng = rng
        self.smooth = smooth
        self.graph = Graph()
        self.values = [self.graph.placeholder("x"), self.graph.placeholder("y")]
        self.to = self.graph.placeholder("to")
        self.in_flight: list[Node] = []
        self.required: list[Node] = []
        self.calls = 0
        self.reads: tuple[Callable[..., object], ...] = servers.READS
        self.tracks = True
        self.returns_all = False
        self.sends_detached = False
        self.views = 4 if smooth else 5  # without `detach`
        self.weights: dict[Callable[[], None], int] = {
            self.unary: 14, self.binary: 14, self.view: 9, self.linear: 7, self.use_weight: 6, self.random_op: 6,
            self.read: 22, self.issue: 5, self.join: 3,
        }  # fmt: skip
        self.unsafe: dict[Callable[[], None], int] = {self.norm: 4, self.write: 5}
        if not smooth:
            self.unsafe |= self._rough()

    def _rough(self) -> dict[Callable[[], None], int]:
        return {
            self.in_place: 12, self.write_buffer: 3, self.write: 9, self.without_grad: 2,
            self.opaque: 2, self.failing_call: 1, self.failing_work: 1, self.read_twice: 6, self.write_on: 6,
        }  # fmt: skip

    def step(self) -> None:
        """Append something; while a call of the program's own is in flight, nothing that the call could notice."""
        if self.in_flight and self.rng.random() < 0.3:
            self.values.append(self.graph.call_function(ops.wait, (self.in_flight.pop(0),)))
            return
        choices = self.weights if self.in_flight else self.weights | self.unsafe
        self.rng.choices(list(choices), list(choices.values()))[0]()

    def finish(self) -> Graph:
        """Wait for what is in flight, and return some values."""
        while self.in_flight:
            self.values.append(self.graph.call_function(ops.wait, (self.in_flight.pop(0),)))
        many = len(self.values) if self.returns_all else min(10 if self.smooth else 4, len(self.values))
        self.graph.output((*self.required, *self.rng.sample(self.values, many)))
        return self.graph

    def pick(self) -> Node:
        if self.smooth and self.rng.random() < 0.6:
            return self.rng.choice(self.values[:4])
        return self.rng.choice(self.values[-8:])

    def emit(self, target: object, *args: object) -> None:
        self.values.append(self.graph.call_function(target, args))  # type: ignore[arg-type]

    def unary(self) -> None:
        self.emit(self.rng.choice((torch.sin, torch.tanh, torch.neg, F.relu, torch.Tensor.clone)), self.pick())

    def binary(self) -> None:
        self.emit(self.rng.choice((torch.add, torch.mul, torch.sub, torch.maximum)), self.pick(), self.pick())

    def view(self) -> None:
        method, args = self.rng.choice(
            (("view", (2, 4)), ("contiguous", ()), ("narrow", (0, 0, 2)), ("contiguous", ()), ("detach", ()))[
                : self.views
            ]
        )
        self.values.append(self.graph.call_method(method, (self.pick(), *args)))

    def join(self) -> None:
        """Take an item of two tuples put together with `+`."""
        first, second = (self.graph.call_function(tuple, ([self.pick()],)) for _ in range(2))
        joined = self.graph.call_function(operator.add, self.rng.choice(((first, second), (first, (self.pick(),)))))
        self.emit(operator.getitem, joined, self.rng.randrange(2))

    def linear(self) -> None:
        self.values.append(self.graph.call_module("linear", (self.pick(),)))

    def use_weight(self) -> None:
        self.emit(torch.mul, self.graph.get_attr(self.rng.choice(("weight", "buffer"))), self.pick())

    def random_op(self) -> None:
        kind = self.rng.randrange(3)
        if kind == 0:
            self.values.append(self.graph.call_module("drop", (self.pick(),)))
        elif kind == 1:
            self.emit(F.dropout, self.pick(), 0.3)
        else:
            self.emit(torch.rand_like, self.pick())

    def norm(self) -> None:
        self.values.append(self.graph.call_module("norm", (self.pick(),)))

    def in_place(self) -> None:
        kind, value = self.rng.randrange(6), self.pick()
        if kind == 0:
            self.values.append(self.graph.call_method("add_", (value, 0.5)))
        elif kind == 1:
            self.values.append(self.graph.call_method("copy_", (value, self.pick())))
        elif kind == 2:
            self.graph.call_function(operator.setitem, (value, slice(0, 1), 0.25))
        elif kind == 3:
            self.values.append(self.graph.call_module("relu", (value,)))
        elif kind == 4:
            clean = self.graph.call_method("detach", (value,))
            self.values.append(self.graph.call_function(torch.add, (self.const(), 1.5), {"out": clean}))
        else:
            self.emit(operator.imul, value, 0.5)

    def const(self) -> Node:
        return self.graph.call_method("detach", (self.pick(),))

    def write_buffer(self) -> None:
        self.values.append(self.graph.call_method("add_", (self.graph.get_attr("buffer"), 0.125)))

    def read(self) -> None:
        self.call(ops.remote_call, self.rng.choice(self.reads))

    def read_twice(self) -> None:
        """Make one read twice, with or without something between; mostly, no gradient is taken and nothing changed."""
        to, function, value = self.rng.choice((*servers.SERVERS, self.to)), self.rng.choice(self.reads), self.pick()
        for again in (False, True):
            call = self.graph.call_function(ops.remote_call, (to, functions.name_of(function), (value,), {}, None))
            call.meta["contract"] = contract_of(function)
            larger = self.graph.call_function(torch.ge, (call, 0.25))
            self.values.append(self.graph.call_method("float", (larger,)))
            fate = self.rng.random()
            if fate < 0.15:
                self.graph.call_method("mul_", (call, -1.5))
            elif fate < 0.3:
                self.values.append(call)
            elif fate < 0.4:
                self.emit(opaque, self.graph.call_method("view", (call, 2, 4)))
            if not again and self.rng.random() < 0.5:
                self.rng.choice((self.write, self.in_place, self.read, self.unary))()

    def write(self) -> None:
        self.call(ops.remote_call, self.rng.choice(servers.WRITES))

    def write_on(self) -> None:
        """Write to one server time and again, mostly with nothing between; one of the writes may fail."""
        to = self.rng.choice((*servers.SERVERS, self.to))
        for _ in range(self.rng.randrange(2, 5)):
            chances = ((*servers.WRITES, servers.failing_write), (6, 6, 1, 1))
            (function,) = self.rng.choices(*chances)
            self.call(ops.remote_call, function, to=to)
            if self.rng.random() < 0.3:
                self.rng.choice((self.unary, self.in_place, self.random_op, self.read))()
            elif self.rng.random() < 0.3:
                self.call(ops.remote_call, self.rng.choice(self.reads), to=to)

    def failing_call(self) -> None:
        self.call(ops.remote_call, self.rng.choice(servers.FAILING))

    def failing_work(self) -> None:
        if self.rng.random() < 0.5:
            self.emit(torch.matmul, self.pick(), self.pick())
            self.required.append(self.values[-1])  # unused work is taken not to raise

    def issue(self) -> None:
        self.call(ops.issue_call, self.rng.choice(self.reads))

    def call(self, form: Callable[..., object], function: Callable[..., object], *, to: str | Node = "") -> None:
        to = to or self.rng.choice((*servers.SERVERS, *servers.SERVERS, self.to))
        args, name = (self.const() if self.sends_detached else self.pick(),), functions.name_of(function)
        call = self.graph.call_function(form, (to, name, args, {}, None))
        if (contract := contract_of(function)) is not None:
            call.meta["contract"] = contract
        self.calls += 1
        if form is ops.issue_call:
            self.in_flight.append(call)
            return
        self.values.append(call)
        if self.tracks and contract is not None and contract.gradient is not None and self.rng.random() < 0.7:
            self.emit(ops.track_gradient, call, to, contract.gradient, args, {}, None, self.calls)

    def opaque(self) -> None:
        self.emit(opaque, self.pick())

    def without_grad(self) -> None:
        self.graph.call_function(torch._C._set_grad_enabled, (False,))
        for _ in range(self.rng.randrange(1, 4)):
            self.rng.choice((self.unary, self.binary, self.read))()
        self.graph.call_function(torch._C._set_grad_enabled, (True,))
