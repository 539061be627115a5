"""Read the manifest of a zoo: a TOML file that lists models, and how each is measured.

`[defaults]` holds settings for all models; each `[[model]]` names one source (`factory`, `file` or `entry_point`), may
override the settings, and may stand for several entries, by a glob or by a matrix. An entry is one question to the
service, and one row of a run.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from fxlib.errors import FxlibError, PassError
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.spec.job import TrialOptions
from fxlib.spec.labels import problems_of, show_labels
from fxlib.utils.text import did_you_mean
from fxlib.zoo.workload_table import KEYS, workload_of

_TRIAL: Final = TrialOptions()

Source = Literal["factory", "file", "entry_point"]
SOURCES: Final = get_args(Source)

EXPECTATIONS: Final = ("adopt", "keep_original", "measured", "failed", *(each.name for each in Reason))
"""Values of `expect`: a decision, that there is a figure, that the entry cannot run, or a reason."""

_SETTINGS: Final[Mapping[str, tuple[type, ...]]] = {
    "recipe": (str,),
    "passes": (list,),
    "namespace": (str,),
    "labels": (dict,),
    "where": (dict,),
    "replicas": (list,),
    "min_gain": (int, float),
    "confidence": (int, float),
    "budget_s": (int, float),
    "max_relative_error": (int, float),
    "deadline_s": (int, float),
    "capture_s": (int, float),
    "memory_gib": (int, float),
    "expect": (str,),
}
_MODEL: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "factory": (str,),
    "file": (str,),
    "entry_point": (str,),
    "args": (dict,),
    "workload": (str, dict),
    "threads": (int,),
    "matrix": (dict,),
    **_SETTINGS,
}
_VARIED: Final = ("recipe", "threads", "where")
"""Settings that a matrix may vary besides the arguments of a factory."""

_BATCH_SIZE: Final = "batch_size"
"""The setting that a matrix may also vary for a file or an entry point, if the workload is a table."""

_KINDS: Final = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}

MOST_ENTRIES: Final = 10_000
_MOST_MEMORY_GIB: Final = 1 << 20


class ManifestError(FxlibError):
    """A manifest does not say what to measure; the message names file, line and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model with one set of choices: one question to the service.

    Attributes:
        name: the name of the row, unique in the manifest.
        source: where the model comes from.
        target: the function "pkg.mod:function", the path of the file, or the entry point's name.
        arguments: the arguments of the factory.
        workload: "pkg.mod:function" that returns a `Workload`, or the description of one; empty if the factory returns
            both.
        threads: the threads of a trial's trainers; None: the workload's number.
        recipe: the recipe's name, unless there are `passes`.
        passes: names of passes, or [name, options], run in this order instead of a recipe.
        namespace: the namespace of the job.
        labels: labels of the job, besides those that every job of a zoo has.
        where: the labels that a worker must have to measure the entry; empty: any worker will do.
        replicas: the labels, besides those of `where`, for each of several workers that measure the entry; the gain is
            then the mean over their machines. Empty: one job.
        min_gain: the least gain to adopt (0.02 is 2%).
        confidence: the level of the interval.
        budget_s: the wall-clock budget of the measurement, in seconds.
        max_relative_error: limit on the relative error of results against the original's.
        deadline_s: time limit of the whole entry, in seconds.
        capture_s: time limit of its capture, in seconds.
        memory_gib: memory limit of its capture, in GiB.
        expect: one of `EXPECTATIONS`; "": anything but a failure.
    """

    name: str
    source: Source
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    workload: str | Mapping[str, Any] = ""
    threads: int | None = None
    recipe: str = "schedule"
    passes: Sequence[Any] = ()
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    replicas: Sequence[Mapping[str, str]] = ()
    min_gain: float = _TRIAL.min_gain
    confidence: float = _TRIAL.confidence
    budget_s: float = _TRIAL.budget_s
    max_relative_error: float = _TRIAL.max_relative_error
    deadline_s: float = 1800.0
    capture_s: float = 300.0
    memory_gib: float = 16.0
    expect: str = ""

    @property
    def digest(self) -> str:
        """A hash of everything that decides the answer; rows with equal digests ask the same, if no file changed."""
        asked = {name: value for name, value in asdict(self).items() if name not in ("deadline_s", "expect")}
        for name in ("where", "replicas"):
            if not asked[name]:
                del asked[name]  # so that manifests without this setting have the digests of earlier releases
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    @property
    def wheres(self) -> list[dict[str, str]]:
        """The labels that a worker must have, for each job that measures the entry."""
        return [{**self.where, **each} for each in self.replicas] or [dict(self.where)]

    @property
    def steps(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The passes as (name, options)."""
        return [(each, {}) if isinstance(each, str) else (each[0], each[1]) for each in self.passes]

    @property
    def trial(self) -> TrialOptions:
        """The options with which the service measures the entry.

        Raises:
            WorkloadError: a number is out of its range.
        """
        return TrialOptions(
            min_gain=self.min_gain,
            confidence=self.confidence,
            budget_s=self.budget_s,
            max_relative_error=self.max_relative_error,
        )

    def expects(self, decision: str, reason: str, *, measured: bool, failed: bool) -> bool:
        """Return whether an outcome is what the manifest expects."""
        if not self.expect:
            return not failed
        if failed or self.expect == "failed":
            return failed and self.expect == "failed"
        return measured if self.expect == "measured" else self.expect in (decision, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest that was read: its path, its text, and its entries in order."""

    path: Path
    text: str
    entries: tuple[Entry, ...]

    def chosen(self, only: Sequence[str] = (), shard: tuple[int, int] = (1, 1)) -> tuple[Entry, ...]:
        """Return the entries whose names match one of the patterns, if there are any, and that belong to this shard.

        Args:
            only: shell-style patterns, such as `resnet*`.
            shard: (i, n): the i-th of n parts, counted from 1.

        Raises:
            ManifestError: a pattern matches nothing.
        """
        for pattern in only:
            if not any(_matches(each.name, pattern) for each in self.entries):
                hint = did_you_mean(pattern, (each.name for each in self.entries))
                raise ManifestError(f"no model matches {pattern!r}", where="--only", hint=hint)
        wanted = [each for each in self.entries if not only or any(_matches(each.name, one) for one in only)]
        index, count = shard
        return tuple(wanted[index - 1 :: count])


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ManifestError: the manifest cannot be read, is not TOML, or has a wrong key or value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ManifestError(error.strerror or str(error), where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ManifestError("it is not UTF-8 text", where=str(path)) from error
    try:
        read = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(str(error), where=str(path)) from error
    reader = _Reader(path, text)
    seen = dict[str, Entry]()
    for index, entry in reader.entries(read):
        if entry.name in seen:
            problem = f"two models are called {entry.name!r}"
            raise reader.error(problem, key=entry.name, index=index, hint="Give one of them another name.")
        seen[entry.name] = entry
    if not seen:
        raise ManifestError("it lists no model", where=str(path), hint="Add a table [[model]].")
    return Manifest(path=path, text=text, entries=tuple(seen.values()))


def _first_size(tensor: Any) -> str:
    """Return the first size in the manifest's description of a tensor, `8` of `8x3x224x224`; "" if it has none."""
    return str(tensor).partition(":")[0].partition("x")[0]


def _matches(name: str, pattern: str) -> bool:
    # This does not use fnmatch, since names contain [ and ], which are character classes there.
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


class _Reader:
    """Turns the tables of one file into entries, and says where an error is."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def entries(self, read: Mapping[str, Any]) -> Iterator[tuple[int, Entry]]:
        """Yield each entry, with the index of the table that it comes from."""
        for key in read:
            if key not in ("defaults", "model"):
                raise self._unknown(key, ("defaults", "model"), table="")
        defaults, models = read.get("defaults", {}), read.get("model", [])
        if not isinstance(defaults, dict):
            raise self.error("defaults is a table", key="defaults", hint="Write [defaults].")
        if not (isinstance(models, list) and all(isinstance(each, dict) for each in models)):
            raise self.error("models are tables", key="model", hint="Write [[model]], with two brackets.")
        self._check(defaults, _SETTINGS, "defaults", 0)
        for index, model in enumerate(models):
            self._check(model, _MODEL, "model", index)
            for entry in self._expanded({**defaults, **model}, model, index):
                yield index, entry

    def error(self, message: str, *, key: str = "", index: int = 0, hint: str = "") -> ManifestError:
        """Return an error that names the line of the key, which is looked for first in the model of this index."""
        return ManifestError(message, where=f"{self._path}{self._line(key, index)}", hint=hint)

    def _expanded(self, settings: Mapping[str, Any], model: Mapping[str, Any], index: int) -> Iterator[Entry]:
        sources = [each for each in SOURCES if each in model]
        if len(sources) != 1:
            found = " and ".join(sources) if sources else "none of " + ", ".join(SOURCES)
            raise self.error(
                f"a model has one source; this one has {found}", key=(sources or ["model"])[0], index=index
            )
        (source,) = sources
        targets = self._targets(source, model[source], index)
        matrix = model.get("matrix", {})
        for key, values in matrix.items():
            if not (isinstance(values, list) and values):
                raise self.error(f"matrix.{key} is a list of values", key=key, index=index)
            if key not in (*_VARIED, _BATCH_SIZE) and source != "factory":
                raise self.error(
                    f"matrix.{key} would be an argument of a factory, and there is none",
                    key=key,
                    index=index,
                    hint="A file and an entry point may vary batch_size, recipe, threads and where.",
                )
        count = math.prod(map(len, matrix.values())) * len(targets)
        if count > MOST_ENTRIES:
            raise self.error(f"{count} entries are more than {MOST_ENTRIES}", key="matrix", index=index)
        points = [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]
        for target, point in itertools.product(targets, points):
            yield self._entry(settings, model, source, target, point, several=len(targets) > 1, index=index)

    def _targets(self, source: str, given: str, index: int) -> list[str]:
        if source == "file":
            folder = self._path.parent.resolve()
            if not glob.has_magic(given):
                return [str(folder / given)]
            try:
                found = sorted(map(str, folder.glob(given)))
            except (ValueError, NotImplementedError, OSError) as error:
                problem = f"{given!r} is no pattern of files beside the manifest: {error}"
                raise self.error(problem, key="file", index=index) from error
            if not found:
                raise self.error(f"no file matches {given!r}", key="file", index=index)
            return found
        if source == "factory" and not all(given.partition(":")[::2]):
            raise self.error(f"{given!r} is not of the form pkg.mod:function", key="factory", index=index)
        return [given]

    def _entry(
        self,
        settings: Mapping[str, Any],
        model: Mapping[str, Any],
        source: Source | str,
        target: str,
        point: Mapping[str, Any],
        *,
        several: bool,
        index: int,
    ) -> Entry:
        settled = _VARIED if source == "factory" else (*_VARIED, _BATCH_SIZE)
        arguments = {**model.get("args", {}), **{k: v for k, v in point.items() if k not in settled}}
        workload = model.get("workload", "")
        if _BATCH_SIZE in point and source != "factory":
            workload = self._of_size(workload, point[_BATCH_SIZE], index)
        chosen = {name: value for name, value in settings.items() if name in _SETTINGS}
        if "recipe" in point or "recipe" in model:
            chosen.pop("passes", None) if "passes" not in model else None
        chosen |= {name: point[name] for name in ("recipe", "where") if name in point}
        made = Entry(
            name=self._name(model, target, point, several=several, index=index),
            source=source,  # type: ignore[arg-type]
            target=target,
            arguments=arguments,
            workload=workload,
            threads=point.get("threads", model.get("threads")),
            **{**chosen, "labels": {**settings.get("labels", {})}},
        )
        self._check_choices(made, index)
        return made

    def _of_size(self, workload: Any, size: Any, index: int) -> dict[str, Any]:
        """Return a workload's table with another batch size, the first size of the first input.

        A tensor with another first size has no batch dimension, and stays as it is.
        """
        if not isinstance(workload, dict):
            origin = "a function makes the workload, so that" if workload else "there is no workload, in which"
            hint = 'Write the workload as a table, such as workload = { inputs = ["8x3x224x224"] }.'
            raise self.error(f"{origin} matrix.batch_size changes nothing", key=_BATCH_SIZE, index=index, hint=hint)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise self.error(f"batch_size is a whole number above zero, not {size!r}", key=_BATCH_SIZE, index=index)
        inputs, kwargs = workload.get("inputs", []), workload.get("kwargs", {})
        if not (isinstance(inputs, list) and isinstance(kwargs, dict)):
            raise self.error("inputs is a list, and kwargs a table", key="workload", index=index)
        tensors = [*inputs, *kwargs.values()]
        before = _first_size(tensors[0]) if tensors else ""
        if not before:
            raise self.error("no input has a size that matrix.batch_size could change", key=_BATCH_SIZE, index=index)

        def sized(text: Any) -> Any:
            return f"{size}{str(text)[len(before) :]}" if _first_size(text) == before else text

        made = {**workload, "inputs": [sized(each) for each in inputs]}
        if kwargs:
            made["kwargs"] = {name: sized(each) for name, each in kwargs.items()}
        if "target" in workload:
            made["target"] = sized(workload["target"])
        return made

    def _name(
        self, model: Mapping[str, Any], target: str, point: Mapping[str, Any], *, several: bool, index: int
    ) -> str:
        stem = Path(target).stem if model.get("file") else target.rpartition(":")[2]
        name = model.get("name", stem)
        point = {key: show_labels(value) if isinstance(value, dict) else value for key, value in point.items()}
        known = {**point, "file": stem}
        if "{" in name:
            filled = re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), name)
            if "{" in filled or "}" in filled:
                hint = f"It may hold {', '.join('{' + each + '}' for each in known)}."
                raise self.error(f"the name {name!r} cannot be filled in", key="name", index=index, hint=hint)
            return filled
        name = f"{name}/{stem}" if several else name
        return f"{name}[{','.join(f'{key}={value}' for key, value in point.items())}]" if point else name

    def _check_choices(self, entry: Entry, index: int) -> None:
        """Check everything that needs no import: recipe, passes, numbers, expectation."""
        for each in entry.passes:
            if not (isinstance(each, str) or (isinstance(each, list) and list(map(type, each)) == [str, dict])):
                hint = 'Write "name", or ["name", { option = 1 }].'
                raise self.error(f"{each!r} is no pass", key="passes", index=index, hint=hint)
        try:
            recipes.from_passes(entry.steps) if entry.passes else recipes.get(entry.recipe)
        except PassError as error:
            key = "passes" if entry.passes else "recipe"
            raise self.error(str(error), key=key, index=index) from error
        if isinstance(entry.workload, Mapping):
            self._check_workload(entry.workload, index)
        if entry.expect and entry.expect not in EXPECTATIONS:
            hint = (
                did_you_mean(entry.expect, EXPECTATIONS) or "Write adopt, keep_original, measured, failed, or a reason."
            )
            raise self.error(f"nothing is expected by {entry.expect!r}", key="expect", index=index, hint=hint)
        for key in ("deadline_s", "capture_s", "memory_gib"):
            if not getattr(entry, key) > 0:
                raise self.error(f"{key} is positive", key=key, index=index)
        if entry.memory_gib > _MOST_MEMORY_GIB:
            raise self.error(f"memory_gib is at most {_MOST_MEMORY_GIB}", key="memory_gib", index=index)
        try:
            _ = entry.trial
        except FxlibError as error:
            raise self.error(str(error), key=error.where.rpartition(".")[2], index=index) from error
        try:
            _ = entry.digest
        except TypeError as error:
            hint = "Write it as text, and have the factory read it."
            raise self.error("a date or a time is no value here", key="args", index=index, hint=hint) from error
        threads: object = entry.threads  # a matrix may hold anything
        if threads is not None and not (isinstance(threads, int) and threads > 0):
            raise self.error(f"threads is a whole number above zero, not {threads!r}", key="threads", index=index)

    def _check_workload(self, table: Mapping[str, Any], index: int) -> None:
        self._check(table, KEYS, "workload", index)
        try:
            workload_of(table)
        except FxlibError as error:
            key = next((each for each in reversed(error.where.split(".")) if each in table), "workload")
            raise self.error(str(error), key=key, index=index) from error

    def _check(self, given: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], table: str, index: int) -> None:
        for key, value in given.items():
            if key not in known:
                raise self._unknown(key, known, table=table, index=index)
            if not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
                wanted = " or ".join(dict.fromkeys(_KINDS[each] for each in known[key]))
                raise self.error(f"{key} is {wanted}, not {value!r}", key=key, index=index)
        self._check_labels(given, index)

    def _check_labels(self, given: Mapping[str, Any], index: int) -> None:
        """Check the labels of the job, and those of the workers that may measure it."""
        matrix, replicas = given.get("matrix", {}).get("where", []), given.get("replicas", [])
        if not isinstance(matrix, list):
            matrix = []  # the error is reported where the matrix is multiplied out
        for key, name, tables in (("where", "matrix.where", matrix), ("replicas", "replicas", replicas)):
            for table in tables:
                if not isinstance(table, dict):
                    raise self.error(f"{name} holds tables of labels, not {table!r}", key=key, index=index)
        if len(replicas) == 1 or any(each in replicas[:at] for at, each in enumerate(replicas)):
            hint = 'Write for each the labels of its worker: replicas = [{ rack = "1" }, { rack = "2" }].'
            raise self.error("replicas are two or more, each of other labels", key="replicas", index=index, hint=hint)
        for labels in (given.get("labels", {}), given.get("where", {}), *matrix, *replicas):
            for key, value in labels.items():
                if not isinstance(value, str):
                    raise self.error(f"the label {key} is text, not {value!r}", key=key, index=index)
        for key, several in (("where", (given.get("where", {}), *matrix)), ("replicas", replicas)):
            for label, problem in (each for labels in several for each in problems_of(labels)):
                raise self.error(f"{key} {label} {problem}", key=key, index=index)

    def _unknown(
        self, key: str, known: Mapping[str, object] | Sequence[str], *, table: str, index: int = 0
    ) -> ManifestError:
        hint = did_you_mean(key, known) or f"Known: {', '.join(sorted(known))}."
        where = f"[{table}] has no key {key!r}" if table else f"there is no table {key!r}"
        return self.error(where, key=key, index=index, hint=hint)

    def _line(self, key: str, index: int) -> str:
        """Return ":LINE" of a key, which is looked for first in the model of this index.

        If the key does not occur as written, return the line of the model itself, and "" if there is no model.
        """
        heads = [at for at, line in enumerate(self._lines) if re.match(r"\s*\[\[\s*model\s*\]\]", line)]
        start = heads[index] if index < len(heads) else 0
        pattern = re.compile(
            rf"\s*(?:\[+\s*(?:[\w.]+\.)?{re.escape(key)}\b|(?:[\w.]+\.)?[\"']?{re.escape(key)}[\"']?\s*=)"
        )
        found = [at for at, line in enumerate(self._lines) if pattern.match(line)]
        inline = [at for at, line in enumerate(self._lines) if re.search(rf"(?<!\w){re.escape(key)}(?!\w)", line)]
        near = next((at for at in [*found, *inline] if at >= start), next(iter(found), None))
        if near is None:
            near = heads[index] if index < len(heads) else None
        return "" if near is None else f":{near + 1}"
