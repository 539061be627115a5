"""The table `workload` of a manifest: a workload that is described by sizes, dtypes and ranges of integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from fxlib.errors import WorkloadError
from fxlib.spec.inputs import BatchSpec, Tensors
from fxlib.spec.workload import Workload

KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "inputs": (list,),
    "kwargs": (dict,),
    "target": (str, int),
    "count": (int,),
    "loss": (str,),
    "optimizer": (str,),
    "mode": (str,),
    "accumulation": (int,),
    "clip_norm": (int, float),
    "loss_scale": (int, float),
    "threads": (int,),
    "trainers": (int,),
    "assume": (str,),
    "seed": (int,),
    "evaluation": (bool,),
    "pipeline": (int,),
    "stale": (int,),
}
"""The types of the values by key: descriptions of tensors, and the fields of a `Workload` that TOML can hold."""

_FORM: Final = "Write sizes, a dtype and the range of integers: 8x3x224x224, 8x12:int64<30000."


def workload_of(table: Mapping[str, Any]) -> Workload:
    """Return the workload that a table describes, whose keys and types are those of `KEYS`.

    Raises:
        WorkloadError: a value is no description of a tensor, or is out of its range.
    """
    step = dict(table)
    inputs = tuple(map(_tensors, step.pop("inputs", [])))
    kwargs = {name: _tensors(each) for name, each in step.pop("kwargs", {}).items()}
    target = _tensors(step.pop("target")) if "target" in step else None
    batches = BatchSpec(inputs=inputs, kwargs=kwargs, target=target, count=step.pop("count", 4))
    return Workload(batches=batches, **step)


def _tensors(text: object) -> Tensors:
    """Read `SIZES[:DTYPE[<HIGH]]`, the description of one tensor."""
    shape, _, rest = str(text).partition(":")
    name, _, high = rest.partition("<")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise WorkloadError(f"{text!r} is no tensor", hint=_FORM)
    try:
        sizes = tuple(int(each) for each in shape.split("x")) if shape else ()
        if high or not (dtype.is_floating_point or dtype.is_complex):
            return Tensors(shape=sizes, dtype=dtype, low=0, high=int(high) if high else 2)
    except ValueError as error:
        raise WorkloadError(f"{text!r} is no tensor", hint=_FORM) from error
    return Tensors(shape=sizes, dtype=dtype)
