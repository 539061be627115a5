"""The usual service time of calls, from all calls of their kind: a plan should not follow one noisy measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from torch.fx import Node

from fxlib.analysis.cost.costs import CallCost, Costs, transfer_s

_ALIKE = 4.0
"""Service times of one function at one server within this factor, up or down, count as the same but for noise."""


def typical(costs: Costs, issues: Iterable[Node]) -> Mapping[Node, CallCost]:
    """Return single calls with the service time that calls of their function have at their server, in linear time.

    That is the median of what all of them take without their transfer, and the transfer of the call's own bytes. A call
    that was measured to take something else altogether is believed.

    Args:
        costs: of the program.
        issues: of single calls.
    """
    calls = {issue: costs.messages[issue].calls[0] for issue in issues}
    stays_s: dict[tuple[str, str], list[float]] = {}
    for call in calls.values():
        stays_s.setdefault((call.to, call.function), []).append(_stay_s(call, costs))
    middle_s = {kind: median(measured) for kind, measured in stays_s.items()}
    return {issue: _as_usual(call, middle_s[call.to, call.function], costs) for issue, call in calls.items()}


def _as_usual(call: CallCost, usual_s: float, costs: Costs) -> CallCost:
    own_s = _stay_s(call, costs)
    if own_s == usual_s or not usual_s <= _ALIKE * own_s <= _ALIKE * _ALIKE * usual_s:
        return call
    return replace(call, service_s=usual_s + call.service_s - own_s)


def _stay_s(call: CallCost, costs: Costs) -> float:
    """Return the part of a call's service that is no transfer."""
    return max(call.service_s - transfer_s(call, costs.servers[call.to]), 0.0)
