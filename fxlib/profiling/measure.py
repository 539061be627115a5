"""Measures whole steps of a module in a live RPC world, and summarizes them; the caller says how to run one step.

A profile has medians over steps, scaled so that the parts add up to the whole.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch.distributed import rpc
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxlib.analysis.effects.resources import contract_of_call, function_name
from fxlib.profiling.server_probe import Probed, Read, probe, unprobed
from fxlib.profiling.step_runs import STEPS, WARMUPS, StepRuns
from fxlib.profiling.step_samples import (
    NOTEWORTHY,
    CallSample,
    ForwardSample,
    PushSample,
    StepSample,
    handling_s,
    own_s,
    services_s,
    undisturbed,
)
from fxlib.runtime import is_issue
from fxlib.runtime.ops.registry import REPEATABLE
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, Push, Spread, TensorShape
from fxlib.utils.hardware import cores, processor

SHARED = 0.25
"""The share of a step from which on a profile's notes say for how long this host's cores were busy in it."""

_NO_CONTRACTS: Mapping[str, Contract] = {}


def measure(
    module: GraphModule,
    step: Callable[[], object],
    *,
    steps: int = STEPS,
    warmups: int = WARMUPS,
    contracts: Mapping[str, Contract] = _NO_CONTRACTS,
    probing_s: float = math.inf,
    calibrates: bool = False,
    recorded: bool = False,
) -> Profile:
    """Run whole steps, probe the servers by repeating the module's own reads, and return the profile of the module.

    While steps run, one call is in flight at a time, so that they take as long as the steps of a blocking program.

    Args:
        module: the captured module, with no batches of calls in it.
        step: runs one step, including `module`'s forward. It marks its parts by spans "loss" and "backward" of the
            current recording; `push_gradients` marks "push" by itself.
        steps: number of steps to measure.
        warmups: number of steps before these that are not measured.
        contracts: the contracts of remote functions that declare none, by name.
        probing_s: seconds after which no further server is probed.
        calibrates: whether to run further steps, on the batches from `step_runs.batches_of`: whole ones, and
            others whose calls return their last results. They separate local work from what standing still in calls
            adds to it.
        recorded: whether `step` runs under distributed autograd, which records calls.

    Raises:
        FxlibError: the graph holds batches, or a step ran the original's own forward instead of its code.
        Exception: whatever a step raises.
    """
    runs = StepRuns(module, step, calibrates=calibrates and not any(is_issue(node) for node in module.graph.nodes))
    runs.run(steps, warmups)
    notes: list[str] = []
    calls = _calls_of(undisturbed(runs.whole)[0], undisturbed(runs.local)[0], notes)
    probed = list(_servers(calls, _reads(runs, contracts), probing_s, recorded=recorded))
    found = Profile(
        calls=calls,
        servers=tuple(each.server for each in probed),
        steps=steps,
        hardware=f"{platform.machine()}, {processor()}, {cores()} cores",
        torch_version=torch.__version__,
        notes=(*notes, *(note for each in probed for note in each.notes)),
    )
    return _calibrated(_with_local_work(found, runs), runs)


def contract_of(call: Node, contracts: Mapping[str, Contract]) -> Contract | None:
    """Return the contract of a call: its own, or the one stated for its function."""
    return contract_of_call(call) or contracts.get(function_name(call))


def _with_local_work(found: Profile, runs: StepRuns) -> Profile:
    """Add the local work of the step, taken from the steps that made no call, if there are any."""
    local, others = undisturbed(runs.local or runs.whole)
    whole, _ = undisturbed(runs.whole)
    after = whole if _is_carried(found) else local
    note = (f"cores were shared: other processes took {others:.0%} of the time of local work, which is left out",)
    made = replace(
        found,
        notes=(*found.notes, *(note if others > NOTEWORTHY else ())),
        nodes=_nodes_of([forward for sample in local for forward in sample.forwards]),
        loss_s=median(each.spans_s["loss"] for each in local),
        backward_s=median(each.spans_s["backward"] for each in after),
        # The cost of an autograd context that spans servers arises where the context ends, and only if they take part.
        rest_s=median(each.rest_s for each in after),
    )
    return replace(made, least_share=_least_share(made, local, whole))


def _is_carried(found: Profile) -> bool:
    """Return whether servers take part in backward, which is then complete only in steps that make their calls."""
    returned = pytree.tree_leaves([call.returns for call in found.calls])
    return any(each.requires_grad for each in returned if isinstance(each, TensorShape))


def _calibrated(found: Profile, runs: StepRuns) -> Profile:
    """Add the cost of waiting in calls to the local work that follows, and the least local work that was measured."""
    if not runs.calibrates or any(len(sample.forwards) != 1 for sample in runs.whole):
        return found
    # The steps run once more, since other load on the machine comes in bursts.
    cold = [*runs.run_locally(), *runs.cold]
    step_s = median(own_s([passed_s for passed_s, _ in runs.unclocked_s], [cpu_s for _, cpu_s in runs.unclocked_s]))
    pushes_s = median(each.spans_s["push"] for each in runs.whole)
    calls = _waking(found.calls, step_s - _parts_s(found) - pushes_s)
    both, _ = undisturbed([*runs.local, *cold])
    share = _least_share(found, both, undisturbed(runs.whole)[0])
    runs.stand_still()
    return _with_cores(replace(found, calls=calls, step_s=step_s, least_share=share), runs)


def _with_cores(found: Profile, runs: StepRuns) -> Profile:
    """Add how long a step keeps the cores of this host busy that other processes leave, in whichever processes."""
    if not runs.used_s:
        return found
    passed_s = median(passed_s for passed_s, _ in runs.unclocked_s)
    used_s, left = median(runs.used_s) - runs.idle_cores * passed_s, cores() - runs.idle_cores
    busy_s = min(max(used_s, 0.0) / left, found.step_s) if left > 0.0 else found.step_s
    notes = list(found.notes)
    if busy_s > SHARED * found.step_s:
        notes.append(
            f"a step kept this host's cores busy for {busy_s * 1e3:.1f} of {found.step_s * 1e3:.1f} ms: where its "
            "servers run here, too, one that hides its calls is hardly shorter than that"
        )
    return replace(found, cores_s=busy_s, notes=tuple(notes))


def _parts_s(found: Profile) -> float:
    """Return the sum of a step's parts in seconds, with each call made and awaited in its place."""
    calls_s = sum(call.issue_s + call.service_s.median + call.wait_s for call in found.calls)
    return sum(node.seconds for node in found.nodes) + calls_s + found.loss_s + found.backward_s + found.rest_s


def _servers(
    calls: tuple[CallProfile, ...], reads: Mapping[str, Read], probing_s: float, *, recorded: bool
) -> Iterator[Probed]:
    begun = time.perf_counter()
    for name in dict.fromkeys(call.to for call in calls):
        reached = [call for call in calls if call.to == name]
        if not _is_worker(name):
            yield unprobed(name, reached, "no worker of torch.distributed.rpc")
            continue
        if time.perf_counter() - begun > probing_s:
            yield unprobed(name, reached, "its turn came too late")
            continue
        longest = sorted(reached, key=lambda call: call.service_s.median, reverse=True)
        read = next((reads[call.call] for call in longest if call.call in reads), None)
        yield probe(name, reached, read, recorded=recorded)


def _reads(runs: StepRuns, contracts: Mapping[str, Contract]) -> dict[str, Read]:
    """Return the calls that may be repeated, with their last arguments."""
    found: dict[str, Read] = {}
    for name, sample in runs.whole[-1].forwards[-1].calls.items():
        contract = contract_of(sample.node, contracts)
        if contract is not None and contract.is_read and sample.node.target in REPEATABLE:
            to, function, args, kwargs, timeout_s = runs.made[name]
            batchable = contract.batchable and not function.startswith(".")
            found[name] = Read(
                to=to,
                function=function,
                args=args,
                kwargs=kwargs,
                timeout_s=timeout_s,
                batchable=batchable,
                batched_by=contract.batched_by,
                request_bytes=sample.request_bytes,
                response_bytes=sample.response_bytes,
            )
    return found


def _is_worker(name: str) -> bool:
    try:
        rpc.get_worker_info(name)
    except RuntimeError:
        return False
    return True


def _nodes_of(forwards: Sequence[ForwardSample]) -> tuple[NodeProfile, ...]:
    """Return the local work of each node: its median, scaled so that all of them add up to the median of the whole."""
    seconds = {name: median(each.seconds[name] for each in forwards) for name in forwards[-1].seconds}
    whole_s = median(sum(each.seconds.values()) for each in forwards)
    scale = whole_s / total_s if (total_s := sum(seconds.values())) else 1.0
    sizes = forwards[-1].output_bytes
    return tuple(
        NodeProfile(node=name, seconds=each * scale, output_bytes=sizes[name]) for name, each in seconds.items()
    )


def _calls_of(steps: Sequence[StepSample], local: Sequence[StepSample], notes: list[str]) -> tuple[CallProfile, ...]:
    """Return every call, with the push of its gradient if there is one; `local` shows when that is ready."""
    forwards = [forward for step in steps for forward in step.forwards]
    pushes, ready = _pushes(steps), _pushes(local)
    return tuple(
        _ready(
            _call(
                name,
                [forward.calls[name] for forward in forwards if name in forward.calls],
                pushes.get(name, []),
                notes,
            ),
            [each.ready_s or 0.0 for each, _ in ready.get(name, [])],
        )
        for name in forwards[-1].calls
    )


def _least_share(found: Profile, local: Sequence[StepSample], whole: Sequence[StepSample]) -> float:
    """Return the shortest measured time of the local work, as a share of its time in the profile.

    It is the smallest such share among the parts that a bound adds up: the nodes, what follows the forward, the
    handling of calls, and all of them together. Each counts with its shortest time in any step.

    Args:
        found: the profile.
        local: the steps that its local work was measured in, or more of them.
        whole: the steps that made their calls.
    """
    forwards, calling = ([forward for step in steps for forward in step.forwards] for steps in (local, whole))
    after = whole if _is_carried(found) else local
    usual_s = [
        sum(node.seconds for node in found.nodes),
        found.loss_s + found.backward_s + found.rest_s,
        sum(call.issue_s + call.wait_s for call in found.calls),
    ]
    samples = ([each.calls[call.call] for each in calling if call.call in each.calls] for call in found.calls)
    least_s = [
        sum(min(each.seconds[node.node] for each in forwards) for node in found.nodes),
        min(each.spans_s["loss"] for each in local) + sum(min(part) for part in _after(after)),
        sum(min(seconds) for each in samples for seconds in handling_s(each)),
    ]
    pairs = zip([*least_s, sum(least_s)], [*usual_s, sum(usual_s)], strict=True)
    return min((least / usual for least, usual in pairs if 0.0 < least < usual), default=1.0)


def _after(steps: Sequence[StepSample]) -> Iterator[list[float]]:
    yield [each.spans_s["backward"] for each in steps]
    yield [each.rest_s for each in steps]


def _waking(calls: Sequence[CallProfile], missing_s: float) -> tuple[CallProfile, ...]:
    """Divide the time by which a step takes longer than its parts among the calls, which each make the program wait."""
    wake_s = max(0.0, missing_s / len(calls)) if calls else 0.0
    return tuple(replace(call, wake_s=wake_s) for call in calls)


def _call(
    name: str, samples: Sequence[CallSample], pushes: Sequence[tuple[PushSample, float | None]], notes: list[str]
) -> CallProfile:
    last = samples[-1]
    if any(each.returns != last.returns for each in samples):
        notes.append(f"{name}: its results differ in structure from step to step; the last one is kept")
    if not last.is_complete:
        notes.append(
            f"{name}: its result does not only consist of tensors, numbers and text; the rest cannot be replayed"
        )
    issues_s, waits_s = handling_s(samples)
    call = CallProfile(
        call=name,
        function=function_name(last.node),
        to=last.to,
        request_bytes=round(median(each.request_bytes for each in samples)),
        response_bytes=round(median(each.response_bytes for each in samples)),
        returns=Opaque() if last.returns is None else last.returns,
        issue_s=median(issues_s),
        wait_s=median(waits_s),
        service_s=Spread.of(services_s(samples)),
    )
    return call if not pushes else _with_push(call, pushes)


def _with_push(call: CallProfile, pushes: Sequence[tuple[PushSample, float | None]]) -> CallProfile:
    """Add the push of a call's gradient; if none was sent, its cost is taken from the call."""
    last = pushes[-1][0]
    own_s = call.issue_s + call.wait_s
    sent = [max(0.0, seconds - own_s) for _, seconds in pushes if seconds is not None]
    push = Push(
        function=last.function,
        request_bytes=last.request_bytes,
        issue_s=call.issue_s,
        service_s=Spread.of(sent) if sent else call.service_s,
        ready_s=median(each.ready_s or 0.0 for each, _ in pushes),
    )
    return replace(call, push=push)


def _ready(call: CallProfile, ready_s: Sequence[float]) -> CallProfile:
    if call.push is None or not ready_s:
        return call
    return replace(call, push=replace(call.push, ready_s=median(ready_s)))


def _pushes(steps: Iterable[StepSample]) -> dict[str, list[tuple[PushSample, float | None]]]:
    """Return the push sample of each call's gradient in each step, with the seconds of its push if one was made."""
    found: dict[str, list[tuple[PushSample, float | None]]] = {}
    for step in steps:
        due = [
            push
            for forward in step.forwards
            for push in sorted(forward.pushes, key=lambda each: each.index)
            if push.ready_s is not None
        ]
        made: Sequence[float | None] = step.pushed_s if len(step.pushed_s) == len(due) else [None] * len(due)
        for push, seconds in zip(due, made, strict=True):
            found.setdefault(push.call, []).append((push, seconds))
    return found
