"""What parts are made of: nodes that come together, weights and constants of their own, and rows that they look up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import rpc
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

import fxlib
from fxlib.capture.coerce import as_graph
from fxlib.errors import FxlibWarning
from fxlib.runtime import backends
from fxlib.runtime.lowering import parts_of
from tests.passes.local.copies import Copies, lowered

pytestmark = pytest.mark.slow


class Tied(nn.Module):
    """One weight in two operators, with an operator between them that no part takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(4, 4)), nn.Embedding(8, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = F.linear(x, self.weight).relu().tanh() + self.table(ids)
        return F.linear(x, self.weight).relu().tanh()


def test_parts_of_an_exported_graph_have_their_weights_as_their_own(copies: Copies) -> None:
    model, inputs = Tied().eval(), (torch.randn(2, 4), torch.tensor([3, 5]))
    with torch.no_grad():
        module = lowered(as_graph(torch.export.export(model, inputs), ()))
        assert torch.equal(module(*inputs), model(*inputs))
    taken = [sum(each.op == "placeholder" for each in part.graph.nodes) for part in copies.compiled]
    held = [sum(each.op == "get_attr" for each in part.graph.nodes) for part in copies.compiled]
    assert taken == [1, 2]
    assert held == [1, 1]


class Gathering(Tied):
    """A weight in two operators, with one between them that no part takes, since it raises for some ids."""

    @override
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = F.linear(x, self.weight).relu().tanh() + self.table.weight.gather(0, ids)
        return F.linear(x, self.weight).relu().tanh()


IDS = torch.tensor([[3, 5, 0, 7], [1, 1, 2, 6]])


def test_what_raises_for_some_ids_comes_first_where_that_joins_parts(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)
    model, inputs = Gathering().eval(), (torch.randn(2, 4), IDS)
    with torch.no_grad():
        module = lowered(as_graph(torch.export.export(model, inputs), ()).eval())
        gather = torch.ops.aten.gather.default
        assert next(each.target for each in module.graph.nodes if each.op == "call_function") is gather
        assert torch.equal(module(*inputs), model(*inputs))
        with pytest.raises(RuntimeError, match="out of bounds"):
            module(inputs[0], 99 * IDS)
    assert len(copies.compiled) == 1
    assert len(list(parts_of(module.graph))) == 1


def test_parts_stay_between_calls_where_they_are_joined(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)

    class Two(Gathering):
        @override
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            x = super().forward(x, ids)
            x = x + rpc.rpc_sync("server", torch.neg, (x,))
            return super().forward(x, ids)

    with torch.no_grad():
        module = lowered(Two().eval())
    names = [str(node.target) for node in module.graph.nodes if node.op.startswith("call_")]
    call = next(index for index, name in enumerate(names) if "remote_call" in name)
    assert [index for index, name in enumerate(names) if name == "gather"] == [0, call + 1]
    assert len(list(parts_of(module.graph))) == 2


class Looking(nn.Module):
    """Looks the rows of tokens and of their positions up, as encoders do, which gather the kinds of tokens, too."""

    numbers: Tensor

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(8, 4, max_norm=max_norm), nn.Embedding(16, 4)
        self.kinds, self.linear = nn.Embedding(2, 4), nn.Linear(4, 4)
        self.register_buffer("numbers", torch.arange(16))

    def forward(self, ids: Tensor) -> Tensor:
        numbers = self.numbers[: ids.shape[1]]
        kinds = torch.zeros(16, dtype=torch.long).gather(0, numbers).expand(ids.shape)
        x = self.words(ids) + F.embedding(kinds, self.kinds.weight) + self.positions(numbers)
        return self.linear(x.relu()).tanh()


FORMS = {
    "traced": fxlib.capture,
    "exported": lambda model: as_graph(torch.export.export(model, (torch.tensor([[1, 7, 0]]),)), ()).eval(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_part_looks_rows_up_by_ids_that_it_is_given_and_are_rows(
    form: str, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)
    model, ids = Looking().eval(), torch.tensor([[1, 7, 0]])
    with torch.no_grad():
        module = lowered(FORMS[form](model))
        assert [each.meta.get("backend") for each in module.graph.nodes if "gather" in each.name] == [None]
        for each in (ids, ids.flip(1), ids - ids):
            assert torch.equal(module(each), model(each))
        assert (len(copies.compiled), copies.runs) == (1, 3)  # the first one compares the results
        operators = [each.name for each in copies.compiled[0].graph.nodes if each.op.startswith("call_")]
        assert sum(each.startswith(("embedding", "words", "positions")) for each in operators) == 3
        for wrong in (ids + 1, ids - 1):
            with pytest.raises(IndexError):
                module(wrong)
        assert torch.equal(module(ids), model(ids))
    assert copies.runs == 4


def test_lookups_that_write_and_those_in_large_tables_or_by_ids_of_a_part_s_own_are_in_no_part(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)
    ids = torch.tensor([[1, 7, 0]])

    def in_parts(model: nn.Module) -> set[str]:
        with torch.no_grad():
            module = lowered(model.eval())
            assert torch.equal(module(ids), model(ids))
        return {str(each.target) for part in parts_of(module.graph) for each in part if each.op == "call_module"}

    assert in_parts(Looking()) >= {"words", "positions"}
    assert "words" not in in_parts(Looking(max_norm=1.0))

    class Coded(Looking):
        @override
        def forward(self, ids: Tensor) -> Tensor:
            x = self.linear(self.words(ids)).relu().tanh()
            return self.linear(self.kinds(x.argmax(-1) % 2).relu()).tanh()

    parts = list(parts_of(lowered(Coded().eval()).graph))
    for part in parts:
        for node in part:
            assert node.target != "kinds" or node.args[0] not in part
    monkeypatch.setattr("fxlib.passes.local.lower._LARGEST_TABLE", 8 * 4 * 4 - 1)
    assert in_parts(Looking()) & {"words", "positions", "kinds"} == set()


def test_a_received_part_that_looks_rows_up_by_ids_of_its_own_runs_as_it_is(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)
    with torch.no_grad():
        module = fxlib.capture(model := Looking().eval())
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                node.meta["backend"] = backends.installed("copies")
        module.recompile()
        ids = torch.tensor([[1, 7, 0]])
        with pytest.warns(FxlibWarning, match="looks rows up by ids that it computes itself"):
            assert torch.equal(module(ids), model(ids))
    assert not copies.compiled


def test_constants_are_a_part_s_own_where_weights_are_compiled_in(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.tensor([1.0, 2.0])).tanh() + torch.tensor(0.5)

    x = torch.randn(3, 2)
    with torch.no_grad():
        module = lowered(as_graph(torch.export.export(Shifted(), (x,)), ()).eval())
        assert torch.equal(module(x), Shifted()(x))
        (part,) = copies.compiled
        assert sum(each.op == "placeholder" for each in part.graph.nodes) == 1
        name = next(str(each.target) for each in part.graph.nodes if each.op == "get_attr")
        setattr(module, name, torch.tensor([3.0, 3.0]))
        with pytest.warns(FxlibWarning, match="weights from which it was computed were replaced"):
            module(x)


def test_an_exported_graph_whose_parts_are_too_small_stays_as_it_is(copies: Copies) -> None:
    model, inputs = Tied().eval(), (torch.randn(2, 4), torch.tensor([3, 5]))
    with torch.no_grad():
        captured = as_graph(torch.export.export(model, inputs), ())
        assert lowered(captured, least_nodes=10).code == captured.code


def test_an_order_that_would_leave_no_part_is_not_taken(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)

    class Gathers(nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
            first, a = x.gather(1, at), x.tanh().relu()
            b, second = a.sigmoid(), a.gather(1, at)
            third, fourth = second.tanh().gather(1, at), second.relu().gather(1, at)
            return first, b, third, fourth.tanh().gather(1, at), fourth.relu().gather(1, at)

    model, inputs = Gathers().eval(), (torch.randn(2, 4), IDS % 4)
    with torch.no_grad():
        module = lowered(model)
        assert len(list(parts_of(module.graph))) == 1
        assert all(map(torch.equal, module(*inputs), model(*inputs)))


class Placed(nn.Module):
    """Looks rows up by a whole buffer, besides ids that it is given."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table, self.linear = nn.Embedding(8, 4), nn.Embedding(8, 4), nn.Linear(4, 4)
        self.register_buffer("places", torch.tensor([[0, 1, 7]]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear((self.words(ids).relu().tanh() + self.table(self.places)).relu()).tanh()


@pytest.mark.parametrize("form", FORMS)
def test_ids_that_a_buffer_holds_are_read_before_the_part(
    form: str, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)
    model, ids = Placed().eval(), torch.tensor([[1, 7, 0]])
    with torch.no_grad():
        module = lowered(FORMS[form](model))
        assert torch.equal(module(ids), model(ids))
        assert torch.equal(module(ids), model(ids))
    (part,) = copies.compiled
    assert [each.op for each in part.graph.nodes].count("placeholder") == 2  # both are ids


def test_tables_that_a_part_is_given_have_the_rows_that_they_have_then(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, ids: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            weight = self.table.weight
            return F.embedding(ids, weight).relu().tanh(), weight.gather(0, at)

    model, at = Shared().eval(), torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        module = lowered(model)
        for rows, ids in ((8, [1, 7, 0]), (4, [1, 3, 0]), (4, [2, 0, 0])):
            model.table.weight = nn.Parameter(torch.randn(rows, 4))
            assert torch.equal(module(torch.tensor(ids), at)[0], model(torch.tensor(ids), at)[0])
        runs = copies.runs
        with pytest.raises(IndexError):
            module(torch.tensor([1, 7, 0]), at)
    assert copies.runs == runs


def test_sparse_constants_and_inputs_of_transforms_are_left(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "keeps_weights", True)

    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near = torch.eye(3).to_sparse()

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(self.near, x.relu().tanh()).relu().tanh()

    x, ids = torch.randn(3, 2), torch.tensor([[1, 7, 0]])
    with torch.no_grad():
        assert torch.equal(lowered(Neighbours().eval())(x), Neighbours()(x))
        model = Looking().eval()
        module = lowered(model)
        assert torch.equal(module(ids), model(ids))
        runs = copies.runs
        both = torch.stack([ids, ids])
        assert torch.equal(torch.vmap(module)(both), torch.vmap(model)(both))
        with forward_ad.dual_level():
            assert torch.equal(module(ids), model(ids))
    assert copies.runs == runs


def test_where_what_is_saved_for_backward_is_watched_parts_run_as_they_are(copies: Copies) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(3, 4)
    module = lowered(model)
    for _ in range(2):
        found = []
        for run in (model, module):
            model.zero_grad()
            checkpoint(run, x, use_reentrant=False).sum().backward()
            found.append([each.grad for each in model.parameters() if each.grad is not None])
        assert all(map(torch.equal, *found))
    assert not copies.compiled


class Best(nn.Module):
    """A maximum, with its index, after local work: both of them, or the one value that holds both."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Any:
        found = x.sin().exp().max(1)
        return found if self.whole else (found[0], found[1])


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("whole", [False, True])
def test_several_results_of_one_operator_are_the_programs(*, whole: bool) -> None:
    model, x = Best(whole=whole), torch.randn(3, 4)
    module = lowered(model, least_nodes=2)
    names = [[node.name for node in part] for part in parts_of(module.graph)]
    assert names == [["sin", "exp", "max_1"] if whole else ["sin", "exp"]]
    with pytest.warns(FxlibWarning, match="results that are no tensors") if whole else nullcontext():
        found = [module(x) for _ in range(2)]
    assert all(torch.equal(*each) for pair in found for each in zip(pair, model(x), strict=True))


class Clamping(Copies):
    """A compiler whose lookups return some row for an id that is none, as those of OpenVINO do."""

    @override
    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        super().compile(part, inputs)
        assert isinstance(part, GraphModule)
        interpreter = Interpreter(part)

        def run(*values: Any) -> Any:
            self.runs += 1
            return self.results(interpreter.run(*values))

        return run


def row_of(ids: Tensor, table: Tensor) -> Tensor:
    return table[ids.clamp(0, len(table) - 1)].clone()


class Interpreter(torch.fx.Interpreter):
    @override
    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.fetch_attr(target)
        found = super().call_module
        return row_of(args[0], called.weight) if isinstance(called, nn.Embedding) else found(target, args, kwargs)

    @override
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.embedding.default:
            return row_of(args[1], args[0])
        return row_of(args[0], args[1]) if target is F.embedding else super().call_function(target, args, kwargs)


class Drawn(nn.Module):
    """A drawn program of lookups in tables by ids that it gets, holds or computes."""

    numbers: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for rows in (4, 6, 9))
        self.linear = nn.Linear(4, 4)
        self.register_buffer("numbers", torch.arange(5))

    def table(self, number: int) -> nn.Embedding:
        found = self.tables[number]
        assert isinstance(found, nn.Embedding)
        return found

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        choose = random.Random(self.seed)
        values, keys = [x, x.tanh()], [ids]
        for _ in range(choose.randint(4, 12)):
            value, key, table = choose.choice(values), choose.choice(keys), self.table(choose.randrange(3))
            match choose.randrange(9):
                case 0 | 1:
                    values.append(table(key))
                case 2:
                    values.append(F.embedding(key, table.weight))
                case 3:
                    values.append(table.weight.gather(0, key.unsqueeze(1).expand(5, 4)))
                case 4:
                    values.append(self.linear(value).relu())
                case 5:
                    values.append(value + choose.choice(values))
                case 6:
                    keys.append((key + 1) % choose.choice([4, 7]))
                case 7:
                    keys.append(value.argmax(-1))
                case _:
                    keys.append(self.numbers[:5])
        return torch.stack(values).sum(0), keys[-1]


def error_or_results(module: nn.Module, *inputs: Tensor) -> list[Tensor] | bool:
    """Return the results, or whether it is an error of ids: of two, a part's may come second."""
    try:
        return list(module(*inputs))
    except (IndexError, RuntimeError):
        return True


@given(seed=st.integers(0, 10_000), exported=st.booleans())
@settings(max_examples=40)
def test_a_drawn_program_looks_up_what_it_did_and_raises_for_what_is_no_row(seed: int, exported: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(backends.BACKENDS, "copies", compiler := Clamping())
        patch.setattr(compiler, "keeps_weights", True)
        model, x, ids = Drawn(seed).eval(), torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
        if error_or_results(model, x, ids) is True:
            return  # its own ids are no rows
        example = torch.export.export(model, (x, ids)) if exported else None
        module = lowered(fxlib.capture(model) if example is None else as_graph(example, ()).eval())
        for each in (ids, ids, ids.flip(0), ids - 1, ids + 1, ids * 3):
            ours, theirs = error_or_results(module, x, each), error_or_results(model, x, each)
            if isinstance(ours, bool) or isinstance(theirs, bool):
                assert ours is theirs
            else:
                assert all(map(torch.equal, ours, theirs))
