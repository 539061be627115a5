"""What a remote call returns, without calling: by its contract, or by the profile of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxlib.analysis.effects.resources import contract_of_call, function_name, names_a_function
from fxlib.errors import ContractError
from fxlib.inspection.reasons import Unknown, Why
from fxlib.runtime.batched_items import is_item, item_of
from fxlib.runtime.calls import client_of
from fxlib.runtime.record import call_name
from fxlib.spec.profile import Opaque, Profile, Result, TensorShape


def stand_in(call: Node, values: dict[Node, Any], profile: Profile | None) -> Any:
    """Return tensors like those that a call returns; to be asked under a mode that makes them without memory.

    Args:
        call: a blocking call, an issue, or the wait for one item of a batch.
        values: of the nodes before.
        profile: of the program, if there is one.

    Raises:
        ContractError: the contract's `returns` does not take the arguments of the call.
    """
    contract = contract_of_call(call)
    states = names_a_function(call) or is_item(call) or client_of(call) is not None
    if states and contract is not None and callable(contract.returns):
        args, kwargs = _arguments(call)
        positional, named = map_arg((args, kwargs), values.__getitem__)
        try:
            return contract.returns(*positional, **named)
        except Exception as error:
            raise ContractError(
                f"returns= of the contract fails: {type(error).__name__}: {error}",
                where=f"node {call.name}",
                hint="It is called with the arguments of the call, tensors without values among them.",
            ) from error
    known = None if profile is None else profile.call_by_name.get(call_name(call))
    if known is not None:
        return _made(known.returns)
    return Unknown(Why.REMOTE, function_name(call))


def _arguments(call: Node) -> tuple[Any, Any]:
    if is_item(call):
        item = item_of(call)
        return item.args, dict(item.kwargs)
    if client_of(call) is not None:
        return call.args, dict(call.kwargs)
    _, _, args, kwargs, *_ = call.args
    return args, kwargs


def _made(result: Result) -> Any:
    if isinstance(result, TensorShape):
        return torch.empty(result.shape, dtype=result.dtype)
    if isinstance(result, Opaque):
        return result.value
    if isinstance(result, dict):
        return {name: _made(each) for name, each in result.items()}
    return type(result)(map(_made, result))
