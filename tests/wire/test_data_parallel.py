"""DistributedDataParallel on the wire: what describes one is data, and checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from fxlib import wire
from fxlib.errors import WireError
from fxlib.runtime.data_parallel import DataParallel, DataParallelOptions
from fxlib.v1 import graph_pb2 as pb
from tests.wire.support import graph_of, round_trip

OPTIONS = DataParallelOptions(
    forward_sync_buffers=False,
    find_unused_parameters=True,
    gradient_as_bucket_view=True,
    static_graph=True,
    skip_all_reduce_unused_params=True,
    batched_grad_copy=True,
    bucket_cap_mb=0.5,
    hook="allreduce_hook",
)


def wrapped(options: DataParallelOptions = OPTIONS, oddity: str = "") -> nn.Module:
    root = nn.Module()
    root.dense = DataParallel(nn.Linear(2, 2), options, group="7", ranks=4, oddity=oddity)
    return root


@pytest.mark.parametrize("options", [OPTIONS, DataParallelOptions()])
def test_all_that_is_known_of_it_comes_back(options: DataParallelOptions) -> None:
    module = graph_of(lambda graph, x: graph.call_module("dense", (x,)), wrapped(options, "a hook of its own"))
    dense = round_trip(module).dense
    assert (dense.options, dense.group, dense.ranks, dense.oddity) == (options, "7", 4, "a hook of its own")
    assert type(dense.module) is nn.Linear


def is_empty(module: pb.Module) -> None:
    del module.children[:]


def holds_two(module: pb.Module) -> None:
    module.children.add(name="other", module=0)


def holds_another(module: pb.Module) -> None:
    module.children[0].name = "reducer"


def holds_nothing(module: pb.Module) -> None:
    module.children[0].ClearField("module")


def has_an_attribute(module: pb.Module) -> None:
    module.attributes.add(name="process_group").value.integer = 1


def names_a_hook(module: pb.Module) -> None:
    module.parallel.hook = "os.system"


def has_no_ranks(module: pb.Module) -> None:
    module.parallel.ranks = 0


def has_no_size(module: pb.Module) -> None:
    module.parallel.bucket_cap_mb = float("nan")


def names_a_group(module: pb.Module) -> None:
    module.parallel.group = "0'\n"


def ends_a_comment(module: pb.Module) -> None:
    module.parallel.oddity = '"""'


@pytest.mark.parametrize(
    "spoil",
    [
        *(is_empty, holds_two, holds_another, holds_nothing, has_an_attribute),
        *(names_a_hook, has_no_ranks, has_no_size, names_a_group, ends_a_comment),
    ],
)
def test_a_message_that_no_encoder_writes_is_refused(spoil: Callable[[pb.Module], None]) -> None:
    graph = wire.encode(graph_of(lambda graph, x: graph.call_module("dense", (x,)), wrapped())).graph
    spoil(next(each for each in graph.modules if each.WhichOneof("kind") == "parallel"))
    with pytest.raises(WireError):
        wire.decode(graph)
