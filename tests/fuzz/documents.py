"""Changes documents of JSON value by value, so that a changed document still parses and reaches what lies behind it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.fuzz.messages import FRACTIONS, NUMBERS

_DESCEND = 0.7
_OTHERS: tuple[Any, ...] = (None, True, False, "", [], {}, 0, -1, 1 << 70, 0.5, [[]], {"x": 1})


def change_document(data: bytes, rng: random.Random, words: Sequence[str], other: bytes) -> bytes | None:
    """Return the document with one to six changes, some of them from another one; None if it is none."""
    try:
        document = json.loads(data)
        beside = json.loads(other) if other else None
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        document = _changed(document, rng, words, beside)
    return json.dumps(document).encode()


def _changed(value: Any, rng: random.Random, words: Sequence[str], other: Any) -> Any:
    """Return a value with one change, at some depth."""
    if isinstance(value, list) and value and rng.random() < _DESCEND:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(value[place], rng, words, other), *value[place + 1 :]]
    if isinstance(value, dict) and value and rng.random() < _DESCEND:
        name = rng.choice(list(value))
        return {**value, name: _changed(value[name], rng, words, other)}
    if isinstance(value, list) and rng.random() < 0.8:
        return _changed_list(value, rng, words, other)
    if isinstance(value, dict) and rng.random() < 0.8:
        return _changed_object(value, rng, words, other)
    return _another(value, rng, words, other)


def _changed_list(value: list[Any], rng: random.Random, words: Sequence[str], other: Any) -> list[Any]:
    place = rng.randrange(len(value) + 1)
    if value and rng.random() < 0.3:
        return value[:place] + value[place + 1 :]
    again = value[place : place + 1] * rng.choice((1, 1, 40))
    return [*value[:place], *(again or [_another(None, rng, words, other)]), *value[place:]]


def _changed_object(value: dict[str, Any], rng: random.Random, words: Sequence[str], other: Any) -> dict[str, Any]:
    kept = dict(value)
    name = rng.choice(list(value)) if value else ""
    choice = rng.randrange(3)
    if choice == 0 and value:
        del kept[name]
    elif choice == 1 and value:
        kept[rng.choice(words)] = kept.pop(name)
    else:
        kept[rng.choice(words)] = _another(None, rng, words, other)
    return kept


def _another(value: Any, rng: random.Random, words: Sequence[str], other: Any) -> Any:
    """Return something in place of a value, more often than not of its own type."""
    choice = rng.random()
    if choice < 0.2:
        return rng.choice(_OTHERS)
    if choice < 0.35:
        return _part(other, rng)
    if isinstance(value, str):
        place = rng.randrange(len(value) + 1)
        return rng.choice((rng.choice(words), value[:place] + rng.choice(words)[:8] + value[place + 1 :]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + rng.choice((-2, -1, 1, 2)), rng.choice(NUMBERS)))
    if isinstance(value, float):
        return rng.choice((*FRACTIONS, -value, value * 2))
    return rng.choice((rng.choice(words), rng.choice(_OTHERS), rng.choice(NUMBERS)))


def _part(value: Any, rng: random.Random) -> Any:
    """Return some part of a value."""
    while rng.random() < _DESCEND:
        if isinstance(value, list) and value:
            value = rng.choice(value)
        elif isinstance(value, dict) and value:
            value = rng.choice(list(value.values()))
        else:
            break
    return value
