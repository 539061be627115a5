"""Random programs, randomly reordered as a schedule may: the same error is raised, and the same writes are made."""

from __future__ import annotations

from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, Node

from fxlib.runtime import CallKind, CapturedModule, register

_POOL = ThreadPoolExecutor(4)
_WRITES: list[int] = []


def work(place: int, broken: bool, *inputs: object) -> int:
    if broken:
        raise ValueError(f"node {place}")
    return place


def store(place: int, broken: bool, *inputs: object) -> int:
    work(place, broken)
    _WRITES.append(place)
    return place


def ask(place: int, broken: bool, *inputs: object) -> int:
    return join(ask_later(place, broken, *inputs))


def ask_later(place: int, broken: bool, *inputs: object) -> Pending[int]:
    return _POOL.submit(work, place, broken, *inputs)


def join(pending: Pending[int]) -> int:
    return pending.result()


@pytest.fixture(scope="module", autouse=True)
def _client() -> Any:
    register(CallKind(name="random programs", blocking=ask, issue=ask_later, wait=join))
    yield
    _POOL.shutdown()


Line = tuple[str, bool, tuple[int, ...]]


@st.composite
def programs(draw: st.DrawFn) -> list[Line]:
    """Lines of (kind, broken, places of its inputs)."""
    kinds = st.sampled_from(["local", "local", "call", "call", "write"])
    lines: list[Line] = []
    for place in range(draw(st.integers(2, 9))):
        inputs = draw(st.sets(st.integers(0, place - 1), max_size=2)) if place else set()
        lines.append((draw(kinds), draw(st.integers(0, 3)) == 0, tuple(sorted(inputs))))
    return lines


Item = tuple[int, str]  # a line's place, and which part of it runs: "local", "write", "call", "issue", "wait"


@st.composite
def schedules(draw: st.DrawFn, lines: list[Line]) -> list[Item]:
    """An order that a schedule may choose: inputs first, and all that stands before a write runs before it."""
    items: list[Item] = []
    for place, (kind, _, _) in enumerate(lines):
        split = kind == "call" and draw(st.booleans())
        items += [(place, "issue"), (place, "wait")] if split else [(place, kind)]
    done: list[Item] = []
    while items:
        ready = [item for item in items if _may_run(item, lines, items)]
        chosen = draw(st.sampled_from(ready))
        items.remove(chosen)
        done.append(chosen)
    return done


def _may_run(item: Item, lines: list[Line], left: list[Item]) -> bool:
    place, part = item
    waiting = {each for each, _ in left if each != place}
    inputs_done = not waiting.intersection(lines[place][2])
    issued = part != "wait" or (place, "issue") not in left
    first_write = part != "write" or place <= min(waiting, default=place)
    return inputs_done and issued and first_write


def build(lines: list[Line], schedule: list[Item]) -> CapturedModule:
    graph, values, issues = Graph(), dict[int, Node](), dict[int, Node]()
    for place, part in schedule:
        kind, broken, inputs = lines[place]
        arguments: Any = (place, broken, *(values[each] for each in inputs))
        if part == "wait":
            node = values[place] = graph.call_function(join, (issues[place],))
        elif part == "issue":
            node = issues[place] = graph.call_function(ask_later, arguments)
        else:
            target = {"local": work, "write": store, "call": ask}[kind]
            node = values[place] = graph.call_function(target, arguments)
        node.meta["order"] = place
    graph.output([values[place] for place in range(len(lines))])
    return CapturedModule(nn.Module(), graph)


def outcome(module: CapturedModule) -> tuple[object, list[int]]:
    _WRITES.clear()
    try:
        result: object = module()
    except ValueError as error:
        result = str(error)
    return result, list(_WRITES)


@pytest.mark.slow
@given(st.data())
def test_a_reordered_program_fails_as_the_program_does(data: st.DataObject) -> None:
    lines = data.draw(programs())
    program = build(lines, [(place, kind) for place, (kind, _, _) in enumerate(lines)])
    rewritten = build(lines, data.draw(schedules(lines)))
    assert outcome(rewritten) == outcome(program)
