"""fxlib makes distributed training jobs faster without touching the model.

Every public name is imported on first use, so that a command or a server that needs no torch does not load it.
The service and the workers are packages of their own, `fxlib_service` and `fxlib_workers`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxlib.capture import capture
    from fxlib.client import Client, Handle, Tls, connect
    from fxlib.client.result import Result
    from fxlib.equivalence.bisect import Culprit, bisect
    from fxlib.equivalence.verify import verify
    from fxlib.errors import FxlibError
    from fxlib.inspection import analyze, draw
    from fxlib.passes.local.decompose import decompose
    from fxlib.pipeline import Pipeline, check_keys, pipeline, prefetch
    from fxlib.profiling import load_profile, profile, save_profile
    from fxlib.reasons import Reason
    from fxlib.recipes.recipes import optimize
    from fxlib.render import write_report
    from fxlib.rules import Rule, register_guard
    from fxlib.runtime.graph_set import usage
    from fxlib.runtime.ops.calls import register_call
    from fxlib.runtime.push_gradients import drop_gradients, push_gradients
    from fxlib.serialization.files import load, save
    from fxlib.serialization.package import to_folder
    from fxlib.spec.contract import Contract, Exactly, remote
    from fxlib.spec.job import TrialOptions
    from fxlib.spec.profile import Profile
    from fxlib.spec.report import Usage
    from fxlib.spec.workload import (
        Batch,
        BatchSpec,
        Dense,
        Optimizer,
        RemoteObject,
        Server,
        Table,
        Tensors,
        Variant,
        Workload,
    )

__all__ = [
    "Batch",
    "BatchSpec",
    "Client",
    "Contract",
    "Culprit",
    "Dense",
    "Exactly",
    "FxlibError",
    "Handle",
    "Optimizer",
    "Pipeline",
    "Profile",
    "Reason",
    "RemoteObject",
    "Result",
    "Rule",
    "Server",
    "Table",
    "Tensors",
    "Tls",
    "TrialOptions",
    "Usage",
    "Variant",
    "Workload",
    "analyze",
    "bisect",
    "capture",
    "check_keys",
    "connect",
    "decompose",
    "draw",
    "drop_gradients",
    "load",
    "load_profile",
    "optimize",
    "pipeline",
    "prefetch",
    "profile",
    "push_gradients",
    "register_call",
    "register_guard",
    "remote",
    "save",
    "save_profile",
    "to_folder",
    "usage",
    "verify",
    "write_report",
]

__version__ = version("fxlib")

_HOMES = {
    "fxlib.equivalence.bisect": ("Culprit", "bisect"),
    "fxlib.capture": ("capture",),
    "fxlib.client": ("Client", "Handle", "Tls", "connect"),
    "fxlib.spec.contract": ("Contract", "Exactly", "remote"),
    "fxlib.errors": ("FxlibError",),
    "fxlib.serialization.files": ("load", "save"),
    "fxlib.serialization.package": ("to_folder",),
    "fxlib.runtime.push_gradients": ("drop_gradients", "push_gradients"),
    "fxlib.inspection": ("analyze", "draw"),
    "fxlib.passes.local.decompose": ("decompose",),
    "fxlib.pipeline": ("Pipeline", "check_keys", "pipeline", "prefetch"),
    "fxlib.spec.profile": ("Profile",),
    "fxlib.profiling": ("load_profile", "profile", "save_profile"),
    "fxlib.reasons": ("Reason",),
    "fxlib.render": ("write_report",),
    "fxlib.recipes.recipes": ("optimize",),
    "fxlib.client.result": ("Result",),
    "fxlib.spec.report": ("Usage",),
    "fxlib.rules": ("Rule", "register_guard"),
    "fxlib.runtime.ops.calls": ("register_call",),
    "fxlib.runtime.graph_set": ("usage",),
    "fxlib.spec.job": ("TrialOptions",),
    "fxlib.equivalence.verify": ("verify",),
    "fxlib.spec.workload": (
        "Batch",
        "BatchSpec",
        "Dense",
        "Optimizer",
        "RemoteObject",
        "Server",
        "Table",
        "Tensors",
        "Variant",
        "Workload",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name from its home, and cache it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)  # a module of this library: the table above is closed
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))


class _Package(ModuleType):
    """A package in which `fxlib.capture` stays the function, although a submodule has the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        """Keep the import system from binding a submodule over a public name."""
        if not (isinstance(value, ModuleType) and name in _HOME_OF):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
