"""Capture by `torch.export`, with sample inputs, of forwards whose decisions depend on structure, sizes and flags.

A graph returns tensors. If the program returns an object of a class that torch's pytree does not know, such as a
key-value cache, a container whose parts are the object's attributes takes its position in the structure of the graph's
results. Unflattening the container makes an object of the program's own class, without calling its constructor.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import os
import re
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _PyTreeInfo
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.capture import source
from fxlib.capture.declarations import Declarations
from fxlib.capture.export import checks, inlining
from fxlib.capture.export.calls import ExportRecorder, Undeclared, recording
from fxlib.capture.export.checks import ExportChecks, refuse_writes
from fxlib.capture.export.hooks import install
from fxlib.capture.export.sizes import guards_of
from fxlib.capture.export.stand_ins import StandIns, let_go, state_of
from fxlib.capture.export.value_checks import ValueChecks
from fxlib.capture.handled_errors import capture_error, unswallowed
from fxlib.capture.intercept import Interception, leave_logging_alone
from fxlib.capture.metadata import annotate
from fxlib.capture.recording.recorder import Recorder
from fxlib.capture.samples import Samples
from fxlib.capture.state import WEIGHT_LISTS, equal_copies, generators_unused, unchanged
from fxlib.capture.trace import refusals
from fxlib.capture.trace.remote import RemoteCalls
from fxlib.capture.trace.writes import refuse_out
from fxlib.errors import CaptureError, FxlibError
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.conditions import FixedAnswers
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.module_state import FunctionModel
from fxlib.runtime.program_modes import training_modes
from fxlib.runtime.submodules import local_modules, local_tensors
from fxlib.utils.pytree import has_tensors, is_state

_IMMEDIATE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Module)
_kinds: list[type[_ObjectState]] = []


class _ObjectState:
    """The attributes of one object: those that hold tensors are `parts`, and numbers and the like are in `context`.

    The context is data: {"parts": names, "plain": {name: value}, "order": names of all attributes}.
    """

    of: ClassVar[type]
    """The program's class."""
    held: ClassVar[dict[str, Any]]
    """The attributes that are neither tensors nor plain values: classes, functions, lists of numbers."""
    shared: ClassVar[frozenset[str]]
    """The names of the attributes that every object of the class shares with the program."""

    def __init__(self, parts: list[Any], context: dict[str, Any]) -> None:
        self.parts = parts
        self.context = context

    @classmethod
    def rebuilt(cls, parts: list[Any], context: dict[str, Any]) -> Any:
        """Return an object of the program's class with these attributes."""
        made: Any = object.__new__(cls.of)
        found = dict(zip(context["parts"], parts, strict=True)) | context["plain"]
        held = {name: value if name in cls.shared else copy.deepcopy(value) for name, value in cls.held.items()}
        made.__dict__.update({name: found[name] if name in found else held[name] for name in context["order"]})
        return made


def _with_states(value: Any, persistent: Collection[int]) -> Any:
    """Return a nested structure in which an `_ObjectState` replaces each object that holds tensors.

    Args:
        value: the result of a program.
        persistent: ids of objects that outlive a call; these stay as they are.
    """

    def stand_in(leaf: Any) -> Any:
        return _state_of(leaf, persistent) if is_state(leaf) and id(leaf) not in persistent else leaf

    return pytree.tree_map(stand_in, value)


def _state_of(value: Any, persistent: Collection[int]) -> _ObjectState:
    attributes = dict(vars(value))
    parts = {name: _with_states(each, persistent) for name, each in attributes.items() if has_tensors(each)}
    plain = {name: each for name, each in attributes.items() if name not in parts and _is_immediate(each)}
    held = {name: each for name, each in attributes.items() if name not in parts and name not in plain}
    shared = frozenset(name for name, each in held.items() if isinstance(each, _SHARED) or id(each) in persistent)
    kind = _kind(
        type(value), {name: each if name in shared else copy.deepcopy(each) for name, each in held.items()}, shared
    )
    return kind(list(parts.values()), {"parts": list(parts), "plain": plain, "order": list(attributes)})


def _is_immediate(value: object) -> bool:
    return all(map(_is_immediate, value)) if type(value) is tuple else type(value) in _IMMEDIATE


def _kind(of: type, held: dict[str, Any], shared: frozenset[str]) -> type[_ObjectState]:
    """Return the container class, known to torch's pytree, for objects of a class with these other attributes."""
    alike = [each for each in _kinds if each.of is of]
    for each in alike:
        if each.shared == shared and each.held.keys() == held.keys() and _same(each, held):
            return each
    number = f"#{len(alike) + 1}" if alike else ""
    names = {"__module__": of.__module__, "__qualname__": of.__qualname__ + number}
    kind: type[_ObjectState] = type(of.__name__, (_ObjectState,), {**names, "of": of, "held": held, "shared": shared})
    pytree.register_pytree_node(
        kind,
        lambda each: (each.parts, each.context),
        lambda parts, context: kind.rebuilt(list(parts), context),
        flatten_with_keys_fn=lambda each: (
            [(pytree.GetAttrKey(name), part) for name, part in zip(each.context["parts"], each.parts, strict=True)],
            each.context,
        ),
    )
    _kinds.append(kind)
    return kind


def _same(kind: type[_ObjectState], held: dict[str, Any]) -> bool:
    return all(
        kind.held[name] is value if name in kind.shared else _equal(kind.held[name], value)
        for name, value in held.items()
    )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are one object, or nests of immediate values that are the same to the bit."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if type(one) is dict:
        return _equal(list(one.items()), list(other.items()))
    if type(one) in (set, frozenset):
        return _equal(sorted(one, key=repr), sorted(other, key=repr))
    return type(one) in _IMMEDIATE and repr(one) == repr(other)


def export(
    model: nn.Module | Callable[..., Any],
    samples: Samples,
    dynamic_shapes: Any,
    declarations: Declarations,
    recorder: Recorder,
) -> CapturedModule:
    """Run the forward on stand-ins for the samples, and return the operators that it calls as a captured module.

    Args:
        model: the model, as `fxlib.capture` takes it.
        samples: the arguments of one call.
        dynamic_shapes: the sizes that may vary, as `torch.export.export` takes them.
        declarations: contracts of the remote functions that the forward calls.
        recorder: the recorder of the Python state that the forward reads.

    Raises:
        CaptureError: the forward does something that a graph cannot hold; the message says where, and what to do.
    """
    module = model if isinstance(model, nn.Module) else FunctionModel(model)
    _check(module, samples)
    remote = ExportRecorder(module)
    remote.calls, remote.end = RemoteCalls(remote, declarations, recorder), sys._getframe()
    export_checks = ExportChecks(ValueChecks(pytree.tree_leaves((samples.args, samples.kwargs))), recorder)
    program = _exported(module, samples, dynamic_shapes, _Around(remote, export_checks, recorder))
    if remote.has_checkpoints and any(map(_writes_an_input, program.graph.nodes)):
        raise capture_error(refusals.CHECKPOINT_WRITES, hint=refusals.CHECKPOINT_HINT)
    flat = program.module(check_guards=False)
    constants = {**_constants(module, flat, recorder), **remote.constants}
    try:
        for name, value in constants.items():
            setattr(module, name, value)
        graph = _graph_of(program, flat, samples, remote, export_checks, as_traced=True)
        annotate(graph, module)
        refuse_writes(graph, constants)
        refuse_out(graph, grad_enabled=torch.is_grad_enabled())
        class_name = None if isinstance(model, nn.Module) else getattr(model, "__name__", None)
        asked = FixedAnswers(
            grad_mode=recorder.asked_grad_mode,
            requires_grad=export_checks.asked,
            tensor_metadata=True,
            strides=True,
            classes=recorder.asked_classes,
        )
        facts, entries = recorder.facts(graph), remote.rref_paths.ways()
        return CapturedModule(
            module, graph, original=module, facts=facts, asked=asked, entries=entries, class_name=class_name
        )
    finally:
        for name in constants:
            delattr(module, name)
        let_go((program, flat))
        remote.forget()


def _writes_an_input(node: Node) -> bool:
    """Return whether a node of an exported program writes to a parameter, a buffer or an argument."""
    target, written = node.target, node.args[0] if node.args else None
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return writes and isinstance(written, Node) and written.op == "placeholder"


def of_program(program: ExportedProgram) -> CapturedModule:
    """Return an exported program as a captured module over the same parameters and buffers.

    The captured module has no original: it refuses inputs for which the program was not exported, as the program itself
    does. Its training flag is that with which the program computes.

    Raises:
        TypeError: `program` is not an exported program.
        CaptureError: the program holds something that a graph cannot hold, or takes arguments that cannot be checked.
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(f"a module or an exported program is wanted, not {type(program).__name__}")
    flat = program.module(check_guards=False)
    codegen: Any = flat.graph._codegen
    info = codegen.pytree_info
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    kinds = [spec.kind.name for spec in program.graph_signature.input_specs]
    inputs = [value for value, kind in zip(values, kinds, strict=True) if kind == "USER_INPUT"]
    args, kwargs = program.example_inputs or pytree.tree_unflatten(inputs, info.in_spec)
    samples = Samples(args=tuple(args), kwargs=dict(kwargs), names=tuple(info.orig_args))
    graph = _graph_of(
        program, flat, samples, ExportRecorder(flat), ExportChecks(ValueChecks([]), None), as_traced=False
    )
    flat._forward_pre_hooks.clear()  # torch's own input checks, which the guards replace
    for name in [name for name, part in flat.named_children() if isinstance(part, GraphModule)]:
        delattr(flat, name)  # the bodies of blocks, which are inlined in the graph
    annotate(graph, flat)
    flat.training = True in training_modes(graph)
    return CapturedModule(flat, graph, class_name=_class_of(program))


def _graph_of(
    program: ExportedProgram,
    flat: GraphModule,
    samples: Samples,
    remote: ExportRecorder,
    export_checks: ExportChecks,
    *,
    as_traced: bool,
) -> Graph:
    signature = program.module_call_graph[0].signature
    if signature is None:
        raise AssertionError("an exported program has a signature")
    decided = export_checks.values.conditions
    guards = guards_of(program, samples, gradients=export_checks.asked, decided=decided, as_traced=as_traced)
    graph = inlining.inlined(flat, remote, guards)
    info = _PyTreeInfo(list(samples.names), signature.in_spec, signature.out_spec)
    graph.set_codegen(GuardedCodeGen(info, guards))
    return graph


def _class_of(program: ExportedProgram) -> str | None:
    """Return the class of the model that was exported, as the exporter noted it on the nodes."""
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if not path:
                return str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return None


_UNSUPPORTED = re.compile(r"Unsupported input type <class '(.*?)'>")


class _Around(NamedTuple):
    """The objects that observe one export."""

    remote: ExportRecorder
    export_checks: ExportChecks
    recorder: Recorder


def _exported(module: nn.Module, samples: Samples, dynamic_shapes: Any, around: _Around) -> ExportedProgram:
    remote, export_checks, recorder = around
    stand_ins = StandIns(module, recorder, sys._getframe())
    forward = module.forward if isinstance(module, FunctionModel) else type(module).forward
    quiet = unchanged(module, (), same=equal_copies)
    with recorder, quiet, generators_unused(forward), Interception() as interception:
        install(interception, remote)
        leave_logging_alone(interception)
        stand_ins.install(interception)
        checks.answer_as_eager(interception)
        try:
            with (
                unswallowed(),
                recording(remote),
                checks.real_looking_tensors(),
                export_checks,
                stand_ins,
                _quiet(),
                _without_hooks(module),
                _weight_lists_kept(module),
                recorder.observing(),
                _begun(module, around, stand_ins),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", r"The tensor attributes? self\..*_flat_weights")
                return torch.export.export(
                    module, samples.args, samples.kwargs, dynamic_shapes=dynamic_shapes, strict=False
                )
        except FxlibError:
            raise
        except Exception as error:
            if found := _UNSUPPORTED.match(str(error)):
                raise CaptureError(
                    f"an argument is a {found[1].rpartition('.')[2]}, an object of the program's own, and a graph takes"
                    " tensors, plain values, and containers of them",
                    where=source.of_definition(forward),
                    hint="Capture a module that takes the object's tensors, makes the object, and returns its tensors.",
                ) from error
            raise CaptureError(
                f"torch.export refuses the forward: {type(error).__name__}: {_first_paragraph(error)}",
                where=source.of_error(error) or source.of_definition(forward),
                hint=_hint(error),
            ) from error


class _OfOtherThreads(logging.Filter):
    """Drops the log records of the thread that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging why it refuses, and from printing the graph it had so far: the error says it in a line.

    With TORCH_LOGS set, torch is left alone.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    others = _OfOtherThreads()
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    printed: dict[str, Any] = vars(importlib.import_module("torch.export._trace"))  # torch imports it at its first use
    printed["print"] = lambda *_, **__: None
    for each in loggers:
        each.addFilter(others)
    try:
        yield
    finally:
        printed.pop("print", None)
        for each in loggers:
            each.removeFilter(others)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Keep the root's forward hooks out of the graph: they run around the graph, as around the forward."""
    tables = {name: module.__dict__[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
    module.__dict__.update({name: OrderedDict() for name in tables})
    try:
        yield
    finally:
        module.__dict__.update(tables)


@contextmanager
def _weight_lists_kept(module: nn.Module) -> Iterator[None]:
    """Put back the weight lists of recurrent modules, which rebuild them from the stand-ins for their weights."""
    kept = [
        (each, {name: each.__dict__[name] for name in WEIGHT_LISTS})
        for _, each in local_modules(module)
        if isinstance(each, nn.RNNBase)
    ]
    try:
        yield
    finally:
        for each, lists in kept:
            each.__dict__.update(lists)


@contextmanager
def _begun(module: nn.Module, around: _Around, stand_ins: StandIns) -> Iterator[None]:
    """Start the checks of values when the exported forward begins, and make containers of its results when it ends.

    What the forward changes of its modules is looked for where it ends: afterwards, torch.export has put it back.
    """
    outliving = {id(value) for _, each in local_modules(module) for value in vars(each).values()}
    forward = ExitStack()

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        around.export_checks.values.begin(args, kwargs)
        stand_ins.begin(args, kwargs)
        around.recorder.given((*args, *kwargs.values()))
        around.recorder.forward_begins()
        forward.enter_context(unchanged(module, (), where=around.recorder.changed_at))

    def end(_: nn.Module, __: Any, output: Any) -> None:
        around.recorder.handed_on(output)
        around.recorder.forward_ends()
        forward.close()

    def result(_: nn.Module, __: Any, output: Any) -> Any:
        for each in pytree.tree_leaves(output):
            if isinstance(each, Undeclared):
                each.refuse_returned()
        return _with_states(output, outliving)

    handles = [
        module.register_forward_pre_hook(begin, with_kwargs=True),
        module.register_forward_hook(end, always_call=True),
        module.register_forward_hook(result),
    ]
    try:
        yield
    finally:
        forward.pop_all()
        for handle in handles:
            handle.remove()


def _check(module: nn.Module, samples: Samples) -> None:
    for path, each in local_modules(module):
        if isinstance(each, nn.RNNBase) and not is_parametrized(each) and not each._weights_have_changed():
            own_weights = map(each._parameters.get, each._flat_weights_names)
            if not all(map(is_, each._flat_weights, own_weights)):
                raise CaptureError(
                    "a recurrent module runs with other weights than its parameters",
                    where=path,
                    hint="Set them as attributes.",
                )
    own = {id(each) for each in local_tensors(module).values()}
    if any(id(each) in own for each in pytree.tree_leaves((samples.args, samples.kwargs))):
        raise CaptureError(
            "a sample is a parameter or a buffer of the model, for which the graph would take all inputs",
            where="sample_inputs",
            hint="Pass a copy.",
        )
    for path, each in local_modules(module):
        if each is not module and (each._backward_hooks or each._backward_pre_hooks):
            raise CaptureError(
                "a module has backward hooks, which torch.export would lose",
                where=f"{path} ({type(each).__name__})",
                hint="Remove them before the capture.",
            )


def _constants(module: nn.Module, flat: GraphModule, recorder: Recorder) -> Mapping[str, Any]:
    """Return the tensors that export has added to those of the model, by name.

    Export puts a tensor that a submodule makes from numbers below that submodule. The tensor becomes an attribute of
    the root, because the submodules are the model's own. A parameter that the forward found elsewhere, such as in a
    list, stays a parameter.
    """
    paths = {id(each): f"{path}." if path else "" for path, each in local_modules(module)}
    found: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    for node in flat.graph.nodes:
        path = str(node.target)
        if node.op != "get_attr" or isinstance(value := _found(flat, path), nn.Module):
            continue
        if path not in renamed and _holds(module, path):
            continue
        if path not in renamed and (place := state_of(module, value)) is not None:
            owner, table, key = place
            recorder.hold_to(getattr(owner, table), key)
            renamed[path] = paths[id(owner)] + key
        elif path not in renamed:
            name = path.rpartition(".")[2]
            names = (f"{name}_{count}" if count else name for count in itertools.count())
            renamed[path] = next(each for each in names if each not in found and not _holds(module, each))
            found[renamed[path]] = value
            setattr(flat, renamed[path], value)
        node.target = renamed[path]
    return found


def _found(module: nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


def _holds(module: nn.Module, path: str) -> bool:
    """Return whether a model or one of its modules has an attribute at a path."""
    *above, name = path.split(".")
    for each in above:
        found = module._modules.get(each)
        if found is None:
            return False
        module = found
    return any(name in table for table in (vars(module), module._parameters, module._buffers, module._modules))


def _hint(error: Exception) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return "What depends on values of tensors belongs out of the forward."
    return "Write this part with functions of torch that torch.export takes, or keep it out of the forward."


def _first_paragraph(error: Exception) -> str:
    return str(error).strip().partition("\n\n")[0]
