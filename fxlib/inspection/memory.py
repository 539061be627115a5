"""How much memory the values of a forward hold, node by node, in program order.

Memory is counted once, however many views lie in it, from the node that makes it to the last that uses it or a view of
it, as in the code that `torch.fx` generates. Parameters, buffers and inputs are there throughout. What autograd keeps
for backward, and what an operator needs only while it runs, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node

from fxlib.inspection.propagate import Run
from fxlib.inspection.tensors import held_bytes, memory_of, number, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one run, in bytes."""

    state_bytes: int
    """Parameters and buffers."""
    input_bytes: int
    live_bytes: Mapping[Node, int]
    """While each node runs: state, inputs, and values of nodes that are still needed, its own among them."""

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return max(self.live_bytes.values(), default=self.state_bytes + self.input_bytes)


def memory(module: nn.Module, runs: Mapping[Node, Run]) -> Memory:
    """Follow memory through a run, in linear time. What is unknown counts as nothing."""
    order = list(runs)
    within = {node: _memories(runs[node].value) for node in order}
    resident = {key: size for node in order if node.op in _RESIDENT for key, size in within[node].items()}
    inputs = {key: size for node in order if node.op == "placeholder" for key, size in within[node].items()}
    state = {memory_of(each): _size(each) for each in (*module.parameters(), *module.buffers())}
    state_bytes, input_bytes = sum(state.values()), sum(inputs.values())
    ends = _ends(order, within)
    held, live = state_bytes + input_bytes, dict[Node, int]()
    there = set(resident)
    for node in order:
        held += sum(size for key, size in within[node].items() if key not in there)
        there.update(within[node])
        live[node] = held
        held -= sum(ends.get(node, {}).values())
    return Memory(state_bytes=state_bytes, input_bytes=input_bytes, live_bytes=live)


_RESIDENT = ("placeholder", "get_attr")


def _memories(value: object) -> dict[int, int]:
    return {memory_of(each): _size(each) for each in tensors_in(value)}


def _size(value: torch.Tensor) -> int:
    return number(held_bytes(value)) or 0


def _ends(order: Sequence[Node], within: Mapping[Node, Mapping[int, int]]) -> dict[Node, dict[int, int]]:
    """Return the memory that each node is the last to use; what is there throughout, and what is returned, has none."""
    last: dict[int, tuple[Node, int]] = {}
    kept = {key for node in order if node.op in _RESIDENT for key in within[node]}
    for node in order:
        for each in (node, *node.all_input_nodes):
            for key, size in within[each].items():
                last[key] = (node, size)
    ends: dict[Node, dict[int, int]] = {}
    for key, (node, size) in last.items():
        if key not in kept and node.op != "output":
            ends.setdefault(node, {})[key] = size
    return ends
