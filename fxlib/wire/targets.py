"""The allow-lists: which functions and methods a received graph may name.

The lists are built once, from torch's own registries and from names written here. A name from a graph is looked up in
them and nowhere else; no attribute is walked because a graph names it. Anything on no list stays with the client, as an
opaque slot.
"""

from __future__ import annotations

import builtins
import collections
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import rpc
from torch.overrides import get_overridable_functions

from fxlib.runtime import int8
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.ops import calls
from fxlib.runtime.ops.registry import BY_LABEL
from fxlib.wire.faults import Fault
from fxlib.wire.memory_safety import WAY_OUT, reached_outside, reason, safe

Function = Callable[..., Any]

_BUILTINS = (
    *("abs", "bool", "complex", "dict", "divmod", "float", "getattr", "int", "len", "list", "max", "min", "pow"),
    *("range", "round", "slice", "sum", "tuple", "zip"),
)
_OPERATOR_WITHHELD = frozenset({"attrgetter", "call", "itemgetter", "methodcaller"})
_CONSTRUCTORS = (
    *("arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "broadcast_shapes", "empty"),
    *("empty_permuted", "empty_strided", "eye", "full", "hamming_window", "hann_window", "kaiser_window", "linspace"),
    *("logspace", "normal", "ones", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"),
    *("range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor"),
    *("sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices"),
    *("vander", "zeros"),
)
# In-place functions, which are on torch's list of what may not be overridden.
_IN_PLACE = (
    *("abs_", "acos_", "acosh_", "alpha_dropout_", "asin_", "asinh_", "atan_", "atanh_", "ceil_", "celu_", "clamp_"),
    *("clamp_max_", "clamp_min_", "clip_", "cos_", "cosh_", "deg2rad_", "detach_", "dropout_", "erf_", "erfc_"),
    *("exp2_", "exp_", "expm1_", "feature_alpha_dropout_", "feature_dropout_", "fill_", "fix_", "floor_", "frac_"),
    *("index_put_", "log10_", "log1p_", "log2_", "log_", "logit_", "nan_to_num_", "neg_", "negative_", "rad2deg_"),
    *("reciprocal_", "relu_", "resize_as_", "round_", "rrelu_", "rsqrt_", "selu_", "sigmoid_", "sin_", "sinc_"),
    *("sinh_", "sqrt_", "square_", "tan_", "tanh_", "threshold_", "trunc_", "xlogy_", "zero_"),
)
_TORCH_EXTRAS = (
    *(
        "Size",
        "_assert",
        "_weight_norm",
        "as_strided",
        "can_cast",
        "device",
        "fill",
        "finfo",
        "get_default_dtype",
        "iinfo",
    ),
    *("is_autocast_enabled", "is_grad_enabled", "is_tensor", "promote_types", "result_type", "segment_reduce"),
    *("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum", "unique"),
)
_FUNCTIONAL_EXTRAS = (
    *("celu_", "elu_", "hardsigmoid", "hardswish", "hardtanh_", "leaky_relu_", "logsigmoid", "relu_", "rrelu_"),
    *("selu_", "sigmoid", "tanh", "threshold", "threshold_", "upsample", "upsample_bilinear", "upsample_nearest"),
)

METHODS_WITHHELD = frozenset(
    {
        # Functions that call their arguments, expose memory, or have effects outside of the tensor.
        *("apply_", "map_", "map2_", "module_load", "register_hook", "register_post_accumulate_grad_hook"),
        *("const_data_ptr", "data_ptr", "numpy", "record_stream", "set_", "share_memory_", "storage", "storage_type"),
        "untyped_storage",
    }
)
DATA_ATTRIBUTES = frozenset(
    name for name in dir(torch.Tensor) if not name.startswith("_") and not callable(getattr(torch.Tensor, name))
) - {"grad_fn"}
"""Attributes that `getattr` may read of a tensor directly; under other names, a decoded graph refuses anything
callable."""
_METHOD_EXTRAS = (
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "stride", "unflatten"),
    *("to_padded_tensor", "to_sparse_bsc", "to_sparse_bsr", "to_sparse_coo", "to_sparse_csc", "to_sparse_csr"),
)
_OF_OTHERS = frozenset(
    {
        # Methods of sequences, dicts, futures and RRefs.
        *("count", "get", "items", "keys", "done", "value", "wait", "is_owner", "owner", "owner_name", "to_here"),
    }
)
NO_TENSORS = ("torch.futures.", "torch._C.", "torch.amp.", "torch.distributed.")
"""Modules of functions that access no tensor memory."""
_ARITHMETIC = (
    *("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv"),
    "xor",
)
_DUNDERS = frozenset(
    {
        *(f"__{form}{name}__" for name in _ARITHMETIC for form in ("", "i", "r")),
        *("__abs__", "__bool__", "__contains__", "__eq__", "__float__", "__ge__", "__getitem__", "__gt__"),
        *("__index__", "__int__", "__invert__", "__le__", "__len__", "__lt__", "__ne__", "__neg__", "__pos__"),
        "__setitem__",
    }
)

_NAMESPACES = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "aten", "mkldnn", "onednn", "prims", "quantized"),
        *("quantized_decomposed", "rngprims", "torchvision", "fbgemm", int8.NAMESPACE),
    }
)
_WITHHELD = frozenset(
    {
        # Functions that reach files, raw memory, and standard output.
        *("aten::from_file", "aten::record_stream", "aten::set", "aten::set_", "aten::_print", "mkldnn::data_ptr"),
        *("aten::_share_data", "aten::_cuda_getCurrentRawStream"),
        # Its argument becomes another tensor, which no schema tells, and no count of writes.
        "aten::set_data",
    }
)


@cache
def methods() -> frozenset[str]:
    """Return the names that a `call_method` node may have."""
    spelled = {"__pow__": "pow", "__ipow__": "pow_"}
    inside = safe()
    return frozenset(name for name in _methods() if f"torch.Tensor.{spelled.get(name, name)}" in inside) | _OF_OTHERS


def _methods() -> frozenset[str]:
    tensor = {getattr(function, "__name__", "") for function in get_overridable_functions()[torch.Tensor]}
    plain = {
        name for name in tensor if not name.startswith("_") and inspect.isroutine(getattr(torch.Tensor, name, None))
    }
    return frozenset(plain - METHODS_WITHHELD) | frozenset(_METHOD_EXTRAS) | _DUNDERS


@cache
def functions() -> Mapping[str, Function]:
    """Return the functions that a `call_function` node may name."""
    return {name: function for name, function in candidates().items() if _travels(name)}


@cache
def candidates() -> Mapping[str, Function]:
    """Return the functions that may travel if they stay inside of their tensors."""
    return dict(_functions())


def _travels(name: str) -> bool:
    return not name.startswith("torch.") or name.startswith(NO_TENSORS) or name in safe()


def function_name(function: object) -> str | None:
    """Return the name of a function on the list, or None."""
    name = _names().get(id(function))
    if name is None and getattr(type(function), "__hash__", None) and _is_builtin(function):
        name = _builtin_names().get(function)
    return name


def registered() -> Mapping[str, Function]:
    """Return the operators of the call kinds that this process registered beyond the library's own, by label."""
    own = _own()
    found = (each for kind in calls.kinds() for each in kind.operators)
    return {f"{each.__module__}.{each.__qualname__}": each for each in found if each not in own}


@cache
def _own() -> frozenset[Function]:
    return frozenset(each for name, each in functions().items() if name.startswith("fxlib.runtime."))


@cache
def _names() -> dict[int, str]:
    names: dict[int, str] = {}
    for name, function in functions().items():
        names.setdefault(id(function), name)
    return names | {id(read_attribute): "builtins.getattr"}  # which stands for it in decoded graphs


@cache
def _builtin_names() -> dict[object, str]:
    # Each access to a builtin method of a type makes a new object, equal to the last.
    names: dict[object, str] = {}
    for name, function in functions().items():
        if _is_builtin(function):
            names.setdefault(function, name)
    return names


def _is_builtin(function: object) -> bool:
    return inspect.isbuiltin(function) or inspect.ismethoddescriptor(function)


def _functions() -> Iterator[tuple[str, Function]]:
    yield from _of(builtins, "builtins", _BUILTINS)
    yield from _of(collections, "collections", ("OrderedDict",))
    yield from _of(operator, "operator", sorted(set(operator.__all__) - _OPERATOR_WITHHELD))
    yield from _of(math, "math", [name for name in dir(math) if callable(getattr(math, name)) and name[0] != "_"])
    yield from _of(torch, "torch", (*_overridable(torch), *_CONSTRUCTORS, *_IN_PLACE, *_TORCH_EXTRAS))
    # The list omits the function that calls its argument.
    names = {*_overridable(torch.nn.functional), *_FUNCTIONAL_EXTRAS} - {"triplet_margin_with_distance_loss"}
    yield from _of(torch.nn.functional, "torch.nn.functional", sorted(names))
    for name in ("linalg", "fft", "special"):
        yield from _of(getattr(torch, name), f"torch.{name}", _overridable(getattr(torch, name)))
    # torch.fx renders torch.Tensor.__pow__ as torch._tensor.pow, which does not exist.
    yield from _of(torch.Tensor, "torch.Tensor", sorted(_methods() - {"__pow__", "__ipow__"}))
    yield from _of(torch.futures, "torch.futures", ("collect_all", "wait_all"))
    # Beginnings and ends of grad-mode and autocast blocks, as capture records them.
    yield from _of(torch._C, "torch._C", ("_set_grad_enabled",))
    yield from _of(torch.amp.autocast_mode, "torch.amp.autocast_mode", ("_enter_autocast", "_exit_autocast"))
    yield from ((label, each.function) for label, each in BY_LABEL.items())
    # The name of a server, as capture records it.
    yield from _of(rpc, "torch.distributed.rpc", ("get_worker_info",))


def _overridable(namespace: ModuleType) -> list[str]:
    # The name of a builtin includes its namespace: torch.fft.fft is named fft_fft.
    prefix = namespace.__name__.rpartition(".")[2] + "_"
    called = {getattr(each, "__name__", "") for each in get_overridable_functions()[namespace]}
    names = {name for each in called for name in (each, each.removeprefix(prefix))}
    return sorted(name for name in names if name and hasattr(namespace, name))


def _of(namespace: Any, prefix: str, names: Any) -> Iterator[tuple[str, Function]]:
    for name in names:
        if hasattr(namespace, name):  # torch's registries differ between versions
            yield f"{prefix}.{name}", getattr(namespace, name)


def operator_name(operator: OpOverload | OpOverloadPacket) -> str | None:
    """Return the wire's name of an operator, "aten::add.Tensor" (a packet has no overload), or None if not allowed."""
    if isinstance(operator, OpOverload):
        packet, overload = str(operator.overloadpacket._qualified_op_name), f".{operator._overloadname}"
    else:
        packet, overload = str(operator._qualified_op_name), ""
    name = packet + overload
    return name if _allowed(name) else None


def check_operator(name: str) -> None:
    """Raise Fault unless the name belongs to an operator that is registered here and stays inside of its tensors."""
    if _allowed(name):
        return
    if not _known(name):
        raise Fault(f"operator {name[:80]!r} is not on the allow-list of torch.ops")
    raise Fault(f"operator {name[:80]!r} may not travel: {reason(name)}", WAY_OUT)


def find_operator(name: str) -> OpOverload | OpOverloadPacket:
    """Return an operator whose name `check_operator` has passed."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), base)
    found = getattr(packet, overload) if overload else packet
    if not isinstance(found, (OpOverload, OpOverloadPacket)):
        raise Fault(f"{name!r} is not an operator")
    return found


def _allowed(name: str) -> bool:
    if not _known(name):
        return False
    if "." in name:
        return name in safe()
    # A packet chooses one of its overloads when it is called.
    overloads = {f"{name}.{each}" for each in registered_operators()[name]}
    return not overloads.isdisjoint(safe()) and not any(reached_outside(each) for each in overloads)


def _known(name: str) -> bool:
    packet, _, overload = name.partition(".")
    overloads = registered_operators().get(packet)
    return overloads is not None and (name == packet or overload in overloads)


@cache
def registered_operators() -> Mapping[str, frozenset[str]]:
    """Return the overloads of each operator of the namespaces ("default" is unnamed), without those withheld."""
    found: dict[str, set[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        if name.partition("::")[0] in _NAMESPACES and packet not in _WITHHELD:
            found.setdefault(packet, set()).add(overload or "default")
    return {packet: frozenset(overloads) for packet, overloads in found.items()}
