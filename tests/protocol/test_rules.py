"""Rules travel as two graphs and the name of a guard, no code is taken from a message, and weights go where needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

import fxlib
from fxlib import wire
from fxlib.errors import FxlibError, LimitError, PassError, WireError
from fxlib.passes import RewriteRules
from fxlib.protocol import check_weights, recipe_from_proto, recipe_to_proto
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Recipe
from fxlib.rules import Rule
from fxlib.v1 import graph_pb2, jobs_pb2
from tests.rules.rule_programs import ruled, targets


def _pattern(x: Tensor, n: float) -> tuple[Tensor, Tensor]:
    return F.gelu(x) * n, torch.cat([x, x], dim=1)


def _replacement(x: Tensor, n: float) -> tuple[Tensor, Tensor]:
    return n * F.gelu(x), torch.cat((x, x), 1)


def _sent(*rules: Rule) -> jobs_pb2.Recipe:
    return recipe_to_proto([("rewrite_rules", {"rules": rules, "rounds": 1}), "dead_code"])


def _rules(recipe: Recipe) -> tuple[Rule, ...]:
    (step, _) = recipe.passes
    assert isinstance(step, RewriteRules)
    return step.rules


def test_a_rule_arrives_as_it_was_sent() -> None:
    rule = Rule(_pattern, _replacement, guard="floating_point")
    read = recipe_from_proto(_sent(rule))
    assert repr(_rules(read)) == repr((rule,))
    assert read.key == recipe_from_proto(_sent(rule)).key
    assert "floating_point" in read.key
    assert _sent(rule).SerializeToString(deterministic=True) == _sent(rule).SerializeToString(deterministic=True)


def test_rules_that_differ_have_other_keys() -> None:
    one, other = (recipe_from_proto(_sent(each)).key for each in (_scaled(2.0), _scaled(3.0)))
    assert one != other


def test_so_have_rules_of_functions_that_torch_names_alike() -> None:
    def rule(function: Any) -> Rule:
        graph = Graph()
        x = graph.placeholder("x")
        graph.output(graph.create_node("call_function", function, (x, 1), name="pooled"))
        return Rule(lambda x: F.relu(F.relu(x)), GraphModule({}, graph), name="one")

    assert F.max_pool2d.__qualname__ == F.adaptive_max_pool2d.__qualname__
    assert repr(rule(F.max_pool2d)) != repr(rule(F.adaptive_max_pool2d))
    assert repr(rule(F.max_pool2d)) == repr(rule(F.max_pool2d))


def _scaled(factor: float) -> Rule:
    return Rule(lambda x: torch.exp(x) * factor, lambda x: factor * torch.exp(x), name="scaled")


@pytest.mark.slow
def test_a_rule_that_arrived_is_found_where_the_sent_one_is() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu(x) * 2.0 + torch.cat([x, x], dim=1)[:, :4] * y

    rule = Rule(_pattern, _replacement)
    (read,) = _rules(recipe_from_proto(_sent(rule)))
    assert targets(ruled(program, read)) == targets(ruled(program, rule))
    assert ruled(program, read).changed


def test_code_does_not_travel() -> None:
    with pytest.raises(WireError, match="guard is a function"):
        _sent(Rule(lambda x: x.exp(), lambda x: x.sin(), guard=lambda _: True))
    with pytest.raises(WireError, match=r"decompose.rules"):
        recipe_to_proto([("decompose", {"rules": {F.gelu: F.relu}})])


def _unknown_guard(proto: jobs_pb2.Rule) -> None:
    proto.guard = "mine"


def _unknown_function(proto: jobs_pb2.Rule) -> None:
    proto.pattern.targets[-2].function = "os.system"


def _user_code(proto: jobs_pb2.Rule) -> None:
    next(each for each in proto.pattern.targets if each.function).opaque_function = "my.code"


def _no_pattern(proto: jobs_pb2.Rule) -> None:
    proto.pattern.Clear()


def _other_inputs(proto: jobs_pb2.Rule) -> None:
    proto.replacement.CopyFrom(_sent(_scaled(1.0)).passes[0].rules[0].replacement)


@pytest.mark.parametrize("harm", [_unknown_guard, _unknown_function, _user_code, _no_pattern, _other_inputs])
def test_what_is_no_rule_is_refused_at_the_door(harm: object) -> None:
    proto = _sent(_scaled(1.0), Rule(_pattern, _replacement))
    assert callable(harm)
    harm(proto.passes[0].rules[1])
    with pytest.raises((WireError, PassError), match=r"rewrite_rules.rules\[1\]"):
        recipe_from_proto(proto)


@pytest.mark.slow
def test_too_many_rules_and_too_large_ones_are_refused() -> None:
    proto = _sent(*[_scaled(1.0)] * 300)
    with pytest.raises(LimitError, match="300 rules"):
        recipe_from_proto(proto)
    proto = _sent(_scaled(1.0))
    body = proto.passes[0].rules[0].pattern.modules[-1].graph
    for _ in range(300):
        body.nodes.add().CopyFrom(body.nodes[1])
    with pytest.raises(FxlibError, match="nodes"):
        recipe_from_proto(proto)


def test_rules_for_a_pass_that_has_none_are_refused() -> None:
    proto = _sent(_scaled(1.0))
    proto.passes[0].name = "dead_code"
    del proto.passes[0].options["rounds"]
    with pytest.raises(PassError, match="has no option 'rules'"):
        recipe_from_proto(proto)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.linear(x))
        return normed


@pytest.fixture
def graph() -> graph_pb2.Graph:
    return wire.encode(fxlib.capture(Normed().eval())).graph


def test_without_them_the_pass_the_tensor_the_node_and_its_line_are_named(graph: graph_pb2.Graph) -> None:
    with pytest.raises(PassError) as caught:
        check_weights(recipes.get("inference"), graph)
    assert caught.value.where == "fold_norms"
    text = str(caught.value)
    assert "without the values of 'linear.weight', which node 'linear' uses (" in text
    assert "test_rules.py:" in text
    assert "weights=True" in text


def test_a_pass_that_needs_none_takes_a_graph_without_them(graph: graph_pb2.Graph) -> None:
    check_weights(recipes.get("schedule"), graph)


def test_a_graph_with_all_of_them_passes() -> None:
    check_weights(recipes.get("inference"), wire.encode(fxlib.capture(Normed().eval()), weights=True).graph)


def test_a_tensor_of_no_elements_has_no_values_to_miss() -> None:
    model = nn.Sequential(nn.Identity())
    model.register_buffer("nothing", torch.empty(0))
    check_weights(recipes.get("inference"), wire.encode(fxlib.capture(model)).graph)
