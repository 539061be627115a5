"""Rewrite rules and decompositions through the whole loop, from the launcher to a trial and back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import fxlib
from fxlib import Workload
from fxlib.client import Client
from fxlib.reasons import Reason
from tests.cli.gates import Gates, any_rules
from tests.workers.trial_settings import MEASURED

pytestmark = pytest.mark.cluster


def test_rules_are_applied_held_to_a_tolerance_and_measured(client: Client) -> None:
    workload = Workload.describe([torch.randn(64, 4)], mode="forward")
    steps: list[tuple[str, Mapping[str, object]]] = [
        ("rewrite_rules", {"rules": any_rules()}),
        ("decompose", {"operators": ["gelu"]}),
    ]
    graph = fxlib.capture(Gates())
    result = client.optimize(graph, workload, recipe=steps, budget_s=8)
    assert result.reason in MEASURED, result.explanation
    assert [(each.name, each.changes) for each in result.passes] == [("rewrite_rules", 1), ("decompose", 1)]
    assert result.preserves == "tolerance"
    assert result.max_relative_error is not None
    assert result.max_relative_error < 1e-5


def test_a_rule_that_says_another_thing_is_found_out(client: Client) -> None:
    workload = Workload.describe([torch.randn(64, 4)], mode="forward")
    wrong = fxlib.Rule(lambda x: x.sigmoid(), lambda x: x.tanh(), name="wrong")
    graph = fxlib.capture(Gates())
    result = client.optimize(graph, workload, recipe=[("rewrite_rules", {"rules": [wrong]})], budget_s=30)
    assert (result.decision, result.reason) == ("keep_original", Reason.NOT_SAME)
    assert "output has a relative error of" in result.explanation
    assert result.gain is None
    assert result.module is graph
