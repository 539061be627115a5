"""One run of a graph, node by node: the value of each node, its gradient, and the writes to memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fxlib.capture import source
from fxlib.equivalence.snapshot import CallArguments, backward, formed
from fxlib.errors import PassError
from fxlib.runtime.preserve_state import copied, state_kept
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext
from fxlib.utils.pytree import leaves
from fxlib.utils.text import location_of

_PLAIN = (bool, int, float, complex, str)


@dataclass(slots=True, kw_only=True)
class Steps:
    """The record of one run of a graph's nodes, by the name of the node. Tensors are copies, made at once."""

    values: dict[str, list[object]] = field(default_factory=dict)
    """The tensors, numbers and strings in the value of each node."""
    forms: dict[str, dict[str, str]] = field(default_factory=dict)
    """The nesting of each value, and the layouts of its tensors."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of nodes that made one tensor, in the backward from all outputs."""
    reads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The memory that each node reads, and how many writes had been made to it."""
    writes: dict[int, list[str]] = field(default_factory=dict)
    """The nodes that wrote to each memory, in order."""
    failed: Node | None = None
    error: Exception | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)
    """Handles of hooks that record gradients, on values of the run, some of which are the module's own parameters."""

    def writers_before(self, name: str) -> tuple[str, ...]:
        """Return the nodes that had written to memory that the node `name` reads by the time it ran."""
        return tuple(writer for memory, count in self.reads.get(name, ()) for writer in self.writes[memory][:count])


def follow(module: GraphModule, batch: CallArguments, *, grad: bool) -> Steps:
    """Run a graph node by node on copies of its inputs, and restore the module's state and the generators.

    It takes the memory of a copy of every value of the run.

    Raises:
        PassError: the graph does not accept these arguments.
    """
    steps, outer = Steps(), THREAD.forward
    THREAD.forward = ForwardContext()
    try:
        with state_kept(module), torch.set_grad_enabled(grad):
            output = _run(module, copied(batch), steps)
            if steps.error is None:
                try:
                    backward(output)
                except Exception as error:  # noqa: BLE001 - for the caller to compare
                    steps.error = error
    finally:
        THREAD.forward = outer
        for hook in steps.hooks:
            hook.remove()
    return steps


def location_of_failure(module: nn.Module, batches: Sequence[CallArguments], error: Exception, *, grad: bool) -> str:
    """Return where in a module an error arises: node, module path and line, as far as they are known."""
    if not isinstance(module, GraphModule):
        return source.of_error(error)
    for batch in batches:
        try:
            steps = follow(module, batch, grad=grad)
        except PassError:
            return ""
        if steps.failed is not None:
            return location_of(steps.failed)
    return source.of_error(error)


def _run(module: GraphModule, batch: CallArguments, steps: Steps) -> Any:
    interpreter = Interpreter(module, garbage_collect_values=False)
    values = interpreter.env = _bound(module, batch)
    for node in module.graph.nodes:
        given = list(_tensors([values[each] for each in node.all_input_nodes]))
        steps.reads[node.name] = [
            (memory, len(steps.writes.setdefault(memory, []))) for memory in dict.fromkeys(map(_memory, given))
        ]
        versions = [_version(tensor) for tensor in given]
        try:
            if node not in values:
                values[node] = interpreter.run_node(node)
        except Exception as error:  # noqa: BLE001 - for the caller to compare
            steps.failed, steps.error = node, error
            return None
        written = {_memory(each) for each, version in zip(given, versions, strict=True) if _version(each) != version}
        for memory in written:
            steps.writes[memory].append(node.name)
        _note(node, values[node], steps)
    return values[node]


def _note(node: Node, value: Any, steps: Steps) -> None:
    found = list(_tensors(value))
    plain = (leaf for _, leaf in leaves(value) if isinstance(leaf, (torch.Tensor, *_PLAIN)))
    steps.values[node.name] = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in plain]
    steps.forms[node.name] = formed("", value)
    if len(found) == 1 and found[0].requires_grad and torch.is_grad_enabled() and node.op != "output":

        def note(gradient: torch.Tensor) -> None:
            steps.gradients[node.name] = gradient.detach().clone()

        steps.hooks.append(found[0].register_hook(note))


def _bound(module: GraphModule, batch: CallArguments) -> dict[Node, Any]:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    try:
        arguments = inspect.signature(module.forward).bind(*batch[0], **batch[1])
    except TypeError as error:
        raise PassError(f"the graph does not accept these arguments: {error}", where=type(module).__name__) from error
    arguments.apply_defaults()
    values: list[Any] = list(arguments.arguments.values())
    if isinstance(module.graph._codegen, _PyTreeCodeGen):
        values = pytree.tree_leaves(values)
    if len(values) != len(placeholders):
        raise PassError("the arguments are not nested as the graph takes them", where=type(module).__name__)
    return dict(zip(placeholders, values, strict=True))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)
