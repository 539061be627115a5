"""Rules travel as two graphs and the name of a guard, and no code is ever taken from a message."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxlib.errors import FxlibError, LimitError, PassError, WireError
from fxlib.passes import RewriteRules
from fxlib.protocol import recipe_from_proto, recipe_to_proto
from fxlib.recipes.recipes import Recipe
from fxlib.rules import Rule
from fxlib.v1 import jobs_pb2
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


def _scaled(factor: float) -> Rule:
    return Rule(lambda x: torch.exp(x) * factor, lambda x: factor * torch.exp(x), name="scaled")


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
