"""Valid calls of operators: torch's own samples, what runs below them, and the same arguments for other spellings.

torch.testing describes 700 functions and 114 modules with inputs on which they run (OpInfo, ModuleInfo). Each is run
forward and backward, and every operator that the dispatcher meets on the way is a call, too. Arguments are kept by
their names in the operator's schema, so that what holds for `aten::add.Tensor` is tried for `aten::add_.Tensor`,
`aten::add.out`, `torch.add` and `torch.Tensor.add_`.
"""

from __future__ import annotations

import io
import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.fx import Interpreter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxlib.wire.targets import candidates
from tests.wire.zoo import CASES

Call = tuple[tuple[Any, ...], dict[str, Any]]
PER_OPERATOR = 16
"""Calls that are kept of an operator: of arguments of different kinds and dimensions. Not all of them run."""
PER_INFO = 8
LARGEST = 4096
"""Elements of the largest tensor of a call that is kept."""


class Samples:
    """Valid calls by the name of the operator, "aten::add.Tensor" or "torch.add"."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self._seen: dict[str, set[str]] = defaultdict(set)

    def add(self, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        """Keep a copy of a call unless there are enough of its kind."""
        if len(self.calls[name]) >= PER_OPERATOR:
            return
        leaves = pytree.tree_leaves((tuple(args), kwargs))
        if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) > LARGEST:
            return
        kind = repr([_kind(leaf) for leaf in leaves]) + repr(sorted(kwargs))
        if kind not in self._seen[name]:
            self._seen[name].add(kind)
            self.calls[name].append(pytree.tree_map(_copy, (tuple(args), dict(kwargs))))

    def spread(self) -> None:
        """Give the calls of each operator to its other overloads and to its in-place and out variants."""
        families: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for name, calls in list(self.calls.items()):
            schema = _schema(name)
            for args, kwargs in calls if schema is not None else ():
                names = [each.name for each in schema.arguments]
                families[_family(name)].append(dict(zip(names, args, strict=False)) | kwargs)
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and _family(name) in families:
                schema = _schema(_full(name))
                for values in families[_family(name)] if schema is not None else ():
                    if (call := _bind(schema, values)) is not None:
                        self.add(_full(name), *call)

    def drop_unpicklable(self) -> None:
        """Drop the calls that cannot be kept in a file."""
        for name, calls in self.calls.items():
            self.calls[name] = [call for call in calls if _pickles(call)]

    def of(self, name: str) -> list[Call]:
        """Return the calls of an operator or of a function's spelling."""
        found = [*([by_hand[name]] if name in (by_hand := _by_hand()) else ()), *self.calls.get(name, ())]
        if "::" not in name:
            base = name.rpartition(".")[2]
            space = {"torch.special": "special_", "torch.linalg": "linalg_", "torch.fft": "fft_"}
            bare = base.strip("_")
            bare = bare[1:] if bare[1:] in _ARITHMETIC and base.startswith("__") and bare not in _ARITHMETIC else bare
            prefix = "aten::" + space.get(name.rpartition(".")[0], "")
            wanted = {prefix + base, prefix + bare, prefix + _DUNDERS.get(bare, bare)}
            for other, calls in self.calls.items():
                if other.partition(".")[0] in wanted and "out" not in other.partition(".")[2]:
                    found += calls[:3]
        elif (schema := _schema(name)) is not None:
            found += generated(schema)
        return (found if "::" in name else found + _guesses())[:60]


_ARITHMETIC = frozenset({"add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift"}) | {
    *("sub", "truediv", "xor"),
}
_DUNDERS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "truediv": "div", "mod": "remainder"} | {
    "floordiv": "floor_divide",
    "getitem": "index",
    "invert": "bitwise_not",
    "setitem": "index_put_",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


def collect(wanted: Callable[[str], bool] = lambda _: True) -> Samples:
    """Run torch's samples of the functions whose names are wanted, and return their calls."""
    # torch's tests take their base class from a package that the samples do not need.
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    samples = Samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            if wanted(info.name):
                _functions(samples, info)
        for each in module_db:
            if wanted(each.name):
                _modules(samples, each)
        for name, (make, inputs) in CASES.items():
            if wanted(name):
                _exported(samples, make(), inputs)
        samples.spread()
    return samples


class _Recorder(TorchDispatchMode):
    def __init__(self, samples: Samples) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with suppress(Exception):
            self._samples.add(
                str(func.name()) + ("" if func._overloadname != "default" else ".default"), args, kwargs or {}
            )
        return func(*args, **(kwargs or {}))


class _Spellings(TorchFunctionMode):
    """Keeps each call of torch's Python interface, for the function and for the operators of its name."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with suppress(Exception):
            if name := _spelling(func):
                self._samples.add(name, args, kwargs or {})
                for overload in _overloads("aten::" + name.rpartition(".")[2]):
                    self._samples.add(overload, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _functions(samples: Samples, info: Any) -> None:
    spelled = [info.op, info.method_variant, info.inplace_variant, info.operator_variant]
    spelled += [info.inplace_operator_variant, *(alias.op for alias in info.aliases)]
    names = list(dict.fromkeys(name for each in spelled if each is not None and (name := _spelling(each))))
    dtypes = [each for each in (torch.float32, torch.int64, torch.bool, torch.complex64) if each in info.dtypes]
    for dtype in dtypes or list(info.dtypes)[:1]:
        for index, sample in enumerate(_inputs(info, dtype)):
            if index == (PER_INFO if dtype is torch.float32 else 2):
                break
            args = (sample.input, *sample.args)
            for name in names:
                samples.add(name, args, sample.kwargs)
            _record(samples, info.op, args, sample.kwargs)
            for overload in _overloads(f"aten::{info.aten_name or info.name}"):
                samples.add(overload, args, sample.kwargs)


def _inputs(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    with suppress(Exception):
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)


def _modules(samples: Samples, info: Any) -> None:
    with suppress(Exception):
        for sample in info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True)[:3]:
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs)
            _record(samples, module, sample.forward_input.args, sample.forward_input.kwargs)
            _record(samples, module.eval(), sample.forward_input.args, sample.forward_input.kwargs)


def _exported(samples: Samples, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Keep the calls of the module's graph as torch.export makes it, of operators that the dispatcher takes apart."""

    class Recorder(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(target, torch._ops.OpOverload):
                samples.calls[_full(str(target.name()))][:0] = [pytree.tree_map(_copy, (tuple(args), dict(kwargs)))]
            return super().call_function(target, args, kwargs)

    with suppress(Exception):
        exported = torch.export.export(module, inputs, strict=False).module(check_guards=False)
        Recorder(exported).run(*inputs)


def _record(samples: Samples, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run forward and backward, keeping each operator that the dispatcher meets."""
    args, kwargs = pytree.tree_map(_leaf, (args, kwargs))
    with suppress(Exception), _Spellings(samples), _Recorder(samples):
        outs = [out for out in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(out, torch.Tensor)]
        outs = [out for out in outs if out.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        value = value.detach().clone()
        return value.requires_grad_(value.is_floating_point() or value.is_complex())
    return value


def _pickles(call: Call) -> bool:
    try:
        torch.load(io.BytesIO(_saved(call)), weights_only=False)
    except Exception:  # noqa: BLE001 - whatever it holds
        return False
    return True


def _saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _kind(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype.is_floating_point, leaf.layout
    return type(leaf).__name__


@cache
def _names() -> dict[object, str]:
    return {function: name for name, function in reversed(list(candidates().items()))}


def _spelling(function: Any) -> str:
    return _names().get(function, "")


def _full(name: str) -> str:
    return name if "." in name else name + ".default"


def _family(name: str) -> str:
    packet = name.partition(".")[0]
    return packet.removesuffix("_") if not packet.endswith("__") else packet


def _overloads(packet: str) -> list[str]:
    space, _, base = packet.partition("::")
    found: Any = getattr(getattr(torch.ops, space), base.replace(".", "_"), None)
    return [f"{packet}.{each}" for each in found.overloads()] if found is not None else []


def _schema(name: str) -> Any:
    if "::" not in name:
        return None
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), base), overload or "default")._schema
    except AttributeError:
        return None


def generated(schema: Any) -> list[Call]:
    """Return calls with what the types of a schema allow: tensors of one shape, small numbers."""
    return [
        call
        for shape in ((2, 3), (3, 3), (2, 3, 4, 4), (6,), ())
        for dtype in (torch.float32, torch.int64)
        if (call := _typed(schema, torch.ones(shape, dtype=dtype))) is not None
    ]


def _typed(schema: Any, tensor: torch.Tensor) -> Call | None:
    values: dict[str, Any] = {}
    pool = {
        "Tensor": tensor,
        "number": 1,
        "Scalar": 1,
        "float": 0.5,
        "int": 1,
        "SymInt": 1,
        "bool": False,
        "str": "mean",
    } | {
        "List[Tensor]": [tensor, tensor],
        "List[int]": [1],
        "List[SymInt]": [1],
        "List[bool]": [True],
        "List[Optional[Tensor]]": [tensor],
        "Device": torch.device("cpu"),
        "ScalarType": tensor.dtype,
        "List[number]": [1],
        "List[float]": [0.5],
    }
    for each in schema.arguments:
        kind = str(each.real_type)
        if kind in pool:
            if not each.has_default_value():
                values[each.name] = pool[kind]
        elif not each.has_default_value():
            if not kind.startswith("Optional"):
                return None
            values[each.name] = None
    return _bind(schema, values)


def _guesses() -> list[Call]:
    """Calls with few arguments, for functions of which nothing is known."""
    x, y, i = torch.rand(3, 4), torch.rand(4, 4), torch.tensor([0, 1, 1])
    found: list[tuple[Any, ...]] = [
        (x,),
        (y,),
        (i,),
        (x, x),
        (y, y),
        (i, i),
        (x, 1),
        (x, 0, 1),
        (x, 0, i),
        (x, i),
        (x, [3, 4]),
    ]
    found += [
        (x, [2, 3]),
        (x, (4, 3)),
        (3,),
        (3, 4),
        ([2, 3],),
        ([2, 3], 1),
        ([2, 3], [3, 1]),
        (),
        (x, x, x),
        ([x, x],),
        (x, 0.5),
    ]
    found += [
        (x, torch.float64),
        (torch.float32,),
        (torch.float32, torch.int64),
        (0, 1, 5),
        (0.5,),
        (True,),
        (x > 0.5,),
        (y, i, 0),
    ]
    found += [(torch.tensor(2),), (torch.tensor(2.0), 1)]
    return [(args, {}) for args in found]


def _by_hand() -> dict[str, Call]:
    """Calls of what torch.testing has no sample of, or one under another name."""
    image, channels, pair = torch.rand(2, 3, 4, 4), [torch.ones(3) for _ in range(4)], torch.rand(2, 3)
    scores, classes = torch.rand(8, 2, 5).log_softmax(2), torch.randint(1, 5, (2, 3))
    lengths = (torch.tensor([8, 8]), torch.tensor([3, 3]))
    levels, integers = torch.randint(256, (2, 4, 4, 4), dtype=torch.uint8), torch.ones(5, 4, 3, 3, dtype=torch.int8)
    ones, to, window = (torch.ones(5), torch.ones(5)), (0.02, 5), ([1, 1], [1, 1], [1, 1], 1)
    other = torch.randint(256, (2, 5, 4, 4), dtype=torch.uint8)
    found: dict[str, tuple[Any, ...]] = {
        "aten::_native_batch_norm_legit_no_training.default": (image, *channels, 0.1, 1e-5),
        "aten::_native_batch_norm_legit_functional.default": (image, *channels, True, 0.1, 1e-5),
        "aten::where.ScalarSelf": (pair > 0.5, 1.0, pair),
        "aten::where.ScalarOther": (pair > 0.5, pair, 1.0),
        "aten::choose_qparams_optimized.default": (torch.rand(4096), 4096, 200, 0.16, 8),
        "aten::upsample_nearest1d.default": (levels[0], [4], 1.0),
        "aten::ctc_loss.IntList": (scores, classes, [8, 8], [3, 3]),
        "aten::ctc_loss.Tensor": (scores, classes, *lengths),
        "torch.ctc_loss": (scores, classes, *lengths),
        "torch.conv_tbc": (torch.rand(5, 2, 3), torch.rand(3, 3, 4), torch.rand(4)),
        "torch.affine_grid_generator": (torch.rand(2, 2, 3), [2, 3, 4, 4], False),
        "torch.nn.functional.affine_grid": (torch.rand(2, 2, 3), [2, 3, 4, 4], False),
        "torch.nn.functional.fold": (torch.rand(2, 16, 9), (4, 4), (2, 2)),
        "torch.nn.functional.upsample": (image, None, 2.0),
        "torch.nn.functional.conv_tbc": (torch.rand(5, 2, 3), torch.rand(3, 3, 4), torch.rand(4)),
        "torch.nn.functional.native_channel_shuffle": (torch.rand(2, 4, 3, 3), 2),
        "torch.native_channel_shuffle": (torch.rand(2, 4, 3, 3), 2),
        "torch.fake_quantize_per_tensor_affine": (pair, 0.1, 0, 0, 255),
        "torch.fake_quantize_per_channel_affine": (pair, torch.ones(3), torch.zeros(3), 1, 0, 255),
        "torch.Tensor.new_empty_strided": (pair, (2, 3), (3, 1)),
        "torch.Tensor.new_full": (pair, (2, 3), 1.0),
        "torch.Tensor.new_tensor": (pair, [1, 2]),
        "torch.Tensor.view_as": (pair, pair),
        "torch.Tensor.reshape_as": (pair, pair),
        "torch.Tensor.type": (pair, torch.float64),
        "torch._assert": (True, ""),
        "torch.promote_types": (torch.float32, torch.float64),
        "torch.can_cast": (torch.float32, torch.float64),
        "torch.device": ("cpu",),
        "fxlib::quantize.default": (pair, 0.01, 3),
        "fxlib::dequantize.default": (levels, 0.01, 3),
        "fxlib::int8_linear.default": (levels[0, 0], 0.01, 3, integers[:, :, 0, 0].contiguous(), *ones, *to, "gelu"),
        "fxlib::int8_conv2d.default": (levels, 0.01, 3, integers, *ones, *window, None, 0, "relu"),
        "fxlib::int8_conv2d_add.default": (levels, 0.01, 3, integers, *ones, *window, other, 0.03, 1, *to, True),
        "fxlib::int8_conv2d_add_over.default": (levels, 0.01, 3, integers, *ones, *window, other, 0.03, 1, *to, True),
        "fxlib::int8_max_pool2d.default": (levels, [3, 3], [2, 2], [1, 1], [1, 1], False),
        "fxlib::int8_avg_pool2d.default": (levels, [3, 3], [2, 2]),
        "fxlib::int8_norm.default": (levels, 0.01, 3, torch.ones(4), torch.ones(4), *to),
    }
    return {name: (args, {}) for name, args in found.items()}


def _bind(schema: Any, values: dict[str, Any]) -> Call | None:
    """Return a call with these values by name; what is written out to is like the first tensor."""
    like = next((each for each in values.values() if isinstance(each, torch.Tensor)), None)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for position, each in enumerate(schema.arguments):
        if each.name in values:
            value = values[each.name]
        elif each.has_default_value():
            continue
        elif each.is_out and like is not None:
            value = like
        else:
            return None
        if each.kwarg_only or len(args) < position:
            kwargs[each.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs
