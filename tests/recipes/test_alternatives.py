"""The variants of a recipe among which a worker chooses."""

from __future__ import annotations

import pytest

from fxlib.recipes import recipes
from fxlib.recipes.alternatives import candidates
from fxlib.spec.profile import CallProfile, Opaque, Profile, ServerProfile, Spread


def test_the_recipe_itself_comes_first() -> None:
    schedule = recipes.get("schedule")
    first, *variants = candidates(schedule)
    assert first is schedule
    assert variants


def test_variants_have_names_of_their_own_that_say_what_differs() -> None:
    names = [each.name for each in candidates(recipes.get("schedule"))]
    assert len(set(names)) == len(names)
    assert "schedule without coalesce_calls" in names
    assert not any("calls_in_flight" in name for name in names)


def test_a_variant_differs_in_what_it_says_and_in_nothing_else() -> None:
    schedule, *variants = candidates(recipes.get("schedule"))
    by_name = {each.name: each for each in variants}
    kept = [step for step in schedule.passes if step.name != "coalesce_calls"]
    assert list(by_name["schedule without coalesce_calls"].passes) == kept
    singly = by_name["schedule declared=False"]
    changed = [one for one, other in zip(singly.passes, schedule.passes, strict=True) if one != other]
    assert [step.name for step in changed] == ["coalesce_calls"]


def busy(*, calls: int, concurrency: int, bytes_per_s: float) -> Profile:
    """Calls of 10 ms, whose answers are of 1 MB."""
    made = [
        CallProfile(
            call=f"c{place}", function="shop:read", to="ps0", request_bytes=0, response_bytes=1_000_000,
            returns=Opaque(), issue_s=0.0, wait_s=0.0, service_s=Spread.of([0.01]),
        )
        for place in range(calls)
    ]  # fmt: skip
    server = ServerProfile(name="ps0", round_trip_s=1e-3, concurrency=concurrency, bytes_per_s=bytes_per_s)
    return Profile(calls=tuple(made), servers=(server,))


@pytest.mark.parametrize(
    "profile, limit",
    [
        (busy(calls=20, concurrency=5, bytes_per_s=1e12), "5"),
        (busy(calls=20, concurrency=16, bytes_per_s=3e8), "3"),
        (busy(calls=5, concurrency=16, bytes_per_s=1e12), None),
    ],
    ids=["a busy server", "a busy link", "a free server"],
)
def test_no_more_calls_are_in_flight_than_keep_a_server_busy_where_a_profile_says_that_others_stand_in_line(
    profile: Profile, limit: str | None
) -> None:
    names = [each.name for each in candidates(recipes.get("schedule"), profile)]
    found = [name.partition("calls_in_flight=")[2] for name in names if "calls_in_flight" in name]
    assert found == ([] if limit is None else [limit])


def test_no_two_candidates_do_the_same_by_their_keys() -> None:
    keys = [each.key for each in candidates(recipes.get("schedule"))]
    assert len(set(keys)) == len(keys)


def test_auto_tries_the_recipes_for_inference_and_each_backend() -> None:
    asked = ["inductor", "inductor_freezing", "openvino"]
    names = [each.name for each in candidates(recipes.get("auto"), backends=asked, has_calls=False)]
    assert names == [
        "auto", "int8", "bfloat16", "lower to openvino", "lower to inductor_freezing", "lower to inductor", "inference",
        "inference without channels_last", "int8 without channels_last",
    ]  # fmt: skip
    assert "auto without coalesce_calls" in [each.name for each in candidates(recipes.get("auto"))]


def test_a_list_of_passes_is_exactly_what_was_asked_for() -> None:
    everything = [step.name for step in recipes.get("schedule").passes]
    for names in (["split_calls"], everything):
        custom = recipes.from_passes([(name, {}) for name in names])
        assert candidates(custom) == (custom,)
