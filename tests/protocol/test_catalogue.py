"""The list of passes: what a user may ask for, with types and docs."""

from __future__ import annotations

import pytest

from fxlib import passes
from fxlib.errors import PassError
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.protocol import catalogue_to_proto
from fxlib.recipes import recipes

OWN = {name for name, kind in passes.REGISTRY.items() if kind.__module__.startswith("fxlib.")}


def test_every_option_of_every_pass_has_a_type_a_default_and_a_doc() -> None:
    options = {
        (each.name, option.name): option
        for each in catalogue_to_proto().passes
        if each.name in OWN
        for option in each.options
    }
    assert ("fold_constants", "max_bytes") in options
    lacking = [name for name, each in options.items() if not (each.type and each.default_value and each.doc)]
    assert lacking == []


def test_recipes_tell_their_passes_and_those_their_promises_and_needs() -> None:
    listed = catalogue_to_proto()
    known = {each.name: each for each in listed.passes}
    recipe = {each.name: each for each in listed.recipes}["inference"]
    assert {"fold_norms", "channels_last"} <= set(recipe.passes) <= set(known)
    assert (known["fold_norms"].preserves, list(known["fold_norms"].needs)) == ("tolerance", ["eval_mode", "weights"])


def test_a_doc_may_take_several_lines_and_be_missing() -> None:
    @register_pass("with_options_of_a_test", preserves="bitwise")
    class WithOptions(GraphPass):
        many: int = 1
        """Of one thing,
        and of another."""
        bare: str = "x"

        def run(self, module: object, context: Context) -> PassResult:
            raise NotImplementedError

    try:
        (listed,) = (each for each in catalogue_to_proto().passes if each.name == "with_options_of_a_test")
    finally:
        del passes.REGISTRY["with_options_of_a_test"]
    assert [(each.name, each.type, each.default_value, each.doc) for each in listed.options] == [
        ("many", "int", "1", "Of one thing, and of another."),
        ("bare", "str", "'x'", ""),
    ]


@pytest.mark.parametrize("value", ["64", 1.5, True, None])
def test_an_option_of_another_type_is_refused_with_both(value: object) -> None:
    with pytest.raises(PassError, match=r"fold_constants: the option 'max_bytes' is of type int, and .* is not"):
        recipes.from_passes([("fold_constants", {"max_bytes": value})])


def test_an_option_may_have_any_of_its_types() -> None:
    for limit in (None, 5):
        (step,) = recipes.from_passes([("overlap_calls", {"calls_in_flight": limit})]).passes
        assert step == passes.OverlapCalls(calls_in_flight=limit)
