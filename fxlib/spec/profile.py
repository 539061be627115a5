"""What a few measured steps say of a program: its calls, its servers, its local work. Data alone, and no weights.

All times are in seconds. A profile is what the cost model predicts from (`fxlib.analysis.cost.costs`) and what replay
servers answer from; `fxlib.profile` makes one, and `.fxp` files hold one. Every figure is finite and not negative: what
plans by them could make nothing of others. Where one is not, its part raises a `WorkloadError` when it is made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from fxlib.errors import WorkloadError

MIN_BYTES_PER_S = 1.0
"""A slower link would make times of which there is no sum."""

Result: TypeAlias = "TensorShape | Opaque | tuple[Result, ...] | list[Result] | dict[str, Result]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements: their least, evenly spaced quantiles, and their greatest, in ascending order."""

    quantiles: tuple[float, ...]
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse what no measurements leave."""
        _check("Spread.quantiles", self.quantiles)
        if not self.quantiles or any(map(operator.gt, self.quantiles, self.quantiles[1:])):
            raise WorkloadError("must be at least one, in ascending order", where="Spread.quantiles")

    @classmethod
    def of(cls, samples: Sequence[float], points: int = 11) -> Spread:
        """Sum up measurements, at least one, in so many quantiles."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            quantiles=tuple(ordered[round(point * last / (points - 1))] for point in range(points)), count=len(ordered)
        )

    @property
    def median(self) -> float:
        """The middle one."""
        return self.quantiles[len(self.quantiles) // 2]

    @property
    def least(self) -> float:
        """The first one."""
        return self.quantiles[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """One tensor of a remote result."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A leaf of a remote result that is no tensor: a number, text or None as it was, by value."""

    value: int | float | bool | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The call that sends the gradient of a result home, and when in backward that gradient is there."""

    function: str
    request_bytes: int
    issue_s: float
    """On the trainer's thread."""
    service_s: Spread
    """From the end of the issue to the arrival of the answer, nothing else in flight."""
    ready_s: float
    """From the start of backward to the arrival of the gradient."""

    def __post_init__(self) -> None:
        """Refuse what no clock and no size says."""
        _check(f"Push({self.function!r})", (self.request_bytes, self.issue_s, self.ready_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProfile:
    """One remote call of the graph, measured alone: nothing else in flight."""

    call: str
    """Its name as captured: `meta["call"]`, else the node's name."""
    function: str
    to: str
    """The worker that it reached."""
    request_bytes: int
    response_bytes: int
    returns: Result
    issue_s: float
    """The time of the trainer's thread that issuing takes."""
    wait_s: float
    """The time of the trainer's thread that a wait takes when the answer is already there."""
    service_s: Spread
    """The time from the end of the issue to the arrival of the answer: transfer, queue and work on the server."""
    wake_s: float = 0.0
    """The time that a wait that blocks adds, until the thread runs again, as fast as before it stood still."""
    push: Push | None = None

    def __post_init__(self) -> None:
        """Refuse what no clock and no size says."""
        sizes = self.request_bytes, self.response_bytes
        _check(f"CallProfile({self.call!r})", (*sizes, self.issue_s, self.wait_s, self.wake_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProfile:
    """One destination."""

    name: str
    round_trip_s: float
    """The time of a call that does nothing."""
    concurrency: int
    """The number of calls that it works on at once."""
    bytes_per_s: float
    """The rate of large transfers, one way."""
    per_item_s: float | None = None
    """The time that each further call in a batch adds to the batch's service time, besides the transfer of its bytes;
    None if it was not tried."""
    per_call_s: float | None = None
    """The time that each further call in flight adds that travels by itself, without its server's own work and the
    transfer of its bytes: the work of the RPC layer, which the calls of one trainer share whatever their servers.
    None if it was not tried."""
    per_turn_s: float | None = None
    """The same as `per_item_s` for a batch that works its calls off one after another, in their declared batched form
    where they have one."""

    def __post_init__(self) -> None:
        """Refuse what no clock says, and a server that never answers."""
        where = f"ServerProfile({self.name!r})"
        further = (each for each in (self.per_item_s, self.per_call_s, self.per_turn_s) if each is not None)
        _check(where, (self.round_trip_s, self.bytes_per_s, *further))
        if self.concurrency < 1 or self.bytes_per_s < MIN_BYTES_PER_S:
            raise WorkloadError("it works on at least one call, and carries at least a byte a second", where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """Local work of one node of the forward."""

    node: str
    seconds: float
    output_bytes: int

    def __post_init__(self) -> None:
        """Refuse what no clock and no size says."""
        _check(f"NodeProfile({self.node!r})", (self.seconds, self.output_bytes))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A program, measured."""

    calls: tuple[CallProfile, ...] = ()
    nodes: tuple[NodeProfile, ...] = ()
    servers: tuple[ServerProfile, ...] = ()
    loss_s: float = 0.0
    backward_s: float = 0.0
    rest_s: float = 0.0
    """The time of a step besides forward, loss, backward and pushes: the optimizer's above all."""
    step_s: float = 0.0
    """The time of a whole step with no clock between its nodes, which the parts add up to; 0 if none was run."""
    least_share: float = 1.0
    """The least that was seen of each part of the local work, as a share of what the parts usually take."""
    cores_s: float = 0.0
    """How long such a step kept the cores of the launcher's host busy: the processor time of all its processes, without
    what they take while the step stands still, divided by the cores that this leaves; 0 if it is not known. Where
    servers and other launchers are on that host, it is theirs, too, and no order of calls makes it much less."""
    steps: int = 0
    """The number of steps that were measured."""
    hardware: str = ""
    torch_version: str = ""
    notes: tuple[str, ...] = field(default=())
    """Sentences that say what could not be measured, and why."""

    def __post_init__(self) -> None:
        """Refuse what no clock says."""
        _check("Profile", (self.loss_s, self.backward_s, self.rest_s, self.step_s, self.least_share, self.cores_s))

    @cached_property
    def call_by_name(self) -> Mapping[str, CallProfile]:
        """Calls by their name as captured."""
        return {each.call: each for each in self.calls}

    @cached_property
    def node_by_name(self) -> Mapping[str, NodeProfile]:
        """Local work by the name of its node as captured."""
        return {each.node: each for each in self.nodes}

    @cached_property
    def server_by_name(self) -> Mapping[str, ServerProfile]:
        """Destinations by name."""
        return {each.name: each for each in self.servers}


def _check(where: str, figures: Iterable[float]) -> None:
    for each in figures:
        if not 0 <= each < math.inf:
            raise WorkloadError(f"{each!r} is no amount: it must be finite and not negative", where=where)
