"""Import a program as it is: with stand-ins for packages of which a step takes nothing, and without accelerators."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

INSTALLED: Final = "torch"
"""Where a path begins that is that of a module of the installed torch."""


def load(name: str, path: str, holds: str, sources: Path) -> ModuleType:
    """Import a program's file, under a name that is the same in all processes.

    Args:
        name: of the program.
        path: how the path of its file ends.
        holds: a text in that file.
        sources: the folder below which it lies.

    Raises:
        FileNotFoundError: `sources` has no such file.
        Exception: whatever importing it raises.
    """
    if path.startswith(f"{INSTALLED}/"):
        return importlib.import_module(path.removesuffix(".py").replace("/", "."))
    files = sorted(sources.rglob(f"*{path.rpartition('/')[2]}"))
    found = [file for file in files if str(file).endswith(path) and holds in file.read_text()]
    if not found:
        raise FileNotFoundError(f"no file ...{path} with {holds!r} below {sources}")
    imported = f"program_{name}"
    spec = importlib.util.spec_from_file_location(imported, found[0])
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{found[0]} is no Python file")
    if not any(isinstance(each, _StandIns) for each in sys.meta_path):
        sys.meta_path.append(_StandIns())  # behind those that find what is installed
    module = importlib.util.module_from_spec(spec)
    sys.modules[imported] = module
    with _as_a_script(found[0]):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _as_a_script(file: Path) -> Iterator[None]:
    """Let a file find its neighbours, no arguments, and a folder to write in."""
    arguments, sys.argv = sys.argv, [str(file)]
    before = list(sys.path)
    sys.path[:0] = [str(each) for each in file.parents[:3]]  # of a file in a package: the folder that the package is in
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            yield
    finally:
        sys.argv = arguments
        sys.path[:] = before


_UNUSED: Final = frozenset({"lightning", "pandas", "timm", "torchmetrics", "torchvision"})
"""Packages that programs import, and of which a step takes nothing: data sets, metrics, loops around the model."""


class _StandIns(MetaPathFinder, Loader):
    """Lets programs import those of these packages that are not installed."""

    @override
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in _UNUSED else None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def _nothing(name: str) -> type:
    """Return a class that does nothing, or raise for a name of Python's own."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing(name, (), {"__init__": lambda *_, **__: None, "__len__": lambda _: 1})


class _Nothing(type):
    """The type of classes that do nothing, and in which every name is another one: `transforms.ToTensor`."""

    def __getattr__(cls, name: str) -> type:
        return _nothing(name)


class _StandIn(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> type:
        return _nothing(name)


def wrapped_on_processors(module: nn.Module, device_ids: object = None) -> nn.Module:
    """Wrap as the programs do, for a machine without the devices that they name."""
    del device_ids
    return DistributedDataParallel(module)


def quiet() -> None:
    """Let nothing that the programs print be seen."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
