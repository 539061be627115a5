"""`fxlib.analyze`: everything known about a graph without running it, including its time on a described device.

An operator takes its launch time, plus the time for its arithmetic and elements or the time for its bytes, whichever is
longer. The host calls a node's function and launches its operators one after another. If the host runs the operators
itself, times add up; if a device runs them, the host goes on, and the device waits only for the host and for its own
earlier work.

Source of the roofline: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fxlib.analysis.cost.simulate import live_bytes
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.analysis.effects.prologue import CallAhead, calls_ahead
from fxlib.analysis.effects.resources import GENERATOR, PEERS, PROCESS, REDUCTIONS, Resource, ServerState, Storage
from fxlib.capture.coerce import Model, as_graph, samples_of
from fxlib.inspection.device import Device, load_device
from fxlib.inspection.graph_inputs import GivenInputs, GraphInputs
from fxlib.inspection.operations import Operation
from fxlib.inspection.propagate import NodeRun, Propagation, Unknown, UnknownReason
from fxlib.inspection.tensor_facts import Size, TensorFacts, distinct_tensors, facts_of, held_bytes, memory_of, number
from fxlib.recipes.recipes import PlanningRequest
from fxlib.recipes.undeclared import undeclared
from fxlib.runtime.ops.registry import is_batch, waits_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.profile import CallProfile, Profile
from fxlib.spec.report import Undeclared, what_to_declare
from fxlib.utils.text import plain, seconds, table

META = "figures"
"""Key of a node's `meta` under which `Analysis.annotate` stores the node's figures. No pass reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceTime:
    """How long one forward takes on a device."""

    seconds: float
    """Seconds from the first operator to the end of the last."""
    host_s: float
    """Seconds until the host has launched everything."""
    node_s: Mapping[Node, float]
    """Seconds of each node: its operators' time on the device, or the time that the host works or waits there."""


@dataclass(slots=True)
class _Clocks:
    """The times at which host and device become free."""

    host_s: float = 0.0
    device_s: float = 0.0


def _device_time(
    runs: Mapping[Node, NodeRun], behaviours: Mapping[Node, Behaviour], device: Device, profile: Profile | None = None
) -> _DeviceTime:
    """Add up the time of a forward on a device, in linear time.

    This is the time of local work on a described machine. `fxlib.analysis.cost.simulate` gives the time of a training
    step with its calls in flight, on the machine where it was measured.

    Operators of unknown size take their launch time alone, and remote calls that no profile knows take no time.
    """
    clocks, node_s = _Clocks(), dict[Node, float]()
    answers_s: dict[Node, float] = {}
    for node, run in runs.items():
        begun_s = clocks.host_s
        calls = [] if profile is None else _calls_in(node, profile)
        if calls:
            _communicate(node, behaviours[node].part, calls, clocks, answers_s)
        clocks.host_s += _call_s(node, device)
        busy_s = _work(run.operations, device, clocks)
        host_s = clocks.host_s - begun_s
        node_s[node] = busy_s if device.asynchronous and not calls else host_s
    seconds = max(clocks.host_s, clocks.device_s)
    return _DeviceTime(seconds=seconds, host_s=clocks.host_s, node_s=node_s)


def _work(operations: Sequence[Operation], device: Device, clocks: _Clocks) -> float:
    total_s = 0.0
    for each in operations:
        clocks.host_s += device.dispatch_s
        if each.is_view:
            continue
        busy_s = _operation_s(each, device)
        clocks.device_s = max(clocks.device_s, clocks.host_s) + busy_s
        if not device.asynchronous:
            clocks.host_s = clocks.device_s
        total_s += busy_s
    return total_s


def _operation_s(operation: Operation, device: Device) -> float:
    """Return how long a device works on one operator."""
    peak = device.peak(operation.dtype, operation.work, operation.operator)
    arithmetic_s = (number(operation.flops) or 0) / peak.flops_per_s
    walk_s = (number(operation.elements) or 0) / peak.elements_per_s
    moved_s = device.transfer_s((number(operation.read_bytes) or 0) + (number(operation.written_bytes) or 0))
    return peak.launch_s + max(arithmetic_s + walk_s, moved_s)


def _call_s(node: Node, device: Device) -> float:
    """Return the time that the program needs for the node itself, before any operator runs."""
    if node.op == "call_module":
        return device.layer_s
    if node.op == "get_attr":
        return device.attribute_s
    return device.overload_s if isinstance(node.target, OpOverload) else 0.0


def _calls_in(node: Node, profile: Profile) -> list[CallProfile]:
    """Return the calls that a node makes, issues or waits for, as far as the profile has them."""
    named = (waits_of(node) if is_batch(node) else None) or (node,)
    names = map(call_name, named)
    return [profile.call_by_name[each] for each in names if each in profile.call_by_name]


def _communicate(
    node: Node, part: Part, calls: Sequence[CallProfile], clocks: _Clocks, answers_s: dict[Node, float]
) -> None:
    """Let the host issue a message, wait for an answer, or both for a blocking call. Calls of a batch overlap."""
    if part is Part.CALL or part is Part.ISSUE:
        begun_s = max(clocks.host_s, clocks.device_s)  # the arguments must have been computed
        clocks.host_s = begun_s + max(each.issue_s for each in calls)
        answers_s[node] = clocks.host_s + max(each.service_s.median for each in calls)
    if part is Part.CALL or part is Part.WAIT:
        issue = node if part is Part.CALL else node.all_input_nodes[0]
        clocks.host_s = max(clocks.host_s, answers_s.get(issue, 0.0)) + calls[0].wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """The figures of one node. Sizes are numbers, or symbols if the sizes of the inputs are symbols."""

    tensors: tuple[TensorFacts, ...]
    """The tensors in the node's value, in order."""
    operations: tuple[Operation, ...]
    """The operators that the node runs."""
    effects: tuple[str, ...]
    live_bytes: int
    """Bytes held in memory while the node runs."""
    seconds: float | None = None
    """Seconds that the node takes on the requested device."""
    unknown: Unknown | None = None
    """Why the node's value is unknown; empty if it is known."""

    @property
    def flops(self) -> Size:
        """Number of floating-point operations; a multiplication with an addition counts as two."""
        return sum(each.flops for each in self.operations)

    @property
    def read_bytes(self) -> Size:
        """Bytes that the node's operators read, one after another."""
        return sum(each.read_bytes for each in self.operations)

    @property
    def written_bytes(self) -> Size:
        """Bytes that the node's operators write."""
        return sum(each.written_bytes for each in self.operations)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The analysis of one graph for one set of inputs; as text, a table of the nodes that take longest."""

    name: str
    nodes: Mapping[Node, NodeFigures]
    """The figures of each node, in program order."""
    state_bytes: int
    input_bytes: int
    peak_bytes: int
    """The most memory held at once, in bytes: state, inputs, and values that are still needed."""
    peak_node: str
    """The first node at which memory is at its peak."""
    device: Device | None = None
    seconds: float | None = None
    """Seconds of one forward on the device, without remote calls that no profile knows."""
    undeclared: tuple[Undeclared, ...] = ()
    """Remote functions that declare nothing, and the gain the cost model expects from declaring them; largest first."""
    ahead: tuple[CallAhead, ...] = ()
    """For each remote call, whether `fxlib.pipeline` may make it ahead of its step, and if not, why."""

    @property
    def flops(self) -> int:
        """Number of floating-point operations of one forward, without those of unknown size."""
        return sum(number(each.flops) or 0 for each in self.nodes.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that one forward reads, without those of unknown size."""
        return sum(number(each.read_bytes) or 0 for each in self.nodes.values())

    @property
    def written_bytes(self) -> int:
        """Bytes that one forward writes, without those of unknown size."""
        return sum(number(each.written_bytes) or 0 for each in self.nodes.values())

    @property
    def unknown(self) -> dict[str, str]:
        """The nodes whose value is unknown, and why; nodes that are unknown only because an input is are left out."""
        return {
            node.name: str(each.unknown)
            for node, each in self.nodes.items()
            if each.unknown is not None and each.unknown.why is not UnknownReason.INPUT
        }

    def annotate(self) -> None:
        """Store the figures of each node in its `meta["figures"]`."""
        for node, figures in self.nodes.items():
            node.meta[META] = figures

    def __str__(self) -> str:
        """Return the totals and the nodes that take longest, as text."""
        return render(self)


def analyze(
    model: Model,
    inputs: GivenInputs = None,
    *,
    profile: Profile | None = None,
    device: Device | str | os.PathLike[str] | None = None,
    symbolic: bool = False,
) -> Analysis:
    """Return shapes, dtypes, FLOPs, bytes, memory, time and effects of each node, in linear time, running nothing.

    Remote calls are not made: what they return comes from the contract's `returns` or from a profile. Without either,
    the values that depend on them are reported as unknown.

    Args:
        model: a module, captured or not, a graph of torch.fx, or an exported program. It is left as it is.
        inputs: the arguments of one call, by position or by name; real tensors, or ones on the "meta" device. None: the
            inputs with which an exported graph of fixed sizes was captured.
        profile: the program's profile. With it, remote calls take as long as they did in the profile.
        device: the device to simulate: a description, the name of one in `fxlib.inspection.devices()`, or the path of a
            file. None: no times are computed.
        symbolic: whether the inputs' sizes stay symbols. Sizes that an export declared dynamic always do.

    Raises:
        CaptureError: the model cannot be captured.
        FxlibError: inputs are missing, a node cannot run on them (the message names the node, its module and the
            model's line), or there is no such device.
        ContractError: a contract's `returns` does not accept the arguments of its call.
    """
    module = as_graph(model, samples_of(inputs))
    described = device if device is None or isinstance(device, Device) else load_device(device)
    effects = Effects.of(module)
    behaviours = dict(zip(effects.nodes, effects.behaviours, strict=True))
    runs = _runs(module, inputs, behaviours, profile, symbolic=symbolic)
    timed = None if described is None else _device_time(runs, behaviours, described, profile)
    held = _Memory.of(module, runs)
    return Analysis(
        name=type(module).__name__,
        nodes=_figures(runs, _effects_of(effects), held, timed),
        state_bytes=held.state_bytes,
        input_bytes=held.input_bytes,
        peak_bytes=held.peak_bytes,
        peak_node=max(held.live_bytes, key=held.live_bytes.__getitem__).name if held.live_bytes else "",
        device=described,
        seconds=None if timed is None else timed.seconds,
        undeclared=undeclared(module, request=PlanningRequest(profile=profile)),
        ahead=calls_ahead(module),
    )


def _runs(
    module: GraphModule,
    inputs: GivenInputs,
    behaviours: Mapping[Node, Behaviour],
    profile: Profile | None,
    *,
    symbolic: bool,
) -> dict[Node, NodeRun]:
    lies_on = next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    given = GraphInputs(module.graph, inputs, lies_on, symbolic=symbolic)
    propagation = Propagation(module, behaviours, profile, symbolic=given.symbolic)
    return propagation.run(given.stand_ins(propagation.mode))


def _figures(
    runs: Mapping[Node, NodeRun], effects: Mapping[Node, tuple[str, ...]], held: _Memory, timed: _DeviceTime | None
) -> dict[Node, NodeFigures]:
    found = {}
    for node, run in runs.items():
        unknown: Any = run.value if isinstance(run.value, Unknown) else None
        found[node] = NodeFigures(
            tensors=tuple(map(facts_of, distinct_tensors(run.value))),
            operations=run.operations,
            effects=effects[node],
            live_bytes=held.live_bytes[node],
            seconds=None if timed is None else timed.node_s[node],
            unknown=unknown,
        )
    return found


_RESOURCES: Mapping[Resource, str] = {
    GENERATOR: "the random generators",
    PROCESS: "this process's memory",
    PEERS: "the order of collectives",
    REDUCTIONS: "the order of what backward reduces",
}


def _effects_of(effects: Effects) -> dict[Node, tuple[str, ...]]:
    """Return the effects of each node as short phrases; a node that only computes its own value has none.

    Memory is named after the first node whose value may lie in it. Memory that no node of the graph writes is left out.
    """
    names: dict[int, str] = {}
    for node in effects.nodes:
        names.setdefault(effects.aliases.of(node), node.name)
    found = {}
    for node, does in zip(effects.nodes, effects.per_node, strict=True):
        words = [f"fence: {does.fence.sentence()}"] if does.fence is not None else []
        words += _phrase("writes", does.writes, names)
        words += _phrase("reads", does.reads - does.writes, names)
        if does.part is Part.WAIT:
            words = [f"until here: {each}" for each in words]
        found[node] = tuple(words)
    return found


def _phrase(verb: str, resources: Iterable[Resource], names: Mapping[int, str]) -> list[str]:
    listed = sorted({_name(each, names) for each in resources})
    return [f"{verb} {', '.join(listed)}"] if listed else []


def _name(resource: Resource, names: Mapping[int, str]) -> str:
    if isinstance(resource, Storage):
        owner = names.get(resource.alias_class, "the module's own state")
        return f"the memory of {owner}"
    if isinstance(resource, ServerState):
        part = "any state" if resource.name is None else resource.name
        return f"{part} of {resource.server or 'any server'}"
    return _RESOURCES[resource]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The memory of one run, in bytes."""

    state_bytes: int
    """Bytes of parameters and buffers."""
    input_bytes: int
    live_bytes: Mapping[Node, int]
    """Bytes held while each node runs: state, inputs, and values that are still needed, the node's own included."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return max(self.live_bytes.values(), default=self.state_bytes + self.input_bytes)

    @classmethod
    def of(cls, module: nn.Module, runs: Mapping[Node, NodeRun]) -> _Memory:
        """Follow memory through a run, in linear time. Unknown sizes count as zero.

        Memory is counted once, however many views share it. Parameters, buffers and inputs are held throughout.
        """
        within = {node: _storages(run.value) for node, run in runs.items()}
        inputs, resident, sizes = dict[int, int](), set[int](), dict[int, int]()
        for node, storages in within.items():
            sizes |= storages
            if node.op == "placeholder":
                inputs |= storages
            if node.op in ("placeholder", "get_attr"):
                resident |= storages.keys()
        state = {memory_of(each): _size(each) for each in (*module.parameters(), *module.buffers())}
        state_bytes, input_bytes = sum(state.values()), sum(inputs.values())

        def needed(node: Node) -> Iterator[int]:
            for each in (node, *node.all_input_nodes):
                yield from within[each].keys() - resident

        held = live_bytes(list(runs), needed, sizes.__getitem__)
        live = {node: state_bytes + input_bytes + each for node, each in zip(runs, held, strict=True)}
        return cls(state_bytes=state_bytes, input_bytes=input_bytes, live_bytes=live)


def _storages(value: object) -> dict[int, int]:
    """Return the sizes, in bytes, of the storages that the tensors of a value lie in."""
    return {memory_of(each): _size(each) for each in distinct_tensors(value)}


def _size(value: torch.Tensor) -> int:
    return number(held_bytes(value)) or 0


_LONGEST = 20


def render(analysis: Analysis) -> str:
    """Render an analysis: totals, the nodes that take longest (or do most), and what is unknown."""
    moved = f"{size(analysis.read_bytes)} read, {size(analysis.written_bytes)} written"
    held = f"{size(analysis.state_bytes)} of parameters and buffers, {size(analysis.input_bytes)} of inputs"
    lines = [
        f"{analysis.name}: {len(analysis.nodes)} nodes, {flops(analysis.flops)}, {moved}",
        f"memory: {held}; {size(analysis.peak_bytes)} at the most, at {analysis.peak_node}",
    ]
    if analysis.device is not None:
        lines.append(f"one forward on {analysis.device.name}: {seconds(analysis.seconds)}, by the model of the device")
    ranked = sorted(analysis.nodes.items(), key=lambda each: _weight(each[1]), reverse=True)[:_LONGEST]
    rows = [[node.name, *cells(figures), "; ".join(figures.effects) or "-"] for node, figures in ranked]
    heads = ["node", "makes", "takes", "arithmetic", "moves", "live", "effects"]
    lines += ["", f"the {len(rows)} nodes with most to do", *table([heads, *rows], right=(2, 3, 4, 5))]
    if analysis.unknown:
        lines += ["", "unknown", *(f"  {name}: {why}" for name, why in analysis.unknown.items())]
    if analysis.undeclared:
        lines += ["", *what_to_declare(analysis.undeclared)]
    if analysis.ahead:
        lines += ["", "calls ahead of their step, by fxlib.pipeline", *(f"  {each}" for each in analysis.ahead)]
    return "\n".join(map(plain, lines))


def cells(figures: NodeFigures) -> list[str]:
    """Return a node's value, time, arithmetic, bytes moved and live bytes, as table cells."""
    made = ", ".join(map(str, figures.tensors)) or ("unknown" if figures.unknown is not None else "-")
    moved = figures.read_bytes + figures.written_bytes
    return [made, seconds(figures.seconds), flops(figures.flops), size(moved), size(figures.live_bytes)]


def flops(value: Size) -> str:
    """Format an amount of arithmetic with a fitting unit; a symbolic amount is formatted by its hint."""
    known = number(value)
    if known is None:
        return "unknown"
    amount = float(known)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TFLOP"


def size(value: Size) -> str:
    """Format bytes with a fitting unit; a symbolic amount is formatted by its hint."""
    known = number(value)
    if known is None:
        return "unknown"
    amount = float(known)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _weight(figures: NodeFigures) -> tuple[float, int]:
    moved = (number(figures.read_bytes) or 0) + (number(figures.written_bytes) or 0)
    return figures.seconds or 0.0, (number(figures.flops) or 0) + moved
