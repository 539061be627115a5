"""Rewrite rules through the whole service: they leave as graphs, and the rewritten module comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional as F

import fxlib
from fxlib import Client, Rule, Workload
from fxlib.client.result import Result
from fxlib.errors import FxlibWarning
from tests.cli.gates import Gates, any_rules
from tests.client.asked import as_asked
from tests.shared.real_service import real_service, scripted_worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        real_service(tmp_path_factory.mktemp("service")) as address,
        scripted_worker(address, as_asked),
        fxlib.connect(address, patience_s=60) as opened,
    ):
        yield opened


@pytest.fixture
def graph() -> GraphModule:
    return fxlib.capture(Gates())


def _asked(client: Client, graph: GraphModule, *steps: tuple[str, Mapping[str, object]]) -> Result:
    workload = Workload.describe([torch.randn(2, 4)], mode="forward")
    return client.optimize(graph, workload, recipe=steps, progress=False)


def test_rules_and_decompositions_come_back_on_the_models_own_weights(client: Client, graph: GraphModule) -> None:
    rules = ("rewrite_rules", {"rules": any_rules()})
    result = _asked(client, graph, rules, ("decompose", {"operators": ["gelu"]}))
    assert [(each.name, each.changes) for each in result.passes] == [("rewrite_rules", 1), ("decompose", 1)]
    assert result.preserves == "tolerance"
    code = str(result.module.code)
    assert "silu" in code
    assert "gelu" not in code
    assert dict(result.module.named_parameters())["layer.weight"] is dict(graph.named_parameters())["layer.weight"]
    assert fxlib.verify(graph, result.module, [torch.randn(2, 4)], rtol=1e-5, atol=1e-6)


def test_a_guard_that_is_a_function_does_not_leave(client: Client, graph: GraphModule) -> None:
    rule = Rule(lambda x: F.gelu(x), lambda x: F.relu(x), guard=lambda _: True, name="mine")  # noqa: PLW0108 - names
    with pytest.warns(FxlibWarning, match=r"rule 'mine'.*the guard is a function"):
        assert _asked(client, graph, ("rewrite_rules", {"rules": [rule]})).module is graph
