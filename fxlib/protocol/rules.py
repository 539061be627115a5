"""Rewrite rules, to and from protobuf: two graphs and the name of a guard, and no code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from fxlib import wire
from fxlib.errors import LimitError, PassError, WireError
from fxlib.rules import Rule
from fxlib.rules.snippet import MAX_NODES
from fxlib.v1 import graph_pb2, jobs_pb2

_MAX_RULES = 256
_LIMITS = wire.Limits(graph_bytes=1 << 20, nodes=MAX_NODES, steps=2 * MAX_NODES, modules=8, weights_bytes=0)


def rule_to_proto(rule: Rule) -> jobs_pb2.Rule:
    """Write a rule.

    Raises:
        WireError: a side cannot be written, or the guard is a function.
    """
    if rule.guard is not None and not isinstance(rule.guard, str):
        hint = "Register it, there and here, with fxlib.rules.register_guard, and give its name."
        raise WireError("the guard is a function, and code does not travel", where=f"rule {rule.name!r}", hint=hint)
    return jobs_pb2.Rule(
        name=rule.name,
        pattern=wire.encode(GraphModule(torch.nn.Module(), rule.seeks.graph)).graph,
        replacement=wire.encode(GraphModule(torch.nn.Module(), rule.gives.graph)).graph,
        guard=rule.guard or "",
    )


def rules_from_proto(protos: Sequence[jobs_pb2.Rule], where: str) -> tuple[Rule, ...]:
    """Read rules.

    Raises:
        LimitError: there are too many, or a side is too large.
        WireError: a side is malformed, or names what is not allowed.
        PassError: the two sides are no rule, or the guard is unknown here.
    """
    if len(protos) > _MAX_RULES:
        raise LimitError(f"{len(protos)} rules, and there may be {_MAX_RULES}", where=where)
    return tuple(_rule(each, f"{where}[{place}]") for place, each in enumerate(protos))


def _rule(proto: jobs_pb2.Rule, where: str) -> Rule:
    name = proto.name if proto.name.isprintable() else ""
    try:
        pattern, replacement = (_graph(each) for each in (proto.pattern, proto.replacement))
        return Rule(pattern, replacement, proto.guard or None, name=name)
    except (WireError, PassError) as error:
        raise type(error)(str(error), where=where) from error


def _graph(proto: graph_pb2.Graph) -> GraphModule:
    return wire.decode(proto, limits=_LIMITS)
