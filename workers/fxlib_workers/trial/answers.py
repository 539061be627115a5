"""The answers of a trial's processes, as JSON. A process in which a graph has run is not trusted, and never unpickled.

Each method has its own form, in which the process writes its answer and the driver reads it. An answer without that
form (another type, a figure that is not finite, a text that is too long) is malformed and ends the trial.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from fxlib.analysis.effects.process_groups import Groups
from fxlib.errors import FxlibError
from fxlib.protocol import contract_from_proto, contract_to_proto, profile_from_proto, profile_to_proto
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile
from fxlib.spec.report import MAX_TIMELINE_STEPS as MAX_STEPS
from fxlib.spec.report import CompiledPart, Span, Timeline
from fxlib.spec.workload import MAX_DEPTH
from fxlib.v1 import graph_pb2, profile_pb2
from fxlib_workers.process.exceptions import Raised, shorten
from fxlib_workers.trial.requirements import Requirements
from fxlib_workers.trial.trial_process import StoreAddress

T = TypeVar("T")

_LONGEST_TEXT: Final = 100_000
"""The length of the longest text in an answer, in characters, such as names of tensors, functions and servers."""

_HIGHEST_PORT: Final = 65_535


class MalformedAnswerError(Exception):
    """A process gave an answer that our own code never writes."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a method's answer.

    Attributes:
        write: a function that converts an answer to JSON's own types.
        read: a function that checks these and converts them back.
    """

    write: Callable[[Any], object]
    read: Callable[[Any], object]


def write_answer(method: str, answer: object) -> bytes:
    """Return the message for a method's result, which may be a `Raised`.

    An answer that cannot be written becomes a `Raised` that says why.
    """
    if not isinstance(answer, Raised):
        try:
            return json.dumps({"answer": FORMS[method].write(answer)}).encode()
        except FxlibError as error:
            answer = Raised.of(error)
    fields = {"text": answer.text, "out_of_memory": answer.out_of_memory, "stranded": answer.stranded}
    return json.dumps({"raised": fields}).encode()


def write_failure(text: str) -> bytes:
    """Return the message for an exception of the process's own code."""
    return json.dumps({"failed": text}).encode()


def read_answer(method: str, message: bytes) -> object:
    """Return a method's answer, which may be a `Raised`.

    Raises:
        MalformedAnswerError: the message is not valid, or does not have the form of the method's answers.
        ProcessFailureError: the process's own code raised.
    """
    try:
        found = json.loads(message.decode())  # json would guess the encoding of bytes
    except (ValueError, RecursionError) as error:
        raise MalformedAnswerError(f"it is not JSON: {type(error).__name__}") from error
    if not isinstance(found, dict) or len(found) != 1:
        raise MalformedAnswerError("it is neither an answer nor an exception")
    ((kind, value),) = found.items()
    if kind == "answer":
        return FORMS[method].read(value)
    if kind == "raised":
        fields = _fields(value, "text", "out_of_memory", "stranded")
        flags = {name: _flag(fields[name]) for name in ("out_of_memory", "stranded")}
        return Raised(text=shorten(_text(fields["text"])), **flags)
    if kind == "failed":
        raise ProcessFailureError(shorten(_text(value)))
    raise MalformedAnswerError("it is neither an answer nor an exception")


class ProcessFailureError(Exception):
    """The code of a trial's process itself, and not the user's, raised."""


def _nothing(value: object) -> None:
    if value is not None:
        raise MalformedAnswerError("nothing was to be answered")


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise MalformedAnswerError("a flag is neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise MalformedAnswerError(f"a text is none, or longer than {_LONGEST_TEXT} characters")
    return value.encode(errors="replace").decode()  # JSON may hold lone surrogates, which nothing else accepts


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MalformedAnswerError("a figure is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise MalformedAnswerError("a figure is beyond all numbers") from error


def _amount(value: object) -> float:
    """Read a number that is finite and not negative."""
    found = _number(value)
    if not math.isfinite(found) or found < 0.0:
        raise MalformedAnswerError(f"a figure is {found}, which nothing takes")
    return found


def _duration(value: object) -> float:
    """Read a positive number of seconds."""
    if (found := _amount(value)) == 0.0:
        raise MalformedAnswerError("steps took no time")
    return found


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MalformedAnswerError("a count is not a whole number")
    return value


def _fields(value: object, *names: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise MalformedAnswerError(f"an object has not the fields {', '.join(names)}")
    return value


def _each(read: Callable[[Any], T], *, least: int = 0) -> Callable[[object], list[T]]:
    """Return a function that reads a list of at least so many values."""

    def listed(value: object) -> list[T]:
        if not isinstance(value, list) or len(value) < least:
            raise MalformedAnswerError(f"a list is none, or has less than {least} entries")
        return [read(each) for each in value]

    return listed


def _by_name(read: Callable[[Any], T]) -> Callable[[object], dict[str, T]]:
    """Return a function that reads values by name."""

    def named(value: object) -> dict[str, T]:
        if not isinstance(value, dict):
            raise MalformedAnswerError("values have no names")
        return {_text(name): read(each) for name, each in value.items()}

    return named


_TEXTS: Final = _each(_text)
_TEXTS_BY_NAME: Final = _by_name(_TEXTS)
_SIZES: Final = _by_name(lambda value: tuple(_each(_count)(value)))


def _bytes(value: object) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
    except ValueError as error:  # binascii.Error is one; characters beyond ASCII raise another
        raise MalformedAnswerError("bytes are not in base64") from error


def _write_contract(contract: Contract) -> str:
    return base64.b64encode(contract_to_proto(contract).SerializeToString()).decode()


def _read_contract(value: object) -> Contract:
    try:
        return contract_from_proto(graph_pb2.Contract.FromString(_bytes(value)))
    except (DecodeError, FxlibError) as error:
        raise MalformedAnswerError(f"a contract cannot be read: {error}") from error


def _write_profile(profile: Profile) -> str:
    message = profile_to_proto(profile)
    profile_from_proto(message)  # the measuring process reports a profile that exceeds the limits
    return base64.b64encode(message.SerializeToString()).decode()


def _read_profile(value: object) -> Profile:
    try:
        return profile_from_proto(profile_pb2.Profile.FromString(_bytes(value)))
    except (DecodeError, FxlibError) as error:
        raise MalformedAnswerError(f"a profile cannot be read: {error}") from error


def _write_requirements(required: Requirements) -> Mapping[str, object]:
    return {
        "opaque": required.opaque,
        "functions": dict(required.functions),
        "contracts": {name: _write_contract(each) for name, each in required.contracts.items()},
        "created": dict(required.created),
        "collectives": dict(required.groups.collectives),
        "reducing": dict(required.groups.reducing),
    }


def _read_requirements(value: object) -> Requirements:
    fields = _fields(value, "opaque", "functions", "contracts", "created", "collectives", "reducing")
    functions, created = _TEXTS_BY_NAME(fields["functions"]), _TEXTS_BY_NAME(fields["created"])
    return Requirements(
        opaque=tuple(_TEXTS(fields["opaque"])),
        functions={server: tuple(names) for server, names in functions.items()},
        contracts=_by_name(_read_contract)(fields["contracts"]),
        created={function: tuple(names) for function, names in created.items()},
        groups=Groups(collectives=_SIZES(fields["collectives"]), reducing=_SIZES(fields["reducing"])),
    )


def _write_timelines(timelines: Sequence[Timeline]) -> Sequence[object]:
    return [
        {
            "step_s": each.step_s,
            "steps": each.steps,
            "spans": [[span.kind, span.name, span.to, span.start_s, span.end_s] for span in each.spans],
        }
        for each in timelines
    ]


def _read_timeline(value: object) -> Timeline:
    fields = _fields(value, "step_s", "steps", "spans")
    spans, steps = tuple(_each(_read_span)(fields["spans"])), _count(fields["steps"])
    if not 1 <= steps <= MAX_STEPS:
        raise MalformedAnswerError(f"a timeline is of {steps} steps")
    return Timeline(spans=spans, step_s=_amount(fields["step_s"]), steps=steps)


def _read_span(value: object) -> Span:
    if not isinstance(value, list) or len(value) != len(Span.__dataclass_fields__):
        raise MalformedAnswerError("a span is none")
    kind, name, to, start_s, end_s = value
    return Span(kind=_text(kind), name=_text(name), to=_text(to), start_s=_start(start_s), end_s=_start(end_s))


def _start(value: object) -> float:
    """Read a time within a step; a call that was issued in the previous step may begin before this one."""
    if not math.isfinite(found := _number(value)):
        raise MalformedAnswerError("a moment is not finite")
    return found


def _read_part(value: object) -> CompiledPart:
    fields = _fields(value, *CompiledPart.__dataclass_fields__)
    plain_s, compiled_s = (
        None if fields[name] is None else _amount(fields[name]) for name in ("plain_s", "compiled_s")
    )
    return CompiledPart(
        first=_text(fields["first"]),
        nodes=_count(fields["nodes"]),
        backend=_text(fields["backend"]),
        compile_s=_amount(fields["compile_s"]),
        plain_s=plain_s,
        compiled_s=compiled_s,
        compiled=_flag(fields["compiled"]),
        why=_text(fields["why"]),
    )


def _read_staleness(value: object) -> dict[int, int]:
    found = {missed: reads for missed, reads, *_ in _each(_each(_count, least=2))(value)}
    if not all(0 <= missed <= MAX_DEPTH and 0 <= reads < 2**62 for missed, reads in found.items()):
        raise MalformedAnswerError("reads missed a number of steps that there cannot be")
    return found


def _read_address(value: object) -> StoreAddress:
    fields = _fields(value, "host", "port")
    port = _count(fields["port"])
    if not 0 < port <= _HIGHEST_PORT:
        raise MalformedAnswerError(f"{port} is no port")
    return StoreAddress(_text(fields["host"]), port)


_NOTHING: Final = Form(_nothing, _nothing)
_REQUIRED: Final = Form(_write_requirements, _read_requirements)
_NAMES: Final = Form(list, _TEXTS)

FORMS: Final[Mapping[str, Form]] = {
    "make": _NOTHING,
    "host_store": Form(lambda made: {"host": made.host, "port": made.port}, _read_address),
    "join": _NOTHING,
    "serve": _NOTHING,
    "not_served": _NAMES,
    "not_made": _NAMES,
    "replay": _NOTHING,
    "switch_program": _NOTHING,
    "load": _REQUIRED,
    "join_group": _NOTHING,
    "calibrate": _NOTHING,
    "prepare": _NOTHING,
    "load_candidate": _REQUIRED,
    "time_parts": Form(lambda parts: [asdict(each) for each in parts], _each(_read_part)),
    "leave_parts": _NOTHING,
    "writes_inputs": Form(bool, _flag),
    "note_inputs": _NOTHING,
    "samples": Form(list, _each(_amount, least=1)),
    "reset": _NOTHING,
    "profile": Form(_write_profile, _read_profile),
    "digest_step": Form(dict, _by_name(_text)),
    "errors": Form(dict, _by_name(_number)),
    "block": Form(float, _duration),
    "instructions": _NAMES,
    "run_delay_share": Form(float, _amount),
    "staleness": Form(lambda found: [[*each] for each in found.items()], _read_staleness),
    "timelines": Form(_write_timelines, _each(_read_timeline, least=1)),
}
"""The form of each method's answer, by the method's name; "make" stands for the making of the process's object."""
