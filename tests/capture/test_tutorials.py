"""PyTorch's public parameter-server programs, in our own words: captured and right, or refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn import RemoteModule

import fxlib
from fxlib.errors import CaptureError, ContractError
from fxlib.runtime import is_call, is_issue
from tests.capture import servers
from tests.capture.checks import same, targets
from tests.capture.servers import Averager, Decoder, Sharded, Table, remote_method
from tests.shared.process_group import process_group

pytestmark = pytest.mark.usefixtures("world")


class Trainer(nn.Module):
    """The parameter-server tutorial: the middle of the network lives behind one RRef, called through helpers."""

    def __init__(self) -> None:
        super().__init__()
        self.server = rpc.remote("ps0", servers.shared, args=("tutorial",))
        self.bottom = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return remote_method(Sharded.forward, self.server, self.bottom(x))


def test_the_parameter_server_tutorial() -> None:
    model = Trainer()
    captured = same(model, torch.zeros(2, 3))

    assert targets(captured) == ["remote_call"]
    call = next(node for node in captured.graph.nodes if is_call(node))
    assert call.args[:2] == ("ps0", f"{servers.NAME}:call_method")
    assert server_gradients(model) == server_gradients(captured)


def server_gradients(model: Any) -> tuple[list[float], list[float]]:
    """Gradients of the server and of the trainer, by distributed autograd."""
    with autograd.context() as context:
        autograd.backward(context, [model(torch.arange(6.0).view(2, 3)).sum()])
        ours = autograd.get_gradients(context)[model.bottom.weight]
        theirs = model.server.rpc_sync().gradient(context)
    return theirs.flatten().tolist(), ours.flatten().tolist()


class Recurrent(nn.Module):
    """The RNN tutorial: an embedding on one server, an LSTM here, a decoder on another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = rpc.remote("ps0", Table, args=(10, 6))
        self.rnn = nn.LSTM(6, 5, 2, dropout=0.0)
        self.decoder = rpc.remote("ps1", Decoder, args=(5, 10))

    def forward(self, words: torch.Tensor, hidden: Any) -> Any:
        embedded = remote_method(Table.forward, self.embedding, words)
        output, hidden = self.rnn(embedded, hidden)
        return remote_method(Decoder.forward, self.decoder, output), hidden


def test_the_rnn_tutorial() -> None:
    hidden = (torch.zeros(2, 3, 5), torch.zeros(2, 3, 5))
    captured = same(Recurrent(), torch.zeros(4, 3, dtype=torch.long), hidden)

    assert [node.args[0] for node in captured.graph.nodes if is_call(node)] == ["ps0", "ps1"]


@pytest.mark.slow
def test_the_batch_updating_parameter_server() -> None:
    server = rpc.remote("ps1", Averager)

    def step(gradient: torch.Tensor) -> Any:
        model = rpc.rpc_sync(server.owner(), Averager.update, args=(server, [gradient, gradient * 3]))
        return model + server.rpc_sync().later(gradient) + server.rpc_async().later(model).wait()

    captured = same(step, torch.zeros(3))

    assert targets(captured) == ["remote_call", "remote_call", "issue_call", "wait"]
    assert not captured.state_dict()


class Hybrid(nn.Module):
    """The tutorial that joins DistributedDataParallel with a remote embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = RemoteModule("ps1", nn.EmbeddingBag, args=(10, 4), kwargs={"mode": "sum"})
        self.dense = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> Any:
        return self.dense(self.embedding.forward(rows, offsets))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_hybrid_of_ddp_and_rpc(tmp_path: Path) -> None:
    rows, offsets = torch.arange(6), torch.tensor([0, 2, 4])

    with process_group(tmp_path):
        model = Hybrid()
        captured = fxlib.capture(model)
        assert torch.equal(captured(rows, offsets), model(rows, offsets))

    assert [node.args[1] for node in captured.graph.nodes if is_issue(node)] == [".forward"]
    assert any(node.target == "embedding.module_rref" for node in captured.graph.nodes)
    assert list(model._modules) == ["embedding", "dense"]


class ManyTables(nn.Module):
    """The RPC benchmark: one lookup a table, in a loop over RRefs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [rpc.remote(f"ps{i % 2}", nn.EmbeddingBag, args=(10, 4)) for i in range(8)]
        self.top = nn.Linear(32, 1)

    def forward(self, sparse: torch.Tensor) -> Any:
        found = []
        for index, table in enumerate(self.tables):
            found.append(table.rpc_sync().forward(sparse[index]))
        return self.top(torch.cat(found, dim=1))


@pytest.mark.slow
def test_the_benchmark_with_many_tables() -> None:
    captured = same(ManyTables(), torch.zeros(8, 3, 2, dtype=torch.long))

    calls = [node for node in captured.graph.nodes if is_call(node)]
    assert len(calls) == 8
    assert all(node.meta["contract"].is_read for node in calls)
    assert [str(node.args[0].target) for node in calls] == [f"tables_{i}" for i in range(8)]


def asked_for_its_pieces(x: torch.Tensor) -> Any:
    total = torch.zeros(3)
    for index, piece in enumerate(rpc.rpc_sync("ps0", servers.pair, args=(x,))):
        total = total + piece * index
    return total


def test_a_loop_over_a_remote_result_needs_its_structure_and_gets_by_with_it() -> None:
    with pytest.raises(CaptureError, match="Declare the structure"):
        fxlib.capture(asked_for_its_pieces)

    same(asked_for_its_pieces, torch.zeros(3), contracts={f"{servers.NAME}:pair": fxlib.Contract(returns=(None, None))})


def keeps_answers(x: torch.Tensor) -> Any:
    found = [rpc.rpc_sync(f"ps{server}", servers.pair, args=(x,)) for server in range(2)]
    return sum(first for first, _ in (each for each in found if each is not None))


def filters_answers(x: torch.Tensor) -> Any:
    found = rpc.rpc_sync("ps0", servers.nothing, args=(x,))
    return x + 1 if found is not None else x


def test_what_a_forward_decides_by_whether_there_is_an_answer_is_checked() -> None:
    declared = fxlib.Contract(returns=(None, None))
    same(keeps_answers, torch.zeros(3), contracts={f"{servers.NAME}:pair": declared})
    captured = fxlib.capture(filters_answers, contracts={f"{servers.NAME}:nothing": declared})
    with pytest.raises(ContractError, match=r"servers:nothing"):
        captured(torch.zeros(3))


def pipelined(x: torch.Tensor) -> Any:
    futures = [rpc.rpc_async("ps0", servers.double, args=(part,)) for part in iter(x.split(2, dim=0))]
    return torch.cat(torch.futures.wait_all(futures))


def test_the_pipeline_tutorial_is_refused_as_its_number_of_pieces_depends_on_the_batch() -> None:
    with pytest.raises(CaptureError, match="only a run knows its length"):
        fxlib.capture(pipelined)


class Stages(nn.Module):
    """Micro-batches through two stages, of which each fetches from the others what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = rpc.remote("ps0", servers.Stage, args=(3,))
        self.second = rpc.remote("ps1", servers.Stage, args=(3,))

    def forward(self, xs: torch.Tensor) -> Any:
        found = []
        for x in iter(xs.split(2, dim=0)):
            x_rref = rpc.RRef(x)
            y_rref = self.first.remote().forward(x_rref)
            found.append(self.second.rpc_sync().forward(x_rref, y_rref))
        return torch.cat(found)


STAGES: Any = {".forward": fxlib.Contract(reads=frozenset({"layer"}))}


@pytest.mark.slow
def test_micro_batches_through_stages_that_fetch_are_one_after_another_as_torch_may_hang_otherwise() -> None:
    model, xs = Stages(), torch.randint(0, 5, (4, 3))
    captured = fxlib.capture(model, sample_inputs=(xs,), contracts=STAGES)
    rewritten = fxlib.optimize(captured)

    assert targets(rewritten) == ["create", "remote_call"] * 2
    expected = of_stages(model, model, xs)
    assert of_stages(captured, model, xs) == expected
    assert of_stages(rewritten, model, xs) == expected


def of_stages(forward: Any, model: Stages, xs: torch.Tensor) -> list[Any]:
    """Output and gradients on both servers, by distributed autograd."""
    with autograd.context() as context:
        output = forward(xs)
        autograd.backward(context, [output.sum()])
        held = [each.rpc_sync().gradients(context) for each in (model.first, model.second)]
    return [each.tolist() for each in (output, *held)]


class Beside(Stages):
    """Another use of what a stage fetches, which gets a gradient from both, and a change of it."""

    def forward(self, xs: torch.Tensor) -> Any:
        x = xs * 2
        found = self.second.rpc_sync().forward(rpc.RRef(x))
        looked_up = rpc.rpc_sync("ps0", servers.lookup, args=("table", x))
        return found.sum() + (x * 3).sum() + looked_up.sum() + x.mul_(5).sum()


def test_what_a_server_fetches_from_here_is_neither_changed_nor_used_until_it_has_it() -> None:
    rewritten = fxlib.optimize(fxlib.capture(Beside(), contracts=STAGES))

    order = [getattr(node.target, "__name__", node.target) for node in rewritten.graph.nodes]
    stage = max(order.index(name) for name in ("wait", "remote_call") if name in order[: order.index("mul_")])
    assert order.index("make_rref") < stage < order.index("mul_")
    xs = torch.randn(2, 3)
    assert torch.equal(rewritten(xs.clone()), Beside()(xs.clone()))


def branches_on_a_shape(x: torch.Tensor) -> Any:
    return rpc.rpc_sync("ps0", servers.double, args=(x if x.shape[0] > 2 else x + 1,))


def test_a_branch_on_a_shape_is_refused() -> None:
    with pytest.raises(CaptureError, match="decides which way"):
        fxlib.capture(branches_on_a_shape)
