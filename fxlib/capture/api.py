"""`fxlib.capture`: turn a model into a graph in which every remote call is one node."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule, Tracer
from torch.fx._symbolic_trace import _assert_is_none
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fxlib.capture import source
from fxlib.capture.declarations import Declarations
from fxlib.capture.handled_errors import capture_error, unswallowed
from fxlib.capture.intercept import Interception, is_capturing, leave_logging_alone, one_at_a_time
from fxlib.capture.metadata import annotate
from fxlib.capture.recording import bytecode
from fxlib.capture.recording.recorder import Recorder, StuckError
from fxlib.capture.rrefs import RRefPaths
from fxlib.capture.samples import Given, bind, left_at_defaults
from fxlib.capture.state import DrawnError, generators_unused, unchanged
from fxlib.capture.trace.eager import EagerCalls
from fxlib.capture.trace.hooks import install
from fxlib.capture.trace.remote import RemoteCalls
from fxlib.capture.trace.traced_through import WHOLE, TracedThrough
from fxlib.capture.trace.tracer import RemoteTracer, tracer_for
from fxlib.capture.trace.writes import protect_old_values, refuse_out, refuse_shared_writes
from fxlib.errors import CaptureError, FxlibError, FxlibWarning
from fxlib.runtime import CapturedModule, is_call
from fxlib.runtime.data_parallel import keep_body
from fxlib.runtime.guards.capture_facts import Change
from fxlib.runtime.guards.conditions import FixedAnswers
from fxlib.runtime.module_state import FunctionModel
from fxlib.runtime.own_code import is_closed_graph
from fxlib.runtime.submodules import local_modules, submodule
from fxlib.spec.contract import Contract

_LOG = logging.getLogger(__name__)
Model = nn.Module | Callable[..., Any]

_ATTEMPTS = 4
"""Maximum number of attempts to trace or export a model; one is repeated if it ran functions not yet observed."""
_QUESTIONS = (rpc.get_worker_info, "owner", "owner_name")


class Options(NamedTuple):
    """The options of a trace; `capture` explains them."""

    tracer_class: type[Tracer] | None = None
    leaf_modules: Collection[type[nn.Module] | nn.Module | str] = ()
    wrap: Collection[Callable[..., Any]] = ()
    concrete_args: Mapping[str, Any] | None = None
    contracts: Mapping[str, Contract] | None = None
    changed: Mapping[str, Sequence[Change]] | None = None
    """Changes made in mid-step by code of the program's own, by the nodes that ran it, in their order."""

    def again(self, model: nn.Module, changed: Mapping[str, Sequence[Change]]) -> CapturedModule:
        """Return a module for a step in which code of the program's own has changed what the forward reads afterwards.

        Raises:
            CaptureError: with these changes, the forward does something that a graph cannot hold.
        """
        written = model.forward if isinstance(model, FunctionModel) else model
        options = self._replace(changed=changed)
        with one_at_a_time, warnings.catch_warnings():
            warnings.simplefilter("ignore", FxlibWarning)  # the warning was given when the model was captured
            return _traced(written, options)


def capture(
    model: Model,
    *,
    tracer_class: type[Tracer] | None = None,
    leaf_modules: Collection[type[nn.Module] | nn.Module | str] = (),
    wrap: Collection[Callable[..., Any]] = (),
    concrete_args: Mapping[str, Any] | None = None,
    contracts: Mapping[str, Contract] | None = None,
    sample_inputs: Given | None = None,
    dynamic_shapes: Any = None,
    how: Literal["auto", "trace", "export"] = "auto",
) -> CapturedModule:
    """Return a module that runs a graph of a model's forward, in which every remote call is one node.

    The forward is traced symbolically. If it decides by the structure, sizes or flags of its values, which tracing
    cannot know, and sample inputs are given, it is exported by `torch.export` instead.

    No remote call is made, with one exception: if the forward calls a method of a live RRef for which no contract is
    stated, the owner of the RRef is asked for its class. The model and everything else are left as they were, and other
    threads may go on training. While a model is being exported, however, they must not run that same model:
    `torch.export` replaces its parameters by stand-ins.

    Args:
        model: a module, or a function of tensors (such as a loss).
        tracer_class: a `torch.fx.Tracer` of the caller's own, made without arguments; its overrides are kept.
        leaf_modules: modules to keep as one node each: classes, instances or qualified names.
        wrap: Python functions to keep as one node each, by whichever alias they are called.
        concrete_args: arguments that are fixed while tracing, as in `torch.fx.symbolic_trace`.
        contracts: contracts of remote functions by name ("package.module:function", "package.module:Class.method", or
            ".method" for any object behind an RRef); they take precedence over declared ones. A name that no call has
            causes a warning.
        sample_inputs: arguments of one call: by position, by name, or a `Batch`, which has both. Arguments that they
            leave at a default of None, True or False are fixed at that value while tracing. A graph made by
            `torch.export` is for inputs of the samples' structure, dtypes and sizes. A forward that cannot be exported
            either is traced for the sizes by which it decides. With other inputs, the original forward runs.
        dynamic_shapes: the sizes that may differ from the samples', as `torch.export.export` takes them.
        how: "trace", "export", or "auto": trace, and export what cannot be traced.

    Raises:
        CaptureError: the forward does something that a graph cannot hold; the message says where, and what to do.
    """
    _check(model, how, sample_inputs)
    options = Options(tracer_class, leaf_modules, wrap, concrete_args, contracts)
    with one_at_a_time:
        captured = _captured(model, options, sample_inputs, dynamic_shapes, how)
    captured._fxlib.captured_with = captured._fxlib.captured_with or options
    captured._fxlib.captured_code = captured._program.generated.__code__
    if _LOG.isEnabledFor(logging.DEBUG):
        nodes = list(captured.graph.nodes)
        _LOG.debug(
            "captured %s: %d nodes, %d remote calls, %d facts about Python's state to check before each forward",
            *(_name(model), len(nodes), sum(map(is_call, nodes)), len(captured._fxlib.conditions.python)),
        )
    return captured


def _captured(
    model: Model,
    options: Options,
    sample_inputs: Given | None,
    dynamic_shapes: Any,
    how: str,
) -> CapturedModule:
    _check_call(model)
    if how == "export":
        return _exported(model, options, sample_inputs, dynamic_shapes)
    forward = model.forward if isinstance(model, nn.Module) else model
    fixed = {} if sample_inputs is None else left_at_defaults(forward, sample_inputs)
    fixing = options._replace(concrete_args={**fixed, **(options.concrete_args or {})} or None)
    try:
        return _traced(model, fixing)
    except CaptureError as error:
        if sample_inputs is None or isinstance(error, StuckError):
            raise
        refused = error
    if how != "trace":
        _LOG.debug("%s is exported, since it cannot be traced: %s", _name(model), refused)
        try:
            return _exported(model, options, sample_inputs, dynamic_shapes)
        except CaptureError as error:
            problem = f"neither capture takes the forward. Tracing: {refused}\nExport: {error}"
            refused = CaptureError(problem, where=error.where or refused.where)
    if dynamic_shapes is not None:
        raise refused
    _LOG.debug("%s is traced for the sizes of the samples: %s", _name(model), refused)
    samples = bind(forward, sample_inputs, options.concrete_args or {})
    try:
        return _traced(model, fixing, dict(zip(samples.names, (*samples.args, *samples.kwargs.values()), strict=True)))
    except CaptureError:
        raise refused from None


def _name(model: Model) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else str(getattr(model, "__name__", "a function"))


def _check_call(model: Model) -> None:
    """Refuse a model whose `__call__` does more than run its forward and hooks."""
    called: Any = type(model).__call__
    if isinstance(model, nn.Module) and not getattr(called, "__module__", "").startswith("torch."):
        raise CaptureError(
            f"{type(model).__name__} has a __call__ of its own, which a graph of its forward would pass by",
            where=source.of_definition(called),
            hint="Do that in the forward, or capture the module inside that is called by its forward.",
        )


def _traced(model: Model, options: Options, samples: Mapping[str, Any] | None = None) -> CapturedModule:
    """Return the graph of a trace; if the forward decides by sizes, it is for the sizes of `samples`, if given."""
    traced_through = TracedThrough()
    while True:
        try:
            captured = _traced_through(model, options, traced_through, samples)
            captured._fxlib.captured_with = options
            return captured
        except CaptureError as error:
            if isinstance(error, StuckError) or not traced_through.keep_whole(error):
                raise
            _LOG.debug(
                "%d modules with hooks or parametrizations stay one node each: %s", len(traced_through.whole), error
            )


def _traced_through(
    model: Model, options: Options, traced_through: TracedThrough, samples: Mapping[str, Any] | None
) -> CapturedModule:
    forward = type(model).forward if isinstance(model, nn.Module) else model
    declarations = Declarations(options.contracts or {}, forward)
    once = functools.partial(_traced_once, model, options, declarations, traced_through=traced_through, samples=samples)
    return _seen_whole(model, once)


def _seen_whole(model: Model, attempt: Callable[[Recorder], CapturedModule]) -> CapturedModule:
    """Return the capture of the first attempt in which all functions of the forward were observed from the start.

    If a random generator was drawn from while other threads ran, one more attempt tells whether the forward drew.

    Raises:
        CaptureError: no attempt succeeds, or the forward keeps stand-ins of tensors.
    """
    also: tuple[FunctionType, ...] = ()
    drawn = 0
    for _ in range(_ATTEMPTS):
        with collector_paused():  # finalizers are not part of the forward, and new stand-ins are found at once
            recorder = Recorder(model, also)
            try:
                captured = attempt(recorder)
            except DrawnError as error:
                drawn += 1
                if drawn > 1 or not error.others:
                    raise
                continue
            if (late := recorder.met_late()) is None and not recorder.disturbed:
                recorder.refuse_leaks()
                captured._fxlib.writes_out = bool(recorder.writes_out)
                if recorder.writes_out:
                    where = f"{recorder.writes_out}: the forward prints or logs"
                    warnings.warn(f"{where}, which a graph does not: it does so at capture", FxlibWarning, stacklevel=5)
                for text in recorder.slow_checks():
                    warnings.warn(text, FxlibWarning, stacklevel=5)
                return captured
        also = late or also
    if recorder.disturbed:
        raise CaptureError(
            f"another thread changes {recorder.disturbed} whenever the forward is captured, and the forward reads it",
            where=source.of_definition(getattr(type(model), "forward", model)),
            hint="Let the thread pause while the model is captured, or read it outside of the forward.",
        )
    raise CaptureError(
        "each attempt to capture the forward runs functions that none before has run",
        where=source.of_definition(also[-1] if also else getattr(type(model), "forward", model)),
        hint="Make what calls it a leaf with wrap=.",
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running in a block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _traced_once(
    model: Model,
    options: Options,
    declarations: Declarations,
    recorder: Recorder,
    *,
    traced_through: TracedThrough,
    samples: Mapping[str, Any] | None,
) -> CapturedModule:
    tracer = tracer_for(options.tracer_class)
    module = model if isinstance(model, nn.Module) else None
    rref_paths = RRefPaths(nn.Module() if module is None else module)
    calls = RemoteCalls(tracer, declarations, recorder)
    tracer.prepare(
        calls,
        rref_paths,
        frozenset(options.leaf_modules),
        sys._getframe(),
        recorder=recorder,
        traced_through=traced_through,
        changed=options.changed or {},
        samples=samples,
    )
    try:
        graph = _trace(tracer, model, dict(options.concrete_args) if options.concrete_args else None, options.wrap)
        for name in declarations.unused():
            warnings.warn(f"contracts[{name!r}] is of no call in the model", FxlibWarning, stacklevel=5)
        for text in declarations.unpushed.values():
            warnings.warn(text, FxlibWarning, stacklevel=5)
        fixed = _name_fixed_arguments(graph, options.concrete_args or {})
        captured = _finish(tracer, graph, model)
        for node in graph.find_nodes(op="call_module"):
            if (why := traced_through.whole.get(submodule(tracer.root, str(node.target)))) is not None:
                node.meta[WHOLE] = why
        captured._fxlib.conditions.fixed = fixed
    finally:
        for name in tracer.added if module is not None else ():
            delattr(module, name)
    _capture_inside(captured, options)
    return captured


def _capture_inside(captured: CapturedModule, options: Options) -> None:
    """Make graphs of the modules inside `DistributedDataParallel`, so that a worker can build these modules."""
    inner = options._replace(concrete_args=None, contracts=None)
    for path in dict.fromkeys(str(node.target) for node in captured.graph.nodes if node.op == "call_module"):
        called = submodule(captured, path)
        if isinstance(called, DistributedDataParallel) and not isinstance(called.module, GraphModule):
            classes = (type(each).__module__ for _, each in local_modules(called.module))
            if not all(each.startswith("torch.nn.modules.") for each in classes):
                keep_body(called, None)
                with suppress(CaptureError):  # then only the launcher knows the module inside
                    body = _traced(called.module, inner)
                    keep_body(called, body, closed=is_closed_graph(body))
                    conditions = captured._fxlib.conditions
                    conditions.python = conditions.python.joined(body._fxlib.conditions.python)


def _exported(model: Model, options: Options, sample_inputs: Given | None, dynamic_shapes: Any) -> CapturedModule:
    from fxlib.capture.export.export import export  # loads sympy, which tracing does not need

    forward, written = (model.forward, type(model).forward) if isinstance(model, nn.Module) else (model, model)
    declarations = Declarations(options.contracts or {}, written)
    samples = bind(forward, () if sample_inputs is None else sample_inputs, options.concrete_args or {})
    captured = _seen_whole(model, lambda recorder: export(model, samples, dynamic_shapes, declarations, recorder))
    _capture_inside(captured, options)
    return captured


def _trace(
    tracer: RemoteTracer, model: Model, concrete_args: dict[str, Any] | None, wrap: Collection[Callable[..., Any]]
) -> Graph:
    with tracer.recorder, _undisturbed(tracer, model), Interception() as interception:
        try:
            install(interception, tracer, wrap)
            leave_logging_alone(interception)
            with tracer.recorder.observing(), tracer.before_changes(), unswallowed(), EagerCalls(tracer):
                return tracer.trace(model, concrete_args)
        except FxlibError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the forward cannot be traced: {type(error).__name__}: {error}",
                where=source.of_error(error) or source.of_definition(getattr(type(model), "forward", model)),
                hint="What depends on values belongs out of the forward, or into a leaf (wrap=, leaf_modules=).",
            ) from error


def _finish(tracer: RemoteTracer, graph: Graph, model: Model) -> CapturedModule:
    for node in graph.nodes:
        if node.op == "placeholder" and node.all_input_nodes:
            raise CaptureError(
                f"the argument {node.target!r} has a tensor as its default",
                where=source.of_definition(type(model).forward if isinstance(model, nn.Module) else model),
                hint="Take None as the default and hold the tensor in a buffer, or give sample_inputs=.",
            )
    for node in reversed(list(graph.nodes)):
        if node.target in _QUESTIONS and not node.users:  # the trace has answered it
            graph.erase_node(node)
    protect_old_values(graph)
    annotate(graph, tracer.root)
    refuse_out(graph, grad_enabled=torch.is_grad_enabled())
    refuse_shared_writes(graph, tracer.root, tracer.recorder.sharing())
    for node in graph.nodes:
        # Otherwise, generated code would wrap the function again at every recompile, permanently.
        node.meta.pop("is_wrapped", None)
    facts = tracer.recorder.facts(graph)
    asked = FixedAnswers(
        grad_mode=tracer.recorder.asked_grad_mode,
        requires_grad=tracer.asked_gradients,
        tensor_metadata=tracer.answered,
        classes=tracer.recorder.asked_classes,
    )
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", None)
        return CapturedModule(
            tracer.root, graph, original=FunctionModel(model), facts=facts, asked=asked, class_name=name
        )
    entries = tracer.rref_paths.ways()
    return CapturedModule(tracer.root, graph, original=model, facts=facts, asked=asked, entries=entries)


def _name_fixed_arguments(graph: Graph, concrete: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the numbers that torch.fx adds to the names of fixed arguments, and return the values of these arguments.

    Containers keep the numbered names, since the graph takes their elements one by one.
    """
    fixed = {name: value for name, value in concrete.items() if value is None or isinstance(value, bool | int | float)}
    for node in list(graph.nodes):
        name = str(node.target).removesuffix("_1")
        if node.op == "placeholder" and name in fixed:
            node.target = name
        elif node.target is _assert_is_none:  # a private function of torch.fx that need not be known elsewhere
            with graph.inserting_before(node):
                same = graph.call_function(operator.eq, (node.args[0], None))
            node.target, node.args = torch._assert, (same, *node.args[1:])
    return fixed


def _check(model: Model, how: str, sample_inputs: object) -> None:
    if not callable(model):
        raise CaptureError(
            f"there is no module to optimize: a {type(model).__name__} has no forward",
            hint="Pass the torch.nn.Module that its step runs, if there is one.",
        )
    if how not in ("auto", "trace", "export"):
        raise CaptureError(f"how={how!r} is no way to capture", hint='Choose "auto", "trace" or "export".')
    if how == "export" and sample_inputs is None:
        raise CaptureError("torch.export runs the forward once", hint="Give arguments of one call in sample_inputs=.")
    if not bytecode.IS_KNOWN:
        raise CaptureError(
            "fxlib does not know the bytecode of Python {}.{}, and could not see what a forward reads".format(
                *bytecode.VERSION
            ),
            hint="Capture with Python 3.11, 3.12 or 3.13.",
        )
    if is_capturing():
        raise capture_error("a forward cannot capture a model", hint="Capture it before.")
    if isinstance(model, CapturedModule):
        where = type(model).__name__
        raise CaptureError("the model is captured already", where=where, hint="Capture the original model.")
    if isinstance(model, DistributedDataParallel):
        where, hint = type(model).__name__, "Capture the module inside, and wrap the captured one."
        raise CaptureError(
            "its forward prepares the reduction of gradients, which a graph would lose", where=where, hint=hint
        )
    for path, module in local_modules(model) if isinstance(model, nn.Module) else ():
        _check_module(module, where=path or type(module).__name__, is_root=module is model)
    if isinstance(model, nn.Module) and "forward" in model.__dict__:
        raise CaptureError(
            "the model's forward was replaced on the instance, and torch.fx traces that of its class",
            where=type(model).__qualname__,
            hint="Override forward in a subclass.",
        )


def _check_module(module: nn.Module, *, where: str, is_root: bool) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(module).__name__} is a module of TorchScript, a program of its own that no graph can hold",
            where=where,
            hint="Put the nn.Module there that it was scripted or traced from.",
        )
    if _gathers_weights(module, is_root=is_root):
        raise CaptureError(
            f"FSDP gathers the weights of {type(module).__name__} around its forward, which a graph would lose",
            where=where,
            hint="Call fully_shard on the root alone: what it does is done around the captured forward, too.",
        )
    held = (*module._parameters.values(), *module._buffers.values())
    if any(is_lazy(each) for each in held if each is not None):
        raise CaptureError(
            f"{type(module).__name__} has parameters without a shape",
            where=where,
            hint="Run the model on one batch before the capture.",
        )


def _gathers_weights(module: nn.Module, *, is_root: bool) -> bool:
    """Return whether FSDP prepares a module's forward where only the module's own call does."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who shards a model has imported it
    if fsdp is None:
        return False
    return isinstance(module, fsdp.FullyShardedDataParallel) or (isinstance(module, fsdp.FSDPModule) and not is_root)


@contextmanager
def _undisturbed(tracer: RemoteTracer, model: Model) -> Iterator[None]:
    forward = type(model).forward if isinstance(model, nn.Module) else model
    with _modes_restored(), unchanged(model, tracer.added), generators_unused(forward):
        yield


@contextmanager
def _modes_restored() -> Iterator[None]:
    grad_enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad_enabled)
