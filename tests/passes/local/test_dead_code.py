"""What is deleted for want of users, and what stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.effects import node_kinds
from fxlib.passes import Context, DeadCode
from fxlib.recipes import recipes
from tests.analysis.sketch import Sketch, names


def alive(module: GraphModule) -> list[str]:
    return names(recipes.apply(module, recipes.from_passes([("dead_code", {})])).module)


def test_work_that_nobody_uses_goes_with_what_only_it_needed() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    kept = program.work("kept", torch.sin, x)
    program.work("second", torch.exp, program.work("first", torch.cos, x))
    assert alive(program.returns(kept)) == ["kept"]


def test_a_write_by_the_method_behind_an_assignment_stays() -> None:
    root = nn.Module()
    root.register_buffer("cache", torch.zeros(2))
    program = Sketch("x", root=root)
    (x,) = program.inputs
    program.work("kept", "__setitem__", program.state("cache"), 0, x)
    assert alive(program.returns(x)) == ["kept"]


def test_statistics_that_an_operator_updates_though_its_schema_does_not_say_so_stay_up_to_date() -> None:
    root = nn.Module()
    root.register_buffer("mean", torch.zeros(2))
    root.register_buffer("variance", torch.ones(2))
    program = Sketch("x", root=root)
    (x,) = program.inputs
    mean, variance = program.state("mean"), program.state("variance")
    program.work("kept", torch.batch_norm_update_stats, x, mean, variance, 0.1)
    assert alive(program.returns(x)) == ["kept"]


def test_each_method_of_a_chain_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Node] = []
    by_itself = node_kinds._Receivers._by_itself

    def noted(receivers: node_kinds._Receivers, value: Node) -> bool | None:
        looked_at.append(value)
        return by_itself(receivers, value)

    monkeypatch.setattr(node_kinds._Receivers, "_by_itself", noted)
    program = Sketch("x")
    (x,) = program.inputs
    value = program.work("first", torch.sin, x)
    for place in range(200):
        value = program.work(f"n{place}", "relu", value)
    module = program.returns(x)
    assert DeadCode().run(module, Context(module)).changes == 201
    assert len(looked_at) == len(set(looked_at)) == 200
