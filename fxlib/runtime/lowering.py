"""Parts of a graph that a backend compiles where the module runs.

The graph itself stays as it is: nodes name in their metadata (`BACKEND`) the backend that is to compute them.
Neighbours that name the same backend are one part, so that a part never reaches over a call, and whatever order a graph
has, its parts do what its nodes do, one after another. Another program over the same state runs in place of the graph,
in which one function stands for each part. A part that cannot be compiled, or not in time, runs as it is.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node

from fxlib.errors import FxlibWarning
from fxlib.runtime import compiled_numbers
from fxlib.runtime.backends import BACKENDS, Backend, installed
from fxlib.runtime.lookups import are_rows, lookup_of
from fxlib.runtime.submodules import TABLES

T = TypeVar("T")

BACKEND: Final = "backend"
"""Key of a node's `meta`: the backend that computes it, with its version, as `openvino==2026.4.1`."""

ASSERTION: Final = torch.ops.aten._assert_tensor_metadata.default
"""The operator by which `torch.export` asserts the dtype of a value; a backend is not given it."""

_SHAPES: Final = 8
"""The number of kinds of inputs for which a part is compiled; for others it runs as it is."""
_one_at_a_time: Final = threading.RLock()
"""Held while a compiler runs, since exporters and tracers of torch change state of the whole process."""
_COMPILING_S: Final = 900.0
"""Time limit of a compiler, in seconds; one that takes longer is left to itself."""


def backend_of(node: Node) -> Backend | None:
    """Return the backend that is to compute a node; None if the node names none, or an unknown one."""
    return BACKENDS.get(str(node.meta.get(BACKEND, "")).partition("==")[0])


def parts_of(graph: Graph) -> Iterator[Sequence[Node]]:
    """Yield the parts of a graph, each as a list of adjacent nodes that name the same backend."""
    for name, nodes in itertools.groupby(graph.nodes, lambda node: node.meta.get(BACKEND, "")):
        if name:
            yield list(nodes)


class LoweredProgram:
    """The program that runs in place of one module's graph; it is made on first use, and anew for another graph."""

    def __init__(self) -> None:
        """Begin without a program."""
        self._made: tuple[Graph, GraphModule | None] | None = None
        self.parts: tuple[Part, ...] = ()
        """The parts of the program, in its order; empty until it is made."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LoweredProgram:
        return LoweredProgram()  # the copied module has state of its own, over which its program is made

    def of(self, module: GraphModule) -> GraphModule | None:
        """Return the program over the state of a module in which functions stand for parts; None if it has no parts."""
        if self._made is None or self._made[0] is not module._graph:
            program, self.parts = _lowered(module)
            self._made = module._graph, program
        return self._made[1]

    def forget(self) -> None:
        """Forget the program, since the graph was edited."""
        self._made = None


def inputs_and_results(part: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Return the values that a part takes from nodes before it, and those of its values that are used after it."""
    own = set(part)
    taken = dict.fromkeys(value for node in part for value in node.all_input_nodes if value not in own)
    used = [node for node in part if not own.issuperset(node.users)]
    return list(taken), used


def _lowered(module: GraphModule) -> tuple[GraphModule | None, tuple[Part, ...]]:
    parts = {part[0]: part for part in parts_of(module.graph)}
    if not parts:
        return None, ()
    graph = Graph(tracer_cls=module.graph._tracer_cls)
    graph.set_codegen(copy.copy(module.graph._codegen))
    copied: dict[Node, Node] = {}
    inside = {node for part in parts.values() for node in part}
    made: list[Part] = []
    for node in module.graph.nodes:
        if node in parts:
            made.append(_call(module, graph, parts[node], copied))
        elif node not in inside:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    return over(module, graph), tuple(made)


def _call(module: GraphModule, graph: Graph, part: Sequence[Node], copied: dict[Node, Node]) -> Part:
    """Replace a part by one call and a node for each of its results."""
    taken, used = inputs_and_results(part)
    body, values = Graph(), dict[Node, Node]()
    for each in taken:
        values[each] = body.placeholder(each.name)
    for node in part:
        values[node] = body.node_copy(node, values.__getitem__)
    body.output(tuple(values[each] for each in used))
    made = Part(over(module, body), part, _checks_of(module, part, taken))
    function = _function(made, f"part_{len(copied)}")
    call = graph.call_function(function, tuple(copied[each] for each in taken))
    # If a part fails, calls that stand before its last node in program order are waited for first.
    call.meta["order"] = max(node.meta.get("order", 0) for node in part)
    for index, node in enumerate(used):
        copied[node] = found = graph.call_function(getitem, (call, index))
        found.meta.update(node.meta)
    return made


@dataclass(frozen=True, slots=True)
class _Check:
    """The rows that ids may name: ids and, if it is one, the table are inputs of a part, given by their indices."""

    ids: int
    table: int | None
    rows: int

    def holds(self, values: Sequence[Any]) -> bool:
        """Return whether the ids among the inputs are rows."""
        return are_rows(values[self.ids], self.rows if self.table is None else values[self.table].shape[0])


def _checks_of(module: GraphModule, part: Sequence[Node], taken: Sequence[Node]) -> Sequence[_Check] | None:
    """Return what has to hold before a part looks rows up; None if it computes ids itself, which nobody can check."""
    index = {node: at for at, node in enumerate(taken)}
    lookups = [found for node in part if (found := lookup_of(module, node)) is not None]
    if not all(each.ids in index for each in lookups):
        return None
    return [
        _Check(index[each.ids], None if each.weight is None else index.get(each.weight), each.table.shape[0])
        for each in lookups
    ]


def over(module: GraphModule, graph: Graph) -> GraphModule:
    """Return a module that runs a graph over another module's state, which the two share now and later.

    Of the other one's plain tensors that the graph reads, it has those of now: `WeightAssumptions` notice another one.
    """
    made = GraphModule(nn.Module(), Graph(), type(module).__name__)
    for table in TABLES:
        made.__dict__[table] = module.__dict__[table]
    constants = {str(node.target) for node in graph.find_nodes(op="get_attr")} & module.__dict__.keys()
    made.__dict__.update({name: module.__dict__[name] for name in constants})
    made.training = module.training
    made.graph = graph
    return made


def _function(part: Part, name: str) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        return part(values)

    run.__name__ = run.__qualname__ = name
    return run


class Part:
    """One part of a graph: compiled code of the backend computes it for inputs of this kind, or else its nodes do.

    Attributes:
        first: the name of its first node.
        nodes: the number of its nodes.
        name: the backend with its version.
        compile_s: the time that compiling has taken so far, in seconds.
        problem: why the part runs as it is; empty if it does not.
        limit_s: the time that compiling may take, in seconds; a compiler that hangs stays behind in a thread of its
            own. Without a limit (`math.inf`), it runs in the caller's thread.
        watch: a function that is called the next time that compiled code is to run, with that code, the module that
            computes the part as it is, and the values of the call.
    """

    def __init__(self, module: GraphModule, nodes: Sequence[Node], checks: Sequence[_Check] | None) -> None:
        """Make a part, which is not compiled yet.

        Args:
            module: computes the part as it is.
            nodes: the nodes of the graph for which the part stands.
            checks: what has to hold of its inputs for compiled code to run; None if that cannot be known.
        """
        self._module = module
        self._checks = checks or ()
        self.first, self.nodes, self.name = nodes[0].name, len(nodes), str(nodes[0].meta[BACKEND])
        self.compile_s, self.problem, self.limit_s = 0.0, "", _COMPILING_S
        self.watch: Callable[[Callable[..., Any], nn.Module, tuple[Any, ...]], None] | None = None
        self._backend = BACKENDS.get(self.name.partition("==")[0])
        self._compiled: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
        if self._backend is None or installed(self._backend.name) != self.name:
            here = (installed(self._backend.name) if self._backend else "") or "it is not installed here"
            self._give_up(f"the graph was measured with {self.name}, and {here}")
        elif checks is None:
            self._give_up("it looks rows up by ids that it computes itself")

    def leave(self, why: str = "") -> None:
        """Run the part as it is from now on; `why` says what the problem is, if there is one."""
        self._backend, self.problem = None, why or self.problem

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """Return the part's results, computed by compiled code if that is possible."""
        backend = self._backend
        if backend is None or (backend.keeps_weights and torch.is_grad_enabled()):
            return self._module.forward(*values)
        key = _kind_of(values)
        if key not in self._compiled:
            if key is None or len(self._compiled) >= _SHAPES:
                return self._module.forward(*values)
            self._compiled[key] = None  # meanwhile, other threads run the part as it is
            try:
                results = self._module.forward(*values)
                self._compiled[key] = self._compile(backend, values, results)
            except BaseException:
                self._compiled.pop(key, None)
                raise
            return results
        compiled = self._compiled[key]
        if compiled is None or not all(each.holds(values) for each in self._checks):
            return self._module.forward(*values)  # it raises for an id that is no row
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch(compiled, self._module, values)
        try:
            return compiled(*values)
        except Exception as error:  # noqa: BLE001 - the part as it is raises the program's own errors
            results = self._module.forward(*values)
            self._give_up(f"{self.name} failed: {type(error).__name__}: {str(error)[:500]}")
            return results

    def _compile(self, backend: Backend, values: tuple[Any, ...], results: Any) -> Callable[..., Any] | None:
        """Return the compiled code of the part; None, with one warning, if the backend makes none, or wrong code."""
        if not all(isinstance(each, torch.Tensor) for each in results):
            self._give_up("it has results that are no tensors, such as a maximum with its index")
            return None
        # Each kind has a module of its own, since TorchDynamo counts how often it compiles one piece of code.
        graph = copy.deepcopy(self._module.graph)
        for node in graph.find_nodes(op="call_function", target=ASSERTION):
            graph.erase_node(node)  # it holds for all inputs of the kind, or the nodes have raised just now
        part = over(self._module, graph)
        start = time.perf_counter()
        try:
            compiled_numbers.refuse(part, values, backend.name)
            compiled_numbers.mend(part, backend.name)
            compiled, found = _within(self.limit_s, lambda: _made_by(backend, part, values))
        except compiled_numbers.OtherNumbersError as refusal:  # parts may be compiled for other kinds of inputs
            self._leave_kind(f"{self.name} would compute other numbers: {refusal}")
            return None
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            self._give_up(f"{self.name} could not compile it: {type(error).__name__}: {str(error)[:500]}")
            return None
        finally:
            self.compile_s += time.perf_counter() - start
        if problem := _difference(found, results):
            self._give_up(f"{self.name} returned {problem}")
            return None
        if problem := compiled_numbers.beyond_rounding(part, values, found, results, backend.name):
            self._leave_kind(f"{self.name} computes other numbers than torch: {problem}")
            return None
        compiled = compiled_numbers.guarded(compiled, self._module, backend.name)
        if not any(map(_is_laid_out_otherwise, found, results)):
            return compiled
        layouts = [each.stride() for each in results]
        return lambda *given: tuple(map(_laid_out, compiled(*given), layouts))

    def _leave_kind(self, why: str) -> None:
        self.problem = why
        warnings.warn(f"a part of the graph runs uncompiled: {why}", FxlibWarning, stacklevel=2)

    def _give_up(self, why: str) -> None:
        self.problem = why
        if self._backend is not None:
            warnings.warn(f"a part of the graph runs uncompiled: {why}", FxlibWarning, stacklevel=2)
        self._backend = None


def _made_by(backend: Backend, part: nn.Module, values: tuple[Any, ...]) -> tuple[Callable[..., Any], Any]:
    """Return the code that a backend makes of a part, and the results of that code for the values."""
    compiled = backend.compile(part, values)
    return compiled, compiled(*values)


def _within(limit_s: float, make: Callable[[], T]) -> T:
    """Return the result of a function, while no other thread is here; it has a thread of its own if it has a limit.

    Raises:
        TimeoutError: the function takes longer; its thread stays, and ends with the process.
        Exception: whatever the function raises.
    """
    with _one_at_a_time:
        return make() if not math.isfinite(limit_s) else _in_a_thread(limit_s, make)


def _in_a_thread(limit_s: float, make: Callable[[], T]) -> T:
    made, grad, inference = Future[T](), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run() -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, autocast):
                made.set_result(make())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            made.set_exception(error)

    threading.Thread(target=run, name="fxlib-compile", daemon=True).start()
    wait([made], limit_s)
    if not made.done():
        raise TimeoutError(f"it took more than {limit_s:g} s")
    return made.result()


def _kind_of(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the kind of inputs for which a part is compiled; None for inputs for which no part is."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None  # a transform such as vmap, or a forward derivative, gives tensors that stand for several
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None  # a checkpoint expects that what runs again saves the same tensors for backward
    kinds: list[Any] = [torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()]
    kinds.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
    for each in values:
        if type(each) in (torch.Tensor, nn.Parameter):
            if each.layout is not torch.strided or each.is_nested:
                return None  # no backend takes it, and not all of them have sizes and strides
            if not each.numel() or each.is_neg() or each.is_conj():
                return None  # there is nothing to gain, or a sign that is still to be changed
            kinds.append((each.shape, each.stride(), each.dtype, each.device, each.requires_grad))
        elif type(each) in (bool, int, float, type(None)):
            kinds.append((type(each), repr(each)))  # of two zeros, which are equal, one has a sign
        else:
            return None
    return tuple(kinds)


def _difference(found: Any, results: Any) -> str:
    """Return what is wrong with the form of the results; empty if nothing is."""
    if not isinstance(found, (tuple, list)) or len(found) != len(results):
        return "another number of results"
    for one, other in zip(found, results, strict=True):
        if not isinstance(one, torch.Tensor) or (one.shape, one.dtype, one.device, one.requires_grad) != (
            other.shape, other.dtype, other.device, other.requires_grad
        ):  # fmt: skip
            return f"a result of another form than {tuple(other.shape)}, {other.dtype}"
        if one.requires_grad and _is_laid_out_otherwise(one, other):
            return "a result of another layout"
    return ""


def _is_laid_out_otherwise(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.stride() != other.stride()


def _laid_out(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if value.stride() == stride:
        return value
    once = value  # of what is expanded, one element stands for all
    for dim, step in enumerate(stride):
        once = once.narrow(dim, 0, 1) if step == 0 and value.shape[dim] > 1 else once
    made = torch.empty_strided(once.shape, stride, dtype=value.dtype, device=value.device)
    return made.copy_(once).expand(value.shape)
