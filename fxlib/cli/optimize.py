"""`fxlib optimize pkg.mod:factory`: one model's answer."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxlib.cli.options import add_service, client_of, label
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from torch import nn

    from fxlib.cli.options import Commands
    from fxlib.workload import Workload

_FACTORY_HINT = "Write pkg.mod:factory, for a function that takes nothing and returns (model, workload)."


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "optimize",
        help="ask the service for a faster module, and print the answer",
        description="Ask the service for a faster module. FACTORY is a function of your own, which takes nothing and "
        "returns (model, workload); it is imported and called in this process.",
    )
    parser.add_argument("factory", metavar="FACTORY", help="pkg.mod:function")
    add_service(parser)
    parser.add_argument(
        "--recipe", default="schedule", help="name of a recipe (default: %(default)s); see fxlib passes"
    )
    parser.add_argument("--name", default="", help="the model's name on dashboards (default: its class)")
    parser.add_argument("--namespace", default="", help="whose job it is")
    parser.add_argument("--label", type=label, action="append", default=[], metavar="KEY=VALUE", help="repeatable")
    parser.add_argument("--min-gain", type=float, default=0.02, help="least gain worth adopting (default: %(default)s)")
    parser.add_argument("--confidence", type=float, default=0.95, help="level of the interval (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="for measuring (default: 60)")
    parser.add_argument(
        "--deadline", type=float, default=300.0, metavar="SECONDS", help="for the answer (default: 300)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure anew, whatever was measured before")
    parser.add_argument("--save", metavar="FILE", help="write the module of the answer to FILE (.fxg)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask, print, and return 0 if there is an answer (whichever), 1 if there is none."""
    from fxlib.errors import FxlibWarning

    model, workload = _made(options.factory)
    with client_of(options) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)  # the result says the same
        result = client.optimize(
            model,
            workload,
            recipe=options.recipe,
            name=options.name,
            namespace=options.namespace,
            labels=dict(options.label),
            min_gain=options.min_gain,
            confidence=options.confidence,
            budget_s=options.budget,
            deadline_s=options.deadline,
            fresh=options.fresh,
        )
    if options.json:
        from google.protobuf.json_format import MessageToDict

        from fxlib.protocol import report_to_proto

        told = MessageToDict(report_to_proto(result), preserving_proto_field_name=True)
        print(json.dumps({"job_id": result.job_id, "cached": result.cached, **told}, indent=2))
    else:
        print(result)
    if options.save:
        _save(result.module, options.save)
    return 0 if result.reason is not None else 1


def _save(module: nn.Module, path: str) -> None:
    from torch.fx import GraphModule

    import fxlib

    if not isinstance(module, GraphModule):
        raise FxlibError("the model could not be captured, so there is no graph to save", where=path)
    try:
        fxlib.save(module, path)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=path) from error


def _made(name: str) -> tuple[nn.Module, Workload]:
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise FxlibError(f"{name!r} is not of that form", where="FACTORY", hint=_FACTORY_HINT)
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)  # named by the user, on their own command line
    except ModuleNotFoundError as error:
        raise FxlibError(str(error), where=f"FACTORY {name}", hint=_FACTORY_HINT) from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise FxlibError(f"{module_name} has no {function!r}", where=f"FACTORY {name}", hint=_FACTORY_HINT)
        found = getattr(found, part)
    made = found()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise FxlibError(f"returned {type(made).__name__}", where=f"FACTORY {name}", hint=_FACTORY_HINT)
    return made
