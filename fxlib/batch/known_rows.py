"""Rows of a table together with what their next update needs: with it, whoever has both can make that update, too."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def numerics() -> str:
    """Return what decides, besides the arguments, which bits operators of this process compute."""
    tiny = bool(torch.tensor(1e-39) * 0.5)  # of this thread: whether such small numbers become zero
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {tiny}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownRows:
    """What a function returns that the contract of a read names by `with_state=`.

    >>> KnownRows(rows=weight[keys], state=(squares[keys],), settings=("adagrad", 0.01))
    """

    rows: torch.Tensor
    """What the read returns: one row for each key."""
    state: tuple[torch.Tensor, ...] = ()
    """Of an optimizer, with a row for each key."""
    settings: tuple[object, ...] = ()
    """What else an update needs, the same for all rows."""
    made_by: str = field(default_factory=numerics)
    """How the process computes that made it: another one may compute other bits."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that has a row for each key."""
        return self.rows, *self.state
