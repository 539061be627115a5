"""The installed passes, with their options, and recipes, as a message."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from itertools import pairwise

from fxlib.passes.infra.base import REGISTRY, GraphPass
from fxlib.recipes.recipes import RECIPES
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
    docs = _docs_of(kind)
    return jobs_pb2.PassInfo(
        name=kind.name,
        summary=(kind.__doc__ or "").strip().partition("\n")[0],
        preserves=kind.preserves,
        needs=sorted(kind.needs),
        options=[_option_to_proto(option, docs.get(option.name, "")) for option in fields(kind)],
        version=kind.version,
    )


def _docs_of(kind: type[GraphPass]) -> dict[str, str]:
    """Return what the source of a pass says right below each option."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError):  # of a pass that was made where there is no file, or has changed since
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        option.target.id: " ".join(doc.value.value.split())
        for option, doc in pairwise(body)
        if isinstance(option, ast.AnnAssign) and isinstance(option.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def _option_to_proto(option: Field[object], doc: str) -> jobs_pb2.OptionInfo:
    return jobs_pb2.OptionInfo(
        name=option.name,
        type=str(option.type),
        default_value="" if option.default is MISSING else repr(option.default),
        doc=doc,
    )
