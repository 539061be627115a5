"""What a target of fuzzing is: a parser, inputs to begin with, and how others are made of them."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from fxlib.errors import FxlibError
from tests.fuzz.messages import TEXTS, mutate

_LONGEST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser, and what to try on it.

    Attributes:
        read: reads an input; what it refuses, it refuses by an exception of `refusals`.
        seeds: returns inputs to begin with.
        readers: the reader of each kind of message, where the input is one; `read` is then made of them.
        words: returns names that mean something to the parser.
        refusals: exceptions by which an input is refused.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    readers: Mapping[type[Message], Callable[[Any], object]] = field(default_factory=dict)
    words: Callable[[], Sequence[str]] = lambda: TEXTS
    refusals: tuple[type[Exception], ...] = (FxlibError,)

    def mutated(self, data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
        """Return an input like this one, changed field by field if it is a message, and byte by byte if not."""
        kinds = list(self.readers)
        if not kinds:
            return _changed(data, rng, self.words())
        kind = kinds[data[0] % len(kinds)] if data else kinds[0]
        try:
            message = kind.FromString(data[1:])
            beside = kind.FromString(other[1:]) if other and kinds[other[0] % len(kinds)] is kind else None
        except DecodeError:
            return _changed(data, rng, self.words())
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            mutate(message, rng, self.words(), beside)
        changed = data[:1] + message.SerializePartialToString(deterministic=True)
        return changed if len(changed) <= _LONGEST else data


def _changed(data: bytes, rng: random.Random, words: Sequence[str]) -> bytes:
    """Change a few bytes, or put a word among them."""
    changed = bytearray(data or b" ")
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                del changed[place : place + rng.choice((1, 1, 8, 64))]
            case 2:
                changed[place:place] = rng.choice(words).encode("utf-8", "surrogatepass")
            case 3:
                begin = rng.randrange(len(changed) + 1)
                changed[place:place] = changed[begin : begin + rng.randrange(1, 40)] * rng.choice((1, 1, 2, 60))
            case _:
                changed[place:place] = rng.choice(string.printable).encode()
    return bytes(changed[:_LONGEST])


def of_messages(
    name: str,
    readers: Mapping[type[Message], Callable[[Any], object]],
    seeds: Callable[[], Sequence[Message]],
    *,
    words: Callable[[], Sequence[str]] = lambda: TEXTS,
    refusals: tuple[type[Exception], ...] = (FxlibError,),
) -> Target:
    """Make a target that reads messages of several kinds."""
    kinds = list(readers)

    def read(data: bytes) -> object:
        if not data:
            return None
        kind = kinds[data[0] % len(kinds)]
        return readers[kind](kind.FromString(data[1:]))

    def encoded() -> list[bytes]:
        return [bytes([kinds.index(type(each))]) + each.SerializeToString(deterministic=True) for each in seeds()]

    return Target(name=name, seeds=encoded, read=read, readers=readers, words=words, refusals=(*refusals, DecodeError))


class Scratch:
    """A file in memory, whose content is replaced without opening it for writing, which would count as an escape."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")
        os.fchmod(self._descriptor, 0o600)

    def holding(self, data: bytes) -> Path:
        """Return the file's path, with this content."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        return self.path


def drawn(strategy: SearchStrategy[Any], count: int = 12) -> list[Any]:
    """Return examples of what a strategy draws, the same in each process."""
    found: list[Any] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found


def same(message: Message, read: Callable[[Any], Any], write: Callable[[Any], Any]) -> Any:
    """Read a message, write that again, and require that the same is read of it."""
    value = read(message)
    written = write(value).SerializeToString(deterministic=True)
    again = read(type(message).FromString(written))
    if again != value:  # values that hold NaN, for one, differ from themselves
        assert write(again).SerializeToString(deterministic=True) == written, f"{value!r} comes back as {again!r}"
    return value
