"""Recipes, to and from protobuf: a name, or a list of passes with options; and the list of installed ones.

A rewrite rule travels as two graphs and the name of a guard, and no code.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import pairwise
from typing import TypeAlias, TypeGuard

import torch
from torch.fx import GraphModule

from fxlib import wire
from fxlib.errors import LimitError, PassError, WireError
from fxlib.passes.infra.base import REGISTRY, GraphPass, Need
from fxlib.protocol.values import value_from_proto, value_to_proto
from fxlib.recipes import recipes
from fxlib.recipes.alternatives import AUTO, candidates
from fxlib.recipes.recipes import RECIPES, Recipe
from fxlib.rules import Rule
from fxlib.rules.snippet import MAX_SNIPPET_NODES
from fxlib.runtime.backends import BACKENDS
from fxlib.v1 import graph_pb2, jobs_pb2

RULES_OPTION = "rules"
"""The option that holds rewrite rules, which are not plain values."""

PassLike: TypeAlias = str | tuple[str, Mapping[str, object]] | GraphPass
RecipeLike: TypeAlias = "str | recipes.Recipe | Sequence[PassLike]"


def recipe_to_proto(recipe: RecipeLike) -> jobs_pb2.Recipe:
    """Write a recipe: its name, or passes given by name, as (name, options), or as the passes themselves.

    Raises:
        WireError: an option's value cannot be sent.
    """
    if isinstance(recipe, str):
        return jobs_pb2.Recipe(name=recipe)
    if isinstance(recipe, recipes.Recipe):
        return jobs_pb2.Recipe(name=recipe.name, passes=[_step_to_proto(step) for step in recipe.passes])
    return jobs_pb2.Recipe(passes=[_step_to_proto(step) for step in recipe])


def recipe_from_proto(proto: jobs_pb2.Recipe) -> recipes.Recipe:
    """Find the named recipe, or build one from the passes.

    Raises:
        PassError: a recipe, a pass or an option is unknown.
        WireError: an option holds no valid value.
    """
    if not proto.passes:
        return recipes.get(proto.name)
    return recipes.from_passes([(step.name, _options(step)) for step in proto.passes])


def passes_that_need(need: Need, recipe: RecipeLike) -> tuple[str, ...]:
    """Return the names of a recipe's passes that need, for example, the weights, as far as this library knows them."""
    steps = () if is_auto(recipe) else passes_of(recipe) or ()
    return tuple(step.name for step in steps if need in step.needs)


def passes_of(recipe: RecipeLike) -> tuple[GraphPass, ...] | None:
    """Return the passes of a recipe and of its alternatives; None if this library does not know them."""
    if is_auto(recipe):
        return tuple(step for each in candidates(AUTO, backends=BACKENDS) for step in each.passes)
    try:
        return recipe_from_proto(recipe_to_proto(recipe)).passes
    except PassError:  # a newer service may know what this library does not; if not, it says so
        return None


def is_auto(recipe: RecipeLike) -> bool:
    """Return whether a recipe is the one that tries the others."""
    return recipe == AUTO.name


def _step_to_proto(step: PassLike) -> jobs_pb2.PassSpec:
    if isinstance(step, str):
        return jobs_pb2.PassSpec(name=step)
    if isinstance(step, GraphPass):
        name, options = step.name, {each.name: getattr(step, each.name) for each in fields(step)}
    else:
        name, options = step[0], dict(step[1])
    proto = jobs_pb2.PassSpec(name=name)
    for option, value in options.items():
        if option == RULES_OPTION and _are_rules(value):
            proto.rules.extend(map(rule_to_proto, value))
            continue
        proto.options[option].CopyFrom(value_to_proto(value, f"{name}.{option}"))
    return proto


def _are_rules(value: object) -> TypeGuard[Sequence[Rule]]:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(each, Rule) for each in value)


def _options(step: jobs_pb2.PassSpec) -> dict[str, object]:
    """Read the options of one pass.

    Raises:
        PassError: a rule is not valid.
        WireError: an option holds no valid value.
    """
    options = {name: value_from_proto(value, f"{step.name}.{name}") for name, value in sorted(step.options.items())}
    return options | ({RULES_OPTION: rules_from_proto(step.rules, f"{step.name}.{RULES_OPTION}")} if step.rules else {})


_MAX_RULES = 256
_LIMITS = wire.Limits(
    graph_bytes=1 << 20, nodes=MAX_SNIPPET_NODES, steps=2 * MAX_SNIPPET_NODES, modules=8, weights_bytes=0
)


def rule_to_proto(rule: Rule) -> jobs_pb2.Rule:
    """Write a rule.

    Raises:
        WireError: a side cannot be written, or the guard is a function.
    """
    if rule.guard is not None and not isinstance(rule.guard, str):
        hint = "Register it, there and here, with fxlib.rules.register_guard, and pass its name."
        raise WireError("the guard is a function, and code is never sent", where=f"rule {rule.name!r}", hint=hint)
    return jobs_pb2.Rule(
        name=rule.name,
        pattern=wire.encode(GraphModule(torch.nn.Module(), rule.seeks.graph)).graph,
        replacement=wire.encode(GraphModule(torch.nn.Module(), rule.gives.graph)).graph,
        guard=rule.guard or "",
    )


def rules_from_proto(protos: Sequence[jobs_pb2.Rule], where: str) -> tuple[Rule, ...]:
    """Read rules.

    Raises:
        LimitError: there are too many, or a side is too large.
        WireError: a side is malformed, or names what is not allowed.
        PassError: the two sides do not make a rule, or the guard is unknown here.
    """
    if len(protos) > _MAX_RULES:
        raise LimitError(f"{len(protos)} rules, and there may be {_MAX_RULES}", where=where)
    return tuple(_rule(each, f"{where}[{index}]") for index, each in enumerate(protos))


def _rule(proto: jobs_pb2.Rule, where: str) -> Rule:
    name = proto.name if proto.name.isprintable() else ""
    try:
        pattern, replacement = (_graph(each) for each in (proto.pattern, proto.replacement))
        return Rule(pattern, replacement, proto.guard or None, name=name)
    except (WireError, PassError) as error:
        raise type(error)(str(error), where=where) from error


def _graph(proto: graph_pb2.Graph) -> GraphModule:
    return wire.decode(proto, limits=_LIMITS)


def check_weights(recipe: Recipe, graph: graph_pb2.Graph) -> None:
    """Check that no pass computes with weights that were not sent; `graph` is a valid one.

    Raises:
        PassError: the values of a tensor are missing; the message names the pass, the tensor, and the node that uses
            it.
    """
    wanting = next((step for step in recipe.passes if "weights" in step.needs), None)
    if wanting is None or all(storage.HasField("data") or not storage.bytes for storage in graph.storages):
        return
    for path, tensor in _tensors(graph, len(graph.modules) - 1, ""):
        storage = graph.storages[graph.tensors[tensor].storage]
        if storage.bytes and not storage.HasField("data"):
            raise _missing(wanting, path, graph)


def _tensors(graph: graph_pb2.Graph, index: int, prefix: str) -> Iterator[tuple[str, int]]:
    module = graph.modules[index]
    for slots in (module.parameters, module.buffers):
        yield from ((prefix + slot.name, slot.tensor) for slot in slots if slot.HasField("tensor"))
    for child in module.children:
        if child.HasField("module"):
            yield from _tensors(graph, child.module, f"{prefix}{child.name}.")


def _missing(wanting: GraphPass, path: str, graph: graph_pb2.Graph) -> PassError:
    owner = path.rpartition(".")[0]
    body = graph.modules[-1].graph
    user = next((node for node in body.nodes if graph.targets[node.target].path in {path, owner or path}), None)
    used = f", which node {user.name!r} uses" if user else ""
    source = f" ({graph.texts[user.source]})" if user and user.HasField("source") else ""
    return PassError(
        f"needs the weights, and the graph was sent without the values of {path!r}{used}{source}",
        where=wanting.name,
        hint="Encode the graph with weights=True, as fxlib's client does for a pass that needs them.",
    )


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


@cache  # parsing all passes takes a third of a second
def _docs_of(kind: type[GraphPass]) -> Mapping[str, str]:
    """Return the docstring below each option in the source of a pass."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError):  # the source of the pass has no file, or has changed since
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
