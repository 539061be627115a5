"""Estimates the gain from declaring that undeclared remote functions only read: planned, not measured.

A call without a contract keeps its order with every other effect. Here the program is planned again with one function
at a time assumed to read state and change none, and once with all of them, and the cost model compares the step of each
plan with that of the present plan. This takes one plan per function, for at most `MAX_FUNCTIONS` functions, those with
the most calls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from torch.fx import GraphModule, Node

from fxlib.analysis.cost.simulate import predict
from fxlib.analysis.effects.resources import contract_of_call, function_name, methods_sent, takes_contract
from fxlib.analysis.scheduling.explain_blocked import remedy_for
from fxlib.passes import OverlapCalls
from fxlib.passes.infra.edit import working_copy
from fxlib.recipes.recipes import PlanningRequest, Recipe, get
from fxlib.spec.contract import Contract
from fxlib.spec.report import Undeclared

MAX_FUNCTIONS: Final = 6
_SECONDS: Final = 10.0
"""Seconds after which no further plan is begun."""
_READS: Final = Contract(reads=frozenset({"*"}))


def undeclared(
    module: GraphModule, recipe: str | Recipe = "schedule", request: PlanningRequest | None = None
) -> tuple[Undeclared, ...]:
    """Return the remote functions of a program that declare nothing, those worth most first.

    Args:
        module: a captured module, or any GraphModule; it stays unchanged.
        recipe: the recipe that plans it.
        request: what is known about the program. If it makes an assumption, nothing is undeclared; without a profile,
            gains are estimates for the forward.

    Raises:
        PassError: as for `fxlib.recipes.recipes.apply`.
    """
    recipe, request = get(recipe), PlanningRequest() if request is None else request
    known, profile, unstated = request.contracts, request.profile, replace(request, contracts={})
    calls: dict[str, list[Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if takes_contract(node) and contract_of_call(node) is None and function_name(node) not in known:
            calls[_declared_as(node)].append(node)
    if request.assume or not calls or not any(isinstance(step, OverlapCalls) for step in recipe.passes):
        return ()
    begun, most = time.monotonic(), sorted(calls, key=lambda name: -len(calls[name]))[:MAX_FUNCTIONS]

    def step_s(functions: Iterable[str]) -> float:
        reading = {node.name for each in functions for node in calls[each]}
        planned = recipe.run(_declaring(module, known, reading), unstated)
        return predict(planned.module, profile).step_s

    now_s, found = step_s(()), list[Undeclared]()
    groups = [tuple(calls)] if len(calls) > 1 else []
    for functions in [*groups, *((name,) for name in most)]:
        if found and time.monotonic() - begun > _SECONDS:
            break
        found.append(
            Undeclared(
                functions=functions,
                calls=sum(len(calls[each]) for each in functions),
                gain=max(now_s / max(step_s(functions), 1e-9) - 1.0, 0.0),
                remedy=remedy_for(calls[functions[0]][0]) if len(functions) == 1 else "",
                measured=profile is not None,
            )
        )
    return tuple(sorted(found, key=lambda each: (-round(each.gain, 3), len(each.functions))))


def _declared_as(call: Node) -> str:
    """Return the name of the function to declare: the method, if the call is of a helper that calls a method."""
    sent = methods_sent(call)
    return sent[0] if sent else function_name(call)


def _declaring(module: GraphModule, known: Mapping[str, Contract], reading: set[str]) -> GraphModule:
    working = working_copy(module)
    for node in working.graph.nodes:
        if takes_contract(node) and contract_of_call(node) is None:
            contract = _READS if node.name in reading else known.get(function_name(node))
            if contract is not None:
                node.meta["contract"] = contract
    return working
