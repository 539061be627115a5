"""What a package has to hold of a module: the parts that its graph uses, as Python literals, and their tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxlib.errors import WireError
from fxlib.runtime.guards.folded_weights import FOLDED
from fxlib.wire import leaves
from fxlib.wire.targets import function_name

_SCALARS = (bool, int, str, type(None))
_HINT = "fxlib.save writes it to a file that fxlib.load reads, and names what the model itself has to supply."


@dataclass(slots=True, kw_only=True)
class Contents:
    """Tables of a package, keyed by paths; see `parts.assemble`. `classes` are those of the parts."""

    parts: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    complex_: list[str] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    classes: set[type[nn.Module]] = field(default_factory=set)

    @classmethod
    def of(cls, module: GraphModule) -> Contents:
        """Collect the modules that the graph calls, the tensors that it reads, and what holds them.

        Raises:
            WireError: one of them cannot be written as data; names it.
        """
        return _Collector(module).collected()


class _Collector:
    def __init__(self, root: GraphModule) -> None:
        self._root = root
        self._contents = Contents()
        self._modules: dict[int, str] = {}
        self._held: dict[int, str] = {}
        self._memory: dict[int, str] = {}

    def collected(self) -> Contents:
        for node in self._root.graph.nodes:
            if node.op == "call_module":
                self._module(str(node.target))
            elif node.op == "get_attr":
                self._attribute(str(node.target))
        return self._contents

    def _module(self, path: str) -> None:
        """Note a module that is called, and all below it."""
        if path in self._contents.parts and not self._contents.parts[path].startswith("(torch.nn.Module,"):
            return
        part = self._root.get_submodule(path)
        self._holders(path)
        known = self._modules.setdefault(id(part), path)
        if known != path:
            self._contents.same[path] = known
            return
        where = f"module {path!r}"
        if isinstance(part, GraphModule) or leaves.has_hooks(part):
            what = "is a graph of its own" if isinstance(part, GraphModule) else "carries hooks"
            raise WireError(f"a package cannot hold it: it {what}", where=where, hint=_HINT)
        plain = {name: value for name, value in leaves.attributes(part) if not isinstance(value, torch.Tensor)}
        written = ", ".join(f"{name!r}: {literal(value, f'{where}, {name}')}" for name, value in plain.items())
        self._contents.classes.add(type(part))
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        self._contents.parts[path] = f"({kind}, {part.training}, {{{written}}})"
        self._tensors(part, path)
        for name, child in part._modules.items():
            if child is not None:
                self._module(f"{path}.{name}")

    def _tensors(self, part: nn.Module, path: str) -> None:
        for name, value in (*part._parameters.items(), *part._buffers.items(), *vars(part).items()):
            if isinstance(value, torch.Tensor):
                self._tensor(f"{path}.{name}", value)
            elif value is None and (name in part._parameters or name in part._buffers):
                self._contents.missing[f"{path}.{name}"] = "parameter" if name in part._parameters else "buffer"

    def _attribute(self, place: str) -> None:
        """Note a tensor that the graph reads."""
        path, _, name = place.rpartition(".")
        value = getattr(self._root.get_submodule(path), name)
        if not isinstance(value, torch.Tensor):
            raise WireError(f"a package cannot hold a {type(value).__name__}", where=f"attribute {place!r}", hint=_HINT)
        self._holders(place)
        self._tensor(place, value)

    def _holders(self, path: str) -> None:
        """Note the modules on the way, as mere holders unless they are called themselves."""
        steps = path.split(".")
        for count in range(1, len(steps)):
            self._contents.parts.setdefault(".".join(steps[:count]), "(torch.nn.Module, False, {})")

    def _tensor(self, place: str, value: torch.Tensor) -> None:
        name = self._held.setdefault(id(value), place)
        places = self._contents.tensors.setdefault(name, [])
        if any(place == known for known, _ in places):
            return
        places.append((place, self._role(place, value)))
        if name != place:
            return
        plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
        if not plain or type(value) not in (torch.Tensor, nn.Parameter):
            kind = f"{type(value).__name__} of layout {value.layout} on {value.device}"
            raise WireError(f"a package cannot hold a {kind}", where=f"tensor {place!r}", hint=_HINT)
        other = self._memory.setdefault(value.untyped_storage()._cdata, place)
        if other != place:
            raise WireError(f"it shares memory with {other!r}", where=f"tensor {place!r}", hint=_HINT)
        data = value.detach().resolve_conj().resolve_neg()
        if not data.is_contiguous():
            self._contents.strides[place] = data.stride()
        if data.is_complex():  # safetensors knows one of its dtypes alone
            self._contents.complex_.append(place)
            data = torch.view_as_real(data)
        self._contents.values[place] = data.contiguous().cpu()

    def _role(self, place: str, value: torch.Tensor) -> str:
        path, _, name = place.rpartition(".")
        owner = self._root.get_submodule(path)
        if name in owner._parameters:
            return "parameter" if value.requires_grad else "frozen"
        if name in owner._buffers:
            transient = name in owner._non_persistent_buffers_set and not self._is_computed(place)
            return "transient" if transient else "buffer"
        return "attribute"

    def _is_computed(self, place: str) -> bool:
        """Whether a pass computed it from weights: then it is a weight of the package."""
        return any(
            node.op == "get_attr" and node.target == place and FOLDED in node.meta for node in self._root.graph.nodes
        )


def literal(value: Any, where: str) -> str:
    """Return the Python expression of a plain value.

    Raises:
        WireError: it is none; names the place.
    """
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) in _SCALARS or isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return repr(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list, torch.Size):
        inner = [literal(each, where) for each in value]
        return f"[{', '.join(inner)}]" if isinstance(value, list) else f"({', '.join(inner)}{',' * (len(inner) == 1)})"
    if type(value) is dict:
        pairs = (f"{literal(key, where)}: {literal(each, where)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    name = function_name(value)
    if name is not None and name.startswith("torch."):
        return name
    raise WireError(f"a package cannot hold a {type(value).__name__}", where=where, hint=_HINT)
