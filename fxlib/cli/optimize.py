"""`fxlib optimize pkg.mod:factory`: ask the service for a faster module, and print the answer."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from fxlib.cli.options import (
    UsageError,
    add_service,
    called,
    endpoint_of,
    label,
    namespace,
    output,
    seconds,
    step,
    unreadable,
    written,
)
from fxlib.cli.printing import say, say_json
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from torch import nn

    from fxlib.cli.options import Commands
    from fxlib.client.request import RequestOptions
    from fxlib.client.result import Result
    from fxlib.protocol import RecipeLike
    from fxlib.spec.profile import Profile
    from fxlib.spec.workload import Workload

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
    add_service(parser, patience_s=5.0)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--recipe", default="schedule", help="name of a recipe (default: %(default)s); see fxlib passes")
    asked.add_argument(
        "--pass",
        dest="passes",
        type=step,
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="one pass with its options, instead of a recipe; repeatable, and run in this order",
    )
    parser.add_argument(
        "--rules",
        metavar="FUNCTION",
        help="pkg.mod:function of your own, which takes nothing and returns a list of fxlib.Rule for the pass "
        "rewrite_rules; it is called in this process, and the rules travel as graphs",
    )
    _add_trial(parser)
    _add_answer(parser)
    parser.set_defaults(run=run, misused=parser.error)


def _add_trial(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-relative-error",
        type=float,
        default=1e-4,
        metavar="BOUND",
        help="adopt only results within this relative error of the original's, where passes do not promise the same "
        "bits (default: %(default)s)",
    )
    parser.add_argument(
        "--no-weights",
        dest="weights",
        action="store_false",
        help="send no values of weights: the recipe auto then only tries recipes without them, and others are refused",
    )
    parser.add_argument("--name", type=written, default="", help="the model's name on dashboards (default: its class)")
    parser.add_argument("--namespace", type=namespace, default="", help="the job's namespace (default: 'default')")
    parser.add_argument(
        "--label", type=label, action="append", default=[], metavar="KEY=VALUE", help="label of the job; repeatable"
    )
    parser.add_argument(
        "--where",
        type=label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="measure only on a worker with this label (fxlib worker --label); repeatable",
    )
    parser.add_argument(
        "--min-gain",
        type=float,
        default=0.02,
        metavar="GAIN",
        help="least gain to adopt: 0.02, the default, is 2%%",
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="LEVEL", help="level of the interval (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", type=seconds, default=60.0, metavar="SECONDS", help="longest measurement (default: 60)"
    )
    parser.add_argument(
        "--deadline", type=seconds, default=300.0, metavar="SECONDS", help="longest wait (default: 300)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again, even if the service has an answer")
    parser.add_argument("--profile", metavar="FILE", help="what fxlib profile measured of the model (.fxp)")


def _add_answer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--diff", action="store_true", help="show what each pass did to the generated code, too")
    parser.add_argument("--save", type=output, metavar="FILE", help="write the module of the answer to FILE (.fxg)")
    parser.add_argument(
        "--report", type=output, metavar="FILE", help="write the answer to FILE as a page, with timelines (.html)"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(options: argparse.Namespace) -> int:
    """Ask the service and print its answer; return 0 if there is one, whatever the decision, and 1 if there is none."""
    from fxlib.errors import FxlibWarning

    passes = with_rules(options.passes or (), options.rules)
    _check_recipe(options, passes)
    asked = _asked(options, passes or options.recipe)
    model, workload = _made(options.factory)
    with endpoint_of(options).connect() as client, warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)  # the printed result says the same
        result = client.optimize(model, workload, **asked)
    if options.json:
        say_json(result.to_dict())
    else:
        say(result)
    if options.save:
        _save(result.module, options.save)
    if options.report:
        _write(result, options.report)
    return 0 if result.reason is not None else 1


_FLAGS = {
    "max_relative_error": "--max-relative-error",
    "min_gain": "--min-gain",
    "confidence": "--confidence",
    "budget_s": "--budget",
    "deadline_s": "--deadline",
    "where": "--where",
}
"""The flags of the options that the library checks, by its names for them."""


def _asked(options: argparse.Namespace, recipe: RecipeLike) -> RequestOptions:
    """Return what the options ask of the service.

    Raises:
        UsageError: a value cannot be used; the message names the flag.
    """
    from fxlib.client.request import Question
    from fxlib.errors import WorkloadError

    asked: RequestOptions = {
        "recipe": recipe,
        "max_relative_error": options.max_relative_error,
        "weights": options.weights,
        "name": options.name,
        "namespace": options.namespace,
        "labels": dict(options.label),
        "where": dict(options.where),
        "min_gain": options.min_gain,
        "confidence": options.confidence,
        "budget_s": options.budget,
        "deadline_s": options.deadline,
        "fresh": options.fresh,
        "profile": _profile(options.profile),
        "diffs": options.diff,
    }
    try:
        Question(**asked)
    except WorkloadError as error:
        name, bracket, key = error.where.removeprefix("TrialOptions.").partition("[")
        problem, flag = str(error).removeprefix(f"{error.where}: "), _FLAGS.get(name, name)
        raise UsageError(problem, where=f"{flag}{bracket}{key}") from None
    return asked


def _check_recipe(options: argparse.Namespace, passes: Sequence[PassOptions]) -> None:
    """End with exit code 2 if the recipe, a pass or an option is unknown, before the factory runs.

    Raises:
        UsageError: a pass needs the weights, which may not be sent.
    """
    from fxlib import protocol
    from fxlib.errors import PassError
    from fxlib.recipes import recipes

    try:
        recipes.from_passes(passes) if passes else recipes.get(options.recipe)
    except PassError as error:
        options.misused(str(error))
    if not options.weights and (wanting := protocol.passes_that_need("weights", passes or options.recipe)):
        raise UsageError(f"the pass {wanting[0]} needs the weights", where="--no-weights")


def _save(module: nn.Module, path: str) -> None:
    from torch.fx import GraphModule

    import fxlib

    if not isinstance(module, GraphModule):
        raise FxlibError("the model could not be captured, so there is no graph to save", where=path)
    try:
        fxlib.save(module, path)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=path) from error


def _write(result: Result, path: str) -> None:
    import fxlib

    try:
        fxlib.write_report(result, path)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=path) from error


def _made(name: str) -> tuple[nn.Module, Workload]:
    from torch import nn

    from fxlib.spec.workload import Workload

    made = called(name, f"FACTORY {name}", _FACTORY_HINT)
    match made:
        case (nn.Module() as model, Workload() as workload):
            return model, workload
        case tuple():
            problem = f"returned ({', '.join(type(each).__name__ for each in made)})"
        case _:
            problem = f"returned {type(made).__name__}"
    raise UsageError(problem, where=f"FACTORY {name}", hint=_FACTORY_HINT)


def _profile(path: str | None) -> Profile | None:
    import fxlib

    if path is None:
        return None
    try:
        return fxlib.load_profile(path)
    except OSError as error:
        raise unreadable(error, path) from error


if TYPE_CHECKING:
    from fxlib.rules import Rule

PassOptions: TypeAlias = tuple[str, dict[str, object]]

_PASS = "rewrite_rules"
_HINT = "Write pkg.mod:function, for a function that takes nothing and returns a list of fxlib.Rule."


def with_rules(passes: Sequence[PassOptions], name: str | None) -> list[PassOptions]:
    """Return the passes, with the rules that the user's function returns given to each `rewrite_rules`.

    Args:
        passes: the passes' names and options.
        name: "pkg.mod:function", imported and called in this process; None if there are no rules.

    Raises:
        UsageError: there is no such function, it returns no rules, or no pass takes rules.
        PassError: a rule is not valid.
    """
    if name is None:
        return list(passes)
    if not any(step == _PASS for step, _ in passes):
        raise UsageError(f"no pass takes them; add --pass {_PASS}", where=f"--rules {name}")
    rules = _rules(name)
    return [(step, {**options, "rules": rules} if step == _PASS else options) for step, options in passes]


def _rules(name: str) -> tuple[Rule, ...]:
    from fxlib.rules import Rule

    made = called(name, f"--rules {name}", _HINT)
    if not (isinstance(made, (list, tuple)) and made and all(isinstance(each, Rule) for each in made)):
        raise UsageError(f"returned {made!r}", where=f"--rules {name}", hint=_HINT)
    return tuple(made)
