"""A job that is optimized in the background, while its launcher trains with the original."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from torch import nn

from fxlib.client.ask import Outcome
from fxlib.errors import FxlibWarning
from fxlib.result import Result


class Handle:
    """The answer to `Client.submit`, as far as it has come."""

    def __init__(self, original: nn.Module, run: Callable[[], Outcome]) -> None:
        """Start `run`, which does not raise, on a thread that does not keep the process alive."""
        self._original = original
        self._future: Future[Outcome] = Future()
        self._warned = False
        Thread(target=lambda: self._future.set_result(run()), name="fxlib-submit", daemon=True).start()

    def ready(self) -> bool:
        """Whether the answer is there."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the answer; warn if it is the original because something went wrong.

        Raises:
            TimeoutError: there is none after `timeout_s` seconds.
        """
        outcome = self._future.result(timeout_s)
        self._warn(outcome.problem)
        return outcome.result

    def swap(self, current: nn.Module) -> nn.Module:
        """Return the module to use from now on; call it between two steps.

        That is the rewritten module once it is there and was adopted, and `current` until then and otherwise. It
        shares all parameters, buffers and submodules with the module that was submitted, so optimizers and
        checkpoints stay as they are.
        """
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
        result.module.training = current.training  # its submodules are the original's own
        return result.module

    def _warn(self, problem: str) -> None:
        if problem and not self._warned:
            self._warned = True
            warnings.warn(problem, FxlibWarning, stacklevel=3)
