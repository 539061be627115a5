"""How far a candidate's results are from the original's, where it does not promise the same bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fxlib.utils.compare import relative_error
from fxlib_workers.exchange.candidate import Arm


class ToleranceCheck:
    """Keeps the original's values after each step, and compares those of other arms with them.

    Values of equal bits are kept once, however many steps have them.
    """

    def __init__(self) -> None:
        self._digests: dict[int, Mapping[str, str]] = {}
        self._values: dict[str, object] = {}
        self._errors: dict[Arm, dict[str, float]] = {}

    def keep(self, step: int, values: Mapping[str, object], digests: Mapping[str, str]) -> None:
        """Keep the original's values after a step, unless an earlier run has given them."""
        if step in self._digests:
            return
        self._digests[step] = {name: digests[name] for name in values}
        for name, value in values.items():
            if digests[name] not in self._values:
                self._values[digests[name]] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def compare(self, arm: Arm, step: int, values: Mapping[str, object]) -> None:
        """Note how far an arm's values after a step are from the original's."""
        errors, reference = self._errors.setdefault(arm, {}), self._digests[step]
        for name in values.keys() | reference.keys():
            both = name in values and name in reference
            error = relative_error(values[name], self._values[reference[name]]) if both else math.inf
            errors[name] = max(error, errors.get(name, 0.0))

    def errors(self, arm: Arm) -> Mapping[str, float]:
        """Return the largest relative error so far of each of an arm's values, by name."""
        return self._errors.get(arm, {})
