"""Captured modules as folders: a Python package that runs with torch and safetensors alone.

Files that fxlib itself loads again are in `fxlib.serialization.files`.
"""

from __future__ import annotations

import builtins
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.graph_module import _format_import_block
from torch.package import sys_importer
from torch.utils import _pytree as pytree

from fxlib.capture.coerce import Model, as_graph, samples_of
from fxlib.capture.samples import Given
from fxlib.errors import WireError
from fxlib.runtime import int8
from fxlib.runtime.guards import export_guards, value_conditions
from fxlib.runtime.guards.folded_weights import FOLDED, RANK
from fxlib.runtime.module import outdated
from fxlib.serialization import files
from fxlib.serialization.package import parts
from fxlib.utils.compare import is_freed
from fxlib.utils.pytree import python_number
from fxlib.wire import modules
from fxlib.wire.names import as_name
from fxlib.wire.targets import function_name

_INIT = '''"""{name}, written by fxlib.{needs}"""

from .module import {name}

__all__ = ["{name}"]
'''

_MODULE = '''"""{name}: its graph as torch.fx writes it, and the parts that it is made of.

It computes what the model did in the mode and with the plain attributes that it was captured with.
"""

# The code of a graph: no person wrote it, and formatters have no business with it.
# fmt: off
import pathlib as _pathlib

import torch.nn
{imports}

from . import parts as _parts

_PARTS = {{
{parts}
}}
_SAME = {same}
_TENSORS = {tensors}
_STRIDES = {strides}
_MISSING = {missing}
_COMPLEX = {complex_}
_TRACKED = {tracked}


class {name}(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _parts.assemble(
            self, _pathlib.Path(__file__).parent,
            parts=_PARTS, same=_SAME, tensors=_TENSORS, strides=_STRIDES, missing=_MISSING, complex_=_COMPLEX,
            tracked=_TRACKED,
        )
        self.training = {training}
{setup}
{code}
'''

_WITH_FXLIB = '''"""{name}, written by fxlib. Its graph uses operators of fxlib ({uses}), so it needs fxlib.

`module.py` is its code, for people to read.
"""

from pathlib import Path

import fxlib


def {name}():
    """Return the module, as it was written."""
    return fxlib.load(Path(__file__).with_name("module.fxg"))


__all__ = ["{name}"]
'''

_MODULES = ("torch", "fxlib", "pytree", "module", "parts", "guards", "value_conditions")
_DEFINED = ("Path", "_pathlib", "_parts", "_PARTS", "_SAME", "_TENSORS", "_STRIDES", "_MISSING", "_COMPLEX", "_TRACKED")
"""Names that the templates define."""


def to_folder(model: Model, path: str | os.PathLike[str], inputs: Given | None = None) -> None:
    """Write a module as a Python package: its code as torch.fx writes it, its weights as safetensors, and no pickle.

    `from FOLDER import NAME; NAME()` gives the module, without fxlib. NAME is that of the module's class, with
    underscores if that is not an identifier, or is one that the code uses. Only if the graph has operators of fxlib,
    such as remote calls, does the package need fxlib, and says so; its graph is then a file of `fxlib.save`. Modules of
    classes that are not torch's are imported from where they are defined.

    Args:
        model: a module, captured or not, a graph of torch.fx, or an exported program.
        path: a folder, which is created if it does not exist. Files of an earlier package are replaced; if not all can
            be written, the folder is no package.
        inputs: arguments of one call, as for `fxlib.capture`, to export a model that cannot be traced.

    Raises:
        CaptureError: the model cannot be captured.
        WireError: something that the graph uses cannot be written as data, such as a module with hooks, an attribute
            that is an object, or tensors that share memory (the message names it); or weights are no longer those from
            which values in the graph were computed.
        OSError: a file cannot be written.
    """
    module = as_graph(model, samples_of(inputs))
    if stale := outdated(module):
        raise WireError(stale, where=type(module).__name__)
    folder, generated = Path(path), module.graph.python_code("self")
    name = _class_name(module, generated.globals)
    operators = {str(node.target) for node in module.graph.nodes if int8.is_operator(node.target)}
    uses = sorted({*(key for key, value in generated.globals.items() if _is_ours(value)), *operators})
    code = generated.src[generated.src.index("def forward(") :].strip()
    if uses:
        written = _files_with_fxlib(module, name, code, uses)
    else:
        written = _files_without_fxlib(module, name, code, generated.globals)
    folder.mkdir(parents=True, exist_ok=True)
    # Nobody imports a package of which only some files are written: `__init__.py` goes first, and comes last.
    (folder / "__init__.py").unlink(missing_ok=True)
    for each, data in written.items():
        files.write_whole(folder / each, data)


def _files_with_fxlib(module: GraphModule, name: str, code: str, uses: Sequence[str]) -> dict[str, Sequence[bytes]]:
    """Return the files of a package whose graph uses operators of fxlib, `__init__.py` last."""
    return {
        "module.py": [f"# {name}: for people to read; __init__.py loads module.fxg.\n{code}\n".encode()],
        "module.fxg": files.contents(module),
        "__init__.py": [_WITH_FXLIB.format(name=name, uses=", ".join(uses)).encode()],
    }


def _files_without_fxlib(
    module: GraphModule, name: str, code: str, used: Mapping[str, Any]
) -> dict[str, Sequence[bytes]]:
    """Return the files of a package that runs without fxlib, `__init__.py` last; `used` has what the code names."""
    contents = Contents.of(module)
    source = _MODULE.format(
        name=name,
        imports="\n".join([*_names(used), *_imports(contents.classes)]),
        parts="\n".join(f"    {each!r}: {part}," for each, part in sorted(contents.parts.items())),
        same=pformat(contents.same, width=110),
        tensors=pformat(contents.tensors, width=110),
        strides=pformat(contents.strides, width=110),
        missing=pformat(contents.missing, width=110),
        complex_=pformat(contents.complex_, width=110),
        tracked=pformat(contents.tracked, width=110),
        training=module.training,
        setup="".join(f"        {line}\n" for line in _setup(module)),
        code="".join(f"    {line}\n" if line else "\n" for line in code.splitlines()).rstrip(),
    )
    written: dict[str, Sequence[bytes]] = {
        "module.py": [source.encode()],
        "parts.py": [Path(parts.__file__).read_bytes()],
        "weights.safetensors": [save(contents.values)],
    }
    if _guarded(module):
        for file, home in (("guards.py", export_guards), ("value_conditions.py", value_conditions)):
            text = Path(str(home.__file__)).read_text().replace("from fxlib.runtime.guards.", "from .")
            written[file] = [text.encode()]
    written["__init__.py"] = [_INIT.format(name=name, needs=_needs(contents)).encode()]
    return written


def _class_name(module: GraphModule, used: Mapping[str, Any]) -> str:
    """Return a name for the class of the package that nothing else in it has."""
    name = as_name(type(module).__name__)
    while name in used or name in (*_MODULES, *_DEFINED) or hasattr(builtins, name):
        name += "_"
    return name


def _is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fxlib"


def _names(used: Mapping[str, Any]) -> list[str]:
    """Return statements that define the names that the code uses; an annotation may be a string."""
    for value in used.values():
        home, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if callable(value) and (home == "__main__" or "<" in qualname):
            raise WireError("it cannot be imported", where=f"{home}.{qualname}", hint="Define it in a module.")
    strings = {name: value for name, value in used.items() if isinstance(value, str)}
    objects = {name: value for name, value in used.items() if name not in strings}
    return [_format_import_block(objects, sys_importer), *(f"{name} = {value!r}" for name, value in strings.items())]


def _needs(contents: Contents) -> str:
    others = sorted({kind.__module__ for kind in contents.classes if not kind.__module__.startswith("torch.")})
    return f" It imports {', '.join(others)}." if others else ""


def _imports(classes: Iterable[type[nn.Module]]) -> list[str]:
    for kind in classes:
        if "<" in kind.__qualname__ or kind.__module__ == "__main__":
            raise WireError("its class cannot be imported", where=f"{kind.__module__}.{kind.__qualname__}")
    return sorted({f"import {kind.__module__}" for kind in classes})


def _written(spec: pytree.TreeSpec) -> str:
    try:
        return json.dumps(pytree.treespec_dumps(spec))
    except NotImplementedError as error:
        raise WireError(f"a package cannot hold how it is nested: {error}", where="graph, pytree") from error


def _homes(spec: pytree.TreeSpec) -> list[str]:
    """Return the modules that register the containers of a structure with torch's pytree."""
    inner = {home for child in spec.children() for home in _homes(child)}
    own = getattr(spec.type, "__module__", "builtins")
    return sorted(inner | ({own} - {"builtins", "collections"}))


def _guarded(module: GraphModule) -> bool:
    return isinstance(module.graph._codegen, export_guards.GuardedCodeGen)


def _setup(module: GraphModule) -> list[str]:
    """Return the further statements of the constructor: structures of arguments, and conditions on them."""
    lines = []
    codegen = module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        for attribute, spec in (("_in_spec", codegen.pytree_info.in_spec), ("_out_spec", codegen.pytree_info.out_spec)):
            if spec is not None:
                lines += [f"import {home}" for home in _homes(spec)]
                lines.append(f"self.{attribute} = pytree.treespec_loads({_written(spec)})")
    if isinstance(codegen, export_guards.GuardedCodeGen):
        lines += [
            "from math import inf, nan",
            "from torch.fx.graph import _PyTreeInfo",
            "from .guards import GuardedCodeGen, InputGuards, TensorGuard, ValueGuard",
            "from .value_conditions import Reference, Step, ValueCondition",
            f"info = _PyTreeInfo({list(codegen.pytree_info.orig_args)!r}, self._in_spec, self._out_spec)",
            f"_parts.only_for(self, GuardedCodeGen(info, {codegen.guards!r}).misfit)",
        ]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if ranks := {str(node.target): node.meta[RANK] for node in placeholders if RANK in node.meta}:
        names = [str(node.target) for node in placeholders]
        lines.append(f"_parts.only_for(self, _parts.of_ranks({names!r}, {ranks!r}))")
    return lines


_SCALARS = (bool, int, str, type(None))
_HINT = "fxlib.save writes it to a file that fxlib.load reads, and names what the model itself has to supply."


@dataclass(slots=True, kw_only=True)
class Contents:
    """The tables of a package, keyed by paths; see `parts.assemble`. `classes` are the classes of the parts."""

    parts: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    complex_: list[str] = field(default_factory=list)
    tracked: list[str] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    classes: set[type[nn.Module]] = field(default_factory=set)

    @classmethod
    def of(cls, module: GraphModule) -> Contents:
        """Collect the modules that the graph calls, the tensors that it reads, and the modules that hold these.

        Raises:
            WireError: one of them cannot be written as data; the message names it.
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
        """Record a module that is called, and everything below it."""
        if path in self._contents.parts and not self._contents.parts[path].startswith("(torch.nn.Module,"):
            return
        part = self._root.get_submodule(path)
        self._holders(path)
        known = self._modules.setdefault(id(part), path)
        if known != path:
            self._contents.same[path] = known
            return
        where = f"module {path!r}"
        if isinstance(part, GraphModule) or modules.has_hooks(part):
            what = "is a graph of its own" if isinstance(part, GraphModule) else "carries hooks"
            raise WireError(f"a package cannot hold it: it {what}", where=where, hint=_HINT)
        plain = {name: value for name, value in modules.attributes(part) if not isinstance(value, torch.Tensor)}
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

    def _attribute(self, dotted: str) -> None:
        """Record a tensor that the graph reads."""
        path, _, name = dotted.rpartition(".")
        value = getattr(self._root.get_submodule(path), name)
        if not isinstance(value, torch.Tensor):
            raise WireError(
                f"a package cannot hold a {type(value).__name__}", where=f"attribute {dotted!r}", hint=_HINT
            )
        self._holders(dotted)
        self._tensor(dotted, value)

    def _holders(self, path: str) -> None:
        """Record the modules on the way, as mere holders unless they are called themselves."""
        steps = path.split(".")
        for count in range(1, len(steps)):
            self._contents.parts.setdefault(".".join(steps[:count]), "(torch.nn.Module, False, {})")

    def _tensor(self, dotted: str, value: torch.Tensor) -> None:
        name = self._held.setdefault(id(value), dotted)
        dotted_names = self._contents.tensors.setdefault(name, [])
        if any(dotted == known for known, _ in dotted_names):
            return
        dotted_names.append((dotted, self._role(dotted, value)))
        if name != dotted:
            return
        plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
        if not plain or type(value) not in (torch.Tensor, nn.Parameter):
            kind = f"{type(value).__name__} of layout {value.layout} on {value.device}"
            raise WireError(f"a package cannot hold a {kind}", where=f"tensor {dotted!r}", hint=_HINT)
        if is_freed(value):
            raise WireError(
                "its memory was freed, as FSDP does between forwards",
                where=f"tensor {dotted!r}",
                hint="Gather the weights first.",
            )
        other = self._memory.setdefault(value.untyped_storage()._cdata, dotted)
        if other != dotted:
            raise WireError(f"it shares memory with {other!r}", where=f"tensor {dotted!r}", hint=_HINT)
        data = value.detach().resolve_conj().resolve_neg()
        if not data.is_contiguous():
            self._contents.strides[dotted] = data.stride()
        if data.is_complex():  # safetensors has only one complex dtype
            self._contents.complex_.append(dotted)
            data = torch.view_as_real(data)
        if value.requires_grad and dotted_names[0][1] != "parameter":
            self._contents.tracked.append(dotted)
        self._contents.values[dotted] = data.contiguous().cpu()

    def _role(self, dotted: str, value: torch.Tensor) -> str:
        path, _, name = dotted.rpartition(".")
        owner = self._root.get_submodule(path)
        if name in owner._parameters:
            return "parameter" if value.requires_grad else "frozen"
        if name in owner._buffers:
            transient = name in owner._non_persistent_buffers_set and not self._is_computed(dotted)
            return "transient" if transient else "buffer"
        return "attribute"

    def _is_computed(self, dotted: str) -> bool:
        """Return whether a pass computed it from weights, so that it is a weight of the package."""
        return any(
            node.op == "get_attr" and node.target == dotted and FOLDED in node.meta for node in self._root.graph.nodes
        )


def literal(value: Any, where: str) -> str:
    """Return the Python expression of a plain value.

    Raises:
        WireError: the value is not plain; the message says where it is.
    """
    if (number := python_number(value)) is not None:
        value = number
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else f"float({str(value)!r})"
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
