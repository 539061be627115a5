"""Damaged graphs: decoding works, or raises WireError; nothing else, ever."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxlib import wire
from fxlib.errors import WireError
from fxlib.runtime.ops import issue_call, wait
from fxlib.spec.contract import Contract
from tests.shared.many import many

LIMITS = wire.Limits(weights_bytes=1 << 20)
NUMBERS = [0, 1, 2, 3, 5, 17, 127, 255, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, -1, -(1 << 63)]
TEXTS = [
    "",
    "x",
    "self",
    "__class__",
    "forward",
    "weight",
    "part",
    "a b",
    "torch.add",
    "float32",
    "*args",
    "Linear",
    "π",
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.LSTM(3, 3, batch_first=True))
        self.norm = nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, k: int = 2, **rest: Any) -> Any:
        y, _ = self.part(x[:, 1:, ...] * self.weight)
        y = torch.add(y, 1.5, alpha=k).view(-1, 3).to(torch.float64)
        return {"y": self.norm(y), "z": (y.shape[0], y.dtype, [slice(y, None, 2)], 2**80, 1 + 2j)}


def seeds() -> list[wire.Encoded]:
    module = symbolic_trace(Model())
    node = list(module.graph.nodes)[4]
    node.meta.update(order=3, call="c", source="m.py:3", stack_trace="a\nb", requires_grad=True)
    node.meta["contract"] = Contract(reads=frozenset({"t"}), gradient="a:b", batched_by=".c")
    node.type = dict[str, torch.Tensor | int]
    graph = Graph()
    x = graph.placeholder("x")
    future = graph.call_function(issue_call, ("ps0", "m:f", (x,), {"a": 1}, 1.5))
    graph.output(graph.call_function(wait, (future,)))
    pytree = torch.fx.symbolic_trace(
        lambda x: {"y": x["a"] + x["b"]}, concrete_args={"x": {"a": torch.fx.PH, "b": torch.fx.PH}}
    )
    exported = torch.export.export(Small(), (torch.ones(2),), {"bias": torch.ones(2)}, strict=False)
    modules = [module, GraphModule(nn.Module(), graph), pytree, exported.module(check_guards=False)]
    return [wire.encode(module, weights=True) for module in modules]


class Small(nn.Module):
    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        return x + bias


def attempt(data: bytes, encoded: wire.Encoded) -> bool:
    """Whether the damage went unnoticed."""
    try:
        wire.decode(wire.parse(data), blobs=encoded.blobs, limits=LIMITS)
    except WireError:
        return False
    return True


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(len(damaged))
        match rng.randrange(4):
            case 0:
                damaged[place] ^= 1 << rng.randrange(8)
            case 1:
                damaged[place] = rng.randrange(256)
            case 2:
                del damaged[place : place + rng.randrange(1, 9)]
            case _:
                damaged[place:place] = damaged[rng.randrange(len(damaged)) :][: rng.randrange(1, 20)]
        if not damaged:
            break
    return bytes(damaged)


def messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                yield from messages(each)


def damage_fields(message: Message, rng: random.Random) -> None:
    """Change one field of one part to something that can be read."""
    part = rng.choice(list(messages(message)))
    fields: Any = part.DESCRIPTOR.fields
    field: FieldDescriptor = rng.choice(list(fields))
    if field.is_repeated:
        values = getattr(part, field.name)
        if len(values) and rng.random() < 0.5:
            del values[rng.randrange(len(values))]
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            values.append(like(field, message, rng))
        else:
            values.append(scalar(field, rng))
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(part, field.name).CopyFrom(like(field, message, rng))
    else:
        setattr(part, field.name, scalar(field, rng))


def like(field: FieldDescriptor, message: Message, rng: random.Random) -> Message:
    """A copy of some part of the message that the field could hold."""
    assert field.message_type is not None
    found = [each for each in messages(message) if each.DESCRIPTOR is field.message_type]
    copied: Message = GetMessageClass(field.message_type)()
    if found:
        copied.CopyFrom(rng.choice(found))
    return copied


def scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    kinds: dict[int, list[Any]] = {
        FieldDescriptor.TYPE_BOOL: [True, False],
        FieldDescriptor.TYPE_STRING: TEXTS,
        FieldDescriptor.TYPE_BYTES: [b"", b"\xff", b"\0" * 9],
        FieldDescriptor.TYPE_DOUBLE: [0.0, -1.5, float("nan"), float("inf")],
        FieldDescriptor.TYPE_UINT32: [number for number in NUMBERS if 0 <= number < 1 << 32],
        FieldDescriptor.TYPE_ENUM: [0, 1, 2, 3, 4, 5, 6, 7],
    }
    return rng.choice(kinds.get(field.type, NUMBERS))


@pytest.mark.slow
def test_damaged_bytes_decode_or_are_refused() -> None:
    rng = random.Random(1)
    for encoded in seeds():
        data = wire.serialize(encoded.graph)
        assert attempt(data, encoded)
        assert not any(attempt(data[:length], encoded) for length in rng.sample(range(len(data)), 20))
        for _ in range(many(60)):
            attempt(damage_bytes(data, rng), encoded)


@pytest.mark.slow
def test_damaged_fields_decode_or_are_refused() -> None:
    rng = random.Random(2)
    for encoded in seeds():
        for _ in range(many(60)):
            damaged = type(encoded.graph)()
            damaged.CopyFrom(encoded.graph)
            for _ in range(rng.choice([1, 1, 2, 4])):
                damage_fields(damaged, rng)
            attempt(wire.serialize(damaged), encoded)
