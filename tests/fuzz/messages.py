"""Mutates protobuf messages field by field, so that a changed message still parses and reaches what lies behind it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

NUMBERS = (0, 1, 2, 3, 5, 17, 127, 255, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, -1, -(1 << 63))
FRACTIONS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", "x", "self", "__class__", "forward", "weight", "part", "a b", "torch.add", "float32", "*args", "Linear"),
    *("π", "\x1b[2J", "\u202e", "0", "default", "a.b:c", ".c", "x" * 300, "\n", '"""', "ps0", "import os"),
)
_STAY = 0.25
"""The share of walks that end at a message though others are in it."""
_WALKS = 4
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def some_part(message: Message, rng: random.Random) -> Message:
    """Return a message, or one in it, found by a walk downwards: to look at all of them takes longer than reading."""
    part = message
    while rng.random() > _STAY and (inner := _inside(part, rng, _held(part.DESCRIPTOR))) is not None:
        part = inner
    return part


def part_of_kind(message: Message, kind: Descriptor, rng: random.Random) -> Message | None:
    """Return a part of this kind, if one of a few walks finds any."""
    for _ in range(_WALKS):
        part: Message | None = message
        while part is not None:
            if part.DESCRIPTOR is kind and rng.random() < 0.7:
                return part
            part = _inside(part, rng, _leading_to(part.DESCRIPTOR, kind))
    return None


def _inside(part: Message, rng: random.Random, fields: Sequence[FieldDescriptor]) -> Message | None:
    """Return one of the messages that these fields of a part hold; a field counts as often as it holds one."""
    there = []
    for field in fields:
        if field.is_repeated:
            value = getattr(part, field.name)
            if count := len(value):
                there.append((count, field, value))
        elif part.HasField(field.name):
            there.append((1, field, None))
    if not there:
        return None
    field, value = rng.choices([found[1:] for found in there], [count for count, *_ in there])[0]
    if value is None:
        inner: Message = getattr(part, field.name)
        return inner
    return value[rng.choice(sorted(value))] if is_map(field) else value[rng.randrange(len(value))]


@cache
def _held(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields of a kind of message that hold messages."""
    return tuple(field for field in kind.fields if _message_of(field) is not None)


@cache
def _leading_to(kind: Descriptor, wanted: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields of a kind of message in which messages of the wanted kind may be, however deep."""
    return tuple(field for field in _held(kind) if wanted in _below(_message_of(field)))


@cache
def _below(kind: Descriptor | None) -> frozenset[Descriptor]:
    found, left = set[Descriptor](), [kind]
    while left:
        each = left.pop()
        if each is not None and each not in found:
            found.add(each)
            left += map(_message_of, each.fields)
    return frozenset(found)


def _message_of(field: FieldDescriptor) -> Descriptor | None:
    """Return the kind of the messages that a field holds, those of a map's values, too; None: it holds none."""
    kind = field.message_type
    if kind is None or not is_map(field):
        return kind
    return kind.fields_by_name["value"].message_type


@cache
def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def mutate(message: Message, rng: random.Random, words: Sequence[str] = TEXTS, other: Message | None = None) -> None:
    """Change one field of one part, or swap, repeat or drop a part; `other` is a message that parts may come from."""
    part = some_part(message, rng)
    fields = _fields(part.DESCRIPTOR)
    if not fields:
        return
    there = [field for field, _ in part.ListFields()]
    field = rng.choice(there) if there and rng.random() < 0.6 else rng.choice(fields)
    if rng.random() < 0.08:
        part.ClearField(field.name)
    elif is_map(field):
        _mutate_map(getattr(part, field.name), field, rng, words)
    elif field.is_repeated:
        _mutate_items(part, field, message, rng, words, other=other)
    elif field.message_type is not None:
        getattr(part, field.name).CopyFrom(_like(field, message, rng, other))
    else:
        setattr(part, field.name, _scalar(field, getattr(part, field.name), message, rng, words))


@cache
def _fields(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    return tuple(kind.fields)


def _mutate_items(
    part: Message,
    field: FieldDescriptor,
    message: Message,
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
        items.append(_like(field, message, rng, other))
    elif choice == 3 and len(items):
        items[place] = _scalar(field, items[place], message, rng, words)
    else:
        items.append(_scalar(field, None, message, rng, words))


def _mutate_map(entries: Any, field: FieldDescriptor, rng: random.Random, words: Sequence[str]) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if entries and rng.random() < 0.3:
        del entries[rng.choice(list(entries))]
        return
    name = _scalar(key, None, None, rng, words)
    if value.message_type is not None:
        entries[name].SetInParent()
    else:
        entries[name] = _scalar(value, None, None, rng, words)


def _like(field: FieldDescriptor, message: Message, rng: random.Random, other: Message | None) -> Message:
    """Return a copy of some part of the message, or of the other one, that the field could hold; or an empty one."""
    assert field.message_type is not None
    pool = message if other is None or rng.random() < 0.5 else other
    found = part_of_kind(pool, field.message_type, rng) if rng.random() < 0.9 else None
    made: Message = GetMessageClass(field.message_type)()
    if found is not None:
        made.CopyFrom(found)
    return made


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    made = type(value)()
    made.CopyFrom(value)
    return made


def _scalar(
    field: FieldDescriptor, present: Any, message: Message | None, rng: random.Random, words: Sequence[str]
) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return not present
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"", b"\xff", bytes(9), rng.randbytes(32)))
        case FieldDescriptor.CPPTYPE_STRING:
            return _text(str(present or ""), message, rng, words)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice((*FRACTIONS, (present or 1.0) * 2, -(present or 1.0)))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.randrange(9)
    low, high = _RANGES[field.cpp_type]
    near = (present or 0) + rng.choice((-2, -1, 1, 2))
    number = near if rng.random() < 0.6 else rng.choice(NUMBERS)
    return min(max(number, low), high)


def _text(present: str, message: Message | None, rng: random.Random, words: Sequence[str]) -> str:
    choice = rng.random()
    if choice < 0.55:
        return rng.choice(words)
    if choice < 0.65:
        return rng.choice(TEXTS)
    if choice < 0.8 and message is not None:
        found = [
            value
            for field, value in some_part(message, rng).ListFields()
            if isinstance(value, str) and field.type == FieldDescriptor.TYPE_STRING
        ]
        return rng.choice(found or TEXTS)
    place = rng.randrange(len(present) + 1)
    return present[:place] + rng.choice(TEXTS)[:8] + present[place + rng.randrange(3) :]
