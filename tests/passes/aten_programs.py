"""Random functional programs of ATen operators: views, scatters, casts, shared arguments, overwritten inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
SHAPE = (4, 4)
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Program:
    """A graph in the making, in which every node has its fake value."""

    draw: Draw
    graph: Graph = field(default_factory=Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    values: list[Node] = field(default_factory=list)

    def placeholder(self, name: str) -> None:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(torch.zeros(SHAPE))
        self.values.append(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        fake: Any = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fake[0], **fake[1])
        self.values.append(node)
        return node

    def any(self, *, shape: tuple[int, ...] | None = None, rank: int = 0) -> Node:
        fitting = [
            each
            for each in self.values
            if (shape is None or each.meta["val"].shape == shape) and each.meta["val"].dim() >= rank
        ]
        if not fitting:
            return self.call(aten.full.default, list(SHAPE if shape is None else shape), 0.5)
        # The newest are drawn most often: chains are what may be written over.
        return fitting[-1 - min(self.draw(st.integers(0, 3)) ** 2, len(fitting) - 1)]


def _unary(program: Program) -> None:
    target = program.draw(st.sampled_from([aten.relu, aten.sigmoid, aten.neg, aten.tanh, aten.sin, aten.clone]))
    program.call(target.default, program.any())


def _scalar(program: Program) -> None:
    target = program.draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.fill.Scalar, aten.clamp.default]))
    program.call(target, program.any(), 0.75)


def _binary(program: Program) -> None:
    target = program.draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.copy.default]))
    one = program.any()
    shape = tuple(one.meta["val"].shape)
    other = program.any(shape=shape[program.draw(st.integers(0, len(shape))) :])
    if target is not aten.copy.default and program.draw(st.booleans()):
        one, other = other, one
    program.call(target, one, other)


def _truth(program: Program) -> None:
    one = program.any()
    truth = program.call(aten.ge.Scalar, one, 0.1)
    program.values.remove(truth)
    program.call(aten._to_copy.default, truth, dtype=one.meta["val"].dtype)


_VIEWS: list[tuple[Any, Any]] = [
    (aten.select.int, aten.select_scatter.default),
    (aten.slice.Tensor, aten.slice_scatter.default),
    (aten.diagonal.default, aten.diagonal_scatter.default),
    (aten.as_strided.default, aten.as_strided_scatter.default),
]


def _part(program: Program, base: Node) -> tuple[int, tuple[Any, ...]]:
    kind = program.draw(st.integers(0, 3))
    size = base.meta["val"].shape
    dim = program.draw(st.integers(0, len(size) - 1))
    if kind == 0:
        return kind, (dim, program.draw(st.integers(0, size[dim] - 1)))
    if kind == 1 or len(size) != 2:
        start = program.draw(st.integers(0, size[dim] - 1))
        return 1, (dim, start, program.draw(st.integers(start + 1, size[dim])), program.draw(st.sampled_from([1, 2])))
    if kind == 2 or size != SHAPE or not base.meta["val"].is_contiguous():
        return 2, (program.draw(st.integers(-1, 1)) if min(size) > 1 else 0,)
    return kind, program.draw(st.sampled_from([((2, 2), (4, 1), 5), ((3,), (5,), 0), ((4, 4), (1, 4), 0)]))


def _view(program: Program) -> None:
    base = program.any(rank=1)
    kind, where = _part(program, base)
    program.call(_VIEWS[kind][0], base, *where)


def _overlapping(program: Program) -> None:
    target, args = program.draw(
        st.sampled_from([(aten.as_strided.default, ((3, 2), (1, 1))), (aten.expand.default, ((2, 4, 4),))])
    )
    base = program.any(shape=SHAPE)
    if base.meta["val"].is_contiguous():
        program.call(target, base, *args)


def _turn(program: Program) -> None:
    base = program.any(rank=2)
    target, args = program.draw(
        st.sampled_from([(aten.t.default, ()), (aten.alias.default, ()), (aten.flip.default, ([0],))])
    )
    if base.meta["val"].dim() == 2:
        program.call(target, base, *args)


def _split(program: Program) -> None:
    base = program.any(shape=SHAPE)
    parts = program.call(aten.split.Tensor, base, 2, program.draw(st.integers(0, 1)))
    program.values.remove(parts)
    for index in program.draw(st.sampled_from([(0,), (1,), (0, 1)])):
        item = program.graph.call_function(getitem, (parts, index))
        item.meta["val"] = parts.meta["val"][index]
        program.values.append(item)


def _mutate(program: Program) -> None:
    """What functionalization makes of writes to a view: a view, operators on it, and the scatter that puts it back."""
    base = program.any(rank=1)
    kind, where = _part(program, base)
    part = program.call(_VIEWS[kind][0], base, *where)
    inner = program.draw(st.booleans()) and part.meta["val"].dim() > 0
    deep = _part(program, part) if inner else None
    changed = part if deep is None else program.call(_VIEWS[deep[0]][0], part, *deep[1])
    for _ in range(program.draw(st.integers(1, 3))):
        target = program.draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor]))
        changed = program.call(target, changed, 1.25)
        if program.draw(st.integers(0, 5)) == 0:
            _ANY[program.draw(st.integers(0, len(_ANY) - 1))](program)
    if program.draw(st.integers(0, 5)) == 0:
        changed = program.any(shape=tuple(changed.meta["val"].shape))
    if deep is not None:
        again = program.call(_VIEWS[kind][0], base, *where) if program.draw(st.booleans()) else part
        changed = program.call(_VIEWS[deep[0]][1], again, changed, *deep[1])
    program.call(_VIEWS[kind][1], base, changed, *where)


def _scatter(program: Program) -> None:
    base = program.any(rank=1)
    kind, where = _part(program, base)
    with program.mode:
        shape = tuple(_VIEWS[kind][0](base.meta["val"], *where).shape)
    program.call(_VIEWS[kind][1], base, program.any(shape=shape), *where)


_ANY: list[Callable[[Program], None]] = [
    *(_unary, _scalar, _binary, _truth, _view, _turn, _split, _scatter, _overlapping),
]


@st.composite
def programs(draw: Draw) -> GraphModule:
    """Draw a program of two inputs; it may end by overwriting the first, as a functional program of one that writes."""
    program = Program(draw)
    program.placeholder("x")
    program.placeholder("y")
    for _ in range(draw(st.integers(2, 9))):
        draw(st.sampled_from([*_ANY, _unary, _scalar, _mutate, _mutate, _mutate]))(program)
    overwrites = draw(st.booleans())
    if overwrites:
        final = program.any(shape=SHAPE)
        into = program.values[0]
        program.graph.call_function(aten.copy_.default, (into, final)).meta["val"] = into.meta["val"]
    kept = [each for each in program.values[2:] if draw(st.integers(0, 3)) == 0]
    program.graph.output((*kept, program.any()))
    return GraphModule({}, program.graph)
