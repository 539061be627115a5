"""Mutates protobuf messages field by field, so that a changed message still parses and reaches what lies behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

NUMBERS = (0, 1, 2, 3, 5, 17, 127, 255, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, -1, -(1 << 63))
FRACTIONS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", "x", "self", "__class__", "forward", "weight", "part", "a b", "torch.add", "float32", "*args", "Linear"),
    *("π", "\x1b[2J", "\u202e", "0", "default", "a.b:c", ".c", "x" * 300, "\n", '"""', "ps0", "import os"),
)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def parts_of(message: Message) -> Iterator[Message]:
    """Yield a message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if is_map(field):
            inner = field.message_type.fields_by_name["value"].message_type
            for each in value.values() if inner is not None else ():
                yield from parts_of(each)
        else:
            for each in value if field.is_repeated else [value]:
                yield from parts_of(each)


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def mutate(message: Message, rng: random.Random, words: Sequence[str] = TEXTS, other: Message | None = None) -> None:
    """Change one field of one part, or swap, repeat or drop a part; `other` is a message that parts may come from."""
    parts = list(parts_of(message))
    part = rng.choice(parts)
    fields: list[Any] = list(part.DESCRIPTOR.fields)
    if not fields:
        return
    there = [field for field, _ in part.ListFields()]
    field: FieldDescriptor = rng.choice(there) if there and rng.random() < 0.6 else rng.choice(fields)
    if rng.random() < 0.08:
        part.ClearField(field.name)
    elif is_map(field):
        _mutate_map(getattr(part, field.name), field, rng, words)
    elif field.is_repeated:
        _mutate_items(part, field, parts, rng, words, other=other)
    elif field.message_type is not None:
        getattr(part, field.name).CopyFrom(_like(field, parts, rng, other))
    else:
        setattr(part, field.name, _scalar(field, getattr(part, field.name), parts, rng, words))


def _mutate_items(
    part: Message,
    field: FieldDescriptor,
    parts: Sequence[Message],
    rng: random.Random,
    words: Sequence[str],
    *,
    other: Message | None,
) -> None:
    items = getattr(part, field.name)
    place = rng.randrange(len(items)) if len(items) else 0
    choice = rng.randrange(5)
    if choice == 0 and len(items):
        del items[place]
    elif choice == 1 and len(items) > 1:
        kept = list(items)
        kept.insert(rng.randrange(len(kept)), kept.pop(place))
        copies = [_copy(each) for each in kept]
        del items[:]
        items.extend(copies)
    elif choice == 2 and len(items):
        for _ in range(rng.choice([1, 2, 40])):
            items.extend([_copy(items[place])])
    elif field.message_type is not None:
        items.append(_like(field, parts, rng, other))
    elif choice == 3 and len(items):
        items[place] = _scalar(field, items[place], parts, rng, words)
    else:
        items.append(_scalar(field, None, parts, rng, words))


def _mutate_map(entries: Any, field: FieldDescriptor, rng: random.Random, words: Sequence[str]) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if entries and rng.random() < 0.3:
        del entries[rng.choice(list(entries))]
        return
    name = _scalar(key, None, (), rng, words)
    if value.message_type is not None:
        entries[name].SetInParent()
    else:
        entries[name] = _scalar(value, None, (), rng, words)


def _like(field: FieldDescriptor, parts: Sequence[Message], rng: random.Random, other: Message | None) -> Message:
    """Return a copy of some part of the message, or of the other one, that the field could hold; or an empty one."""
    assert field.message_type is not None
    pool = parts if other is None or rng.random() < 0.5 else list(parts_of(other))
    found = [each for each in pool if each.DESCRIPTOR is field.message_type]
    made: Message = GetMessageClass(field.message_type)()
    if found and rng.random() < 0.9:
        made.CopyFrom(rng.choice(found))
    return made


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    made = type(value)()
    made.CopyFrom(value)
    return made


def _scalar(
    field: FieldDescriptor, present: Any, parts: Sequence[Message], rng: random.Random, words: Sequence[str]
) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return not present
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"", b"\xff", bytes(9), rng.randbytes(32)))
        case FieldDescriptor.CPPTYPE_STRING:
            return _text(str(present or ""), parts, rng, words)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice((*FRACTIONS, (present or 1.0) * 2, -(present or 1.0)))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.randrange(9)
    low, high = _RANGES[field.cpp_type]
    near = (present or 0) + rng.choice((-2, -1, 1, 2))
    number = near if rng.random() < 0.6 else rng.choice(NUMBERS)
    return min(max(number, low), high)


def _text(present: str, parts: Sequence[Message], rng: random.Random, words: Sequence[str]) -> str:
    choice = rng.random()
    if choice < 0.55:
        return rng.choice(words)
    if choice < 0.65:
        return rng.choice(TEXTS)
    if choice < 0.8 and parts:
        found = [
            value
            for field, value in rng.choice(parts).ListFields()
            if isinstance(value, str) and field.type == FieldDescriptor.TYPE_STRING
        ]
        return rng.choice(found or TEXTS)
    place = rng.randrange(len(present) + 1)
    return present[:place] + rng.choice(TEXTS)[:8] + present[place + rng.randrange(3) :]
