"""Capture by `torch.export`, on sample inputs: for forwards whose decisions depend on structure, sizes and flags."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _PyTreeInfo
from torch.utils import _pytree as pytree

from fxlib.capture import inlining, source
from fxlib.capture.ambient import generators_unused
from fxlib.capture.declarations import Declarations
from fxlib.capture.export_hooks import install
from fxlib.capture.exported_calls import ExportRecorder, recording
from fxlib.capture.faults import unswallowed
from fxlib.capture.intercept import Interception
from fxlib.capture.metadata import annotate
from fxlib.capture.questions import GradientQuestions, refuse_writes
from fxlib.capture.remote import RemoteCalls
from fxlib.capture.samples import Samples
from fxlib.capture.sizes import guards_of
from fxlib.capture.state import equal_copies, unchanged
from fxlib.capture.tracked import refuse_out
from fxlib.errors import CaptureError, FxlibError
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards import GuardedCodeGen
from fxlib.runtime.state import FunctionModel
from fxlib.runtime.walk import local_modules


def export(
    model: nn.Module | Callable[..., Any], samples: Samples, dynamic_shapes: Any, declarations: Declarations
) -> CapturedModule:
    """Run the forward on stand-ins for the samples, and return the operators that it called as a captured module.

    Args:
        model: as of `fxlib.capture`.
        samples: arguments of one call.
        dynamic_shapes: as of `torch.export.export`.
        declarations: contracts of the remote functions that the forward calls.

    Raises:
        CaptureError: the forward does something that a graph cannot hold; says where, and what to do.
    """
    module = model if isinstance(model, nn.Module) else FunctionModel(model)
    _check(module, samples)
    recorder = ExportRecorder(module)
    recorder.calls, recorder.end = RemoteCalls(recorder, declarations), sys._getframe()
    questions = GradientQuestions()
    program = _exported(module, samples, dynamic_shapes, recorder, questions)
    flat = program.module(check_guards=False)
    signature = program.module_call_graph[0].signature
    if signature is None:
        raise AssertionError("an exported program has a signature")
    constants = {**_constants(module, flat), **recorder.constants}
    try:
        for name, value in constants.items():
            setattr(module, name, value)
        guards = guards_of(program, samples, gradients=questions.asked)
        graph = inlining.inlined(flat, recorder, guards)
        info = _PyTreeInfo(list(samples.names), signature.in_spec, signature.out_spec)
        graph.set_codegen(GuardedCodeGen(info, guards))
        annotate(graph, module)
        refuse_writes(graph, constants)
        refuse_out(graph, grad_enabled=torch.is_grad_enabled())
        class_name = None if isinstance(model, nn.Module) else getattr(model, "__name__", None)
        return CapturedModule(module, graph, original=module, class_name=class_name)
    finally:
        for name in constants:
            delattr(module, name)


def _exported(
    module: nn.Module, samples: Samples, dynamic_shapes: Any, recorder: ExportRecorder, questions: GradientQuestions
) -> ExportedProgram:
    forward = module.forward if isinstance(module, FunctionModel) else type(module).forward
    quiet = unchanged(module, (), same=equal_copies)
    with quiet, generators_unused(forward), Interception() as interception:
        install(interception, recorder)
        try:
            with unswallowed(), recording(recorder), questions, _without_hooks(module):
                return torch.export.export(
                    module, samples.args, samples.kwargs, dynamic_shapes=dynamic_shapes, strict=False
                )
        except FxlibError:
            raise
        except Exception as error:
            raise CaptureError(
                f"torch.export refuses the forward: {type(error).__name__}: {_first_paragraph(error)}",
                where=source.of_error(error) or source.of_definition(forward),
                hint=_hint(error),
            ) from error


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Keep the forward hooks of the root out of the graph: they run around it, as around the forward."""
    tables = {name: module.__dict__[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
    module.__dict__.update({name: OrderedDict() for name in tables})
    try:
        yield
    finally:
        module.__dict__.update(tables)


def _check(module: nn.Module, samples: Samples) -> None:
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
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


def _constants(module: nn.Module, flat: nn.Module) -> Mapping[str, Any]:
    """Return the tensors and modules that export has added beside those of the model, by name."""
    held = {**module.__dict__, **module._parameters, **module._buffers, **module._modules}
    graph: torch.fx.Graph = flat.graph  # type: ignore[assignment]
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    found = {name: getattr(flat, name) for name in sorted(read) if "." not in name and name not in held}
    return {name: value for name, value in found.items() if not isinstance(value, nn.Module)}


def _hint(error: Exception) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return "What depends on values of tensors belongs out of the forward."
    return "Write this part with functions of torch that torch.export takes, or keep it out of the forward."


def _first_paragraph(error: Exception) -> str:
    return str(error).strip().partition("\n\n")[0]
