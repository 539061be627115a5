"""Watch the steps of a training loop: how fast they are, and whether the rewritten module is still worth it there.

With a canary, the original runs for a share of the steps, in turns with the rewritten module. Each round of steps has
one pair of adjacent blocks, one of each module, and a coin toss decides which comes first: so the figure is the same as
a trial's (`fxlib.profiling.statistics`). The first steps after a switch do not count, since caches are cold and a
pipeline has fetched nothing ahead. Which module runs depends only on the step's number, so that ranks agree on it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Self

from torch import nn
from typing_extensions import override

from fxlib.client.connection import Deadline
from fxlib.client.group_consensus import Rendezvous, Turn
from fxlib.client.result import LiveWatch, WatchOptions
from fxlib.errors import FxlibError, FxlibWarning, RemoteError, WorkloadError
from fxlib.pipeline.watch import own_accesses
from fxlib.profiling.statistics import ConfidenceSequence
from fxlib.runtime import CapturedModule
from fxlib.spec.report import Estimate, LiveFigures, interval

_LOG = logging.getLogger(__name__)

COLD_STEPS: Final = 2
"""Number of steps after a switch that do not count."""
BLOCK_STEPS: Final = 4
"""Number of steps of one block of a pair."""
_TURN: Final = COLD_STEPS + BLOCK_STEPS
WINDOW: Final = 32
"""Number of recent pairs from which the displayed gain is estimated."""
_WINDOWS: Final = (32, 256, 2048)
"""Numbers of pairs after which a decision begins anew, so that old pairs do not hide the present: the short window
detects a large loss soon, and only the long ones detect a small loss."""
_PLAIN_ROUND: Final = 100
"""Number of steps of a round without a canary."""
_DECISIVE: Final = 0.998
"""Two-sided confidence of a decision to go back: within a window, one decision in a thousand is wrong."""
_SHOWN: Final = 0.95
"""Confidence of the interval that is reported."""
_EVERY_S: Final = 30.0
_LOOK_S: Final = 0.25
"""Interval in seconds between two checks of whether rank 0 has decided to go back."""
_CLOSING_S: Final = 5.0
_IN_TURN: Final = "it runs in turn with the rewritten module, to be compared with it"
_BACK: Final = "the gain of the rewritten module fell below what was asked for"
_NO, _YES = b"no", b"yes"

Report = Callable[[LiveFigures], None]
"""A function that reports to the service; it raises a RemoteError if that fails."""


class StepRole(NamedTuple):
    """One step of a round: whether the original runs, whether the step counts, and whether it belongs to a pair."""

    original: bool
    counts: bool = True
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """The plan of which module runs at which step.

    Attributes:
        canary: share of the steps that the original runs; 0: none.
        seed: seed of the coin tosses; the same on all ranks.
    """

    canary: float
    seed: str

    @property
    def round_steps(self) -> int:
        """Number of steps of a round."""
        return max(2 * _TURN, math.ceil(_TURN / self.canary)) if self.canary else _PLAIN_ROUND

    def at(self, step: int) -> StepRole:
        """Return the role of a step in its round, by the step's number from 0."""
        length = self.round_steps
        turn, at = divmod(step, length)
        if not self.canary:
            return StepRole(original=False, counts=step >= COLD_STEPS)
        if _original_first(self.seed, turn):
            original, since = at < _TURN, at if at < _TURN else at - _TURN
            paired = COLD_STEPS <= since < _TURN
        else:
            original = at >= length - _TURN
            since = at - (length - _TURN) if original else at
            paired = since >= COLD_STEPS if original else length - _TURN - BLOCK_STEPS <= at
        return StepRole(original=original, counts=since >= COLD_STEPS, paired=paired)


@lru_cache(maxsize=8)
def _original_first(seed: str, turn: int) -> bool:
    return bool(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[0] & 1)


class _Block:
    """The sums of one module's steps, samples and seconds."""

    __slots__ = ("samples", "seconds", "steps")

    def __init__(self) -> None:
        self.steps, self.samples, self.seconds = 0, 0.0, 0.0

    def add(self, samples: float, seconds: float) -> None:
        self.steps += 1
        self.samples += samples
        self.seconds += seconds


class Comparison:
    """The pairs of blocks so far, and whether the gain has fallen below the least that is worth it.

    Args:
        least_gain: the least gain, relative; 0.02 is 2%.
    """

    def __init__(self, least_gain: float) -> None:
        self._least = math.log1p(least_gain)
        self._late: deque[float] = deque(maxlen=WINDOW)
        self._windows = {size: ConfidenceSequence(_DECISIVE) for size in _WINDOWS}
        self.has_fallen = False

    def add(self, log_ratio: float) -> None:
        """Add one pair, as log(seconds per sample of the original / seconds per sample of the rewritten module)."""
        self._late.append(log_ratio)
        for size, window in self._windows.items():
            window.add(log_ratio)
            if len(window) % (size // _WINDOWS[0]) == 0 and window.below(self._least):  # a long one is slow to check
                self.has_fallen = True
            if len(window) >= size:
                self._windows[size] = ConfidenceSequence(_DECISIVE)

    @property
    def gain(self) -> Estimate | None:
        """The gain over the last pairs; None if they are too few for an interval."""
        shown = ConfidenceSequence(_SHOWN)
        for each in tuple(self._late):
            shown.add(each)
        return shown.gain() if all(map(math.isfinite, shown.interval())) else None


class StepWatch(LiveWatch):
    """Watches the steps of one training loop; everything but the reports happens on the loop's own thread.

    Args:
        module: the module that trains.
        original: the original's graph, to run in turn; None if the module is the original, or has no graph.
        job_id: the id of the job whose answer trains.
        samples: number of samples of a step, unless the loop says otherwise.
        least_gain: the least gain that the job asked for.
        report: a function that reports to the service.
        options: the user's options.

    Raises:
        WorkloadError: the options make no sense, or there is no such group.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        original: CapturedModule | None,
        job_id: str,
        samples: float,
        least_gain: float,
        report: Report | None,
        options: WatchOptions,
    ) -> None:
        canary, every_s = options.get("canary", 0.0), options.get("every_s", _EVERY_S)
        if not 0.0 <= canary <= 0.5:
            raise WorkloadError("must be from 0 to 0.5", where="canary")
        if not every_s > 0.0:
            raise WorkloadError("must be positive", where="every_s")
        least_gain = options.get("least_gain", least_gain)
        if not -1.0 < least_gain < math.inf:
            raise WorkloadError("must be more than -1, and finite", where="least_gain")
        group = options.get("group")
        self._module = module
        self._original = original if isinstance(module, CapturedModule) else None
        self._samples = samples
        self._turns = Turns(canary if self._original is not None else 0.0, job_id)
        self._comparison = Comparison(least_gain)
        self._rendezvous = None if group is None else Rendezvous(group)
        self._turn = None if self._rendezvous is None else Turn(self._rendezvous)
        ranks = 1 if self._rendezvous is None else self._rendezvous.size
        self._ranks = ranks
        self._report = report if self._rendezvous is None or self._rendezvous.rank == 0 else None
        self._every_s = every_s
        self._steps = 0
        self._went_back = self._why_replaced == _BACK  # an earlier watch of the module did
        self._role = StepRole(original=False, counts=False)
        self._rounds: deque[tuple[_Block, _Block]] = deque([(_Block(), _Block())], maxlen=WINDOW)
        """The blocks of the rewritten module and of the original in each of the last rounds."""
        self._pair = (_Block(), _Block())
        self._block = _Step(self)
        self._closed, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=run, name="fxlib-live", daemon=True)
            for run, wanted in ((self._tell, self._report is not None), (self._agree, self._turn is not None))
            if wanted
        ]
        for thread in self._threads:
            thread.start()

    @override
    def step(self, samples: float | None = None) -> AbstractContextManager[None]:
        self._block.samples = self._samples if samples is None else samples
        return self._block

    @property
    @override
    def figures(self) -> LiveFigures:
        rounds = tuple(self._rounds)
        rewritten, original = (_rate([each[which] for each in rounds], self._ranks) for which in (0, 1))
        if self._original is None:  # the module is its original
            rewritten, original = None, rewritten
        return LiveFigures(
            qps_original=original,
            qps_optimized=rewritten,
            gain=self._comparison.gain,
            steps=self._steps,
            went_back=self._went_back,
        )

    @override
    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        if self._why_replaced == _IN_TURN:
            self._switch(None)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Switch to the module that runs in the next step."""
        if self._turn is not None and not self._closed.is_set() and self._turn.has_come():
            self._go_back()
        self._role = self._turns.at(self._steps)
        if self._went_back:
            self._role = StepRole(original=True)
        elif self._closed.is_set():
            self._role = StepRole(original=False)
        why = None if not self._role.original else _BACK if self._went_back else _IN_TURN
        if why != self._why_replaced:
            self._switch(why)

    def end(self, samples: float, seconds: float) -> None:
        """Note a step that has ended without an error."""
        role = self._role
        if not role.counts:
            return
        self._rounds[-1][role.original].add(samples, seconds)
        if role.paired:
            self._pair[role.original].add(samples, seconds)

    def passed(self) -> None:
        """Note that a step is over, with or without an error."""
        self._steps += 1
        if self._steps % self._turns.round_steps == 0:
            self._end_round()

    def _end_round(self) -> None:
        rewritten, original = self._pair
        self._pair = (_Block(), _Block())
        self._rounds.append((_Block(), _Block()))
        if self._went_back or not (rewritten.steps == original.steps == BLOCK_STEPS):
            return  # a step of one of them failed
        if min(rewritten.seconds, original.seconds, rewritten.samples, original.samples) <= 0.0:
            return
        had_fallen = self._comparison.has_fallen
        self._comparison.add(
            math.log(original.seconds / original.samples) - math.log(rewritten.seconds / rewritten.samples)
        )
        if self._comparison.has_fallen and not had_fallen and self._turn is None:
            self._go_back()

    @property
    def _why_replaced(self) -> str | None:
        """Why the original runs in place of the rewritten module; None if it does not."""
        return self._module._fxlib.graphs.why_replaced if isinstance(self._module, CapturedModule) else None

    def _switch(self, why: str | None) -> None:
        """Run the original from now on, for this reason, or the rewritten module (None)."""
        assert isinstance(self._module, CapturedModule)  # noqa: S101 - there is no original otherwise
        graphs = self._module._fxlib.graphs
        if why is None:
            graphs.replace_main(self._module, None)
        else:
            graphs.replace_main(self._module, self._original, why)

    def _go_back(self) -> None:
        """Run the original from the next step on."""
        if self._went_back:
            return
        self._went_back = True
        self._wake.set()
        seen = f" ({interval(gain)} of late)" if (gain := self._comparison.gain) is not None else ""
        warnings.warn(
            f"training goes on with the original module: in this job, the gain of the rewritten one fell below what "
            f"was asked for{seen}",
            FxlibWarning,
            stacklevel=5,
        )

    def _tell(self) -> None:
        """Report from time to time what is new, on a separate thread."""
        assert self._report is not None  # noqa: S101 - the thread would not run
        reported: LiveFigures | None = None
        while True:
            self._wake.wait(min(self._every_s, threading.TIMEOUT_MAX))
            self._wake.clear()
            last, figures = self._closed.is_set(), self.figures
            if figures.steps and figures != reported:  # the service takes a report for what the training does of late
                try:
                    self._report(figures)
                    reported = figures
                except Exception as error:  # noqa: BLE001 - promised: whatever happens, the job trains
                    _LOG.info("the figures of the steps did not reach the service: %s", error)
            if last:
                return

    def _agree(self) -> None:
        """Agree with the other ranks on the step at which all go back, on a separate thread."""
        rendezvous, turn = self._rendezvous, self._turn
        assert rendezvous is not None  # noqa: S101 - the thread would not run
        assert turn is not None  # noqa: S101 - the same
        try:
            with own_accesses():  # else a pipeline would take each look at the ranks' store for a synchronization
                if self._decided(rendezvous):
                    turn.settle()
                elif self._closed.is_set():  # else rank 0 has ended, and nobody asks for this rank's number
                    turn.tell()
        except FxlibError as error:
            _LOG.info("the ranks could not agree on a step to go back at: %s", error)
        except RuntimeError as error:  # torch raises it if the store is gone, and with it the other ranks
            _LOG.info("the store of the ranks does not answer: %s", error)

    def _decided(self, rendezvous: Rendezvous) -> bool:
        """Wait until rank 0 decides to go back, or until it or this rank has ended."""
        while not self._closed.wait(_LOOK_S):
            if rendezvous.rank == 0:
                if self._comparison.has_fallen:
                    rendezvous.write("way back", _YES)
                    return True
                continue
            try:
                return rendezvous.read(0, "way back", Deadline(0.0)) == _YES
            except RemoteError:
                continue
        if rendezvous.rank == 0:
            rendezvous.write("way back", _NO)
        return False


class _Step:
    """The `with` block around one step."""

    __slots__ = ("_began", "_watch", "samples")

    def __init__(self, watch: StepWatch) -> None:
        self._watch, self.samples, self._began = watch, 0.0, 0.0

    def __enter__(self) -> None:
        self._watch.begin()
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        if kind is None:
            self._watch.end(self.samples, seconds)
        self._watch.passed()


def _rate(blocks: list[_Block], ranks: int) -> float | None:
    seconds = sum(each.seconds for each in blocks)
    return ranks * sum(each.samples for each in blocks) / seconds if seconds > 0.0 else None
