"""Predicts how long local work takes that was not measured: a roofline of its operators on a processor like this one.

The rates are round figures, of which only the ratios count: they rank candidates, so that a trial begins with the most
promising one, and the trial decides. Their source is `python -m benchmarks.inference` (the parts `machine`, `resnet50`
and `deep_recommender`).
"""

from __future__ import annotations

from typing import Final

from torch.fx import GraphModule

from fxlib.errors import FxlibError
from fxlib.inspection import analyze
from fxlib.inspection.device import Bandwidth, Device, Peak
from fxlib.runtime import int8
from fxlib.runtime.lowering import backend_of
from fxlib.spec.workload import Workload
from fxlib.utils.hardware import FOR_BFLOAT16, FOR_INT8, instructions

_FLOAT_FLOPS: Final = 1.2e11
"""Operations of one core in float32, in a second."""
_FASTER: Final = {"bfloat16": 2.0, "int8": 5.0}
"""The multiple of float32's operations that a dtype has on processors with instructions for it."""
_WITHOUT: Final = {"bfloat16": 0.3, "int8": 2.5}
"""The same on other processors; for int8 as with ONEDNN_MAX_CPU_ISA=AVX2, and AVX512_CORE."""
_BYTES_PER_S: Final = 2e10
_LAUNCH_S: Final = 3e-6
_INT8_LAUNCH_S: Final = 2e-5
"""Seconds that an operator on int8 weights takes however little it does: part of it is written in Python."""
_SHARE: Final = {"openvino": 0.6, "onnxruntime": 0.65, "inductor_freezing": 0.9, "inductor": 0.95}
"""The share of the time of torch's operators that compiled code takes, by backend."""


def predicted_s(module: GraphModule, workload: Workload) -> float | None:
    """Return how long one forward of a program without calls takes, in seconds; None if its sizes are not known."""
    try:
        batch = workload.samples[0]
        given = batch.inputs if not batch.kwargs else None if batch.inputs else batch.kwargs
        nodes = analyze(module, given, device=_processor(workload.threads)).nodes if given is not None else {}
    except FxlibError:
        return None
    total_s = 0.0
    for node, figures in nodes.items():
        backend = backend_of(node)
        total_s += (figures.seconds or 0.0) * (1.0 if backend is None else _SHARE[backend.name])
    return total_s or None


def _processor(threads: int) -> Device:
    has, flops = set(instructions()), threads * _FLOAT_FLOPS
    bfloat16 = flops * (_FASTER if has & FOR_BFLOAT16 else _WITHOUT)["bfloat16"]
    quantized = flops * (_FASTER if has & FOR_INT8 else _WITHOUT)["int8"]
    layers = (f"{int8.NAMESPACE}.{name}" for name in int8.LAYERS)
    return Device(
        name="a processor like this one",
        source=__name__,
        memory_bytes=1.0,
        layer_s=0.0,
        overload_s=0.0,
        attribute_s=0.0,
        dispatch_s=0.0,
        asynchronous=False,
        memory=(Bandwidth(bytes=1.0, bytes_per_s=_BYTES_PER_S),),
        peaks=(
            Peak(dtype="float32", work="any", flops_per_s=flops, launch_s=_LAUNCH_S),
            Peak(dtype="bfloat16", work="any", flops_per_s=bfloat16, launch_s=_LAUNCH_S),
            *(Peak(dtype="float32", work=each, flops_per_s=quantized, launch_s=_INT8_LAUNCH_S) for each in layers),
        ),
    )
