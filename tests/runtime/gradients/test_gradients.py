"""Gradients of remote results: tracked while the forward runs, pushed after backward, in program order."""

from __future__ import annotations

import gc
import random
import threading
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Node

import fxlib
from fxlib.errors import ContractError, FxlibError
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.gradients.tape import OWN_LOOP_FORWARDS, UNPUSHED_FORWARDS, Tape
from fxlib.runtime.ops import remote_call, send_gradient, track_gradient
from fxlib.runtime.push_gradients import drop_gradients, push_gradients
from fxlib.runtime.tracking.autograd_node import Backward, as_it_is, owned
from fxlib.runtime.tracking.autograd_node import tracked as taking
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext
from fxlib.runtime.tracking.track import track
from tests.random_programs import simulation
from tests.runtime.gradients.pushing import model
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME, read

pytestmark = pytest.mark.usefixtures("servers")
ROWS = torch.tensor([1, 2])


def tracked(program: Program, result: Node, name: str, index: int, *, gradient: str = "take_gradient") -> Node:
    call: Any = ("ps0", f"{NAME}:{gradient}", (name, program.inputs[0]), {}, None, index)
    return program.local(track_gradient, result, *call)


def two_reads(original: nn.Module | None = None, *, first: int = 0, gradient: str = "take_gradient") -> CapturedModule:
    """`3 * read(a) + read(b)`; the code runs the read of index `first` before the other."""
    program, parts = Program("rows"), {}
    for index in (first, 1 - first):
        result = program.call("ps0", "read", "ab"[index], program.inputs[0])
        parts[index] = tracked(program, result, "ab"[index], index, gradient=gradient)
    tripled = program.local(torch.mul, parts[0], 3.0)
    return program.returns(program.local(torch.add, tripled, parts[1]), original=original)


def pushed() -> list[str]:
    return remote_call("ps0", f"{NAME}:read_log", (), {}, None)


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_are_pushed_in_program_order_whatever_the_code_does_first(first: int) -> None:
    module = two_reads(first=first)
    module(ROWS).sum().backward()
    push_gradients(module)
    assert pushed() == ["a [3.0, 3.0]", "b [1.0, 1.0]"]


def test_a_push_is_made_once() -> None:
    module = two_reads()
    module(ROWS).sum().backward()
    push_gradients(module)
    push_gradients(module)
    assert len(pushed()) == 2


def test_gradients_accumulate_over_forwards_and_are_pushed_oldest_first() -> None:
    module = two_reads()
    for scale in (1.0, 2.0):
        (module(ROWS).sum() * scale).backward()
    push_gradients(module)
    assert [entry[:5] for entry in pushed()] == ["a [3.", "b [1.", "a [6.", "b [2."]


def test_a_result_without_gradient_is_passed_over() -> None:
    module = two_reads()
    module(ROWS)
    push_gradients(module)
    assert pushed() == []


def test_nothing_is_tracked_without_grad_mode() -> None:
    module = two_reads()
    with torch.no_grad():
        assert not module(ROWS).requires_grad
    assert len(module._fxlib.tape) == 0


def test_an_error_of_a_push_surfaces_and_the_tape_is_clear_after_it() -> None:
    module = two_reads(gradient="fail")
    module(ROWS).sum().backward()
    with pytest.raises(Exception, match="fail"):
        push_gradients(module)
    push_gradients(module)


def test_a_module_that_was_not_captured_is_refused() -> None:
    with pytest.raises(FxlibError, match="was not captured"):
        push_gradients(nn.Linear(1, 1))


def test_a_wrapper_of_a_captured_module_is_accepted() -> None:
    module = nn.Sequential(two_reads())
    module(ROWS).sum().backward()
    push_gradients(module)
    assert len(pushed()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("bound", [False, True])
def test_forwards_without_backward_leave_little_on_the_tape(bound: bool) -> None:
    module, last = two_reads(), None
    for _ in range(20):
        result = module(ROWS)
        last = result if bound else last
        del result
    gc.collect()
    assert len(module._fxlib.tape) <= (4 if bound else 1)


def test_a_forward_whose_backward_is_yet_to_come_stays_on_the_tape() -> None:
    module = two_reads()
    losses = [module(ROWS).sum() for _ in range(3)]
    torch.stack(losses).sum().backward()
    push_gradients(module)
    assert len(pushed()) == 6


def test_a_push_leaves_later_backwards_of_earlier_forwards_their_push() -> None:
    module = two_reads()
    losses = [module(ROWS).sum() * scale for scale in (1.0, 2.0)]
    for loss in losses:
        loss.backward()
        push_gradients(module)
    assert pushed() == ["a [3.0, 3.0]", "b [1.0, 1.0]", "a [6.0, 6.0]", "b [2.0, 2.0]"]


@pytest.mark.filterwarnings("ignore:.*sends the gradients of 2 forwards:fxlib.errors.FxlibWarning")
def test_graphs_that_the_program_keeps_leave_nothing_on_the_tape() -> None:
    module = two_reads()
    losses = []
    for _ in range(5):
        losses.append(module(ROWS).sum())
        losses[-1].backward(retain_graph=True)
        push_gradients(module)
        assert len(module._fxlib.tape) == 0
    pushed()
    for loss in reversed(losses[:2]):
        loss.backward()
    push_gradients(module)  # forward by forward, whichever backward came first
    assert pushed() == ["a [3.0, 3.0]", "b [1.0, 1.0]"] * 2


@pytest.mark.parametrize("end", [push_gradients, drop_gradients])
def test_each_backward_of_one_forward_has_its_own_push(end: Callable[[CapturedModule], None]) -> None:
    module = two_reads()
    result = module(ROWS)
    for scale in (1.0, 2.0, 4.0):
        (result * scale).sum().backward(retain_graph=True)
        (result * scale).sum().backward(retain_graph=True)
        (end if scale == 2.0 else push_gradients)(module)
        push_gradients(module)
    scales = (1.0, 2.0, 4.0) if end is push_gradients else (1.0, 4.0)
    assert pushed() == [f"{name} [{k * x}, {k * x}]" for x in scales for name, k in (("a", 6), ("b", 2))]


def test_of_a_structure_later_gradients_are_pushed_in_a_structure_like_it() -> None:
    THREAD.forward = forward = ForwardContext()
    try:
        result = track({"x": torch.zeros(1), "y": (torch.zeros(1), 7)}, ("ps0", "f:g", (), {}, None, 0), together=False)
    finally:
        THREAD.forward = None
    tape = Tape()
    tape.add(forward.tracked, forward.backward)
    for part in (result["x"], result["y"][0]):
        (part * 2.0).sum().backward()
        (push,) = tape.take()
        gradient = push.call.gradient_of_result()
        assert gradient["x"] is None or part is result["x"]
        assert gradient["y"] == ((None, None) if part is result["x"] else (torch.tensor([2.0]), None))


def test_a_program_that_never_pushes_is_warned_and_bounded() -> None:
    program = Program("rows")
    value = program.local(torch.Tensor.float, program.inputs[0])
    module = program.returns(program.local(torch.mul, tracked(program, value, "a", 0), 2.0))
    for _ in range(UNPUSHED_FORWARDS):
        module(ROWS).sum().backward()
    with pytest.warns(RuntimeWarning, match="push_gradients"):
        module(ROWS)
    assert len(module._fxlib.tape) == UNPUSHED_FORWARDS


def test_a_forward_that_fails_leaves_nothing_on_the_tape() -> None:
    program = Program("rows")
    result = program.call("ps0", "read", "a", program.inputs[0])
    leaf = tracked(program, result, "a", 0)
    module = program.returns(program.local(torch.Tensor.view, leaf, 7))
    with pytest.raises(RuntimeError, match="shape"):
        module(ROWS)
    assert len(module._fxlib.tape) == 0


def test_threads_that_share_a_module_lose_no_gradient() -> None:
    module = two_reads()

    def train() -> None:
        for _ in range(10):
            module(ROWS).sum().backward()

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    push_gradients(module)
    assert len(pushed()) == 4 * 10 * 2


def test_a_gradient_belongs_to_the_rows_that_were_looked_up_though_their_tensor_is_used_again() -> None:
    module, rows = two_reads(gradient="take_rows"), ROWS.clone()
    module(rows).sum().backward()
    rows.fill_(7)
    push_gradients(module)
    assert pushed() == ["a [1, 2]", "b [1, 2]"]


@pytest.mark.parametrize("write", [lambda row: row.mul_(2.0), lambda row: nn.functional.relu(row, inplace=True)])
def test_a_tracked_result_may_be_written_to_in_place(write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = Program("rows")
    leaf = tracked(program, program.call("ps0", "read", "a", program.inputs[0]), "a", 0)
    module = program.returns(program.local(write, leaf))
    module(ROWS).sum().backward()
    push_gradients(module)
    assert len(pushed()) == 1


@pytest.mark.parametrize("operator", [track_gradient, send_gradient])
def test_of_a_structure_each_tensor_is_tracked_and_its_gradients_are_pushed_in_a_structure_like_it(
    operator: Callable[..., object],
) -> None:
    program = Program("rows")
    result = program.call("ps0", "read_several", "a", program.inputs[0])
    call: Any = ("ps0", f"{NAME}:take_several", ("a", program.inputs[0]), {}, None, 0)
    pair = program.local(getitem, program.local(operator, result, *call), "pair")
    module = program.returns(program.local(torch.mul, program.local(getitem, pair, 1), 3.0))
    for _ in range(3):
        module(ROWS).sum().backward()
        push_gradients(module)
    gradients = {"rows": None, "pair": (None, torch.full((2,), 3.0, dtype=torch.float64))}
    assert pushed() == [f"a {gradients}"] * 3


def test_a_result_without_tensors_has_no_gradient_to_push() -> None:
    with pytest.raises(ContractError, match="without tensors"):
        track_gradient((1, "two"), "ps0", f"{NAME}:take_several", (), {}, None, 0)


def test_results_may_change_their_shape_from_forward_to_forward() -> None:
    program, parts = Program("rows"), []
    for index, name in enumerate("ab"):
        result = program.call("ps0", "read", name, program.inputs[0])
        call: Any = ("ps0", f"{NAME}:take_gradient", (name, program.inputs[0]), {}, None, index)
        parts.append(program.local(torch.sum, program.local(send_gradient, result, *call)))
    module = program.returns(program.local(torch.add, *parts))
    for rows in (ROWS, ROWS, torch.tensor([1]), torch.tensor([1]), ROWS):
        module(rows).backward()
        push_gradients(module)
    assert [len(entry.split(",")) for entry in pushed()] == [2, 2, 2, 2, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("result", [torch.ones(()), torch.ones(0, 3), torch.ones(3, 1), torch.ones(3, 2).t()])
def test_what_is_tracked_is_in_the_results_own_memory_and_its_gradient_is_as_the_result(result: torch.Tensor) -> None:
    ((output, slot),) = taking([result], Backward(), in_distributed_autograd=False)
    assert (output.data_ptr(), output.stride(), output.is_leaf) == (result.data_ptr(), result.stride(), False)
    output.mul_(2.0).sum().backward()
    assert slot.gradient is not None
    assert slot.gradient.stride() == result.stride()
    assert torch.equal(slot.gradient, torch.full_like(result, 2.0))


def gradients_of_a_random_program(seed: int, *, in_one_node: bool) -> list[Any]:
    """Run backwards over what is made of some tracked tensors, writes and failures among it; return the bits."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [dice.choice([(2, 3), (3, 2)]) for _ in range(dice.randint(2, 5))]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    given = [each if each.shape == (2, 3) else each.t() for each in drawn]
    backward, weight = Backward(), torch.randn(2, 3, generator=generator, requires_grad=True)
    nodes = [given] if in_one_node else [[each] for each in given]
    made = [each for node in nodes for each in taking(node, backward, in_distributed_autograd=False)]
    kinds: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        torch.add,
        lambda a, b: a * b.detach(),
        lambda a, b: torch.cat([a, b], 1)[:, 1:4],
        lambda a, _: a * weight,
        lambda a, _: a.sum(0, keepdim=True).expand(2, 3),
    ]
    for _ in range(dice.randint(1, 3)):
        pool = [output for output, _ in made]
        for _ in range(dice.randint(1, 7)):
            pool.append(dice.choice(kinds)(dice.choice(pool), dice.choice(pool)))
            if dice.random() < 0.3:
                dice.choice(made)[0].mul_(1.5)
        if dice.random() < 0.25 and len(pool) > len(made) and (found := pool[-1]).grad_fn is not None:
            found.register_hook(lambda _: 1 // 0)
        with suppress(ZeroDivisionError, RuntimeError):  # a hook's, or what was written to is needed
            torch.stack(dice.sample(pool, 2)).sum().backward(retain_graph=True)
    gradients = [*(slot.gradient for _, slot in made), weight.grad]
    return [each if each is None else (each.stride(), each.numpy().tobytes()) for each in gradients]


@pytest.mark.slow
def test_tensors_that_share_a_node_take_the_gradients_that_each_takes_alone() -> None:
    arrived = 0
    for seed in range(150):
        alone = gradients_of_a_random_program(seed, in_one_node=False)
        assert gradients_of_a_random_program(seed, in_one_node=True) == alone, seed
        arrived += sum(each is not None for each in alone)
    assert arrived > 100


def test_what_stands_for_a_result_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    came = [torch.ones(2), torch.ones(2), torch.ones(2)]
    forward = ForwardContext(shares_nodes=True)
    forward.came_with |= dict.fromkeys(map(id, came), lambda: Namespace(outcomes=came))
    monkeypatch.setattr(THREAD, "forward", forward)
    first = track(came[0], ("ps0", NAME, (), {}, None, 0), together=False)
    assert first.grad_fn is track(came[1], ("ps0", NAME, (), {}, None, 1), together=False).grad_fn
    assert [*forward.made] == [id(came[2])]  # which nobody tracks
    came.clear()
    assert forward.made == {}  # so a later result at the same place in memory is tracked as itself


def test_only_a_gradient_whose_memory_somebody_else_refers_to_is_copied() -> None:
    gradient = torch.ones(2, 2)
    assert owned(gradient, None) is gradient
    view = gradient.view(4)
    copied = owned(gradient, None)
    del view
    storage = gradient.untyped_storage()
    copied_again = owned(gradient, None)
    del storage
    assert len({each.data_ptr() for each in (gradient, copied, copied_again)}) == 3
    assert owned(gradient, None) is gradient


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo, about what it cannot trace
def test_a_module_that_torch_compiles_pushes_as_it_does_uncompiled() -> None:
    reads = (("ps0", "take_gradient", "a"), ("ps0", "take_gradient", "b"))
    plain, module = model(*reads, operator=track_gradient), model(*reads, operator=send_gradient)
    found: list[list[str]] = []
    for called, pushes in ((plain, plain), (torch.compile(module, backend="eager"), module)):
        for scale in (1.0, 2.0, 3.0):
            (called(ROWS) * scale).sum().backward()
            push_gradients(pushes)
        found.append(pushed())
    assert found[0] == found[1]
    assert len(found[0]) == 6


@pytest.mark.parametrize("order", ["sparse dense", "dense sparse", "sparse sparse dense", "dense sparse dense"])
def test_sparse_and_dense_gradients_add_up_as_they_do_in_a_leaf(order: str) -> None:
    leaf = torch.randn(4, 3, requires_grad=True)
    ((result, slot),) = taking([leaf.detach().clone()], Backward(), in_distributed_autograd=False)
    scales = torch.randn(4, 3)
    for kind in order.split():
        for taker in (leaf, result):
            rows = nn.functional.embedding(torch.tensor([1, 2, 1]), taker, sparse=True) * scales[:3]
            (rows if kind == "sparse" else taker * scales).sum().backward()
    assert slot.gradient is not None
    assert leaf.grad is not None
    assert slot.gradient.layout is leaf.grad.layout
    assert torch.equal(slot.gradient.to_dense(), leaf.grad.to_dense())


class Asked(NamedTuple):
    ids: torch.Tensor
    name: str = "users"


@dataclass(frozen=True)
class Described:
    ids: torch.Tensor
    more: tuple[Asked, ...] = ()


class Holds:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids


@pytest.mark.parametrize(
    "nest, ids",
    [
        (Asked, lambda kept: kept.ids),
        (lambda ids: [{"a": Asked(ids)}], lambda kept: kept[0]["a"].ids),
        (lambda ids: OrderedDict(a=ids), lambda kept: kept["a"]),
        (lambda ids: Described(ROWS, (Asked(ids),)), lambda kept: kept.more[0].ids),
        (Holds, lambda kept: kept.ids),
    ],
)
def test_arguments_in_containers_of_any_kind_are_kept_as_they_were(nest: Any, ids: Callable[[Any], Any]) -> None:
    given = ROWS.clone()
    kept = as_it_is(nest(given))
    given.fill_(9)
    assert type(kept) is type(nest(given))
    assert torch.equal(ids(kept), ROWS)


def test_an_argument_that_holds_itself_is_passed_on() -> None:
    given: Any = Holds(ROWS)
    given.ids = [given]
    assert as_it_is(given) is given


class ReturnsRows(nn.Module):
    """Hands its rows to a program that pushes their gradients itself."""

    def forward(self, rows: torch.Tensor) -> Any:
        found = [rpc.rpc_sync("ps0", read, args=(name, rows)).requires_grad_() for name in "ab"]
        return (found[0] * 3 + found[1]).sum(), found


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_loop_of_the_program_s_own_finds_gradients_and_is_told_of_the_way_out_once(
    rewritten: bool, recwarn: pytest.WarningsRecorder
) -> None:
    captured = fxlib.capture(ReturnsRows())
    module = recipes.apply(captured).module if rewritten else captured
    for _ in range(2 * OWN_LOOP_FORWARDS):
        loss, found = module(ROWS)
        loss.backward()
        assert [each.grad.tolist() for each in found] == [[3.0, 3.0], [1.0, 1.0]]
    (told,) = recwarn.list
    assert "loop of its own, call fxlib.push_gradients" in str(told.message)
    assert told.filename == __file__
    assert pushed() == []


def test_who_pushes_and_looks_at_rows_is_not_told(recwarn: pytest.WarningsRecorder) -> None:
    module = fxlib.capture(ReturnsRows())
    for _ in range(2 * OWN_LOOP_FORWARDS):
        module(ROWS)[0].backward()
        push_gradients(module)
        assert pushed() == ["a [3.0, 3.0]", "b [1.0, 1.0]"]
    assert not recwarn.list


def test_a_transform_of_torch_func_goes_through_a_result_that_would_be_tracked() -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = send_gradient(torch.ones(2), "ps0", f"{NAME}:take_gradient", (), {}, None, 0)
        return (found * weight).sum()

    THREAD.forward = forward = ForwardContext()
    try:
        assert torch.equal(torch.func.grad(loss)(torch.ones(2)), torch.ones(2))
    finally:
        THREAD.forward = None
    assert forward.tracked == []


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rpc.rpc_sync("ps0", simulation.lookup, args=(x,))
        return found * self.weight


def test_gradients_that_a_transform_of_torch_func_takes_are_not_silently_missing() -> None:
    x, captured = torch.ones(2, 4), fxlib.capture(Weighs())
    with simulation.simulated(0):
        for module in (captured, fxlib.optimize(captured)):
            torch.func.grad(lambda given, module=module: torch.func.functional_call(module, given, x).sum())(
                {"weight": torch.ones(2, 4)}
            )
            with pytest.raises(FxlibError, match=r"a transform of torch\.func takes the gradients"):
                push_gradients(module)
            module(x).sum().backward()
            push_gradients(module)
