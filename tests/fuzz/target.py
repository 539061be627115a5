"""What a target of fuzzing is: a parser, inputs to begin with, and how others are made of them."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from fxlib.errors import FxlibError
from tests.fuzz.messages import TEXTS, mutate

_LONGEST = 1 << 16
_BY_FIELDS = 0.85
"""The share of documents that are changed value by value; of the others, bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser, and what to try on it.

    Attributes:
        read: reads an input; what it refuses, it refuses by an exception of `refusals`.
        seeds: returns inputs to begin with.
        readers: the reader of each kind of message, where the input is one; `read` is then made of them.
        change: returns a changed document of a form of its own, given an input, a generator, words, and another
            input; None: the input is none.
        words: returns names that mean something to the parser.
        refusals: exceptions by which an input is refused.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    readers: Mapping[type[Message], Callable[[Any], object]] = field(default_factory=dict)
    change: Callable[[bytes, random.Random, Sequence[str], bytes], bytes | None] | None = None
    words: Callable[[], Sequence[str]] = lambda: TEXTS
    refusals: tuple[type[Exception], ...] = (FxlibError,)

    def mutated(self, data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
        """Return an input like this one, changed field by field if it has any, and byte by byte if not."""
        if self.change is not None and rng.random() < _BY_FIELDS:
            document = self.change(data, rng, self.words(), other)
            if document is not None and len(document) <= _LONGEST:
                return document
        kinds = list(self.readers)
        if not kinds:
            return _changed(data, rng, self.words())
        kind = kinds[data[0] % len(kinds)] if data else kinds[0]
        try:
            message = kind.FromString(data[1:])
            alike = other and kinds[other[0] % len(kinds)] is kind
            beside = _read_once(kind.FromString, other[1:]) if alike else None
        except DecodeError:
            return _changed(data, rng, self.words())
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            mutate(message, rng, self.words(), beside)
        changed = data[:1] + message.SerializePartialToString(deterministic=True)
        return changed if len(changed) <= _LONGEST else data


@lru_cache(maxsize=1_000)
def _read_once(read: Callable[[bytes], Message], data: bytes) -> Message:
    return read(data)


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


def folder() -> Path:
    """Return a folder that is deleted when this process ends."""
    path = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


class Scratch:
    """A file in memory, whose content is replaced without opening it for writing, which would count as an escape.

    Args:
        name: its name.
        inside: a folder that gets a link to it, which is then its path; None: there is none.
    """

    def __init__(self, name: str, inside: Path | None = None) -> None:
        self._descriptor = os.memfd_create(name)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")
        os.fchmod(self._descriptor, 0o600)
        if inside is not None:
            (inside / name).symlink_to(self.path)
            self.path = inside / name

    def holding(self, data: bytes) -> Path:
        """Return the file's path, with this content."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        return self.path


def of_file(
    name: str,
    read: Callable[[Path], object],
    seeds: Callable[[], Sequence[bytes]],
    *,
    sealed: Callable[[bytes], bytes] = bytes,
    **more: Any,
) -> Target:
    """Make a target that reads a file; `sealed` puts digests right, as whoever means harm would."""
    scratch = Scratch(name)
    return Target(name=name, read=lambda data: read(scratch.holding(sealed(data))), seeds=seeds, **more)


def framed(data: bytes) -> bytes:
    """Return a file of safetensors: the input as it is, or, behind a zero, one whose header has the length it says."""
    if data[:1] != b"\0":
        return data
    header, _, values = data[1:].partition(b"\0")
    return len(header).to_bytes(8, "little") + header + values


def with_frames(files: Sequence[bytes]) -> list[bytes]:
    """Return files of safetensors, as they are and as `framed` takes them."""
    return [*files, *map(_unframed, files)]


def _unframed(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    return b"\0" + data[8 : 8 + length] + b"\0" + data[8 + length :]


def words_of_json() -> tuple[str, ...]:
    """Return words of JSON, and of the headers of safetensors."""
    safetensors = ('"__metadata__"', '"dtype":"F32"', '"shape":[2,2]', '"data_offsets":[0,16]')
    return (*TEXTS, "{", "}", "[" * 50, "1e999", "NaN", "null", *safetensors)


def check_line(text: str) -> None:
    """Check that what a terminal is to show steers it nowhere."""
    assert text.isprintable(), f"what a terminal shows steers it: {text!r}"


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
