"""Operators of `torch.ops`: by allowed namespace, out of those that torch has registered."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fxlib.runtime import int8
from fxlib.wire.faults import Fault
from fxlib.wire.memory_safety import WAY_OUT, reached_outside, reason, safe

NAMESPACES = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "aten", "mkldnn", "onednn", "prims", "quantized"),
        *("quantized_decomposed", "rngprims", "torchvision", "fbgemm", int8.NAMESPACE),
    }
)
_WITHHELD = frozenset(
    {
        # Files, raw memory, and standard output.
        *("aten::from_file", "aten::record_stream", "aten::set", "aten::set_", "aten::_print", "mkldnn::data_ptr"),
        *("aten::_share_data", "aten::_cuda_getCurrentRawStream"),
    }
)


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
        raise Fault(f"{name!r} is no operator")
    return found


def _allowed(name: str) -> bool:
    if not _known(name):
        return False
    if "." in name:
        return name in safe()
    # A packet picks one of its overloads when it is called.
    overloads = {f"{name}.{each}" for each in registered()[name]}
    return not overloads.isdisjoint(safe()) and not any(reached_outside(each) for each in overloads)


def _known(name: str) -> bool:
    packet, _, overload = name.partition(".")
    overloads = registered().get(packet)
    return overloads is not None and (name == packet or overload in overloads)


@cache
def registered() -> Mapping[str, frozenset[str]]:
    """Overloads of each operator of the namespaces, "default" for the unnamed one, but for those withheld."""
    found: dict[str, set[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        if name.partition("::")[0] in NAMESPACES and packet not in _WITHHELD:
            found.setdefault(packet, set()).add(overload or "default")
    return {packet: frozenset(overloads) for packet, overloads in found.items()}
