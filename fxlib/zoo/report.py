"""Write a run of a zoo as a static site: a leaderboard, a page for each model, and the same data as `results.json`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, UndefinedError
from markupsafe import Markup

from fxlib.pages import environment
from fxlib.serialization.files import write_whole
from fxlib.spec.labels import show_labels
from fxlib.spec.report import plain
from fxlib.zoo.compare_runs import Comparison, compare
from fxlib.zoo.runs import Row, Run, RunError

_MOST_LOG_BYTES: Final = 1 << 16
_MOST_RUNS: Final = 50
"""Maximum number of runs that a model's history shows."""


def results(run: Run, before: Run | None = None) -> dict[str, Any]:
    """Return a run as plain data: counts, rows, and the changes since the run before, if there is one.

    Raises:
        RunError: a file of a run cannot be read.
    """
    rows = run.rows()
    changes = None if before is None else {"run": before.name, **_compared(before, rows).to_dict()}
    return {
        "run": run.name,
        "manifest": run.manifest,
        "counts": dict(Counter(row.outcome for row in rows)),
        "rows": [plain(row.to_dict()) for row in rows],
        "since": changes,
    }


def write_site(run: Run, earlier: Sequence[Run], folder: Path) -> list[Path]:
    """Write a run as a site into a folder, which is created, and return the files. Each appears whole, or not at all.

    Args:
        run: the run.
        earlier: the runs before it, the newest first.
        folder: the folder; other files in it stay.

    Raises:
        RunError: a file cannot be read or written.
    """
    rows = run.rows()
    before = next(iter(earlier), None)
    comparison = None if before is None else _compared(before, rows)
    pages = _environment(run)
    history = _history(rows, [*reversed(earlier[:_MOST_RUNS]), run])
    ranked = sorted(rows, key=lambda row: (-(row.gain.value if row.gain else float("-inf")), row.name))
    made = {
        "index.html": pages.get_template("index.html").render(
            run=run, rows=ranked, counts=Counter(row.outcome for row in rows), groups=_groups(rows),
            comparison=comparison, before=before,
        ),
        "results.json": json.dumps(results(run, before), indent=1),
    }  # fmt: skip
    page = pages.get_template("model.html")
    for row in rows:
        shown = {"row": row, "report": run.report(row.name), "history": history[row.name], "log": _log(run, row)}
        try:
            made[f"models/{run.slug(row.name)}.html"] = page.render(run=run, **shown)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, UndefinedError) as error:
            raise RunError(f"the report on {row.name!r} is of another form: {error}", where=str(run.folder)) from error
    try:
        (folder / "models").mkdir(parents=True, exist_ok=True)
        for name, text in reversed(made.items()):  # the index comes last, so that it names no missing page
            write_whole(folder / name, [text.encode()])
    except OSError as error:
        raise RunError(error.strerror or str(error), where=str(error.filename or folder)) from error
    return [folder / name for name in made]


def _compared(before: Run, rows: Sequence[Row]) -> Comparison:
    return compare(before.rows(), rows)


def _environment(run: Run) -> Environment:
    made = environment("fxlib.zoo")
    script = (files("fxlib.zoo") / "pages" / "index.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made.filters["labels"] = show_labels
    made.globals |= {"slug": run.slug, "script": Markup(script), "script_hash": digest}  # noqa: S704 - our own file
    return made


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows without a gain to adopt, by failure or reason; the largest group first."""
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        if row.outcome in ("failed", "kept"):
            groups[row.failure or row.reason].append(row)
    return sorted(groups.items(), key=lambda each: (-len(each[1]), each[0]))


def _history(rows: Sequence[Row], runs: Sequence[Run]) -> Mapping[str, list[tuple[Run, Row]]]:
    """Return the history of each row over the runs that have it, the oldest first."""
    found = {row.name: list[tuple[Run, Row]]() for row in rows}
    for run in runs:
        for name in found.keys() & set(run.names):
            found[name].append((run, run.row(name)))
    return found


def _log(run: Run, row: Row) -> str:
    """Return the end of a failed capture's output."""
    path = run.log(row.name)
    if row.state != "failed" or not path.exists():
        return ""
    return path.read_bytes()[-_MOST_LOG_BYTES:].decode(errors="replace")
