"""Converts dataclasses and messages field by field: equal names are copied, and each exception is written out.

Exceptions that several messages share are here: numbers that stand for a closed set of words, data types by name, and
received figures, before a person or a monitor sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fxlib.utils.text import plain
from fxlib.wire.faults import Fault
from fxlib.wire.names import DTYPES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
M = TypeVar("M", bound=Message)
T = TypeVar("T")

_TEXT = FieldDescriptor.CPPTYPE_STRING
_NUMBERS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_MESSAGE = FieldDescriptor.CPPTYPE_MESSAGE


def amount(value: float) -> float:
    """Return a figure that must not be negative.

    Raises:
        Fault: the figure is negative, infinite, or NaN.
    """
    if not 0.0 <= value < math.inf:
        raise Fault(f"{value} is not a valid amount")
    return value


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The conversion of one field.

    Attributes:
        write: turns the dataclass's value into the message's, and may raise a `Fault`; None copies the value.
        read: turns the message's value into the dataclass's, likewise.
        unknown: the value written for None; None leaves the field unset.
        fast_write: does what `write` does, except that its faults do not say where in the value they lie: after a
            fault, `write` is called to find that out. None: `write` itself is called.
        fast_read: is to `read` as `fast_write` is to `write`.
    """

    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None
    unknown: object = None
    fast_write: Callable[[Any], Any] | None = None
    fast_read: Callable[[Any], Any] | None = None


class Converter(Generic[D, M]):
    """Writes a dataclass as a message, and reads it back.

    A field that both have is copied: text by `text`, numbers by `number`, other scalars unchanged, repeated fields as
    tuples, maps as dicts. None is written as an unset field, and an unset field that may be unset is read as the
    dataclass's default.

    Args:
        kind: the dataclass.
        message: the message.
        text: reads each text, also in repeated fields and maps.
        number: reads each number with a fraction, likewise.
        rules: the conversions of fields that are not copied.
        left_out: fields of either that only `write_more` and `read_more` convert, if anything does.
        write_more: returns further fields of the message.
        read_more: returns further fields of the dataclass.

    Raises:
        TypeError: a field of one is missing in the other, and is not left out, or holds a message and has no rule.
    """

    def __init__(
        self,
        kind: type[D],
        message: type[M],
        *,
        text: Callable[[str], str] | None = plain,
        number: Callable[[float], float] | None = amount,
        rules: Mapping[str, FieldRule] | None = None,
        left_out: Collection[str] = (),
        write_more: Callable[[D], Mapping[str, Any]] | None = None,
        read_more: Callable[[M], Mapping[str, Any]] | None = None,
    ) -> None:
        declared = {field.name: field for field in fields(kind) if field.name not in left_out}
        there = {field.name: field for field in message.DESCRIPTOR.fields if field.name not in left_out}
        if wrong := declared.keys() ^ there.keys():
            raise TypeError(f"{kind.__name__} and {message.__name__} do not both have {', '.join(sorted(wrong))}")
        names: dict[str, object] = {"message": message, "kind": kind, "write_more": write_more, "read_more": read_more}
        fast = dict[str, object]()
        writes, reads = {}, {}
        for name, field in there.items():
            rule = (rules or {}).get(name) or _copied(cast(FieldDescriptor, field), text, number)
            default = declared[name].default if field.has_presence else MISSING
            names |= {f"write_{name}": rule.write, f"unknown_{name}": rule.unknown}
            names |= {f"read_{name}": rule.read, f"default_{name}": default}
            fast |= {f"write_{name}": rule.fast_write or rule.write, f"read_{name}": rule.fast_read or rule.read}
            writes[name] = f"write_{name}(it.{name})" if rule.write else f"it.{name}"
            if rule.write or rule.unknown is not None:
                writes[name] += f" if it.{name} is not None else unknown_{name}"
            reads[name] = f"read_{name}(it.{name})" if rule.read else f"it.{name}"
            if default is not MISSING:
                reads[name] += f" if it.HasField({name!r}) else default_{name}"
        self._write: Callable[[D], M] = _compiled("message", writes, "write_more" if write_more else "", names | fast)
        self._read: Callable[[M], D] = _compiled("kind", reads, "read_more" if read_more else "", names | fast)
        self._writes = {f".{name}": _lambda(source, names) for name, source in writes.items()}
        self._reads = {f".{name}": _lambda(source, names) for name, source in reads.items()}

    def write(self, value: D) -> M:
        """Return the message of a value.

        Raises:
            Fault: a value cannot be sent; the fault has the field's path from here.
        """
        try:
            return self._write(value)
        except Fault:
            _raise_located(self._writes, value)
            raise

    def read(self, proto: M) -> D:
        """Return the value of a message.

        Raises:
            Fault: a value has no meaning; the fault has the field's path from here.
        """
        try:
            return self._read(proto)
        except Fault:
            _raise_located(self._reads, proto)
            raise

    def read_at(self, where: str, proto: M) -> D:
        """Return the value of a message.

        Raises:
            WireError: a value has no meaning; the message names its field within `where`.
        """
        try:
            return self.read(proto)
        except Fault as fault:
            raise fault.at(where) from None

    def write_at(self, where: str, value: D) -> M:
        """Return the message of a value.

        Raises:
            WireError: a value cannot be sent; the message names its field within `where`.
        """
        try:
            return self.write(value)
        except Fault as fault:
            raise fault.at(where) from None

    @property
    def one(self) -> FieldRule:
        """The rule of a field that holds such a message."""
        return FieldRule(self.write, self.read, fast_write=self._write, fast_read=self._read)

    @property
    def many(self) -> FieldRule:
        """The rule of a field that holds several such messages."""
        return FieldRule(
            each_by(self.write), each_by(self.read), fast_write=_all_by(self._write), fast_read=_all_by(self._read)
        )


def _compiled(made: str, sources: Mapping[str, str], more: str, names: dict[str, object]) -> Callable[[Any], Any]:
    """Return a function that converts all fields, compiled once, like a `dataclass` constructor: loops are slower."""
    arguments = [f"{name}={source}" for name, source in sources.items()]
    return _lambda(f"{made}({', '.join([*arguments, *([f'**{more}(it)'] if more else [])])})", names)


def _lambda(source: str, names: dict[str, object]) -> Callable[[Any], Any]:
    made: Callable[[Any], Any] = eval(f"lambda it: {source}", names)  # noqa: S307 - made of the names of fields alone
    return made


def _raise_located(steps: Mapping[str, Callable[[Any], Any]], value: object) -> None:
    """Raise the fault again, with the part in which it lies."""
    for part, step in steps.items():
        try:
            step(value)
        except Fault as fault:
            fault.inside(part)
            raise


def each_by(convert: Callable[[Any], T]) -> Callable[[Iterable[Any]], tuple[T, ...]]:
    """Return a function that reads or writes a repeated field, given one that does so for a single value."""

    def convert_all(values: Iterable[Any]) -> tuple[T, ...]:
        try:
            return tuple([convert(each) for each in values])
        except Fault:
            for index, each in enumerate(values):
                _raise_located({f"[{index}]": convert}, each)
            raise

    return convert_all


def _all_by(convert: Callable[[Any], T]) -> Callable[[Iterable[Any]], tuple[T, ...]]:
    return lambda values: tuple([convert(each) for each in values])


def _copied(
    field: FieldDescriptor, text: Callable[[str], str] | None, number: Callable[[float], float] | None
) -> FieldRule:
    """Return the rule of a field without one of its own.

    Raises:
        TypeError: the field holds a message.
    """
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_scalar(each, text, number) or _same for each in field.message_type.fields)
        return FieldRule(read=lambda entries: {key(name): value(each) for name, each in entries.items()})
    if field.cpp_type == _MESSAGE:
        raise TypeError(f"{field.full_name} holds a message, and has no rule")
    scalar = _scalar(field, text, number)
    if field.is_repeated:
        return FieldRule(read=tuple if scalar is None else each_by(scalar))
    return FieldRule(read=scalar)


def _scalar(
    field: FieldDescriptor, text: Callable[[str], str] | None, number: Callable[[float], float] | None
) -> Callable[[Any], Any] | None:
    if field.cpp_type == _TEXT:
        return text
    return number if field.cpp_type in _NUMBERS else None


def _same(value: T) -> T:
    return value


W = TypeVar("W")
N = TypeVar("N")


class Bijection(Generic[W, N]):
    """Words to numbers and back."""

    def __init__(self, pairs: Mapping[W, N]) -> None:
        self._there = dict(pairs)
        self._back = {number: word for word, number in pairs.items()}

    def there(self, word: W) -> N:
        """Return the number of a word."""
        return self._there[word]

    def back(self, number: N) -> W:
        """Return the word of a number.

        Raises:
            Fault: the number has no word.
        """
        try:
            return self._back[number]
        except KeyError:
            raise Fault(f"{number} has no meaning") from None

    @property
    def rule(self) -> FieldRule:
        """The rule of a field that holds such a number."""
        return FieldRule(self.there, self.back)


def dtype_to_text(dtype: torch.dtype) -> str:
    """Return the dtype's name: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_text(name: str) -> torch.dtype:
    """Return the dtype called `name`.

    Raises:
        Fault: there is no such dtype.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise Fault(f"no dtype is called {name!r}") from None


DTYPE = FieldRule(dtype_to_text, dtype_from_text)
"""The rule of a field that holds the name of a dtype."""


def finite(value: float) -> float:
    """Return a figure that must be finite.

    Raises:
        Fault: the figure is infinite or NaN.
    """
    if not math.isfinite(value):
        raise Fault(f"{value} is not a finite figure")
    return value
