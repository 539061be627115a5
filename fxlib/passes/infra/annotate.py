"""Contracts that a request gives to remote functions that declare none themselves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch.fx import Graph, Node

from fxlib.analysis.effects.resources import contract_of_call, function_name, methods_sent, takes_contract
from fxlib.errors import FxlibWarning
from fxlib.spec.contract import PURE, Contract
from fxlib.spec.workload import Assume

_ASSUMED = {"reads": Contract(reads=frozenset({"*"})), "pure": PURE}


def assumed_of(node: Node, assume: Assume) -> Contract | None:
    """Return the contract that a call gets by assumption; None if it has one already or cannot take one."""
    if not assume or not takes_contract(node) or contract_of_call(node) is not None:
        return None
    return _ASSUMED[assume]


def annotate(graph: Graph, contracts: Mapping[str, Contract], assume: Assume) -> tuple[str, ...]:
    """Give calls without a contract the one that the request has for them; return these assumptions in words.

    Args:
        graph: the graph, whose calls keep the contracts that they have.
        contracts: contracts by the names of remote functions.
        assume: "reads" or "pure" for every remote function that is still unknown then.
    """
    declared, assumed = set(), set()
    _warn_of_vain(graph, contracts)
    for node in graph.nodes:
        if not takes_contract(node) or contract_of_call(node) is not None:
            continue
        name = function_name(node)
        if name in contracts:
            node.meta["contract"] = contracts[name]
            declared.add(f"{name}: {_words(contracts[name])}, as the request declares")
        elif (contract := assumed_of(node, assume)) is not None:
            node.meta["contract"] = contract
            assumed.add(f"{name}: {_words(contract)}, as the request assumes of every unknown function")
    return (*sorted(declared), *sorted(assumed))


def _warn_of_vain(graph: Graph, contracts: Mapping[str, Contract]) -> None:
    """Warn of contracts, or parts of them, that have no effect: silence would look like consent."""
    calls = [node for node in graph.nodes if takes_contract(node)]
    named = {name for node in calls for name in (function_name(node), *_of_handle(node), *methods_sent(node))}
    open_ = {function_name(node) for node in calls if contract_of_call(node) is None}
    for name, contract in contracts.items():
        if name not in named:
            problem = "is not used: no remote call of the graph has this name"
        elif name in open_ and contract.gradient is not None:
            problem = f"names the gradient {contract.gradient!r}, which only capture can track: nothing will push it"
        else:
            continue
        warnings.warn(f"contracts[{name!r}] {problem}", FxlibWarning, stacklevel=5)


def _of_handle(node: Node) -> tuple[str, ...]:
    """Return the name under which a contract for a method of a single object is stated: "attribute.method"."""
    to, method = node.args[0] if node.args else None, function_name(node)
    held = isinstance(to, Node) and to.op in ("get_attr", "placeholder") and method.startswith(".")
    return (f"{to.target}{method}",) if held else ()  # type: ignore[union-attr]


def _words(contract: Contract) -> str:
    if contract.pure:
        return "touches no state"
    parts = [("reads", contract.reads), ("writes", contract.writes)]
    return " and ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in parts if names) or "declares no state"
