"""Read zoo runs from folders on this machine: the data of the pages about them, as plain data.

A visitor's names are looked up among the existing zoos and runs; no name that comes from outside is made into a path.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fxlib.dashboard.recent import Recent
from fxlib.errors import FxlibError
from fxlib.pages import inert
from fxlib.zoo.compare_runs import compare
from fxlib.zoo.report import results
from fxlib.zoo.runs import Run, RunError, Runs

_MOST_RUNS: Final = 20
"""Maximum number of one zoo's runs in the list."""
_SETTLED_NS: Final = 2 * 10**9
"""Time in nanoseconds for which a folder has to be unchanged before its time reliably shows the next change."""


class UnknownRunError(FxlibError):
    """A visitor names a zoo or a run that does not exist."""


class Zoos:
    """Zoos by their names, which are those of their folders without `.runs`.

    Args:
        folders: the folders of runs.

    Raises:
        FxlibError: a folder does not exist, or two have the same name.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._zoos = dict[str, Runs]()
        for folder in folders:
            name, where = folder.resolve().name.removesuffix(".runs"), f"--zoo {folder}"
            if not folder.is_dir():
                hint = "It is the folder of runs that fxlib zoo run makes beside its manifest, such as zoo.runs."
                raise FxlibError("there is no such folder", where=where, hint=hint)
            if name in self._zoos:
                raise FxlibError(f"two zoos are called {name!r}", where=where, hint="Rename one of the folders.")
            self._zoos[name] = Runs(folder)
        self._recent = Recent()
        self._summaries = dict[Path, tuple[int, dict[str, Any]]]()

    def __bool__(self) -> bool:
        return bool(self._zoos)

    def forget(self) -> None:
        """Read the folders anew from now on, because something happened."""
        self._recent.forget()

    def fingerprint(self) -> str:
        """Return a text that changes whenever a page about zoos would change."""
        shown = [(name, [(run.name, _changed_at(run)) for run in _newest(runs)]) for name, runs in self._zoos.items()]
        return repr(shown)

    def all(self) -> dict[str, Any]:
        """Return each zoo with its newest runs, the newest first, and the number of models in each by their outcome."""
        return self._recent.get("all", self._all)

    def _all(self) -> dict[str, Any]:
        zoos = []
        for name, runs in self._zoos.items():
            newest = _newest(runs)
            zoos.append({"zoo": inert(name), "runs": [self._summary(run) for run in newest], "of": len(_named(runs))})
        return {"zoos": zoos}

    def run(self, name: str, zoo: str = "") -> dict[str, Any]:
        """Return one run, in the form of `fxlib zoo status --json`, with the changes since the run before.

        Args:
            name: the run's name.
            zoo: the name of its zoo; not needed if only one zoo has a run of that name.

        Raises:
            UnknownRunError: there is no such run, or several zoos have one.
            RunError: a file of the run cannot be read.
        """
        zoo = self._zoo_of(name, zoo)
        return self._recent.get(("run", zoo, name), lambda: self._run(zoo, name))

    def _run(self, zoo: str, name: str) -> dict[str, Any]:
        runs = self._zoos[zoo]
        run = _named(runs)[name]
        before = next((each for each in runs.before(run) if each.name.isprintable()), None)
        answer = results(run, before)
        answer["rows"].sort(key=lambda row: (-(row["gain"]["value"] if row["gain"] else float("-inf")), row["name"]))
        return {"zoo": zoo, **_found(answer), "run": name, "over": all(_over(row) for row in answer["rows"])}

    def diff(self, before: str = "", after: str = "", zoo: str = "") -> dict[str, Any]:
        """Return the changes between two runs of a zoo.

        Args:
            before: the name of the earlier run; "": the one before the later run.
            after: the name of the later run; "": the newest.
            zoo: the name of the zoo; not needed if the runs' names determine it.

        Raises:
            UnknownRunError: a run does not exist, or several zoos have it.
            RunError: a file of a run cannot be read.
        """
        zoo = self._zoo_of(after or before, zoo)
        return self._recent.get(("diff", zoo, before, after), lambda: self._diff(zoo, before, after))

    def _diff(self, zoo: str, before: str, after: str) -> dict[str, Any]:
        runs = self._zoos[zoo]
        named = _named(runs)
        for name in filter(None, (before, after)):
            if name not in named:
                raise UnknownRunError(f"no run is called {name!r}", where=zoo)
        two = named[after] if after else next(reversed(named.values()), None)
        if two is None:
            raise UnknownRunError("it has no run yet", where=zoo)
        one = named[before] if before else next((each for each in runs.before(two) if each.name in named), None)
        if one is None:
            raise UnknownRunError(f"no run is before {two.name}, which there is to compare with", where=zoo)
        found = compare(one.rows(), two.rows())
        regressions = [each.name for each in found.regressions]
        answer = {**found.to_dict(), "regressions": regressions}
        return {"zoo": zoo, "before": one.name, "after": two.name, **_found(answer), "runs": list(named)}

    def _zoo_of(self, name: str, zoo: str) -> str:
        if zoo and zoo not in self._zoos:
            known = ", ".join(self._zoos) or "none was named; --zoo DIR does"
            raise UnknownRunError(f"no zoo is called {zoo!r}", hint=f"There are: {known}.")
        have = [each for each in ([zoo] if zoo else self._zoos) if not name or name in _named(self._zoos[each])]
        if len(have) != 1:
            problem = "several zoos have a run" if have else "no run is"
            raise UnknownRunError(f"{problem} called {name!r}", hint="Say of which zoo: zoo=NAME." if have else "")
        return have[0]

    def _summary(self, run: Run) -> dict[str, Any]:
        """Return a run as a row of the list; a run whose files have not changed is not read again."""
        at = _changed_at(run)
        known = self._summaries.get(run.folder)
        if known is not None and known[0] == at:
            return known[1]
        try:
            rows = run.rows()
        except RunError as error:
            return {"run": run.name, "error": inert(str(error))}
        summary = {
            "run": run.name,
            "manifest": inert(run.manifest),
            "models": len(rows),
            "counts": dict(Counter(row.outcome for row in rows)),
            "unexpected": sum(not row.expected for row in rows),
            "over": all(row.over for row in rows),
            "error": "",
        }
        if time.time_ns() - at > _SETTLED_NS:
            self._summaries[run.folder] = at, summary
        return summary


def _named(runs: Runs) -> dict[str, Run]:
    """Return the runs by their names, the oldest first."""
    return {run.name: run for run in runs if run.name.isprintable()}


def _newest(runs: Runs) -> list[Run]:
    return list(reversed(_named(runs).values()))[:_MOST_RUNS]


def _changed_at(run: Run) -> int:
    """Return the time when a row was last written, in nanoseconds; 0 if there is none."""
    try:
        return (run.folder / "rows").stat().st_mtime_ns
    except OSError:
        return 0


def _over(row: dict[str, Any]) -> bool:
    return row["state"] in ("done", "failed")


def _found(answer: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = inert(answer)
    return made
