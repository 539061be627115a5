"""Alternatives to a named recipe, among which a worker finds the fastest for one program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Final

from fxlib.passes import GraphPass, Lower
from fxlib.recipes.recipes import RECIPES, Recipe
from fxlib.runtime.backends import BACKENDS
from fxlib.spec.profile import CallProfile, Profile, ServerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alternative:
    """The change of a recipe that makes an alternative: passes to leave out, options to set."""

    without: frozenset[str] = frozenset()
    options: Mapping[tuple[str, str], object]

    def __str__(self) -> str:
        """Return what it changes, as text to follow the recipe's name."""
        left_out = [f"without {name}" for name in sorted(self.without)]
        return ", ".join([*left_out, *(f"{name}={value!r}" for (_, name), value in self.options.items())])

    def of(self, recipe: Recipe) -> Recipe | None:
        """Return the changed recipe; None if it has no such pass or option."""
        known = {(step.name, each.name) for step in recipe.passes for each in fields(step)}
        if not self.without <= {step.name for step in recipe.passes} or not self.options.keys() <= known:
            return None
        steps = tuple(self._set(step) for step in recipe.passes if step.name not in self.without)
        return replace(recipe, name=f"{recipe.name} {self}", passes=steps)

    def _set(self, step: GraphPass) -> GraphPass:
        return replace(step, **{name: value for (owner, name), value in self.options.items() if owner == step.name})


_LOCAL = (
    _Alternative(without=frozenset({"channels_last"}), options={}),
    _Alternative(without=frozenset({"quantize"}), options={}),
)
"""Alternatives that each leave out a pass over local work: sizes, threads and the processor decide whether it pays."""

_BATCHING = (
    _Alternative(without=frozenset({"coalesce_calls"}), options={}),
    _Alternative(options={("coalesce_calls", "declared"): False}),
)
"""Alternatives that each undo a decision that does not always pay: a batch makes early answers wait for late ones, and
a declared batched form runs its calls one after another."""


AUTO: Final = RECIPES["auto"]


def candidates(
    recipe: Recipe, profile: Profile | None = None, *, has_calls: bool = True, backends: Iterable[str] = ()
) -> tuple[Recipe, ...]:
    """Return the recipe and its alternatives, the recipe itself first; those about calls only if there are any.

    A list of passes that the user gave has no alternatives, as it is exactly what was asked for. The alternatives of
    `auto` are the recipes for inference, and one for each of `backends`, given by name, in the order of the expected
    gain. With a profile there is one more if calls queue: it keeps only as many of them in flight as keep a server and
    its link busy, so that a later call that is needed early does not have to queue.
    """
    if RECIPES.get(recipe.name) != recipe:
        return (recipe,)
    alternatives = (*_LOCAL, *(_of_calls(profile) if has_calls else ()))
    others = _of_auto(backends) if recipe == AUTO else ()
    return (recipe, *others, *filter(None, (each.of(recipe) for each in alternatives)))


def _of_auto(backends: Iterable[str]) -> Iterator[Recipe]:
    int8 = RECIPES["int8"]
    yield int8
    yield RECIPES["bfloat16"]
    for name in sorted(backends, key=list(BACKENDS).index):
        yield replace(AUTO, name=f"lower to {name}", passes=(*AUTO.passes, Lower(backend=name)))
    yield from candidates(RECIPES["inference"], has_calls=False)
    yield from filter(None, [_LOCAL[0].of(int8)])


def _of_calls(profile: Profile | None) -> Iterator[_Alternative]:
    yield from _BATCHING
    enough = None if profile is None else _enough_in_flight(profile)
    if enough is not None:
        yield _Alternative(options={("overlap_calls", "calls_in_flight"): enough})


def _enough_in_flight(profile: Profile) -> int | None:
    """Return how many calls in flight are enough for each server; None if no server has more calls than that."""
    found = {
        server.name: (_keep_busy(server, calls), len(calls))
        for server in profile.servers
        if (calls := [call for call in profile.calls if call.to == server.name])
    }
    enough = max((least for least, _ in found.values()), default=0)
    return enough if any(count > enough for _, count in found.values()) else None


def _keep_busy(server: ServerProfile, calls: list[CallProfile]) -> int:
    """Return the calls in flight that keep a server busy: what it finishes in a second times how long one takes.

    J. Little, "A proof for the queuing formula L = λW", Operations Research 9(3), 1961. The server finishes as many
    calls as it works on at once, or as the link carries.
    """
    takes_s = median(call.service_s.median for call in calls)
    carried_s = median(max(call.request_bytes, call.response_bytes) for call in calls) / server.bytes_per_s
    answer_s = max(takes_s / server.concurrency, carried_s)
    return max(1, math.ceil(takes_s / answer_s)) if answer_s > 0.0 else 1
