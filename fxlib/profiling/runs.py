"""Run steps of a module to measure them: with a clock between its nodes, without calls, and unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.profiling.instrument import Instrumented
from fxlib.profiling.samples import StepSample
from fxlib.runtime.ops.record import Recording, record


class Stopwatch(Recording):
    """A recording in which one module runs its instrumented code."""

    def __init__(self, module: GraphModule, instrumented: Instrumented) -> None:
        """Have `module` run `instrumented`, which was made from it."""
        super().__init__()
        self.cpu_s: dict[str, float] = {}
        """Processor time of the thread in the spans of each kind."""
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
"""Number of measured steps after which further ones are run."""
_LOCAL_STEPS = 3
"""Number of further steps without calls that are run in a row."""

_PARTS = ("loss", "backward", "push")


class Runs:
    """Steps of a module, and what they left behind.

    Args:
        module: the captured module, with no batches of calls in it.
        step: runs one step, `module`'s forward among it.
        calibrates: whether further steps are run among those that are measured.

    Attributes:
        whole: samples of the steps that were asked for.
        local: samples of further steps, whose calls return what they returned last.
        cold: samples of the first of each row of those: it runs with the caches and clock frequencies that waiting has
            left.
        unclocked_s: seconds of further steps that ran unchanged: wall-clock time, and the thread's processor time.

    Raises:
        FxlibError: the graph holds batches.
    """

    def __init__(self, module: GraphModule, step: Callable[[], object], *, calibrates: bool) -> None:
        self.calibrates = calibrates
        self.whole: list[StepSample] = []
        self.local: list[StepSample] = []
        self.cold: list[StepSample] = []
        self.unclocked_s: list[tuple[float, float]] = []
        self._module = module
        self._step = step
        self._instrumented = Instrumented(module)

    @property
    def made(self) -> Mapping[str, tuple[Any, ...]]:
        """What each call's operator was last called with, by the call's name."""
        return self._instrumented.made

    def run(self, steps: int, warmups: int) -> None:
        """Run this number of measured steps, after those that warm up.

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

    def run_locally(self) -> list[StepSample]:
        """Run steps that make no call; the first of them counts as cold, the rest is returned."""
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
        start, cpu_s = time.perf_counter(), time.thread_time()
        self._step()
        return time.perf_counter() - start, time.thread_time() - cpu_s


def batches_of(steps: int, warmups: int, *, calibrates: bool) -> list[int]:
    """Return for each step that is run, in order, which batch it takes, by number.

    A further step takes the batch of the step before it, since the results that its calls repeat may fit no other.
    """
    further = (1 + _LOCAL_STEPS) if calibrates else 0
    numbers = list(range(warmups))
    for count in range(steps):
        numbers += [warmups + count] * (1 + further * (count % _BETWEEN == 0))
    return numbers + numbers[-1:] * (_LOCAL_STEPS if calibrates else 0)
