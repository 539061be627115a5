"""`fxlib.capture`: from a model to a graph in which every remote call is one node."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, Tracer
from torch.nn.parameter import is_lazy

from fxlib.capture import source
from fxlib.capture.ambient import generators_unused
from fxlib.capture.declarations import Declarations
from fxlib.capture.eager import EagerCalls
from fxlib.capture.faults import fault, unswallowed
from fxlib.capture.hooks import install
from fxlib.capture.intercept import Interception, is_capturing
from fxlib.capture.metadata import annotate
from fxlib.capture.rebinding import protect_old_values
from fxlib.capture.remote import RemoteCalls
from fxlib.capture.rrefs import RRefPlaces
from fxlib.capture.samples import bind
from fxlib.capture.state import remote_modules_aside, unchanged
from fxlib.capture.tracer import RemoteTracer, tracer_for
from fxlib.capture.tracked import refuse_out
from fxlib.contracts import Contract
from fxlib.errors import CaptureError, FxlibError, FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.runtime.state import FunctionModel
from fxlib.runtime.walk import local_modules

_one_at_a_time = threading.Lock()
Model = nn.Module | Callable[..., Any]

_QUESTIONS = (rpc.get_worker_info, "owner", "owner_name")


class _Options(NamedTuple):
    """How to trace; see `capture`."""

    tracer_class: type[Tracer] | None
    leaf_modules: Collection[type[nn.Module] | nn.Module | str]
    wrap: Collection[Callable[..., Any]]
    concrete_args: Mapping[str, Any] | None
    contracts: Mapping[str, Contract] | None


def capture(
    model: Model,
    *,
    tracer_class: type[Tracer] | None = None,
    leaf_modules: Collection[type[nn.Module] | nn.Module | str] = (),
    wrap: Collection[Callable[..., Any]] = (),
    concrete_args: Mapping[str, Any] | None = None,
    contracts: Mapping[str, Contract] | None = None,
    sample_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    how: Literal["auto", "trace", "export"] = "auto",
) -> CapturedModule:
    """Make a graph of the forward of a model, a module in which every remote call is one node.

    The forward is traced symbolically. Where it decides by structure, sizes or flags of its values, which tracing
    cannot know, it is exported by `torch.export` instead, if sample inputs are given.

    No remote call is made, save one question for the class behind each live RRef whose method is called and has no
    stated contract. The model is left as it was, and so is everything else; other threads may go on training.

    Args:
        model: a module, or a function of tensors (such as a loss).
        tracer_class: a `torch.fx.Tracer` of the caller's own, made without arguments; its overrides are kept.
        leaf_modules: modules to keep as one node each: classes, instances or qualified names.
        wrap: Python functions to keep as one node each, by whichever alias they are called.
        concrete_args: arguments to be fixed while tracing, as in `torch.fx.symbolic_trace`.
        contracts: contracts of remote functions by name ("package.module:function", "package.module:Class.method", or
            ".method" for any object behind an RRef); they take precedence over declared ones. A name that no call
            has is warned of.
        sample_inputs: arguments of one call, by position or by name, for `torch.export`. The graph is for inputs of
            their structure, dtypes and sizes; with others, the original forward runs.
        dynamic_shapes: the sizes that may differ from the samples', as `torch.export.export` takes them.
        how: "trace", "export", or "auto": trace, and export what cannot be traced.

    Raises:
        CaptureError: the forward does something that a graph cannot hold; says where, and what to do.
    """
    _check(model, how, sample_inputs)
    options = _Options(tracer_class, leaf_modules, wrap, concrete_args, contracts)
    with _one_at_a_time:
        if how == "export":
            return _exported(model, options, sample_inputs, dynamic_shapes)
        try:
            return _traced(model, options)
        except CaptureError as error:
            if how == "trace" or sample_inputs is None:
                raise
            refused = error
        try:
            return _exported(model, options, sample_inputs, dynamic_shapes)
        except CaptureError as error:
            told = f"neither capture takes the forward. Tracing: {refused}\nExport: {error}"
            raise CaptureError(told, where=error.where or refused.where) from error


def _traced(model: Model, options: _Options) -> CapturedModule:
    tracer = tracer_for(options.tracer_class)
    module = model if isinstance(model, nn.Module) else None
    declarations = Declarations(options.contracts or {}, model if module is None else type(module).forward)
    places = RRefPlaces(nn.Module() if module is None else module)
    tracer.prepare(RemoteCalls(tracer, declarations), places, frozenset(options.leaf_modules), sys._getframe())
    try:
        with remote_modules_aside(model):
            graph = _trace(tracer, model, dict(options.concrete_args) if options.concrete_args else None, options.wrap)
        for name in declarations.unused():
            warnings.warn(f"contracts[{name!r}] is of no call in the model", FxlibWarning, stacklevel=3)
        return _finish(tracer, graph, model)
    finally:
        for name in tracer.added if module is not None else ():
            delattr(module, name)


def _exported(
    model: Model, options: _Options, sample_inputs: Sequence[Any] | Mapping[str, Any] | None, dynamic_shapes: Any
) -> CapturedModule:
    from fxlib.capture.export import export  # loads sympy, which no other way to capture needs

    forward, written = (model.forward, type(model).forward) if isinstance(model, nn.Module) else (model, model)
    declarations = Declarations(options.contracts or {}, written)
    samples = bind(forward, () if sample_inputs is None else sample_inputs, options.concrete_args or {})
    return export(model, samples, dynamic_shapes, declarations)


def _trace(
    tracer: RemoteTracer, model: Model, concrete_args: dict[str, Any] | None, wrap: Collection[Callable[..., Any]]
) -> Graph:
    with _undisturbed(tracer, model), Interception() as interception:
        try:
            install(interception, tracer, wrap)
            with unswallowed(), EagerCalls(tracer):
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
    for node in reversed(list(graph.nodes)):
        if node.target in _QUESTIONS and not node.users:  # answered while tracing
            graph.erase_node(node)
    protect_old_values(graph)
    annotate(graph, tracer.root)
    refuse_out(graph, grad_enabled=torch.is_grad_enabled())
    for node in graph.nodes:
        # Generated code would otherwise wrap the function again at every recompile, and for good.
        node.meta.pop("is_wrapped", None)
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", None)
        return CapturedModule(tracer.root, graph, original=FunctionModel(model), class_name=name)
    return CapturedModule(tracer.root, graph, original=model, fixed_looks=tracer.answered)


def _check(model: Model, how: str, sample_inputs: object) -> None:
    if how not in ("auto", "trace", "export"):
        raise CaptureError(f"how={how!r} is no way to capture", hint='Choose "auto", "trace" or "export".')
    if how == "export" and sample_inputs is None:
        raise CaptureError("torch.export runs the forward once", hint="Give arguments of one call in sample_inputs=.")
    if is_capturing():
        raise fault("a forward cannot capture a model", hint="Capture it before.")
    if isinstance(model, CapturedModule):
        where = type(model).__name__
        raise CaptureError("the model is captured already", where=where, hint="Capture the original model.")
    for path, module in local_modules(model) if isinstance(model, nn.Module) else ():
        held = (*module._parameters.values(), *module._buffers.values())
        if any(is_lazy(each) for each in held if each is not None):
            raise CaptureError(
                f"{type(module).__name__} has parameters without a shape",
                where=path or type(module).__name__,
                hint="Run the model on one batch before the capture.",
            )
    if isinstance(model, nn.Module) and "forward" in model.__dict__:
        raise CaptureError(
            "the model's forward was replaced on the instance, and torch.fx traces that of its class",
            where=type(model).__qualname__,
            hint="Override forward in a subclass.",
        )


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
