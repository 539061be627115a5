"""Keep the runs of a zoo as files: a folder for each run, in which each row is a separate file.

A file appears whole or not at all, so a run that was interrupted in any way continues where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Literal, Self, TypeVar, get_args, get_type_hints

from fxlib.errors import FxlibError
from fxlib.serialization.files import write_whole
from fxlib.spec.report import Estimate
from fxlib.zoo.source_files import Dependencies

T = TypeVar("T")

State = Literal["waiting", "asked", "done", "failed"]
"""State of a row: not begun; the service has its job; there is an answer; it could not run."""

_STAMP: Final = "%Y%m%dT%H%M%SZ"
_LARGEST: Final = 1 << 1000
"""The largest magnitude of an integer in a row; larger ones are no floats."""
_FORM: Final = 1
"""Version of the files' format, which a reader checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The outcome of one of several jobs that measure one entry on different machines.

    Attributes:
        where: the labels that its worker must have.
        job_id: the id of the service's job.
        worker: the id of the worker that measured the entry, once there is an answer.
        hardware: the hardware on which the entry was measured.
        decision: "adopt" or "keep_original", by this job alone.
        reason: the reason's name.
        gain: the gain over the original there, relative.
    """

    where: Mapping[str, str]
    job_id: str
    worker: str = ""
    hardware: str = ""
    decision: str = ""
    reason: str = ""
    gain: Estimate | None = None


class RunError(FxlibError):
    """A run cannot be read or written; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The state and the outcome of one entry in one run.

    Attributes:
        name: the entry's name.
        state: the progress of the entry.
        asked: the entry's digest.
        recipe: the recipe, or the passes, for a reader.
        attempt: number of times that the entry was begun.
        job_id: the id of the service's job.
        decision: "adopt" or "keep_original", once there is an answer.
        reason: the reason's name.
        explanation: the reason, or the failure, in a sentence.
        failure: the code of a failure, such as "CAPTURE"; "" without one.
        gain: the gain over the original, relative.
        confidence: the level of the gain's interval.
        qps_original: the original's samples per second.
        qps_optimized: the rewritten module's samples per second.
        max_relative_error: the relative error of the results against the original's.
        cached: whether the service answered from an earlier measurement.
        reused: whether an earlier run of this zoo had the answer, and nothing was asked.
        expected: whether the outcome is what the manifest expects.
        hardware: the hardware on which the entry was measured.
        torch_version: torch's version there.
        capture_s: duration of the capture, in seconds.
        seconds: time from the entry's beginning to its answer, in seconds.
        finished_at: the time of the answer, as ISO 8601 in UTC.
        replicas: its jobs on several machines, if it is measured on several: the gain is the mean over these.
        dependencies: the files that the model was made from.
    """

    name: str
    state: State = "waiting"
    asked: str = ""
    recipe: str = ""
    attempt: int = 0
    job_id: str = ""
    decision: str = ""
    reason: str = ""
    explanation: str = ""
    failure: str = ""
    gain: Estimate | None = None
    confidence: float = 0.95
    qps_original: float | None = None
    qps_optimized: float | None = None
    max_relative_error: float | None = None
    cached: bool = False
    reused: bool = False
    expected: bool = True
    hardware: str = ""
    torch_version: str = ""
    capture_s: float | None = None
    seconds: float | None = None
    finished_at: str = ""
    replicas: tuple[Replica, ...] = ()
    dependencies: Dependencies | None = field(default=None, repr=False)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Make a row from its plain data, as `asdict` returns it.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: the data does not have the form of a row.
        """
        inner = ("gain", "dependencies", "replicas")
        gain, dependencies = data.get("gain"), data.get("dependencies")
        return replace(
            _made(cls, {name: value for name, value in data.items() if name not in inner}),
            gain=None if gain is None else _made(Estimate, gain),
            dependencies=None if dependencies is None else _dependencies(dependencies),
            replicas=tuple(map(_replica, data.get("replicas", ()))),
        )

    @property
    def job_ids(self) -> tuple[str, ...]:
        """The ids of the service's jobs."""
        return tuple(each.job_id for each in self.replicas) or ((self.job_id,) if self.job_id else ())

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to the row in this run."""
        return self.state in ("done", "failed")

    @property
    def outcome(self) -> str:
        """The outcome in one word: adopted, kept, failed, or else the state."""
        if self.state != "done":
            return self.state
        return "adopted" if self.decision == "adopt" else "kept"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, without the fields that only a later run needs."""
        data = {name: value for name, value in asdict(self).items() if name not in ("dependencies", "asked")}
        return {**data, "outcome": self.outcome}


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """A run's description: its manifest's path, its entries' names, and whether it measures everything anew."""

    manifest: str
    began: str
    entries: tuple[str, ...] = ()
    fresh: bool = False


class Run:
    """One run: the entries' rows, each in a file, alongside the reports of the answers and the output of the captures.

    Args:
        folder: the run's folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The folder's name: the UTC time when the run began, or a name after the newest if the clock was behind."""
        return self.folder.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries in the run, in the manifest's order."""
        return self._about().entries

    @property
    def fresh(self) -> bool:
        """Whether the run measures everything anew."""
        return self._about().fresh

    @property
    def manifest(self) -> str:
        """The manifest's path when the run began."""
        return self._about().manifest

    def rows(self) -> list[Row]:
        """Return all rows, in the manifest's order.

        Raises:
            RunError: a file cannot be read.
        """
        return [self.row(name) for name in self.names]

    def row(self, name: str) -> Row:
        """Return one entry's row.

        Raises:
            RunError: its file cannot be read.
        """
        path = self._file("rows", name, "json")
        if not path.exists():
            return Row(name=name)
        data = _read(path)
        try:
            return Row.of(data)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RunError(f"it is no row of a run: {error}", where=str(path)) from error

    def write(self, row: Row) -> None:
        """Write a row.

        Raises:
            RunError: the file cannot be written.
        """
        data = asdict(row)
        if not row.replicas:
            del data["replicas"]  # so that earlier releases can read the row
        _write(self._file("rows", row.name, "json"), data)

    def report(self, name: str) -> Mapping[str, Any]:
        """Return the service's report on an entry in the form of `Result.to_dict`; empty if there is none."""
        path = self._file("reports", name, "json")
        return _read(path) if path.exists() else {}

    def write_report(self, name: str, report: Mapping[str, Any]) -> None:
        """Write the service's report on an entry.

        Raises:
            RunError: the file cannot be written.
        """
        _write(self._file("reports", name, "json"), report)

    def log(self, name: str) -> Path:
        """Return the path of the file with the output of an entry's capture."""
        return self._file("logs", name, "txt")

    @contextlib.contextmanager
    def locked(self, name: str, wait: Callable[[], None]) -> Iterator[None]:
        """Keep others that finish this run, here or in another process, from an entry while the block runs.

        Args:
            name: the entry's name.
            wait: a function that is called again and again while others keep the entry from this thread; an exception
                of it ends the wait.

        Raises:
            RunError: the lock's file cannot be made.
        """
        path = self._file("locks", name, "lock")
        try:
            path.parent.mkdir(exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            raise RunError(error.strerror or str(error), where=str(path)) from error
        with file:
            while _is_held(file):
                wait()
            yield

    @property
    def over(self) -> bool:
        """Whether all rows have an answer or a failure."""
        return all(row.over for row in self.rows())

    def slug(self, name: str) -> str:
        """Return an entry's name as a file name, which is short and unique."""
        plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", name).strip("-.")[:80]
        return f"{plain or 'model'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    def _file(self, kind: str, name: str, suffix: str) -> Path:
        return self.folder / kind / f"{self.slug(name)}.{suffix}"

    def _about(self) -> _About:
        path = self.folder / "run.json"
        data = _read(path)
        entries = data.pop("entries", None)
        try:
            if not (isinstance(entries, list) and all(isinstance(each, str) for each in entries)):
                raise TypeError("entries is no list of names")
            return replace(_made(_About, data), entries=tuple(entries))
        except TypeError as error:
            raise RunError(f"it is no file of a run: {error}", where=str(path)) from error


class Runs:
    """All runs of a zoo, in one folder, the oldest first.

    Args:
        folder: the folder; it is created with the first run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Run]:
        if self.folder.is_dir():
            found = (Run(each.parent) for each in self.folder.glob("*/run.json"))
            yield from sorted(found, key=lambda each: (_order(each.name), each.name))

    def begin(self, manifest: str, entries: Sequence[str], *, fresh: bool = False, now: datetime | None = None) -> Run:
        """Begin a run. Its name sorts after all others, even if the clock was set back since the newest run began.

        Raises:
            RunError: the run's folder cannot be created.
        """
        at = datetime.now(UTC) if now is None else now
        newest = self.latest()
        stamp, first = (at.strftime(_STAMP), 0)
        if newest is not None and _order(newest.name) >= (stamp, 0):
            stamp, last = _order(newest.name)
            first = last + 1
        for number in range(first, first + 1000):
            folder = self.folder / (stamp + (f"-{number}" if number else ""))
            try:
                for kind in ("rows", "reports", "logs"):
                    (folder / kind).mkdir(parents=True, exist_ok=kind != "rows")
            except FileExistsError:
                continue
            except OSError as error:
                raise RunError(error.strerror or str(error), where=str(folder)) from error
            about = {"manifest": manifest, "entries": list(entries), "began": at.isoformat(), "fresh": fresh}
            _write(folder / "run.json", about)
            return Run(folder)
        raise RunError("a thousand runs begin at once", where=str(self.folder))

    def latest(self) -> Run | None:
        """Return the newest run, if there is any."""
        return next(reversed(list(self)), None)

    def named(self, name: str) -> Run:
        """Return the run of this name, or the only one whose name begins with it; "latest" is the newest.

        Raises:
            RunError: there is no such run, or there are several.
        """
        if name == "latest" and (newest := self.latest()) is not None:
            return newest
        if (Path(name) / "run.json").is_file():
            return Run(Path(name))
        found = [each for each in self if each.name.startswith(name)]
        exact = [each for each in found if each.name == name]
        if len(exact or found) != 1:
            known = ", ".join(each.name for each in list(self)[-5:]) or "there is none yet"
            problem = "several runs begin with" if found else "no run is called"
            raise RunError(f"{problem} {name!r}", where=str(self.folder), hint=f"The newest: {known}.")
        return (exact or found)[0]

    def before(self, run: Run) -> list[Run]:
        """Return the runs before this one, the newest first."""
        return [each for each in reversed(list(self)) if _order(each.name) < _order(run.name)]


def _is_held(file: IO[bytes]) -> bool:
    """Return whether others hold the lock on a file; if not, it is the caller's until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    return False


def _order(name: str) -> tuple[str, int]:
    """Return the sort key of a run's name; a run that was renamed counts as the oldest."""
    found = re.fullmatch(r"(\d{8}T\d{6}Z)(?:-(\d{1,9}))?", name, re.ASCII)
    return ("", 0) if found is None else (found[1], int(found[2] or 0))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("form") != _FORM:
            raise RunError("another version of fxlib wrote it", where=str(path))
    except OSError as error:
        raise RunError(error.strerror or str(error), where=str(path)) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise RunError("it is no file of a run", where=str(path)) from error
    found: dict[str, Any] = data
    return found


def _made(kind: type[T], data: Mapping[str, Any]) -> T:
    """Make a dataclass from plain data.

    Raises:
        TypeError: a field is missing or unknown, or a value does not have the field's type.
    """
    _check(kind, data)
    return kind(**data)


def _check(kind: type, data: Mapping[str, Any]) -> None:
    types = _TYPES[kind]
    for name, value in data.items():
        if name in types and not _fits(value, types[name]):
            raise TypeError(f"{name} is {value!r}")


_TYPES: Final[Mapping[type, Mapping[str, Any]]] = {
    kind: get_type_hints(kind) for kind in (Row, Replica, Estimate, _About)
}


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value has a field's type: text, a number, a Boolean, one of several words, or a union of these."""
    if alternatives := get_args(hint):
        return any(value == each if isinstance(each, str) else _fits(value, each) for each in alternatives)
    if isinstance(value, bool):
        return hint is bool
    if value != value or (isinstance(value, int) and abs(value) > _LARGEST):  # noqa: PLR0124 - NaN, or no float
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _replica(data: Mapping[str, Any]) -> Replica:
    where, gain = dict(data["where"]), data.get("gain")
    if not all(isinstance(each, str) for pair in where.items() for each in pair):
        raise TypeError(f"where is {where!r}")
    plain = {name: value for name, value in data.items() if name not in ("where", "gain")}
    _check(Replica, plain)
    return Replica(where=where, gain=None if gain is None else _made(Estimate, gain), **plain)


def _dependencies(data: Mapping[str, Any]) -> Dependencies:
    files = data["files"]
    for path, (size, at) in files.items():
        if not (isinstance(path, str) and isinstance(size, int) and isinstance(at, int)):
            raise TypeError(f"{path} has no size and time")
    if not (isinstance(data["environment"], str) and isinstance(data["complete"], bool)):
        raise TypeError("the environment is none")
    return Dependencies(**{**data, "files": {path: (size, at) for path, (size, at) in files.items()}})


def _write(path: Path, data: Mapping[str, Any]) -> None:
    try:
        write_whole(path, [json.dumps({"form": _FORM, **data}, indent=1).encode()])
    except OSError as error:
        raise RunError(error.strerror or str(error), where=str(path)) from error
