"""Follow a job that is optimized in the background, while its launcher trains with the original."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread

from torch import nn

from fxlib.client.discovery import Discovery
from fxlib.client.group_consensus import Turn
from fxlib.client.result import Result
from fxlib.client.session import Outcome, kept
from fxlib.errors import FxlibWarning
from fxlib.pipeline.watch import own_accesses

_LOG = logging.getLogger(__name__)


class Handle:
    """The answer to `Client.submit`, which may not have arrived yet."""

    def __init__(
        self,
        original: nn.Module,
        run: Callable[[], Outcome],
        turn: Turn | None = None,
        discovery: Discovery | None = None,
    ) -> None:
        """Start `run`, which does not raise, on a thread that does not keep the process alive.

        `turn` decides when several ranks swap together; `discovery` asks about calls that no graph fits.
        """
        self._original = original
        self._turn = turn
        self._discovery = discovery
        if discovery is not None:
            discovery.step(original)
        self._future: Future[Outcome] = Future()
        self._warned = False
        Thread(target=self._answer, args=(run,), name="fxlib-submit", daemon=True).start()

    def _answer(self, run: Callable[[], Outcome]) -> None:
        with own_accesses():  # else a pipeline would take each look at the ranks' store for a synchronization
            self._future.set_result(self._settled(run()))

    @property
    def original(self) -> nn.Module:
        """The module to train with until the answer arrives: the submitted one, or that of an exported program."""
        return self._original

    def ready(self) -> bool:
        """Whether the answer has arrived."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the answer; warn if it is the original because something went wrong.

        Raises:
            TimeoutError: there is no answer after `timeout_s` seconds.
        """
        outcome = self._future.result(timeout_s)
        self._warn(outcome.problem)
        return outcome.result

    @property
    def discovered(self) -> Mapping[str, Result]:
        """The answers about calls that no graph fitted, by name, if `submit(discover=True)` asked for them."""
        return {} if self._discovery is None else dict(self._discovery.results)

    def swap(self, current: nn.Module) -> nn.Module:
        """Return the module to use from now on; call it between two steps.

        The returned module is the rewritten one once it has arrived and was adopted, and `current` until then and
        otherwise. It shares all parameters, buffers and submodules with the module that was submitted, so optimizers
        and checkpoints stay as they are. Ranks that submitted together swap at the same call: each must call this once
        per step. With `submit(discover=True)`, this method asks about calls that no graph fitted, and adds graphs that
        were adopted for them to the module, whichever that is.
        """
        module = self._swapped(current)
        if self._discovery is not None:
            self._discovery.step(module)
        return module

    def _swapped(self, current: nn.Module) -> nn.Module:
        if self._turn is not None and self._turn.has_come():
            self._future.result()  # it is about to arrive
        elif self._turn is not None and self.ready() and self._future.result().result.adopted:
            return current
        if not self.ready():
            return current
        outcome = self._future.result()
        result = outcome.result
        self._warn(outcome.problem)
        if not result.adopted or current is result.module:
            return current
        if current is not self._original:
            self._warn("swap() was given another module than submit(): it keeps its place")
            return current
        _LOG.info("training goes on with the rewritten module of job %s", result.job_id)
        result.module.training = current.training  # its submodules are the original's own
        return result.module

    def _settled(self, outcome: Outcome) -> Outcome:
        """Agree with the other ranks when to swap."""
        if self._turn is None or not outcome.result.adopted:
            return outcome
        try:
            self._turn.settle()
        except Exception as error:  # noqa: BLE001 - promised: whatever happens, the job trains
            return kept(self._original, error, job_id=outcome.result.job_id)
        return outcome

    def _warn(self, problem: str) -> None:
        if problem and not self._warned:
            self._warned = True
            warnings.warn(problem, FxlibWarning, stacklevel=3)
