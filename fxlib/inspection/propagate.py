"""Runs a graph on tensors without memory, and records the value and the operators of each node.

A run has no side effects: it makes no remote call, runs no code with unknown effects, replaces the module's tensors
with stand-ins, and restores modes and random generators. Each node is visited once.

The value of a remote call comes from its contract or from a profile. Without either, and after code with unknown
effects, the value is `Unknown`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.node import map_arg
from torch.nn.utils.stateless import _reparametrize_module

from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.analysis.effects.resources import contract_of_call, function_name, names_a_function
from fxlib.errors import ContractError, FxlibError
from fxlib.inspection.operations import Operation, Operations
from fxlib.reasons import Reason
from fxlib.runtime.ops.calls import client_of, is_wait
from fxlib.runtime.ops.registry import ARGUMENT_RESULTS, NO_TENSOR_RESULTS, is_item, item_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.profile import Opaque, Profile, Result, TensorShape
from fxlib.utils.text import location_of


class UnknownReason(Enum):
    """Why a value is unknown: a sentence in which `{}` stands for the detail."""

    REMOTE = "neither a contract's returns= nor a profile says what {} returns"
    OPAQUE = "it runs code of unknown effects ({}), which an analysis does not run"
    VALUES = "its result depends on the values of tensors ({})"
    UNSUPPORTED = "torch cannot follow it without values ({})"
    INPUT = "its input {} is unknown"

    def sentence(self, detail: str) -> str:
        """Return the reason as a sentence."""
        return self.value.format(detail)


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands for a value that is unknown."""

    why: UnknownReason
    detail: str

    def __str__(self) -> str:
        """Return the reason why the value is unknown."""
        return self.why.sentence(self.detail)


_BY_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException, NotImplementedError)
_UNKNOWN_IN_PLACE = Unknown(UnknownReason.OPAQUE, "an object of the process")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """The run of one node: its value, or why it is unknown, and its operators, in order."""

    value: Any
    operations: tuple[Operation, ...] = ()


class Propagation:
    """One run of a module's graph over stand-ins for its inputs.

    Args:
        module: the module.
        behaviours: what each node does, in the order of the graph.
        profile: the program's profile, if there is one: it has what remote calls return.
        symbolic: whether sizes of inputs are symbols.
    """

    def __init__(
        self, module: GraphModule, behaviours: Mapping[Node, Behaviour], profile: Profile | None, *, symbolic: bool
    ) -> None:
        self._interpreter = Interpreter(module, garbage_collect_values=False)
        self._values: dict[Node, Any] = self._interpreter.env
        self._module = module
        self._states: dict[nn.Module, dict[str, torch.Tensor]] = {}
        self._behaviours = behaviours
        self._profile = profile
        self._symbolic = symbolic
        env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)

    def run(self, inputs: Mapping[Node, Any]) -> dict[Node, NodeRun]:
        """Visit all nodes, in time proportional to the number of nodes and edges.

        Args:
            inputs: a value for each placeholder, with tensors that are stand-ins of `mode`.

        Raises:
            FxlibError: a node cannot run on such inputs, whatever their values; the message says which node and where.
            ContractError: a contract's `returns` does not accept the arguments of its call.
        """
        found: dict[Node, NodeRun] = {}
        with self._aside(), self.mode, Operations() as operations:
            for node, behaviour in self._behaviours.items():
                value = inputs[node] if node.op == "placeholder" else self._value(node, behaviour)
                self._values[node] = value
                found[node] = NodeRun(value=value, operations=operations.taken())
        return found

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.set_grad_enabled(False))
            if self._symbolic:
                stack.enter_context(enable_python_dispatcher())
            yield

    def _value(self, node: Node, behaviour: Behaviour) -> Any:
        if node.op == "output":
            return None
        known, value = self._without_running(node, behaviour)
        if known:
            return value
        for given in node.all_input_nodes:
            if isinstance(self._values[given], Unknown):
                return Unknown(UnknownReason.INPUT, given.name)
        if behaviour.fence not in (None, Reason.MODE_BLOCK):
            return Unknown(UnknownReason.OPAQUE, str(node._pretty_print_target(node.target)))
        return self._run(node)

    def _without_running(self, node: Node, behaviour: Behaviour) -> tuple[bool, Any]:
        """Return whether a node's value is known without running it, and that value."""
        if node.op == "get_attr":
            return True, self._attribute(node)
        if node.target in ARGUMENT_RESULTS:
            return True, self._values[node.args[0]]  # type: ignore[index]
        if node.target in NO_TENSOR_RESULTS:
            return True, None
        if is_item(node) or behaviour.part is Part.CALL:
            return True, stand_in(node, self._values, self._profile)
        if is_wait(node):
            issue = node.args[0]
            has_issue = isinstance(issue, Node) and behaviour.part is Part.WAIT
            return True, stand_in(issue, self._values, self._profile) if has_issue else _UNKNOWN_IN_PLACE  # type: ignore[arg-type]
        return behaviour.part is Part.ISSUE or behaviour.part is Part.INPUT, None

    def _attribute(self, node: Node) -> Any:
        value = self._interpreter.fetch_attr(str(node.target))
        try:
            return self.mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
        except _UNSUPPORTED as error:
            return Unknown(UnknownReason.UNSUPPORTED, _first_line(error))

    @contextmanager
    def _state_aside(self, node: Node) -> Iterator[None]:
        """Give a layer stand-ins for its tensors, since some layers count their batches in memory of their own."""
        if node.op != "call_module":
            yield
            return
        layer = self._module.get_submodule(str(node.target))
        if layer not in self._states:
            named = (
                *layer.named_parameters(remove_duplicate=False),
                *layer.named_buffers(remove_duplicate=False),
            )
            self._states[layer] = {name: self.mode.from_tensor(value, static_shapes=True) for name, value in named}
        with _reparametrize_module(layer, self._states[layer]):
            yield

    def _run(self, node: Node) -> Any:
        try:
            with self._state_aside(node):
                return self._interpreter.run_node(node)
        except _BY_VALUES as error:
            return Unknown(UnknownReason.VALUES, _first_line(error))
        except _UNSUPPORTED as error:
            return Unknown(UnknownReason.UNSUPPORTED, _first_line(error))
        except Exception as error:
            raise FxlibError(
                f"cannot run on such inputs: {_first_line(error)}",
                where=location_of(node),
                hint="Give inputs with the shapes and dtypes that the model takes.",
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stand_in(call: Node, values: dict[Node, Any], profile: Profile | None) -> Any:
    """Return tensors like those that a call returns; call it under a mode that makes tensors without memory.

    Args:
        call: a blocking call, an issue, or the wait for one item of a batch.
        values: the values of the nodes before.
        profile: the program's profile, if there is one.

    Raises:
        ContractError: the contract's `returns` does not accept the arguments of the call.
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
    return Unknown(UnknownReason.REMOTE, function_name(call))


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
