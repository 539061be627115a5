"""The compilers to which parts of a graph are handed, each behind the same small interface, and only where installed.

A service sends the name of a backend, and never compiled code: that is made where the module runs.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Protocol

import torch
from torch import nn

from fxlib.runtime.compiled_cache import Run, through_cache


class Backend(Protocol):
    """Compiles modules without effects, whose inputs and results are tensors."""

    name: str
    package: str
    """The distribution that has to be installed; compiled parts are bound to its version."""
    keeps_weights: bool
    """Whether compiled parts hold the weights as they were at compilation, and give them no gradient."""

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that does what `part` does for inputs of these shapes, dtypes and layouts."""
        ...


class _Inductor:
    """TorchInductor, without worker processes, which would outlive an interrupt."""

    package = "torch"

    def __init__(self, name: str, *, keeps_weights: bool) -> None:
        self.name, self.keeps_weights = name, keeps_weights

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        _check_processes()
        options: dict[str, Any] = {"freezing": self.keeps_weights, "fallback_random": True, "compile_threads": 1}
        compiled: Callable[..., Any] = torch.compile(part, fullgraph=True, dynamic=False, options=options)
        return compiled


def _check_processes() -> None:
    """Check that this process may start a C++ compiler, before seconds of work are spent on each part.

    Raises:
        PermissionError: the process may not start one, as in a contained trial.
    """
    try:
        os.posix_spawn("", ["none"], {})
    except FileNotFoundError:
        pass  # the process was allowed to start one, and found no program of this empty name
    except PermissionError:
        problem = "a contained trial starts no processes, and so no C++ compiler"
        raise PermissionError(f"{problem}; fxlib.optimize, and workers without containment, do") from None


class _OpenVino:
    """OpenVINO on the processor, in float32 as the graph has it.

    This drives the converter directly, since the entry point that the package documents reports usage.
    """

    name, package, keeps_weights = "openvino", "openvino", True

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        import openvino

        core, given = openvino.Core(), tuple(each.detach() for each in inputs)
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": 1,
        }

        def make() -> tuple[Run, Callable[[], bytes]]:
            compiled = core.compile_model(_converted(part, given), "CPU", settings)
            return _runs(compiled), lambda: compiled.export_model().getvalue()

        return through_cache(
            installed(self.name),
            part,
            given,
            read=lambda kept: _runs(core.import_model(io.BytesIO(kept), "CPU", settings)),
            make=make,
        )


def _converted(part: nn.Module, given: Sequence[torch.Tensor]) -> Any:
    """Return a part as OpenVINO's own graph, for inputs of these shapes."""
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    frontend = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchScriptPythonDecoder(part, example_input=given)  # the frontend keeps no reference to it
    model = frontend.convert(frontend.load(decoder))
    for each, value in zip(model.inputs, given, strict=True):
        each.get_node().set_partial_shape(openvino.PartialShape(list(value.shape)))
    model.validate_nodes_and_infer_types()
    return model


def _runs(compiled: Any) -> Run:
    of_thread = threading.local()

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not hasattr(of_thread, "request"):
            of_thread.request = compiled.create_infer_request()
        found = of_thread.request.infer([each.detach().numpy() for each in values], share_inputs=True)
        return tuple(torch.from_numpy(each) for each in found.values())

    return run


class _OnnxRuntime:
    """ONNX Runtime on the processor, in float32 as the graph has it; its threads do not spin while others compute."""

    name, package, keeps_weights = "onnxruntime", "onnxruntime", True

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        given = tuple(each.detach() for each in inputs)

        def make() -> tuple[Run, Callable[[], bytes]]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the exporter warns about itself
                translated = _translations()
                program = torch.onnx.export(
                    _with_own_tables(part), given, dynamo=True, verbose=False, custom_translation_table=translated
                )
            assert program is not None  # noqa: S101 - it is None only if a file is written
            model: bytes = program.model_proto.SerializeToString()
            return _session(model), lambda: model

        return through_cache(installed(self.name), part, given, read=_session, make=make)


def _with_own_tables(part: nn.Module) -> nn.Module:
    """Return a part that holds the same tensors in tables of its own: meanwhile, the exporter puts others there."""
    return copy.deepcopy(part, {id(each): each for each in (*part.parameters(), *part.buffers())})


def _translations() -> dict[Any, Callable[..., Any]]:
    """Return what to export operators as that the exporter has go wrong for infinities and large numbers.

    A limit on one side becomes a `Clip`, which limits the other side, too, to the largest finite number; and the
    logarithm of a sigmoid is that of 0 below -104.
    """
    import onnxscript

    onnx: Any = onnxscript.opset18

    def clamp(self: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - their names in torch
        if self.dtype.is_floating_point():
            min, max = -math.inf if min is None else min, math.inf if max is None else max  # noqa: A001
        return onnx.Clip(self, *(each if each is None else onnx.CastLike(each, self) for each in (min, max)))

    def log_sigmoid(self: Any) -> Any:
        beyond = onnx.Exp(onnx.Neg(onnx.Abs(self)))
        return onnx.Sub(onnx.Min(self, onnx.CastLike(0.0, self)), onnx.Log(onnx.Add(onnx.CastLike(1.0, self), beyond)))

    aten = torch.ops.aten
    return {
        aten.clamp.default: clamp,
        aten.clamp_min.default: clamp,
        aten.clamp_max.default: lambda self, max_: clamp(self, None, max_),
        aten.log_sigmoid.default: log_sigmoid,
    }


def _session(model: bytes) -> Run:
    """Return a function that runs an exported model; to optimize it takes a tenth of the time of the export."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken = {name: each.detach().numpy() for name, each in zip(names, values, strict=True)}
        return tuple(torch.from_numpy(each) for each in session.run(None, taken))

    return run


BACKENDS: Final[dict[str, Backend]] = {
    each.name: each
    for each in (
        _OpenVino(),
        _OnnxRuntime(),
        _Inductor("inductor_freezing", keeps_weights=True),
        _Inductor("inductor", keeps_weights=False),
    )
}
"""All backends by name; those that compile fastest come first."""


def installed(name: str) -> str:
    """Return a backend with its version that is installed here, as `openvino==2026.4.1`; empty if there is none."""
    backend = BACKENDS.get(name)
    try:
        return f"{name}=={_version(backend.package)}" if backend is not None else ""
    except PackageNotFoundError:
        return ""


@functools.cache
def _version(package: str) -> str:
    """Return the version of a distribution; it is kept, since it is read from a file and each part of a graph asks."""
    return version(package)
