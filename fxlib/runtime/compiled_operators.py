"""Operators of which OpenVINO or ONNX Runtime compute something else than torch, with the arguments for which they do.

They are those of ATen, of which functions, methods, modules and exported graphs all consist. Whether a first batch
shows the difference depends on its values, so a part with one of them is not given to the compiler at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch._ops import OpOverload

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of an operator by their names, those that are left out with their defaults."""
_Rule: TypeAlias = tuple[Callable[[Arguments], bool], str]
"""For which arguments a compiler computes something else, and what it does instead."""


def problem_of(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], backend: str) -> str:
    """Return what a compiler does instead of an operator with these arguments; empty if it does the same."""
    rule = _RULES.get(backend, {}).get(operator.overloadpacket.__name__.removesuffix("_"))
    if rule is None:
        return ""
    given = {each.name: each.default_value for each in operator._schema.arguments if each.has_default_value()}
    given |= dict(zip((each.name for each in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    differs, instead = rule
    return instead if differs(given) else ""


def _always(_: Arguments) -> bool:
    return True


def _pads_and_counts(given: Arguments) -> bool:
    return bool(given["ceil_mode"] and given["count_include_pad"] and any(given["padding"]))


def _divides_figures(given: Arguments) -> bool:
    """Return whether floats are divided by anything but a power of two, for which no quotient is rounded."""
    by = given["other"]
    if not _is_of_figures(given["self"], by):
        return False
    return isinstance(by, torch.Tensor) or not (math.isfinite(by) and abs(math.frexp(by)[0]) == 0.5)


def _floors_figures(given: Arguments) -> bool:
    return given.get("rounding_mode") == "floor" and _divides_figures(given)


def _rounds_figures(given: Arguments) -> bool:
    cuts = given.get("rounding_mode") == "trunc" and _is_of_figures(given["self"], given["other"])
    return cuts or _floors_figures(given)


def _reflects_the_nearest(given: Arguments) -> bool:
    nearest, reflection = 1, 2  # as torch numbers the modes
    modes = given["interpolation_mode"], given["padding_mode"]
    return modes == (nearest, reflection) and not given["align_corners"]


def _is_of_figures(*values: Any) -> bool:
    return any(each.is_floating_point() if isinstance(each, torch.Tensor) else type(each) is float for each in values)


_SIGN: Final[_Rule] = (_always, "loses the sign of a zero")
_QUOTIENT: Final[_Rule] = (_divides_figures, "takes it from a rounded quotient")
_WITHOUT_SELF: Final[_Rule] = (lambda given: not given.get("include_self", True), "counts what was there before, too")
_PIXELS: Final[_Rule] = (_reflects_the_nearest, "picks other pixels beyond the edge")
_OF_BOTH: Final[Mapping[str, _Rule]] = {
    "angle": _SIGN,
    "atan2": _SIGN,
    "floor_divide": _QUOTIENT,
    "grid_sampler": _PIXELS,
    "grid_sampler_2d": _PIXELS,
    "grid_sampler_3d": _PIXELS,
    "remainder": _QUOTIENT,
    "scatter_reduce": _WITHOUT_SELF,
    "div": (_floors_figures, _QUOTIENT[1]),
}
_CORRECTION: Final[_Rule] = (lambda given: given.get("correction") not in (None, 0, 1), "takes any correction for 1")
_CEILING: Final[_Rule] = (_pads_and_counts, "divides by other counts at the edge")
_LOGARITHM: Final[_Rule] = (_always, "gives -inf where the sigmoid is 0")
_DIVISOR: Final[_Rule] = (lambda given: given.get("divisor_override") is not None, "ignores the divisor")
_OVERFLOW: Final[_Rule] = (_always, "gives inf where an exponential is")
_BAGS: Final[_Rule] = (_always, "reads other rows for some bags")

_RULES: Final[Mapping[str, Mapping[str, _Rule]]] = {
    "openvino": {
        **_OF_BOTH,
        "div": (_rounds_figures, "rounds in 32 bits, or takes it from a rounded quotient"),
        "fmod": _QUOTIENT,
        "softplus": (lambda given: given["beta"] != 1 or given["threshold"] < 20, "ignores beta and threshold"),
        "round": (lambda given: given.get("decimals", 0) != 0, "ignores decimals"),
        "log_sigmoid_forward": _LOGARITHM,
        "avg_pool2d": _CEILING,
        "avg_pool3d": _CEILING,
        "var": _CORRECTION,
        "std": _CORRECTION,
        "var_mean": _CORRECTION,
        "std_mean": _CORRECTION,
        "cdist": (lambda given: given["p"] != 2, "gives NaN for equal points"),
        "pairwise_distance": (lambda given: given["p"] != 2 or given["eps"] > 1e-6, "gives NaN, or ignores eps"),
        "_embedding_bag": _BAGS,
        "_embedding_bag_forward_only": _BAGS,
    },
    "onnxruntime": {
        **_OF_BOTH,
        "logaddexp": _OVERFLOW,
        "logaddexp2": _OVERFLOW,
        "logcumsumexp": _OVERFLOW,
        "binary_cross_entropy_with_logits": _OVERFLOW,
        "cross_entropy_loss": (lambda given: given["label_smoothing"] != 0, "ignores the smoothing of labels"),
        "avg_pool2d": _DIVISOR,
        "avg_pool3d": _DIVISOR,
    },
}
