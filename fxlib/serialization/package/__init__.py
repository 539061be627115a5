"""Captured modules as folders: a Python package that runs with torch and safetensors alone."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

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
from fxlib.runtime.guards import export_guards, value_conditions
from fxlib.runtime.guards.folded_weights import RANK
from fxlib.runtime.module import outdated
from fxlib.serialization import files
from fxlib.serialization.package import parts
from fxlib.serialization.package.contents import Contents
from fxlib.wire.names import as_name

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


class {name}(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _parts.assemble(
            self, _pathlib.Path(__file__).parent,
            parts=_PARTS, same=_SAME, tensors=_TENSORS, strides=_STRIDES, missing=_MISSING, complex_=_COMPLEX,
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


def to_folder(model: Model, path: str | os.PathLike[str], inputs: Given | None = None) -> None:
    """Write a module as a Python package: its code as torch.fx writes it, its weights as safetensors, and no pickle.

    `from FOLDER import NAME; NAME()` gives the module, without fxlib. NAME is that of the module's class, with
    underscores where that is no name, or is one that the code uses. Only where operators of fxlib are in the graph,
    such as remote calls, does the package need fxlib, and says so; its graph is then a file of `fxlib.save`.
    Modules of classes that are not torch's are imported from where they are defined.

    Args:
        model: a module, captured or not, a graph of torch.fx, or an exported program.
        path: a folder, which is made if it is not there. Files of an earlier package are replaced.
        inputs: arguments of one call, as for `fxlib.capture`, to export a model that cannot be traced.

    Raises:
        CaptureError: the model cannot be captured.
        WireError: something that the graph uses cannot be written as data, such as a module with hooks, an attribute
            that is an object, or tensors that share memory; names it. Or weights are no longer those from which values
            in the graph were computed.
        OSError: a file cannot be written.
    """
    module = as_graph(model, samples_of(inputs))
    if stale := outdated(module):
        raise WireError(stale, where=type(module).__name__)
    folder, generated = Path(path), module.graph.python_code("self")
    name = _class_name(module, generated.globals)
    uses = sorted(key for key, value in generated.globals.items() if _is_ours(value))
    code = generated.src[generated.src.index("def forward(") :].strip()
    written: dict[str, bytes] = {}
    if uses:
        written["__init__.py"] = _WITH_FXLIB.format(name=name, uses=", ".join(uses)).encode()
        written["module.py"] = f"# {name}: for people to read; __init__.py loads module.fxg.\n{code}\n".encode()
    else:
        contents = Contents.of(module)
        imports = [*_names(generated.globals), *_imports(contents.classes)]
        written["__init__.py"] = _INIT.format(name=name, needs=_needs(contents)).encode()
        written["module.py"] = _MODULE.format(
            name=name,
            imports="\n".join(imports),
            parts="\n".join(f"    {each!r}: {part}," for each, part in sorted(contents.parts.items())),
            same=pformat(contents.same, width=110),
            tensors=pformat(contents.tensors, width=110),
            strides=pformat(contents.strides, width=110),
            missing=pformat(contents.missing, width=110),
            complex_=pformat(contents.complex_, width=110),
            training=module.training,
            setup="".join(f"        {line}\n" for line in _setup(module)),
            code="".join(f"    {line}\n" if line else "\n" for line in code.splitlines()).rstrip(),
        ).encode()
        written["parts.py"] = Path(parts.__file__).read_bytes()
        written["weights.safetensors"] = save(contents.values)
        if _guarded(module):
            for file, home in (("guards.py", export_guards), ("value_conditions.py", value_conditions)):
                source = Path(str(home.__file__)).read_text().replace("from fxlib.runtime.guards.", "from .")
                written[file] = source.encode()
    folder.mkdir(parents=True, exist_ok=True)
    if uses:
        files.save(module, folder / "module.fxg")
    for each, data in written.items():
        files.write_whole(folder / each, [data])


def _class_name(module: GraphModule, used: Mapping[str, Any]) -> str:
    """Return a name for the class of the package, which nothing else in it has."""
    name = as_name(type(module).__name__)
    while name in used or name in ("torch", "module", "parts", "guards", "pytree") or hasattr(builtins, name):
        name += "_"
    return name


def _is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fxlib"


def _names(used: Mapping[str, Any]) -> list[str]:
    """Return statements that give the code the names that it uses; an annotation may be a string."""
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
    """Return the modules that make the containers of a structure known to torch's pytree."""
    inner = {home for child in spec.children() for home in _homes(child)}
    own = getattr(spec.type, "__module__", "builtins")
    return sorted(inner | ({own} - {"builtins", "collections"}))


def _guarded(module: GraphModule) -> bool:
    return isinstance(module.graph._codegen, export_guards.GuardedCodeGen)


def _setup(module: GraphModule) -> list[str]:
    """Return what the constructor has to do besides: structures of arguments, and what holds of them."""
    lines = []
    codegen = module.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        for attribute, spec in (("_in_spec", codegen.pytree_info.in_spec), ("_out_spec", codegen.pytree_info.out_spec)):
            if spec is not None:
                lines += [f"import {home}" for home in _homes(spec)]
                lines.append(f"self.{attribute} = pytree.treespec_loads({_written(spec)})")
    if isinstance(codegen, export_guards.GuardedCodeGen):
        lines += [
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
