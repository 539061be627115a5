"""Every pass is measured, here or with networks."""

from __future__ import annotations

from benchmarks.passes import IN_INFERENCE
from benchmarks.transforms.comparisons import COMPARISONS
from fxlib.passes import REGISTRY
from fxlib.recipes import recipes


def test_every_pass_is_measured_by_one_benchmark() -> None:
    scheduling = {each.name for each in recipes.get("schedule").passes}
    ours = {name for name, kind in REGISTRY.items() if kind.__module__.startswith("fxlib.")}  # tests register others
    assert {*COMPARISONS, *scheduling, *IN_INFERENCE} == ours
    assert not IN_INFERENCE & {*COMPARISONS, *scheduling}
