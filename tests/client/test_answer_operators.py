"""A rewritten graph calls what the original calls and what the recipe's passes put in, and draws what it draws."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

import fxlib
from fxlib import wire
from fxlib.client.answer_policy import screen
from fxlib.errors import WireError
from fxlib.passes import REGISTRY, Context, GraphPass, PassResult, RewriteRules, register_pass
from fxlib.passes.infra.introduced import Introduced
from fxlib.recipes import recipes
from fxlib.runtime import int8
from tests.client.models import Clicks

TRAINING = recipes.get("training").passes
ALL = tuple({step.name: step for each in recipes.RECIPES.values() for step in each.passes}.values())
aten = torch.ops.aten

Change = Callable[[Graph, Node], Any]


def program(change: Change = lambda graph, value: value) -> GraphModule:
    """Apply a ReLU to a matrix that is as wide as a row of zeros, and then something else."""
    graph = Graph()
    x = graph.placeholder("x")
    row = graph.call_function(torch.zeros, (2, 3))
    value = graph.call_function(torch.relu, (graph.call_function(torch.add, (x, row)),))
    graph.output(change(graph, value))
    return GraphModule(nn.Module(), graph)


HOSTILE: dict[str, Change] = {
    "rand_like": lambda graph, value: graph.call_function(torch.rand_like, (value,)),
    "randn": lambda graph, value: graph.call_function(torch.randn, (2, 3)),
    "aten.rand": lambda graph, value: graph.call_function(aten.rand.default, ([2, 3],)),
    "dropout": lambda graph, value: graph.call_function(F.dropout, (value, 0.5, True)),
    "uniform_": lambda graph, value: graph.call_method("uniform_", (value,)),
    "relu_": lambda graph, value: graph.call_method("relu_", (value,)),
    "large zeros": lambda graph, value: graph.call_function(torch.zeros, (1 << 17, 1 << 17)),
    "wide zeros": lambda graph, value: graph.call_function(torch.zeros, (1 << 11, 1 << 11, 1 << 11)),
    "ones": lambda graph, value: graph.call_function(torch.ones, (2, 3)),
    "repeat": lambda graph, value: graph.call_method("repeat", (value, 1 << 20)),
    "int8": lambda graph, value: graph.call_function(torch.ops.fxlib.quantize.default, (value, 0.1, 3)),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_neither_the_original_calls_nor_a_pass_puts_in_is_refused(change: Change) -> None:
    for passes in (TRAINING, ()):
        with pytest.raises(WireError, match=r"the rewritten graph (calls|gives|has layers on)"):
            screen(program(change), program(), passes=passes)
    screen(program(change), program(change), passes=TRAINING)


@pytest.mark.parametrize("name", ["rand_like", "randn", "uniform_", "dropout", "large zeros", "relu_", "ones"])
def test_whatever_the_recipe_nothing_draws_or_writes_or_makes_much_of_nothing(name: str) -> None:
    for passes in (ALL, None):
        with pytest.raises(WireError, match=r"the rewritten graph (calls|gives|draws)"):
            screen(program(HOSTILE[name]), program(), passes=passes)


def test_an_operator_is_the_same_in_all_its_forms() -> None:
    for change in (
        lambda graph, value: graph.call_function(F.relu, (value,)),
        lambda graph, value: graph.call_method("relu", (value,)),
        lambda graph, value: graph.call_function(aten.relu.default, (value,)),
    ):
        screen(program(change), program())


def test_of_a_recipe_that_nobody_here_knows_plain_work_passes() -> None:
    screen(program(lambda graph, value: graph.call_function(torch.sin, (value,))), program(), passes=None)
    with pytest.raises(WireError, match="calls sin"):
        screen(program(lambda graph, value: graph.call_function(torch.sin, (value,))), program())


def test_a_module_of_the_answer_s_own_is_of_a_class_that_the_original_has() -> None:
    def of(layer: nn.Module) -> GraphModule:
        return torch.fx.symbolic_trace(nn.Sequential(layer).eval())

    for other in (nn.Dropout(), nn.Sequential(nn.Dropout())):
        with pytest.raises(WireError, match="calls dropout"):
            screen(of(other), of(nn.ReLU()), passes=ALL)


def drawing(*drawn: Callable[[Graph, Node], Node]) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output([each(graph, x) for each in drawn])
    return GraphModule(nn.Module(), graph)


def rand_like(graph: Graph, value: Node) -> Node:
    return graph.call_function(torch.rand_like, (value,))


def rand_like_half(graph: Graph, value: Node) -> Node:
    return graph.call_function(torch.rand_like, (graph.call_function(torch.narrow, (value, 0, 0, 1)),))


def narrowed(graph: Graph, value: Node) -> Node:
    return graph.call_function(torch.narrow, (value, 0, 0, 1))


def dropout(p: float, training: bool) -> Callable[[Graph, Node], Node]:
    return lambda graph, value: graph.call_function(F.dropout, (value, p, training))


OTHERWISE = {
    "more": ([rand_like], [rand_like, rand_like]),
    "in another order": ([rand_like, dropout(0.5, True)], [dropout(0.5, True), rand_like]),
    "another kind": ([dropout(0.5, True), rand_like], [dropout(0.5, True), dropout(0.5, True)]),
    "another share": ([dropout(0.5, True)], [dropout(0.25, True)]),
    "in training": ([dropout(0.5, False)], [dropout(0.5, True)]),
}


@pytest.mark.parametrize("own, given", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_random_numbers_are_drawn_as_in_the_original(own: Sequence[Any], given: Sequence[Any]) -> None:
    for passes in (TRAINING, ALL, None):
        with pytest.raises(WireError, match="draws random numbers otherwise"):
            screen(drawing(*given), drawing(*own), passes=passes)
        screen(drawing(*own), drawing(*own), passes=passes)


def test_as_many_numbers_are_drawn_as_in_the_original() -> None:
    with pytest.raises(WireError, match="draws random numbers otherwise"):
        screen(drawing(narrowed, rand_like_half), drawing(narrowed, rand_like), passes=TRAINING)


def test_a_draw_may_be_left_out_where_a_pass_is_not_bitwise() -> None:
    screen(drawing(), drawing(rand_like), passes=ALL)
    with pytest.raises(WireError, match="draws random numbers otherwise"):
        screen(drawing(), drawing(rand_like), passes=TRAINING)


def test_a_graph_that_draws_is_called_where_the_original_calls_it() -> None:
    inner = drawing(rand_like)

    def calling(times: int) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        graph.output([graph.call_module("inner", (x,)) for _ in range(times)])
        return GraphModule(nn.ModuleDict({"inner": inner}), graph)

    screen(calling(1), calling(1), passes=TRAINING)
    with pytest.raises(WireError, match="draws random numbers otherwise"):
        screen(calling(2), calling(1), passes=TRAINING)


def adding(*targets: str) -> GraphModule:
    """Add one in place to the result of a layer, an argument, or a weight, of which the answer has the launcher's."""
    graph = Graph()
    values = {"x": graph.placeholder("x"), "weight": graph.get_attr("weight")}
    values["row"] = graph.call_function(torch.narrow, (values["weight"], 0, 0, 1))
    values["made"] = graph.call_function(torch.matmul, (values["x"], values["weight"]))
    graph.output([values["made"], *(graph.call_method("add_", (values[each], 1.0)) for each in targets)])
    return GraphModule(HELD, graph)


HELD = nn.Module()
HELD.weight = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("target", ["weight", "row", "x"])
def test_nothing_of_the_launcher_s_is_written_over_that_the_original_leaves_alone(target: str) -> None:
    for passes in (TRAINING, None, ()):
        with pytest.raises(WireError, match=r"writes over (x|weight), which the original"):
            screen(adding("made", target), adding("made"), passes=passes)
        screen(adding("made", target), adding("made", target), passes=passes)


def test_torch_s_operators_are_the_same_objects_afterwards() -> None:
    before = [aten.add.Tensor, aten.mul.Tensor, aten.add_.Tensor]
    screen(adding("made"), adding("made"), passes=())
    assert [id(each) for each in before] == [id(each) for each in (aten.add.Tensor, aten.mul.Tensor, aten.add_.Tensor)]


def test_a_rule_may_bring_what_its_replacement_calls() -> None:
    rule = fxlib.Rule(lambda x: F.gelu(x), lambda x: x * torch.sigmoid(1.702 * x))  # noqa: PLW0108 - it is traced
    captured = torch.fx.symbolic_trace(nn.GELU())
    changed = RewriteRules(rules=(rule,))(torch.fx.symbolic_trace(nn.GELU())).result.module
    screen(changed, captured, passes=(RewriteRules(rules=(rule,)),))
    with pytest.raises(WireError, match=r"calls (sigmoid|mul)"):
        screen(changed, captured, passes=(RewriteRules(rules=()),))


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_an_answer_to_each_recipe_is_accepted(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding_mode="reflect", padding=1), nn.BatchNorm2d(64), nn.ReLU()).eval()
    for captured in (fxlib.capture(Clicks().eval()), fxlib.capture(model)):
        with torch.no_grad():
            rewritten = fxlib.optimize(captured, name)
        sent = wire.encode(rewritten, beside=captured)
        screen(wire.decode(sent.graph, blobs=sent.blobs, root=captured), captured, passes=recipes.get(name).passes)


def test_each_pass_declares_what_it_may_put_in() -> None:
    ours = [each for each in REGISTRY.values() if each.__module__.startswith("fxlib.")]
    assert not [each.name for each in ours if each.introduces.plain]
    assert all(REGISTRY["quantize"].introduces.allows(f"{int8.NAMESPACE}::{name}", ()) for name in ("quantize", "x"))


def test_a_pass_that_puts_in_more_than_it_declares_fails() -> None:
    @register_pass("squares", preserves="tolerance", introduces=Introduced.of(torch.square))
    class Squares(GraphPass):
        function: Any = torch.square

        def run(self, module: GraphModule, context: Context) -> PassResult:
            last = next(node for node in reversed(module.graph.nodes) if node.op == "call_function")
            with module.graph.inserting_after(last):
                more = module.graph.call_function(self.function, (last,))
            last.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
            return PassResult(module, changes=1)

    try:
        assert Squares()(program()).result.changes == 1
        with pytest.raises(fxlib.errors.PassError, match="put in what it does not declare: sin"):
            Squares(function=torch.sin)(program())
    finally:
        del REGISTRY["squares"]
