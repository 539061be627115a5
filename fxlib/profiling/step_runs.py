"""Runs steps of a module to measure them: with a clock between its nodes, without calls, and unchanged.

With the clock, one call is in flight at a time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.profiling.single_call import message_bytes, timed, value_bytes
from fxlib.profiling.step_samples import ForwardSample, PushSample, StepSample
from fxlib.runtime import ops
from fxlib.runtime.ops.calls import is_call, is_issue, is_wait
from fxlib.runtime.ops.registry import CREATIONS, TRACKERS, is_batch
from fxlib.runtime.ops.timeline import Recording, call_name, record
from fxlib.runtime.tracking.forward_context import Tracked, current_forward
from fxlib.utils import hardware
from fxlib.utils.pytree import mapped

_CALIBRATION = 1_000


class Stopwatch(Recording):
    """A recording in which one module runs its instrumented code."""

    def __init__(self, module: GraphModule, instrumented: Instrumented) -> None:
        """Let `module` run `instrumented`, which was made from it."""
        super().__init__()
        self.cpu_s: dict[str, float] = {}
        """Processor time of the thread in the spans of each kind, in seconds."""
        self._module = module
        self._instrumented = instrumented

    @override
    def instrument(self, module: GraphModule, generated: Callable[..., Any]) -> Callable[..., Any]:
        return self._instrumented if module is self._module else generated

    @override
    @contextmanager
    def span(self, kind: str, name: str = "", to: str = "") -> Iterator[None]:
        with super().span(kind, name, to):
            if kind == "backward":
                self._instrumented.backward_begins()
            start = time.thread_time()
            yield
            self.cpu_s[kind] = self.cpu_s.get(kind, 0.0) + time.thread_time() - start


STEPS = 10
WARMUPS = 2
_BETWEEN = 2
"""Number of measured steps after which further ones run."""
_IDLE_S = 0.1
_LOCAL_STEPS = 3
"""Number of further steps without calls that run in a row."""

_PARTS = ("loss", "backward", "push")


class StepRuns:
    """Steps of a module, and their samples.

    Args:
        module: the captured module, with no batches of calls in it.
        step: runs one step, including `module`'s forward.
        calibrates: whether further steps run between the measured ones.

    Attributes:
        whole: samples of the requested steps.
        local: samples of further steps, whose calls return what they returned last.
        cold: samples of the first step in each row of those, which runs with the caches and clock frequencies that
            waiting has left.
        unclocked_s: seconds of further steps that ran unchanged: wall-clock time, and the thread's processor time.
        used_s: the processor time that all processes of this host took meanwhile, step by step, where it is known.
        idle_cores: how many cores they keep busy while the step stands still.

    Raises:
        FxlibError: the graph holds batches.
    """

    def __init__(self, module: GraphModule, step: Callable[[], object], *, calibrates: bool) -> None:
        self.calibrates = calibrates
        self.whole: list[StepSample] = []
        self.local: list[StepSample] = []
        self.cold: list[StepSample] = []
        self.unclocked_s: list[tuple[float, float]] = []
        self.used_s: list[float] = []
        self.idle_cores = 0.0
        self._module = module
        self._step = step
        self._instrumented = Instrumented(module)

    @property
    def made(self) -> Mapping[str, tuple[Any, ...]]:
        """The arguments with which each call's operator was last called, by the call's name."""
        return self._instrumented.made

    def run(self, steps: int, warmups: int) -> None:
        """Run this number of measured steps, after the warm-up steps.

        Raises:
            FxlibError: the module's own code did not run in a step.
            Exception: whatever a step raises.
        """
        for _ in range(warmups):
            self._sample()
        for count in range(steps):
            self.whole.append(self._sample())
            if self.calibrates and count % _BETWEEN == 0:
                self.unclocked_s.append(self._seconds())
                self.local += self.run_locally()

    def stand_still(self) -> None:
        """See what the cores do meanwhile: what that is, no step is to be charged with."""
        before_s, start = hardware.used_s(), time.perf_counter()
        time.sleep(_IDLE_S)
        passed_s, after_s = time.perf_counter() - start, hardware.used_s()
        if before_s is not None and after_s is not None:
            self.idle_cores = (after_s - before_s) / passed_s

    def run_locally(self) -> list[StepSample]:
        """Run steps that make no call; record the first of them as cold, and return the others."""
        self._instrumented.replays = True
        try:
            cold, *warm = [self._sample() for _ in range(_LOCAL_STEPS)]
        finally:
            self._instrumented.replays = False
        self.cold.append(cold)
        return warm

    def _sample(self) -> StepSample:
        instrumented = self._instrumented
        instrumented.forwards.clear()
        stopwatch = Stopwatch(self._module, instrumented)
        with record(stopwatch) as recording:
            start = time.thread_time()
            self._step()
            cpu_s = time.thread_time() - start
        if not instrumented.forwards:
            raise FxlibError(
                "its own code did not run: the original's forward did, or none",
                where=type(self._module).__name__,
                hint="Profile it in the state in which it was captured: grad mode, training flags, hooks.",
            )
        spans = [span for span in recording.timeline.spans if span.kind in _PARTS]
        return StepSample(
            forwards=tuple(instrumented.forwards),
            step_s=recording.timeline.step_s,
            spans_s={kind: sum(each.end_s - each.start_s for each in spans if each.kind == kind) for kind in _PARTS},
            pushed_s=tuple(span.end_s - span.start_s for span in spans if span.kind == "push"),
            step_cpu_s=cpu_s,
            spans_cpu_s={kind: stopwatch.cpu_s.get(kind, 0.0) for kind in _PARTS},
        )

    def _seconds(self) -> tuple[float, float]:
        used_s, start, cpu_s = hardware.used_s(), time.perf_counter(), time.thread_time()
        self._step()
        took_s, after_s = (time.perf_counter() - start, time.thread_time() - cpu_s), hardware.used_s()
        if used_s is not None and after_s is not None:
            self.used_s.append(after_s - used_s)
        return took_s


def batches_of(steps: int, warmups: int, *, calibrates: bool) -> list[int]:
    """Return, for each step in order, the number of the batch that it takes.

    A further step takes the batch of the step before it, since the results that its calls repeat may not fit another.
    """
    further = (1 + _LOCAL_STEPS) if calibrates else 0
    numbers = list(range(warmups))
    for count in range(steps):
        numbers += [warmups + count] * (1 + further * (count % _BETWEEN == 0))
    return numbers + numbers[-1:] * (_LOCAL_STEPS if calibrates else 0)


class Instrumented:
    """Stands in for the generated code of a module.

    `forwards` grows by one with each run; `made` holds the arguments with which each call's operator was last called,
    by its name. If `replays` is set, no call is made, and each returns its last result, so that only the local work is
    left. The code is generated from the same graph, by the same code generator, so that signature, order and the
    moments at which values are freed are those of the module's own.

    Raises:
        FxlibError: the graph holds batches of calls, in which the time of a single call cannot be measured.
    """

    def __init__(self, module: GraphModule) -> None:
        """Generate the code."""
        if (batch := next(filter(is_batch, module.graph.nodes), None)) is not None:
            raise FxlibError(
                "calls that travel in one message have no times of their own",
                where=f"node {batch.name}",
                hint="Profile the module as captured, not a rewritten one.",
            )
        self.forwards: list[ForwardSample] = []
        self.made: dict[str, tuple[Any, ...]] = {}
        self.replays = False
        self._kept: dict[str, Any] = {}
        self._backward_from = 0.0
        self._clock = _Clock()
        code: Any = type(GraphModule(module, self._graph_of(module), "Instrumented")).forward
        self._code: Callable[..., Any] = code

    def __call__(self, module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        self.forwards.append(ForwardSample())
        start = self._clock.start(self.forwards[-1])
        cpu_s = time.thread_time()
        result = self._code(module, *args, **kwargs)
        self.forwards[-1].graph_s = time.perf_counter() - start
        self.forwards[-1].graph_cpu_s = time.thread_time() - cpu_s
        return result

    def backward_begins(self) -> None:
        """Start counting the arrival of gradients."""
        self._backward_from = time.perf_counter()

    def _forward(self) -> ForwardSample:
        return self.forwards[-1]

    def _graph_of(self, module: GraphModule) -> Graph:
        graph, copied = Graph(tracer_cls=module.graph._tracer_cls), dict[Node, Node]()
        graph._codegen = copy.copy(module.graph._codegen)
        reset = True
        for node in module.graph.nodes:
            if reset and node.op != "placeholder":
                graph.call_function(self._clock.reset)
                reset = False
            copied[node] = replacement = graph.node_copy(node, copied.__getitem__)
            is_remote = is_call(node) or is_issue(node) or is_wait(node)
            if is_call(node):
                replacement.target = self._calling(node)
            elif is_remote:
                replacement.target = timed(node, self._forward, self.made)
            elif node.target in TRACKERS:
                replacement.target = self._tracking(node)
            elif node.target in CREATIONS:
                replacement.target = self._creating(node)
            if is_remote:
                graph.call_function(self._clock.reset)
            elif node.op not in {"placeholder", "output"}:
                graph.call_function(self._clock.tick, (node.name, replacement))
        return graph

    def _calling(self, node: Node) -> Callable[..., Any]:
        measured, name = timed(node, self._forward, self.made), call_name(node)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.replays:
                return _again(self._kept[name])
            result = measured(*args, **kwargs)
            self._kept[name] = _again(result)
            return result

        return call

    def _creating(self, node: Node) -> Callable[..., Any]:
        creation = cast("Callable[..., Any]", node.target)

        def create(*args: Any) -> Any:
            if not self.replays:
                self._kept[node.name] = creation(*args)
            return self._kept[node.name]

        return create

    def _tracking(self, node: Node) -> Callable[..., Any]:
        origin = node.args[0]
        name = call_name(origin) if isinstance(origin, Node) else node.name

        def track(*args: Any) -> Any:
            forward = current_forward()
            before = 0 if forward is None else len(forward.tracked)
            # The operator whose pushes travel together is never used: each push is measured alone.
            result = ops.track_gradient(*args)
            if forward is not None and len(forward.tracked) > before:
                self._watch(name, forward.tracked[-1], result)
                if self.replays:  # the gradient of a value that no server returned is dropped
                    forward.tracked.pop()
            return result

        return track

    def _watch(self, call: str, tracked: Tracked, result: Any) -> None:
        size = message_bytes((tracked.args, dict(tracked.kwargs), result))
        push = PushSample(call=call, function=tracked.gradient, index=tracked.index, request_bytes=size)
        self._forward().pushes.append(push)

        def arrived(_: object) -> None:
            if push.ready_s is None:
                push.ready_s = max(0.0, time.perf_counter() - self._backward_from)

        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(arrived)


def _again(result: Any) -> Any:
    """Return a result like this one, which the program may write to; its tensors take gradients where that one's do."""
    try:
        return mapped(lambda leaf: _another(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)
    except RecursionError:  # an object holds itself
        return result


@torch.enable_grad()
def _another(tensor: torch.Tensor) -> torch.Tensor:
    # A copy of a leaf is none itself: as to a tensor that a server sent, autograd allows writing to it.
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


class _Clock:
    """Measures the time from one node to the next through functions that the generated code calls."""

    def __init__(self) -> None:
        self._last = self._last_cpu = 0.0
        self._forward = ForwardSample()
        self.reset, self.tick = self._functions()
        self._own_s = self._own_cpu_s = 0.0
        self._own_s, self._own_cpu_s = self._calibrated()

    def start(self, forward: ForwardSample) -> float:
        """Record what follows in `forward`, and return the time."""
        self._forward, self._last, self._last_cpu = forward, time.perf_counter(), time.thread_time()
        return self._last

    def _functions(self) -> tuple[Callable[[], None], Callable[[str, Any], None]]:
        # These are functions, not methods: code generation uses `__module__` and `__qualname__` to name them.
        def reset() -> None:
            self._last, self._last_cpu = time.perf_counter(), time.thread_time()

        def tick(name: str, value: Any) -> None:
            seconds = time.perf_counter() - self._last - self._own_s
            cpu_s = time.thread_time() - self._last_cpu - self._own_cpu_s
            self._forward.seconds[name] = max(0.0, seconds)
            self._forward.cpu_s[name] = max(0.0, cpu_s)
            self._forward.output_bytes[name] = value_bytes(value)
            self._last, self._last_cpu = time.perf_counter(), time.thread_time()

        return reset, tick

    def _calibrated(self) -> tuple[float, float]:
        """Return the seconds that the clock itself adds to each reading, in wall-clock and in processor time."""
        self.start(forward := ForwardSample())
        for each in range(_CALIBRATION):
            self.tick(str(each), None)
        middle = _CALIBRATION // 2
        return sorted(forward.seconds.values())[middle], sorted(forward.cpu_s.values())[middle]
