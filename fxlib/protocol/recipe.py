"""Recipes, to and from protobuf: a name, or a list of passes with options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias, TypeGuard

from fxlib.errors import PassError
from fxlib.passes.infra.base import GraphPass, Need
from fxlib.protocol.rules import rule_to_proto, rules_from_proto
from fxlib.protocol.values import value_from_proto, value_to_proto
from fxlib.recipes import recipes
from fxlib.rules import Rule
from fxlib.v1 import jobs_pb2

RULES = "rules"
"""The option that holds rewrite rules, which are no plain values."""

Step: TypeAlias = str | tuple[str, Mapping[str, object]] | GraphPass
RecipeLike: TypeAlias = "str | recipes.Recipe | Sequence[Step]"


def recipe_to_proto(recipe: RecipeLike) -> jobs_pb2.Recipe:
    """Write a recipe: its name, or passes given as names, as (name, options), or as the passes themselves.

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
        WireError: an option holds no value.
    """
    if not proto.passes:
        return recipes.get(proto.name)
    return recipes.from_passes([(step.name, _options(step)) for step in proto.passes])


def passes_that_need(need: Need, recipe: RecipeLike) -> tuple[str, ...]:
    """Return the names of a recipe's passes that need the weights, say, as far as this library knows them."""
    try:
        return tuple(step.name for step in recipe_from_proto(recipe_to_proto(recipe)).passes if need in step.needs)
    except PassError:  # a newer service may know what this library does not; if not, it says so
        return ()


def _step_to_proto(step: Step) -> jobs_pb2.PassSpec:
    if isinstance(step, str):
        return jobs_pb2.PassSpec(name=step)
    if isinstance(step, GraphPass):
        name, options = step.name, {each.name: getattr(step, each.name) for each in fields(step)}
    else:
        name, options = step[0], dict(step[1])
    proto = jobs_pb2.PassSpec(name=name)
    for option, value in options.items():
        if option == RULES and _are_rules(value):
            proto.rules.extend(map(rule_to_proto, value))
            continue
        proto.options[option].CopyFrom(value_to_proto(value, f"{name}.{option}"))
    return proto


def _are_rules(value: object) -> TypeGuard[Sequence[Rule]]:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(each, Rule) for each in value)


def _options(step: jobs_pb2.PassSpec) -> dict[str, object]:
    """Read the options of one pass.

    Raises:
        PassError: a rule is none.
        WireError: an option holds no value.
    """
    options = {name: value_from_proto(value, f"{step.name}.{name}") for name, value in sorted(step.options.items())}
    return options | ({RULES: rules_from_proto(step.rules, f"{step.name}.{RULES}")} if step.rules else {})
