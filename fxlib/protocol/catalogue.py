"""The installed passes, with their options, and recipes, as a message."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields

from fxlib.passes.base import REGISTRY, GraphPass
from fxlib.recipes import RECIPES
from fxlib.v1 import jobs_pb2


def catalogue_to_proto() -> jobs_pb2.ListPassesResponse:
    """Describe every pass and recipe of this library, by name."""
    return jobs_pb2.ListPassesResponse(
        passes=[_pass_to_proto(kind) for _, kind in sorted(REGISTRY.items())],
        recipes=[
            jobs_pb2.RecipeInfo(name=name, summary=recipe.summary, passes=[step.name for step in recipe.passes])
            for name, recipe in sorted(RECIPES.items())
        ],
    )


def _pass_to_proto(kind: type[GraphPass]) -> jobs_pb2.PassInfo:
    return jobs_pb2.PassInfo(
        name=kind.name,
        summary=(kind.__doc__ or "").strip().partition("\n")[0],
        preserves=kind.preserves,
        needs=sorted(kind.needs),
        options=[_option_to_proto(option) for option in fields(kind)],
        version=kind.version,
    )


def _option_to_proto(option: Field[object]) -> jobs_pb2.OptionInfo:
    return jobs_pb2.OptionInfo(
        name=option.name,
        type=str(option.type),
        default_value="" if option.default is MISSING else repr(option.default),
        doc=str(option.metadata.get("doc", "")),
    )
