"""The calls that were made ahead for one batch, and whether they are those of a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from fxlib.pipeline.program import Program
from fxlib.pipeline.request import Request, State
from fxlib.pipeline.unchanged import Noted
from fxlib.runtime import CapturedModule


class Entry:
    """The requests that were made ahead for one batch.

    Attributes:
        program: the prologue that made them.
        requests: one for each call of the program.
        is_due: whether the loop has the batch, so that a forward that does not fit is worth a warning.
        why_not: why the last forward did not take the entry while it was due; empty if there was no such forward.
    """

    def __init__(self, program: Program, noted: Sequence[Noted | None], requests: Sequence[Request | None]) -> None:
        self.program = program
        self.noted = noted
        self.requests = requests
        self.modes = modes()
        self.is_due = True
        self.why_not = ""

    @property
    def waiting(self) -> list[Request]:
        """The requests that no forward has taken."""
        return [each for each in self.requests if each is not None and each.state is not State.TAKEN]

    def unchanged(
        self, module: CapturedModule, args: Sequence[Any], kwargs: Mapping[str, Any], now: tuple[object, ...]
    ) -> list[bool] | None:
        """Return for each source of the prologue whether it is as it was; None if the forward is not this batch's.

        Args:
            module: the module whose forward begins.
            args: its positional arguments.
            kwargs: its keyword arguments.
            now: the modes that it runs in.
        """
        if self.program.module is not module or not self.program.is_current():
            self.why_not = "another graph runs"
        elif now != self.modes:
            self.why_not = "autocast, inference mode or the default dtype differs"
        else:
            self.why_not = "other tensors, or changed ones"
            with suppress(TypeError, ValueError):
                unchanged = self.program.unchanged(self.noted, self.program.values(args, kwargs))
                pairs = zip(unchanged, self.program.sources, strict=True)
                of_inputs = [is_so for is_so, each in pairs if not each.path]
                if any(of_inputs) or not of_inputs:
                    return unchanged
        return None


def modes() -> tuple[object, ...]:
    """Return the settings that, besides its arguments, decide the results of local work."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
    )
