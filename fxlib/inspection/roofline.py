"""How long a graph takes on a described device: a roofline for each operator, and a cost for starting it.

An operator takes what its launch takes, and then as long as its arithmetic and its elements, or its bytes, whichever
needs longer. The host calls what is at a node, and gets its operators under way one after another. Where it runs them
itself, times add up; where a device does, the host goes on, and the device waits for nothing but the host and its own
work before.

Source of the roofline: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.inspection.device import Device
from fxlib.inspection.operations import Operation
from fxlib.inspection.propagate import Run
from fxlib.inspection.tensors import number
from fxlib.runtime.ops.batches import is_batch, waits_of
from fxlib.runtime.ops.record import call_name
from fxlib.spec.profile import CallProfile, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """How long one forward takes on a device."""

    seconds: float
    """The time from the first operator to the end of the last."""
    host_s: float
    """The time until the host has got all under way."""
    node_s: Mapping[Node, float]
    """The time of each node: that of its operators on the device, or what the host does or waits for it."""


@dataclass(slots=True)
class _Clocks:
    """When host and device are free."""

    host_s: float = 0.0
    device_s: float = 0.0


def device_time(
    runs: Mapping[Node, Run], behaviours: Mapping[Node, Behaviour], device: Device, profile: Profile | None = None
) -> DeviceTime:
    """Add up what a forward takes on a device, in linear time.

    This is the time of local work on a machine that is described; what a training step takes with its calls in flight,
    on the machine where it was measured, is `fxlib.analysis.cost.simulate`.

    Operators of unknown sizes take what starting them takes, and remote calls that no profile knows take nothing.
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
    return DeviceTime(seconds=seconds, host_s=clocks.host_s, node_s=node_s)


def _work(operations: Sequence[Operation], device: Device, clocks: _Clocks) -> float:
    total_s = 0.0
    for each in operations:
        clocks.host_s += device.dispatch_s
        if each.is_view:
            continue
        busy_s = operation_s(each, device)
        clocks.device_s = max(clocks.device_s, clocks.host_s) + busy_s
        if not device.asynchronous:
            clocks.host_s = clocks.device_s
        total_s += busy_s
    return total_s


def operation_s(operation: Operation, device: Device) -> float:
    """Return how long a device works on one operator."""
    peak = device.peak(operation.dtype, operation.work, operation.operator)
    arithmetic_s = (number(operation.flops) or 0) / peak.flops_per_s
    walk_s = (number(operation.elements) or 0) / peak.elements_per_s
    moved_s = device.transfer_s((number(operation.read_bytes) or 0) + (number(operation.written_bytes) or 0))
    return peak.launch_s + max(arithmetic_s + walk_s, moved_s)


def _call_s(node: Node, device: Device) -> float:
    """Return what the program takes for a node itself, before any operator."""
    if node.op == "call_module":
        return device.layer_s
    if node.op == "get_attr":
        return device.attribute_s
    return device.overload_s if isinstance(node.target, OpOverload) else 0.0


def _calls_in(node: Node, profile: Profile) -> list[CallProfile]:
    """Return the calls that a node makes, issues or waits for, as far as the profile knows them."""
    named = (waits_of(node) if is_batch(node) else None) or (node,)
    names = map(call_name, named)
    return [profile.call_by_name[each] for each in names if each in profile.call_by_name]


def _communicate(
    node: Node, part: Part, calls: Sequence[CallProfile], clocks: _Clocks, answers_s: dict[Node, float]
) -> None:
    """Let the host issue a message, or wait for an answer; both, where a call blocks. Calls of a batch run abreast."""
    if part is Part.CALL or part is Part.ISSUE:
        begun_s = max(clocks.host_s, clocks.device_s)  # what it sends has to be there
        clocks.host_s = begun_s + max(each.issue_s for each in calls)
        answers_s[node] = clocks.host_s + max(each.service_s.median for each in calls)
    if part is Part.CALL or part is Part.WAIT:
        issue = node if part is Part.CALL else node.all_input_nodes[0]
        clocks.host_s = max(clocks.host_s, answers_s.get(issue, 0.0)) + calls[0].wait_s
