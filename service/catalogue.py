"""What the installed library offers: its passes with their options, and its recipes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from functools import cache

from fxlib.passes.base import REGISTRY, GraphPass
from fxlib.recipes import RECIPES
from fxlib.v1 import jobs_pb2


def recipe_names() -> list[str]:
    """Return the names of the recipes."""
    return sorted(RECIPES)


@cache
def list_passes() -> jobs_pb2.ListPassesResponse:
    """Describe every pass and recipe, by name."""
    return jobs_pb2.ListPassesResponse(
        passes=[_pass_info(REGISTRY[name]) for name in sorted(REGISTRY)],
        recipes=[
            jobs_pb2.RecipeInfo(
                name=name, summary=RECIPES[name].summary, passes=[step.name for step in RECIPES[name].passes]
            )
            for name in recipe_names()
        ],
    )


def _pass_info(kind: type[GraphPass]) -> jobs_pb2.PassInfo:
    return jobs_pb2.PassInfo(
        name=kind.name,
        summary=_first_line(kind.__doc__),
        preserves=kind.preserves,
        needs=sorted(kind.needs),
        options=[_option_info(option) for option in fields(kind)],
        version=kind.version,
    )


def _option_info(option: Field[object]) -> jobs_pb2.OptionInfo:
    default = "" if option.default is MISSING else repr(option.default)
    doc = option.metadata.get("doc", "")
    return jobs_pb2.OptionInfo(name=option.name, type=str(option.type), default_value=default, doc=str(doc))


def _first_line(text: str | None) -> str:
    lines: Iterable[str] = (text or "").strip().splitlines()
    return next(iter(lines), "")
