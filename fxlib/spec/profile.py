"""A program's profile: its calls, servers and local work in a few measured steps. It holds data, but no weights.

All times are in seconds. A profile is what the cost model predicts from (`fxlib.analysis.cost.costs`) and what replay
servers answer from; `fxlib.profile` makes one, and `.fxp` files hold one. Every figure is finite and not negative, as
planning requires; a part with another figure raises a `WorkloadError` when it is constructed.
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
"""Lowest rate of a link, in bytes per second; with a slower one, sums of times would overflow."""

Result: TypeAlias = "TensorShape | Opaque | tuple[Result, ...] | list[Result] | dict[str, Result]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements: minimum, evenly spaced quantiles and maximum, in ascending order."""

    quantiles: tuple[float, ...]
    count: int = 1

    def __post_init__(self) -> None:
        """Reject values that no measurements can give."""
        _check("Spread.quantiles", self.quantiles)
        if not self.quantiles or any(map(operator.gt, self.quantiles, self.quantiles[1:])):
            raise WorkloadError("must be at least one, in ascending order", where="Spread.quantiles")

    @classmethod
    def of(cls, samples: Sequence[float], points: int = 11) -> Spread:
        """Summarize measurements, at least one, by the given number of quantiles."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            quantiles=tuple(ordered[round(point * last / (points - 1))] for point in range(points)), count=len(ordered)
        )

    @property
    def median(self) -> float:
        """The median."""
        return self.quantiles[len(self.quantiles) // 2]

    @property
    def least(self) -> float:
        """The minimum."""
        return self.quantiles[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """One tensor of a remote result."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A leaf of a remote result that is not a tensor: a number, string or None, by value."""

    value: int | float | bool | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The call that sends the gradient of a result to its server, and when in backward that gradient is ready."""

    function: str
    request_bytes: int
    issue_s: float
    """Seconds that issuing the call takes on the trainer's thread."""
    service_s: Spread
    """Seconds from the end of the issue to the arrival of the answer, with nothing else in flight."""
    ready_s: float
    """Seconds from the start of backward to the arrival of the gradient."""

    def __post_init__(self) -> None:
        """Reject times and sizes that cannot be."""
        _check(f"Push({self.function!r})", (self.request_bytes, self.issue_s, self.ready_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProfile:
    """One remote call of the graph, measured alone, with nothing else in flight."""

    call: str
    """The call's name as captured: `meta["call"]`, or else the node's name."""
    function: str
    to: str
    """Name of the worker that the call reached."""
    request_bytes: int
    response_bytes: int
    returns: Result
    issue_s: float
    """Seconds that issuing the call takes on the trainer's thread."""
    wait_s: float
    """Seconds that a wait takes on the trainer's thread if the answer is already there."""
    service_s: Spread
    """Seconds from the end of the issue to the arrival of the answer: transfer, queue and work on the server."""
    wake_s: float = 0.0
    """Seconds that a blocking wait adds until the thread runs again at its former speed."""
    push: Push | None = None

    def __post_init__(self) -> None:
        """Reject times and sizes that cannot be."""
        sizes = self.request_bytes, self.response_bytes
        _check(f"CallProfile({self.call!r})", (*sizes, self.issue_s, self.wait_s, self.wake_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProfile:
    """The measured figures of one destination."""

    name: str
    round_trip_s: float
    """Seconds of a call that does nothing."""
    concurrency: int
    """Number of calls that the server works on at once."""
    bytes_per_s: float
    """Rate of large transfers in one direction, in bytes per second."""
    per_item_s: float | None = None
    """Seconds that each further call in a batch adds to the batch's service time, without the transfer of its bytes;
    None if it was not measured."""
    per_call_s: float | None = None
    """Seconds that each further call in flight adds if it travels in a message of its own, without the server's work
    and the transfer of its bytes. This is the work of the RPC layer, which the calls of one trainer share across
    servers. None if it was not measured."""
    per_turn_s: float | None = None
    """Seconds as in `per_item_s`, for a batch whose calls run one after another, in their declared batched form if they
    have one."""

    def __post_init__(self) -> None:
        """Reject times that cannot be, and a server that never answers."""
        where = f"ServerProfile({self.name!r})"
        further = (each for each in (self.per_item_s, self.per_call_s, self.per_turn_s) if each is not None)
        _check(where, (self.round_trip_s, self.bytes_per_s, *further))
        if self.concurrency < 1 or self.bytes_per_s < MIN_BYTES_PER_S:
            raise WorkloadError(
                "it must work on at least one call and transfer at least a byte per second", where=where
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """The local work of one node of the forward."""

    node: str
    seconds: float
    output_bytes: int

    def __post_init__(self) -> None:
        """Reject times and sizes that cannot be."""
        _check(f"NodeProfile({self.node!r})", (self.seconds, self.output_bytes))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of a program."""

    calls: tuple[CallProfile, ...] = ()
    nodes: tuple[NodeProfile, ...] = ()
    servers: tuple[ServerProfile, ...] = ()
    loss_s: float = 0.0
    backward_s: float = 0.0
    rest_s: float = 0.0
    """Seconds of a step outside forward, loss, backward and pushes, mostly the optimizer's."""
    step_s: float = 0.0
    """Seconds of a whole step without a clock between its nodes, to which the parts add up; 0 if none was run."""
    least_share: float = 1.0
    """Shortest time seen of each part of the local work, as a share of the part's usual time."""
    cores_s: float = 0.0
    """Seconds for which such a step keeps the cores of the launcher's host busy: the processor time of all its
    processes, without what they use while the step stands still, divided by the cores that this leaves; 0 if it is
    unknown. If servers and other launchers are on that host, it includes theirs, and no order of calls reduces it
    much."""
    steps: int = 0
    """Number of measured steps."""
    hardware: str = ""
    torch_version: str = ""
    notes: tuple[str, ...] = field(default=())
    """Sentences that say what could not be measured, and why."""

    def __post_init__(self) -> None:
        """Reject times that cannot be."""
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
            raise WorkloadError(f"{each!r} is not valid: it must be finite and not negative", where=where)
