"""Inputs of a step may be nests of any depth: they travel as data, and the reader has no code of the client's."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey

import fxlib
from fxlib import protocol, wire
from fxlib.errors import WireError, WorkloadError
from fxlib.spec.inputs import Batch, BatchSpec, Tensors, draw
from fxlib.utils import pytree
from fxlib.v1 import graph_pb2, workload_pb2
from fxlib.wire.opaque import opaque_record

pytestmark = pytest.mark.slow


class State(NamedTuple):
    hidden: Tensor
    cell: Tensor


@dataclass
class Features:
    rows: Tensor
    scale: float
    state: State | None = None


class Bag(OrderedDict[str, Tensor]):
    """A container of a class that only this process has."""


torch.utils._pytree.register_pytree_node(
    Bag,
    lambda bag: (list(bag.values()), list(bag)),
    lambda parts, names: Bag(zip(names, parts, strict=True)),
    flatten_with_keys_fn=lambda bag: ([(MappingKey(name), part) for name, part in bag.items()], list(bag)),
)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, (h, c) = self.cell(x, hidden)
        return out, (h * 2, c)


class Reads(nn.Module):
    def forward(self, features: Features, *, extra: dict[str, Any]) -> Tensor:
        total = features.rows * features.scale + extra["more"][0]
        return total if features.state is None else total + features.state.hidden


def _states() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 2, 4), torch.randn(1, 2, 4)


def _sent(batch: Batch) -> Batch:
    return protocol.batch_from_bytes(protocol.batch_to_bytes(batch))


def _workload_sent(workload: fxlib.Workload) -> fxlib.Workload:
    encoded = protocol.workload_to_proto(workload)
    return protocol.workload_from_proto(encoded.message, encoded.blobs)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_recurrent_model_takes_its_state_in_a_tuple(how: Any) -> None:
    model, batch = Recurrent(), (torch.randn(2, 3, 4), _states())
    captured = fxlib.capture(model, sample_inputs=batch, how=how)
    there = wire.decode(wire.encode(captured).graph, root=captured)
    for workload in (fxlib.Workload(batches=[batch]), fxlib.Workload.describe([batch], count=2)):
        read = _workload_sent(workload)
        (each, *_) = read.samples
        expected, (h, c) = model(*each.inputs)
        found, state = there(*each.inputs)
        assert torch.equal(found, expected)
        assert torch.equal(state[0], h)
        assert torch.equal(state[1], c)


def test_dataclasses_and_named_tuples_arrive_as_stand_ins_with_their_fields() -> None:
    features = Features(torch.randn(1, 2, 4), 0.5, State(*_states()))
    batch = Batch(inputs=(features,), kwargs={"extra": {"more": [torch.ones(4), None, "text", 3]}})
    captured = fxlib.capture(Reads(), concrete_args=None)
    arrived = _sent(fxlib.Workload(batches=[batch]).real_batches[0])
    assert type(arrived.inputs[0]) is not Features
    assert arrived.inputs[0].scale == 0.5
    assert arrived.kwargs["extra"]["more"][1:] == [None, "text", 3]
    assert arrived.named.keys() == batch.named.keys()
    assert torch.equal(captured(*arrived.inputs, **arrived.kwargs), Reads()(*batch.inputs, **batch.kwargs))


def test_a_container_of_a_registered_class_reaches_an_exported_graph_through_a_stand_in() -> None:
    def forward(x: Tensor, bag: Any) -> Any:
        return Bag(sum=x + bag["left"], right=bag["right"] * len(x))

    batch = (torch.ones(2), Bag(left=torch.randn(2), right=torch.randn(2)))
    captured = fxlib.capture(forward, sample_inputs=batch, how="export")
    arrived = _sent(fxlib.Workload(batches=[batch]).real_batches[0])
    found = wire.decode(wire.encode(captured).graph)(*arrived.inputs)
    assert torch.equal(found.sum, batch[0] + batch[1]["left"])
    assert dict(pytree.leaves(found, "output")).keys() == {"output['sum']", "output['right']"}


def test_a_tensor_that_stands_twice_arrives_as_one() -> None:
    shared = torch.randn(3)
    arrived = _sent(fxlib.Workload(batches=[(shared, [shared, torch.ones(2)])]).real_batches[0])
    assert arrived.inputs[0] is arrived.inputs[1][0]


def test_described_nests_are_drawn_with_their_structure_the_same_everywhere() -> None:
    batches = [(torch.randn(2), {"ids": torch.tensor([0, step + 4]), "flag": True}) for step in range(2)]
    spec = fxlib.Workload.describe(batches, count=3, seed=7).spec
    assert isinstance(spec, BatchSpec)
    read = protocol.spec_from_proto(protocol.spec_to_proto(spec))
    assert read == spec
    assert read.named["input.1['ids']"] == Tensors(shape=(2,), dtype=torch.int64, low=0, high=6)
    for one, other in zip(draw(spec, 7), draw(read, 7), strict=True):
        assert one.inputs[1]["flag"] is True
        assert all(torch.equal(one.named[name], other.named[name]) for name in one.named)


def test_numbers_of_numpy_become_pythons() -> None:
    (batch,) = fxlib.Workload(batches=[(torch.ones(1), [np.int64(3), np.float32(0.5), np.bool_(True)])]).real_batches
    assert [type(each) for each in batch.inputs[1]] == [int, float, bool]
    assert batch.inputs[1] == [3, 0.5, True]


def test_what_is_no_data_is_refused_with_its_place() -> None:
    with pytest.raises(WorkloadError, match=r"batches\[0\] input.0\['f'\]: an input of type function cannot be sent"):
        fxlib.Workload(batches=[({"f": lambda: 0},)])
    with pytest.raises(WorkloadError, match=r"batches\[1\]: is nested as"):
        fxlib.Workload(batches=[([torch.ones(1)],), ((torch.ones(1),),)])
    with pytest.raises(WorkloadError, match=r"input.1: is not a tensor and differs between batches"):
        fxlib.Workload.describe([(torch.ones(1), 3), (torch.ones(1), 4)])
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(WorkloadError, match="holds itself"):
        fxlib.Workload(batches=[(endless,)])
    for make in (lambda many: fxlib.Workload(batches=[(many,)]), lambda many: BatchSpec(inputs=(many,))):
        begun = time.monotonic()
        with pytest.raises(WorkloadError, match=r"more than 65,536 values\. Make tensors of long lists"):
            make([1] * 2**20)
        assert time.monotonic() - begun < 5


def test_received_nests_are_bounded_and_hold_data_alone() -> None:
    deep: Any = torch.ones(1)
    for _ in range(40):
        deep = [deep]
    with pytest.raises(WireError, match="nesting"):
        protocol.workload_to_proto(fxlib.Workload(batches=[(deep,)]))
    for bad in (
        graph_pb2.Value(function="torch.relu"),
        graph_pb2.Value(opaque="x"),
        graph_pb2.Value(node=0),
        graph_pb2.Value(tensor=1),
        graph_pb2.Value(record=graph_pb2.NamedTuple(name="a.B", fields=["class"], items=[graph_pb2.Value(none=True)])),
    ):
        spec = workload_pb2.BatchSpec(count=1)
        nested = spec.nested
        nested.tensors.add(shape=[1], dtype="float32")
        nested.structure.tuple.items.add().tuple.items.add().CopyFrom(bad)
        nested.structure.tuple.items.add().dict.SetInParent()
        with pytest.raises(WireError, match=r"Workload\.description"):
            protocol.spec_from_proto(spec)


def test_stand_ins_for_the_classes_of_others_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.exec", _not_called)  # which Python's dataclasses use for methods made of names
    registered = len(torch.utils._pytree.SUPPORTED_NODES)
    for number in range(600):
        spec = workload_pb2.BatchSpec(count=1)
        for _ in range(2):
            spec.nested.tensors.add(shape=[1], dtype="float32")
        inputs, named = (spec.nested.structure.tuple.items.add() for _ in range(2))
        named.dict.SetInParent()
        record, container = (inputs.tuple.items.add() for _ in range(2))
        record.record.name, container.container.name = f"m.Batch{number}", f"m.Bag{number}"
        record.record.fields.append("rows")
        record.record.items.add().tensor = 0
        container.container.context.none = True
        container.container.items.add().tensor = 1
        assert protocol.spec_to_proto(protocol.spec_from_proto(spec)) == spec
    assert len(torch.utils._pytree.SUPPORTED_NODES) == registered
    assert opaque_record.cache_info().currsize < 600


def _not_called(*_: object) -> None:
    raise AssertionError("code is made of received names")


def test_an_answer_names_no_class_of_containers_that_the_model_has_not() -> None:
    captured = fxlib.capture(lambda x: (x + 1, x * 2), sample_inputs=[torch.ones(2)], how="export")
    graph = wire.encode(captured).graph
    outputs = graph.modules[-1].graph.pytree.outputs
    items = [*outputs.tuple.items]
    outputs.container.name = "m.Ragged"
    outputs.container.context.none = True
    outputs.container.items.extend(items)
    with pytest.raises(WireError, match=r"'m\.Ragged' is not described as in the client's own graphs"):
        wire.decode(graph, root=captured)
    assert len(list(wire.decode(graph)(torch.ones(2)))) == 2
