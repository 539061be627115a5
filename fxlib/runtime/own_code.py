"""Code of the program's own that a graph runs in mid-step, and its changes of state that the forward reads.

A function or a module that is kept whole, and a method of an object that a server returned, may do anything. After
each of them, the conditions of the capture are checked once more. If one is broken, the program is captured again with
the changes made where that code made them; the new graph has the same nodes up to that point, and goes on from there
with the values that they have. So nothing runs twice: no call, no such code, no draw of random numbers.

The checks are nodes in a copy of the graph, one after each piece of such code. Graphs without such code have none.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.nn.modules import module as torchs
from torch.nn.parallel import DistributedDataParallel

from fxlib.errors import CaptureError, FxlibError
from fxlib.runtime import failure
from fxlib.runtime.data_parallel import is_closed, is_ordinary
from fxlib.runtime.dynamo import outside_of_dynamo
from fxlib.runtime.guards.capture_facts import Change
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.lowering import over
from fxlib.runtime.ops.calls import is_call, is_issue, is_wait
from fxlib.runtime.ops.operators import limit_in_flight
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.ops.timeline import call_name
from fxlib.runtime.program_modes import grad_mode_after
from fxlib.runtime.submodules import is_harmless, is_torchs_value, local_modules, submodule
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext, ObjectReceived, WentOn, current_forward

_LEAVES = frozenset({"placeholder", "get_attr", "output"})
_HANDING_ON = frozenset({"_operator", "builtins", __name__.rpartition(".")[0] + ".attributes"})


@outside_of_dynamo
def check_own_code(name: str, _: Any) -> None:
    """Check what the graph takes for granted, after a node that has run code of the program's own.

    Raises:
        WentOn: it holds no longer, and another graph went on from here.
    """
    forward = current_forward()
    if forward is None or forward.check is None:
        return
    # The arguments of the last check keep the values that no later node takes.
    went_on = forward.check(name, functools.partial(getattr, sys._getframe(1), "f_locals"))
    if went_on is not None:
        raise went_on


class CheckedProgram:
    """The program with checks, in place of a module's graph that runs code of the program's own; made on first use."""

    def __init__(self) -> None:
        """Begin without a program."""
        self._made: tuple[Graph, GraphModule | None] | None = None
        self._read: dict[str, Sequence[tuple[str, str]]] = {}
        self.objects = False
        """Whether a server has returned objects of the program's own classes, whose methods may run anywhere."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckedProgram:
        return CheckedProgram()  # the copied module has state of its own, over which its program is made

    def of(self, program: GraphModule, *, keeps_values: bool) -> GraphModule | None:
        """Return the program with its checks; None if it runs no code of the program's own.

        Args:
            program: the module, or the program that runs in its place.
            keeps_values: whether all values are kept up to the last check.
        """
        if self._made is None or self._made[0] is not program._graph:
            self._read = {}
            self._made = program._graph, _checked(program, objects=self.objects, keeps_values=keeps_values)
        return self._made[1]

    def replaced(self, program: GraphModule, name: str, values: Callable[[], Mapping[str, Any]]) -> str:
        """Return which attribute has been replaced that the graph has read and uses after a node; empty if none has.

        Args:
            program: the module.
            name: the name of the node.
            values: a function that returns the values of the nodes so far, by name.
        """
        if name not in self._read:
            self._read[name] = list(_read_before(program, name))
        if not self._read[name]:
            return ""
        known = values()
        for each, path in self._read[name]:
            if each in known and known[each] is not operator.attrgetter(path)(program):
                return f"{path} is not what it was when the forward read it"
        return ""

    def expect_objects(self) -> None:
        """Check after every use of remote results, from the next forward on."""
        self.objects, self._made = True, None

    def forget(self) -> None:
        """Forget the program, since the graph was edited."""
        self._made = None


def _checked(program: GraphModule, *, objects: bool, keeps_values: bool) -> GraphModule | None:
    behind = [node.name for node in running_own_code(program, objects=objects)]
    if not behind:
        return None
    graph = Graph(tracer_cls=program.graph._tracer_cls)
    graph.set_codegen(copy.copy(program.graph._codegen))
    copied: dict[Node, Node] = {}
    for node in program.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        if node.name in behind:
            kept = [value for each, value in copied.items() if keeps_values or each.op in _LEAVES]
            kept = kept if node.name == behind[-1] else []
            check = graph.call_function(check_own_code, (node.name, tuple(kept)))
            check.meta["order"] = node.meta.get("order", 0)
    return over(program, graph)


def _read_before(program: GraphModule, name: str) -> Iterator[tuple[str, str]]:
    """Yield name and path of each attribute that is read before a node and used after it."""
    positions = {node: index for index, node in enumerate(program.graph.nodes)}
    last = next(index for node, index in positions.items() if node.name == name)
    for node in program.graph.find_nodes(op="get_attr"):
        if positions[node] < last and any(positions[user] > last for user in node.users):
            yield node.name, str(node.target)


def running_own_code(program: GraphModule, *, objects: bool = False) -> Iterator[Node]:
    """Yield the nodes of a program that run code of the program's own, which may change anything.

    Args:
        program: a captured module, or the program that runs in its place.
        objects: whether remote results may be objects of the program's own classes.
    """
    may_be_objects = set[Node]()
    for node in program.graph.nodes:
        runs = _runs_own_code(node, program) or not may_be_objects.isdisjoint(node.all_input_nodes)
        if runs and node.op not in _LEAVES and not is_call(node) and not is_issue(node):
            yield node
        if objects and (is_call(node) or is_wait(node) or _hands_on(node, may_be_objects)):
            may_be_objects.add(node)


def is_closed_graph(captured: Any) -> bool:
    """Return whether a forward, as just captured, does nothing besides its graph that might change anything.

    This is so while the facts hold that the capture has found: the forward may decide by nothing else.
    """
    state = captured._fxlib
    if state.writes_out or not state.conditions.are_facts_alone or _has_hooks(state.original):
        return False
    calls = any(is_call(node) or is_issue(node) or is_wait(node) for node in captured.graph.nodes)
    return not calls and next(running_own_code(captured), None) is None


def _runs_own_code(node: Node, program: GraphModule) -> bool:
    if node.op == "call_module":
        called = submodule(program, str(node.target))
        return not is_closed(called) and any(_has_own_code(each) for _, each in local_modules(called))
    if node.op == "call_method":  # the method of an argument that is no tensor
        given = node.args[0]
        return isinstance(given, Node) and given.op == "placeholder" and not hasattr(torch.Tensor, str(node.target))
    return node.op == "call_function" and not is_harmless(node.target)


def _has_own_code(module: nn.Module) -> bool:
    """Return whether a module is of a class of the program's own, or has hooks, or holds a function that it calls."""
    kind = type(module).__module__
    if _has_hooks(module) or not kind.startswith("torch."):
        return True
    if isinstance(module, DistributedDataParallel):
        return not is_ordinary(module)  # it may have a hook for its buffers
    return kind.startswith("torch.nn.modules.") and not all(map(is_torchs_value, vars(module).values()))


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run around the forward of a module, either its own or those of all modules."""
    of_all = torchs._global_forward_hooks or torchs._global_forward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or of_all)


def _hands_on(node: Node, objects: Collection[Node]) -> bool:
    """Return whether a node's value may be an object, a part of one, or what a method of one returned."""
    plain = (
        node.op == "call_method" or getattr(node.target, "__module__", None) in _HANDING_ON or node.target in TRACKERS
    )
    return plain and not set(objects).isdisjoint(node.all_input_nodes)


@dataclass(slots=True)
class _Step:
    """The graphs that one forward has run, one after another, and the changes made where it went on with the next."""

    modules: list[Any]
    changed: dict[str, list[Change]] = field(default_factory=dict)


def run(
    module: Any,
    programs: tuple[GraphModule, GraphModule],
    code: CodeType,
    call: Callable[[], Any],
    forward: ForwardContext,
) -> Any:
    """Run generated code, and go on with another graph where it stops; return the result of the forward.

    Args:
        module: the captured module.
        programs: the program without checks, and the program that runs.
        code: the code that was generated from the latter.
        call: a function that runs this code.
        forward: the forward.

    Raises:
        Exception: what the forward raises.
    """
    plain, program = programs
    if program is not plain:
        _begin(module, plain, forward)
    try:
        return call()
    except WentOn as other:
        went_on = other
    except ObjectReceived as seen:
        module._fxlib.checked.expect_objects()
        forward.expects_objects = True
        _begin(module, plain, forward)
        stop = failure.locate(program, code, seen)
        assert stop is not None  # noqa: S101 - only a node of the graph receives anything
        last = stop.nodes[stop.failed].name
        went_on = go_on(plain, last, {**stop.values, last: seen.result}, forward, objects=True)
    return went_on.end()


def _begin(module: Any, plain: GraphModule, forward: ForwardContext) -> None:
    """Have a forward check what the graph takes for granted, after each piece of code of the program's own."""
    original = module._fxlib.original
    if original is not None and original.training is not module.training:
        original.training = module.training  # such code may change this flag
    forward.check = functools.partial(_check, _Step([module]), plain)


def _check(step: _Step, program: GraphModule, name: str, values: Callable[[], Mapping[str, Any]]) -> WentOn | None:
    """Go on with another graph if code of the program's own, which has just run, changed what the graph takes as given.

    Args:
        step: the forward that runs.
        program: the program that it runs.
        name: the node that has run such code.
        values: a function that returns the values of the nodes so far, by name.
    """
    module, first, forward = step.modules[-1], step.modules[0], THREAD.forward
    assert forward is not None  # noqa: S101 - its operator asks
    mode = torch.is_grad_enabled()
    asked = any(each._fxlib.conditions.asks_grad_mode for each in step.modules)
    broken = _broken_behind(module, program, name, values)
    if asked and mode is not _mode_behind(program, name, forward.grad_enabled):
        broken = f"grad mode is {'on' if mode else 'off'}, and is not what it was"
    if not broken:
        return None
    state = first._fxlib
    state.changed_in_step = f"{broken} any more, behind code of the program's own that the graph runs ({name})"
    changed = {**step.changed, name: [each for one in step.modules for each in one._fxlib.conditions.changes()]}
    changed[name].append(Change(lambda: None, functools.partial(torch.set_grad_enabled, mode)))
    try:
        again, known = _captured_again(step, changed, program, name, values(), grad_enabled=forward.grad_enabled)
    except FxlibError as error:
        state.warned = False
        state.warn_once(
            f"{type(first).__name__}: {state.changed_in_step}. What the forward read behind it in this step was "
            f"what it had been before; the original runs from now on. A graph for this step could not be made: {error}"
        )
        forward.check = None
        return None
    state.tell_of_original(type(first).__name__, state.changed_in_step)
    forward.check = functools.partial(_check, _Step([*step.modules, again], changed), again)
    return go_on(again, name, known, forward, objects=state.checked.objects)


def _broken_behind(module: Any, program: GraphModule, name: str, values: Callable[[], Mapping[str, Any]]) -> str:
    state = module._fxlib
    module._follow()
    conditions, original = state.conditions, state.original
    if original is not None and original.training is not module.training:  # such code has set one of them
        module.__dict__["training"] = original.__dict__["training"] = not conditions.training
    return (
        conditions.broken(grad_enabled=conditions.grad_enabled)
        or conditions.changed_metadata(())
        or state.checked.replaced(program, name, values)
    )


def _mode_behind(program: GraphModule, name: str, mode: bool) -> bool:
    """Return the grad mode after a node, as far as the graph sets it."""
    for node in _up_to(program, name):
        mode = grad_mode_after(node, mode)
    return mode


def _captured_again(
    step: _Step,
    changed: Mapping[str, Sequence[Change]],
    program: GraphModule,
    name: str,
    values: Mapping[str, Any],
    *,
    grad_enabled: bool,
) -> tuple[Any, Mapping[str, Any]]:
    """Return a graph that goes on after a node with the changes made up to there, and the values for it.

    Raises:
        CaptureError: there is no such graph.
    """
    module = step.modules[0]
    state, where = module._fxlib, type(module).__name__
    if state.captured_with is None or state.original is None or isinstance(module.graph._codegen, GuardedCodeGen):
        raise CaptureError("the graph was not traced in this process", where=where)
    if why := _not_put_back(module, [each for made in changed.values() for each in made]):
        raise CaptureError(f"{why} any more, and cannot be put back", where=where)
    now = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(grad_enabled)
        again = state.captured_with.again(state.original, changed)
    finally:
        torch.set_grad_enabled(now)
    known = values_for(again, name, program, values)
    if known is None:
        raise CaptureError("the graph was rewritten, and a value that it would go on with is not there", where=where)
    return again, known


def _not_put_back(module: Any, changes: Sequence[Change]) -> str:
    """Return which condition stays broken when all changes are undone, in words; empty if none does."""
    conditions = module._fxlib.conditions
    undone: list[Change] = []
    try:
        for each in reversed(changes):
            undone.insert(0, each)
            each.undo()
        return str(conditions.broken(grad_enabled=conditions.grad_enabled))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a class that refuses to be set
        return f"it cannot be set ({error}), and so what the forward reads is not what it was"
    finally:
        for each in undone:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                each.redo()


def go_on(program: GraphModule, last: str, values: Mapping[str, Any], forward: ForwardContext, *, objects: bool) -> Any:
    """Run a graph from behind one of its nodes, and return what the forward returns or raises.

    If it raises, the nodes that stand before the failed one in program order run first, and the modes that it has
    entered are left.

    Args:
        program: the module that has the graph.
        last: the name of the last node that has run.
        values: the values of the nodes so far, by name.
        forward: the forward that runs.
        objects: whether remote results may be objects of the program's own classes.
    """
    nodes = list(program.graph.nodes)
    interpreter = Interpreter(program, garbage_collect_values=False)
    interpreter.env = {node: values[node.name] for node in nodes if node.name in values}
    first = next(index for index, node in enumerate(nodes) if node.name == last) + 1
    own = set(running_own_code(program, objects=objects))
    for index in range(first, len(nodes)):
        node = nodes[index]
        try:
            result = interpreter.run_node(node)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the forward raises it
            known = {each.name: value for each, value in interpreter.env.items()}
            stop = failure.Failure(nodes=nodes, failed=index, values=known)
            return WentOn(None, failure.first_error_at(program, stop, error) or error)
        if node.op == "output":
            return WentOn(program.graph.process_outputs(result))
        interpreter.env[node] = result
        if node in own and forward.check is not None:
            went_on = forward.check(node.name, lambda: {each.name: value for each, value in interpreter.env.items()})
            if went_on is not None:
                return went_on
    raise AssertionError("a graph ends in its output")


def values_for(again: GraphModule, last: str, program: GraphModule, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values with which a graph that was captured again can go on; None if it cannot.

    Args:
        again: the module that has the graph, in the order of the program.
        last: the name of the last node that has run, in both graphs.
        program: the module that has run so far, with the graph as it was captured before or a rewrite of it.
        values: the values of its nodes, by name.
    """
    ran = [node for node in _up_to(program, last) if not is_issue(node) and node.target is not limit_in_flight]
    known = {_key(node): node for node in ran}
    partners: dict[Node, Node] = {}
    found: dict[str, Any] = {}
    before = _up_to(again, last)
    for node in before:
        other = known.get(_key(node))
        if other is None or not _alike(node, other, partners):
            continue
        partners[other] = node
        if other.name in values:
            found[node.name] = values[other.name]
    if any(node not in partners and node.op not in _LEAVES for node in ran):
        return None  # it may have written to what the others computed
    needed = {each for node in list(again.graph.nodes)[len(before) :] for each in node.all_input_nodes}
    return found if all(node.name in found for node in before if node in needed) else None


def _up_to(program: GraphModule, last: str) -> list[Node]:
    nodes: list[Node] = []
    for node in program.graph.nodes:
        if node.target is not check_own_code:
            nodes.append(node)
        if node.name == last:
            return nodes
    return []


def _key(node: Node) -> tuple[str, str]:
    """Return the key that a node shares with its form in a rewritten graph: a call's name, or else the node's own."""
    return ("call", call_name(node)) if is_call(node) or is_wait(node) else ("node", node.name)


def _alike(node: Node, other: Node, partners: Mapping[Node, Node]) -> bool:
    """Return whether two nodes do the same with the same values."""
    if is_call(node) or is_wait(node):
        return True
    if node.target in TRACKERS and other.target in TRACKERS:
        return True
    if node.op != other.op or _function(node.target) != _function(other.target):
        return False
    if not all(each in partners for each in other.all_input_nodes):
        return False
    given = map_arg((other.args, dict(other.kwargs)), partners.__getitem__)
    return repr(given) == repr((node.args, dict(node.kwargs)))


def _function(target: Any) -> Any:
    return getattr(target, "__wrapped__", target)
