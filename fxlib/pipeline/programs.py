"""Find the prologue of the graph that a module's next forward would run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxlib.pipeline.choice import Choice
from fxlib.pipeline.program import Program
from fxlib.runtime import CapturedModule


class Programs:
    """The prologues of one module's graphs: those of the module itself, and of the variants that it may run instead.

    Attributes:
        grad_enabled: grad mode of the last forward; None before the first.
    """

    def __init__(self, module: CapturedModule) -> None:
        self._module = module
        self._made: dict[int, Program] = {}
        self._ran: CapturedModule | None = None
        """The module whose graph has run since a prologue was last asked for."""
        self.grad_enabled: bool | None = None

    def ran(self, module: CapturedModule | None, *, grad_enabled: bool) -> None:
        """Note which module's graph runs in a forward; None is the original's, which has no graph."""
        self._ran, self.grad_enabled = module, grad_enabled

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], choice: Choice) -> Program | None:
        """Return the prologue of the graph that a forward with these arguments would run; None if there is none.

        The forward checks the guards. So they are not checked here if the module's only graph has just run.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            choice: is offered the ways of a prologue that was not known before.
        """
        main, ran = self._module, self._ran
        self._ran = None
        grad_enabled = torch.is_grad_enabled() if self.grad_enabled is None else self.grad_enabled
        runs: Any = main
        if main._fxlib.original is not None and (ran is not main or main._fxlib.graphs):
            main._follow()
            runs = main._fxlib.graphs.fits(main, tuple(args), kwargs, grad_enabled=grad_enabled)
        if runs is None:
            return None
        program = self._made.get(id(runs))
        if program is None or program.module is not runs or not program.is_current():
            program = self._made[id(runs)] = Program(runs)
            choice.offer(program.ways, updates=program.updates)
        return program

    def offer(self, choice: Choice) -> None:
        """Offer the ways of all known prologues to a choice."""
        for each in self._made.values():
            choice.offer(each.ways, updates=each.updates)

    @property
    def result_bytes(self) -> int:
        """Size in bytes of the results for one batch, as far as forwards have observed it."""
        return max((sum(each.sizes.values()) for each in self._made.values()), default=0)
