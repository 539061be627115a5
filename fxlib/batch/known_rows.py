"""Rows of a table together with what their next update needs, so that whoever has both can make that update, too."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def numerics() -> str:
    """Return the properties of this process that decide, besides the arguments, which bits its operators compute."""
    number = torch.tensor(1e-39, dtype=torch.float32, device="cpu")
    tiny = bool(number * 0.5)  # whether this thread rounds such small numbers to zero
    modes = (
        *(torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), tiny),
        *(torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        torch.are_deterministic_algorithms_enabled(),
    )
    return " ".join(map(str, modes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownRows:
    """The result of a function that the contract of a read names by `with_state=`.

    >>> KnownRows(rows=weight[keys], state=(squares[keys],), settings=("adagrad", 0.01))
    """

    rows: torch.Tensor
    """The result of the read: one row for each key."""
    state: tuple[torch.Tensor, ...] = ()
    """The state of an optimizer: tensors with a row for each key."""
    settings: tuple[object, ...] = ()
    """Everything else that an update needs; it is the same for all rows."""
    made_by: str = field(default_factory=numerics)
    """How the process that made the rows computes (see `numerics`): another one may compute other bits."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that have a row for each key."""
        return self.rows, *self.state
