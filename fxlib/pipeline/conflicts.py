"""How often keys come again: the share of what a batch reads that the pushes of the batches before it change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from fxlib.analysis.effects.prologue import Way
from fxlib.pipeline.by_keys import keys_in
from fxlib.pipeline.program import Program
from fxlib.runtime import CapturedModule
from fxlib.spec.inputs import Batch

_Part: TypeAlias = tuple[Any, str | int | None]
"""A server, and the part of its state."""


def conflicts(module: CapturedModule, batches: Sequence[Batch], *, depth: int) -> dict[str, float]:
    """Return the share of each call's rows that pushes change after the call has run ahead, by the call's name.

    A push is taken to have the keys of the read whose gradient it takes.

    Args:
        module: the captured module, before any pass.
        batches: those of a loop, which come in turn.
        depth: number of batches that are pulled before their step.

    Raises:
        NotByKeys: what a call sends has no keys that rows can be told apart by.
        Exception: whatever the local work raises that makes the arguments of calls.
    """
    program = Program(module)
    with torch.no_grad():
        found = [_keys_of(program, batch) for batch in batches]
    written: list[dict[_Part, torch.Tensor]] = []
    for of_batch in found:
        by_part: dict[_Part, list[torch.Tensor]] = {}
        for part, keys in of_batch.values():
            by_part.setdefault(part, []).append(keys.reshape(-1))
        written.append({part: torch.cat(keys) for part, keys in by_part.items()})
    shares: dict[str, list[float]] = {}
    for place, of_batch in enumerate(found):
        before = [written[(place - distance) % len(found)] for distance in range(1, depth + 1)]
        for name, (part, keys) in of_batch.items():
            changed = torch.cat([each[part] for each in before if part in each] or [keys.new_empty(0)])
            hit = torch.isin(keys, changed).flatten(1).any(1) if keys.dim() > 1 else torch.isin(keys, changed)
            shares.setdefault(name, []).append(float(hit.double().mean()) if len(hit) else 0.0)
    return {name: sum(each) / len(each) for name, each in shares.items()}


def _keys_of(program: Program, batch: Batch) -> dict[str, tuple[_Part, torch.Tensor]]:
    """Return part and keys of each call of a batch that is read by keys, by its name."""
    arguments = program.arguments(program.values(batch.inputs, batch.kwargs))
    found: dict[str, tuple[_Part, torch.Tensor]] = {}
    for call, (to, _, args, kwargs, _) in zip(program.calls, arguments, strict=True):
        (contract,) = call.contracts
        if call.way is Way.BY_KEYS and contract is not None:
            found[call.name] = (to, contract.part_of(args, kwargs)), keys_in(contract, args, kwargs)
    return found
