"""The reference parameter server: what it returns, how it learns, and that it does both reproducibly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.nn import functional as F

from fxlib import batch, ps
from fxlib.errors import ContractError, WorkloadError
from fxlib.ps import state
from fxlib.ps.state import ServerState
from fxlib.runtime import functions
from fxlib.spec.contract import contract_of
from fxlib.spec.workload import Dense, Server, Table
from tests.shared.rpc_world import rpc_world
from tests.shared.undisturbed import undisturbed

ROWS, DIM, LR = 50, 4, 0.1
INDICES = torch.tensor([[3, 7], [3, 0]])


@pytest.fixture(autouse=True)
def _served() -> None:
    ps.setup(server("sgd"), seed=1)


def server(optimizer: str) -> Server:
    return Server(
        name="ps0",
        tables=(Table(name="t", rows=ROWS, dim=DIM, optimizer=optimizer, lr=LR),),  # type: ignore[arg-type]
        dense=(Dense(name="d", shape=(2, 3), optimizer=optimizer, lr=LR),),  # type: ignore[arg-type]
    )


def table() -> torch.Tensor:
    return ps.lookup("t", torch.arange(ROWS))


def test_a_lookup_returns_rows_in_the_shape_of_its_indices() -> None:
    rows = ps.lookup("t", INDICES)
    assert rows.shape == (2, 2, DIM)
    assert torch.equal(rows, table()[INDICES])
    assert torch.equal(ps.lookup("t", INDICES.int()), rows)


def test_a_lookup_returns_a_copy() -> None:
    ps.lookup("t", INDICES).zero_()
    assert not torch.equal(ps.lookup("t", INDICES), torch.zeros(2, 2, DIM))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_pooled_as_embedding_bag_does(mode: ps.Pooling) -> None:
    indices, offsets = torch.tensor([1, 2, 2, 5]), torch.tensor([0, 3, 3])
    expected = F.embedding_bag(indices, table(), offsets, mode=mode)
    assert torch.equal(ps.lookup_bag("t", indices, offsets, mode=mode), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("mode", ["", "sum", "mean"])
def test_pushes_train_as_torchs_own_optimizers_do(optimizer: str, mode: Any) -> None:
    ps.setup(server(optimizer), seed=1)
    weight = table().requires_grad_()
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad
    reference = kind([weight], lr=LR)
    offsets = torch.tensor([0, 1, 1])
    for step in range(5):
        indices = torch.tensor([step, 3, 3, 8])
        reference.zero_grad()
        rows = F.embedding_bag(indices, weight, offsets, mode=mode) if mode else weight[indices]
        gradient = torch.randn(rows.shape)
        rows.backward(gradient)
        reference.step()
        if mode:
            ps.push_bag("t", indices, offsets, gradient, mode=mode)
        else:
            ps.push("t", indices, gradient)
    torch.testing.assert_close(table(), weight.detach(), rtol=1e-6, atol=1e-7)


def test_rows_named_twice_are_summed_in_the_order_given() -> None:
    gradient = torch.randn(1000, DIM)
    before, total = ps.lookup("t", torch.tensor([3]))[0], torch.zeros(DIM)
    for row in gradient:
        total += row
    ps.push("t", torch.full((1000,), 3), gradient)
    assert torch.equal(ps.lookup("t", torch.tensor([3]))[0], before - LR * total)


@pytest.mark.parametrize("threads", [1, 4])
def test_equal_seeds_and_pushes_give_equal_bits_whatever_the_threads(threads: int) -> None:
    digests, before = set(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            ps.setup(server("adagrad"), seed=5)
            generator = torch.Generator().manual_seed(0)
            for _ in range(3):
                indices = torch.randint(0, ROWS, (4000,), generator=generator)
                ps.push("t", indices, torch.randn(4000, DIM, generator=generator))
            digests.add(ps.state_digest())
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_dense_parameters_are_pulled_and_pushed() -> None:
    before = ps.pull("d")
    ps.push_dense("d", torch.ones(2, 3))
    assert torch.equal(ps.pull("d"), before - LR)


def test_reset_draws_the_state_anew_from_its_seed() -> None:
    digest = ps.state_digest()
    ps.push("t", INDICES, torch.ones(2, 2, DIM))
    ps.push_dense("d", torch.ones(2, 3))
    assert ps.state_digest() != digest
    ps.reset(1)
    assert ps.state_digest() == digest
    ps.reset(2)
    assert ps.state_digest() != digest


def test_a_tables_bits_do_not_depend_on_its_neighbours() -> None:
    alone = table()
    ps.setup(Server(name="other", tables=(Table(name="u", rows=9, dim=2), *server("sgd").tables)), seed=1)
    assert torch.equal(table(), alone)


def test_an_empty_push_changes_nothing() -> None:
    digest = ps.state_digest()
    ps.push("t", torch.empty(0, dtype=torch.long), torch.empty(0, DIM))
    assert ps.state_digest() == digest


@pytest.mark.parametrize("index", [-1, ROWS])
def test_an_index_outside_of_the_table_is_named(index: int) -> None:
    with pytest.raises(IndexError, match=rf"'t' has {ROWS} rows, and no row {index}"):
        ps.lookup("t", torch.tensor([0, index]))
    with pytest.raises(IndexError, match=f"no row {index}"):
        ps.push("t", torch.tensor([index]), torch.ones(1, DIM))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ps.lookup("t", torch.tensor([0.5])), IndexError, "must be integers"),
        (lambda: ps.lookup("u", INDICES), WorkloadError, r"no 'u' among its tables \(t\)"),
        (lambda: ps.pull("u"), WorkloadError, r"no 'u' among its dense \(d\)"),
        (lambda: ps.push("t", INDICES, torch.ones(3)), ValueError, r"should have \(2, 2, 4\)"),
        (lambda: ps.push_dense("d", torch.ones(3)), ValueError, r"should have \(2, 3\)"),
        (lambda: ps.lookup_bag("t", INDICES, torch.tensor([0])), ValueError, "dimensions"),
        (lambda: ps.lookup_bag("t", INDICES[0], torch.tensor([1])), ValueError, "rise from 0"),
        (lambda: ps.lookup_bag("t", INDICES[0], torch.tensor([0, 3])), ValueError, "rise from 0"),
        (lambda: ps.lookup_bag("t", INDICES[0], torch.tensor([0]), mode="max"), ValueError, "mode"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_words(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_service_time_is_added_to_each_call() -> None:
    ps.set_service_time(0.05)
    start = time.perf_counter()
    ps.lookup("t", INDICES)
    assert time.perf_counter() - start >= 0.05


@pytest.mark.parametrize("per, times", [("item", 3), ("call", 1)])
def test_a_batched_form_adds_the_service_time_for_each_item_or_once(per: Any, times: int) -> None:
    ps.set_service_time(0.05, per=per)
    start = time.perf_counter()
    rows = ps.lookup_many([(("t", INDICES + place), {}) for place in range(3)])
    assert time.perf_counter() - start >= 0.05 * times
    ps.set_service_time(0.0)
    assert all(torch.equal(each, ps.lookup("t", INDICES + place)) for place, each in enumerate(rows))


def test_batched_forms_serve_what_the_single_calls_do() -> None:
    indices, offsets = INDICES.reshape(-1), torch.tensor([0, 1])
    bags = ps.lookup_bags([(("t", indices, offsets), {}), (("t", indices, offsets), {"mode": "mean"})])
    assert torch.equal(bags[0], ps.lookup_bag("t", indices, offsets))
    assert torch.equal(bags[1], ps.lookup_bag("t", indices, offsets, mode="mean"))
    with pytest.raises(IndexError, match="no row 99"):
        ps.lookup_many([(("t", INDICES), {}), (("t", torch.tensor([99])), {})])


@pytest.mark.slow
def test_of_calls_in_one_message_the_first_adds_a_service_time_that_is_paid_per_call() -> None:
    with rpc_world(server("sgd"), Server(name="ps1")):
        calls: list[batch.Call] = [(ps.lookup, ("t", INDICES), {})] * 20

        def took_s() -> float:
            start = time.perf_counter()
            rpc.rpc_sync("ps0", batch.run_in_order, args=(calls,))
            return time.perf_counter() - start

        rpc.rpc_sync("ps0", ps.set_service_time, args=(0.05, "item"))
        assert took_s() >= 20 * 0.05
        rpc.rpc_sync("ps0", ps.set_service_time, args=(0.05, "call"))
        assert 0.05 <= undisturbed(took_s, lambda seconds: seconds < 5 * 0.05) < 5 * 0.05


def test_contracts_name_functions_that_resolve() -> None:
    for function in (ps.lookup, ps.lookup_bag, ps.pull):
        contract = contract_of(function)
        assert contract is not None
        assert contract.is_read
        assert contract.gradient is not None
        assert callable(functions.resolve(contract.gradient))
        if contract.batched_by is not None:
            assert callable(functions.resolve(contract.batched_by))
    assert functions.resolve("fxlib.ps:lookup") is ps.lookup


def test_placement_spreads_tables_by_size() -> None:
    sizes = [100, 10, 60, 50]
    servers = ps.place([Table(name=f"t{i}", rows=rows, dim=1) for i, rows in enumerate(sizes)], ["a", "b"])
    assert [[table.name for table in each.tables] for each in servers] == [["t0", "t1"], ["t2", "t3"]]
    with pytest.raises(ValueError, match="no server"):
        ps.place([], [])


def test_it_serves_over_rpc() -> None:
    with rpc_world(server("sgd"), Server(name="ps1")):
        rows = rpc.rpc_sync("ps0", ps.lookup, args=("t", INDICES))
        assert rows.shape == (2, 2, DIM)
        rpc.rpc_sync("ps0", ps.push, args=("t", INDICES, torch.ones(2, 2, DIM)))
        assert not torch.equal(rpc.rpc_sync("ps0", ps.lookup, args=("t", INDICES)), rows)
        with pytest.raises(
            RuntimeError, match=r"(?s)IndexError.*no row 99"
        ):  # as RPC raises an IndexError of the server
            rpc.rpc_sync("ps0", ps.lookup, args=("t", torch.tensor([99])))
        with pytest.raises(RuntimeError, match=r"(?s)WorkloadError.*no 't'"):
            rpc.rpc_sync("ps1", ps.lookup, args=("t", INDICES))


def test_distributed_autograd_carries_gradients_to_the_table() -> None:
    with rpc_world(server("sgd"), Server(name="ps1")), dist_autograd.context() as context:
        every = torch.arange(ROWS)
        before = rpc.rpc_sync("ps0", ps.lookup, args=("t", every))
        rows = rpc.rpc_sync("ps0", ps.lookup_attached, args=("t", INDICES))
        dist_autograd.backward(context, [(rows * 2).sum()])
        gradient = rpc.rpc_sync("ps0", ps.gradients, args=(context,))["t"]
        assert gradient.sum() == 2 * rows.numel()
        rpc.rpc_sync("ps0", ps.step, args=(context,))
        assert torch.equal(rpc.rpc_sync("ps0", ps.lookup, args=("t", every)), before - LR * gradient)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_what_was_saved_goes_on_where_it_stopped(tmp_path: Path, optimizer: str) -> None:
    def steps() -> str:
        for value in (1.0, 2.0):
            ps.push("t", INDICES, torch.full((2, 2, DIM), value))
            ps.push_dense("d", torch.full((2, 3), value))
        return ps.state_digest()

    ps.setup(server(optimizer), seed=1)
    steps()
    ps.save(str(tmp_path))
    after = steps()
    ps.setup(server(optimizer), seed=2)
    ps.load(str(tmp_path))
    assert steps() == after
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dense.d.safetensors", "table.t.safetensors"]


def test_a_table_may_be_loaded_by_another_server(tmp_path: Path) -> None:
    rows = table()
    ps.save(str(tmp_path))
    ps.setup(Server(name="ps7", tables=(Table(name="t", rows=ROWS, dim=DIM),)), seed=5)
    ps.load(str(tmp_path))
    assert torch.equal(table(), rows)


def test_nothing_is_loaded_where_a_part_is_missing_or_of_another_size(tmp_path: Path) -> None:
    ps.save(str(tmp_path))
    more = Server(name="ps0", tables=(Table(name="t", rows=ROWS, dim=DIM), Table(name="u/v", rows=3, dim=1)))
    ps.setup(more, seed=5)
    before = ps.state_digest()
    with pytest.raises(WorkloadError, match=r"nothing was saved as .*table\.u%2Fv\.safetensors"):
        ps.load(str(tmp_path))
    assert ps.state_digest() == before
    ps.setup(Server(name="ps0", tables=(Table(name="t", rows=ROWS, dim=DIM, optimizer="adagrad"),)), seed=5)
    with pytest.raises(WorkloadError, match="is of another size or dtype, or of another optimizer"):
        ps.load(str(tmp_path))


@pytest.mark.parametrize("size", [0, 4, 60])
def test_a_file_that_was_cut_off_is_not_loaded(tmp_path: Path, size: int) -> None:
    ps.save(str(tmp_path))
    before = ps.state_digest()
    os.truncate(tmp_path / "table.t.safetensors", size)
    with pytest.raises(WorkloadError, match=r"table\.t\.safetensors cannot be read"):
        ps.load(str(tmp_path))
    assert ps.state_digest() == before


def test_a_file_of_another_server_is_not_overwritten(tmp_path: Path) -> None:
    other = Server(name="ps7", tables=(Table(name="own", rows=3, dim=1), Table(name="t", rows=ROWS, dim=DIM)))
    ps.save(str(tmp_path))
    ps.save(str(tmp_path))  # its own, again
    rows = table()
    ps.setup(other, seed=5)
    with pytest.raises(WorkloadError, match=r"'ps7': .*table\.t\.safetensors was saved by server 'ps0'.*a folder"):
        ps.save(str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dense.d.safetensors", "table.t.safetensors"]
    ps.save(str(tmp_path / "ps7"))
    ps.setup(server("sgd"), seed=2)
    ps.load(str(tmp_path))
    assert torch.equal(table(), rows)


def test_of_servers_that_save_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_late(*given: Any, **named: Any) -> None:
        monkeypatch.undo()
        ps.save(str(tmp_path))
        save_file(*given, **named)

    late = ServerState(Server(name="ps7", tables=(Table(name="t", rows=ROWS, dim=DIM),)), seed=5)
    monkeypatch.setattr(state, "save_file", save_late)
    with pytest.raises(WorkloadError, match="was saved by server 'ps0'"):
        late.save(str(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dense.d.safetensors", "table.t.safetensors"]


def test_a_file_without_a_writer_is_overwritten_and_one_of_another_dtype_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "table.t.safetensors"
    ps.save(str(tmp_path))
    save_file({name: each.to(torch.int8) for name, each in load_file(file).items()}, file)
    before = ps.state_digest()
    with pytest.raises(WorkloadError, match="is of another size or dtype"):
        ps.load(str(tmp_path))
    assert ps.state_digest() == before
    ps.save(str(tmp_path))
    ps.load(str(tmp_path))
    file.write_bytes(b"no tensors")
    ps.save(str(tmp_path))
    ps.load(str(tmp_path))
    assert ps.state_digest() == before


@pytest.mark.parametrize("name", ["save", "load"])
def test_no_graph_can_have_a_server_write_or_read_files(name: str) -> None:
    with pytest.raises(ContractError, match="no remote function"):
        functions.resolve(f"fxlib.ps:{name}")


@pytest.mark.slow
def test_a_meeting_that_torchrun_never_serves_is_explained_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there, nowhere = (rpc.TensorPipeRpcBackendOptions(init_method=each) for each in ("env://", "tcp://localhost:1"))
    ps.check_meeting(nowhere)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    ps.check_meeting(there)
    with pytest.raises(WorkloadError, match="nobody serves a store at tcp://localhost:1"):
        ps.serve(server("sgd"), rank=0, world_size=1, options=nowhere)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(WorkloadError, match=r"holds what those before have left.*Call fxlib.ps.use_own_store"):
        ps.serve(server("sgd"), rank=0, world_size=1, options=there)


RESTARTED = """
import os, signal
import torch
from torch.distributed import rpc
from fxlib import ps, Server, Table

ps.use_own_store()
rank, size, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
options = rpc.TensorPipeRpcBackendOptions(init_method="env://")
if rank == size - 1:
    server = Server(name="ps0", tables=[Table(name="rows", rows=10, dim=4)])
    ps.serve(server, rank=rank, world_size=size, options=options)
else:
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    found = rpc.rpc_sync("ps0", ps.lookup, args=("rows", torch.arange(3)))
    if rank == 0 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    print("found", attempt, tuple(found.shape), flush=True)
    rpc.shutdown()
"""


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_meets_again(tmp_path: Path) -> None:
    program = tmp_path / "restarted.py"
    program.write_text(RESTARTED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--max-restarts",
        "1",
        str(program),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("found 1 (3, 4)") == 2
