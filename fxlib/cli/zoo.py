"""`fxlib zoo`: measure all models of a manifest, go on after interruptions, report, and compare runs."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fxlib.cli.options import add_service, count, endpoint_of
from fxlib.cli.printing import say, say_json, warn
from fxlib.utils.text import plain

if TYPE_CHECKING:
    from fxlib.cli.options import Commands
    from fxlib.zoo.runs import Row, Run, Runs

FAILED: Final = 1
MISUSED: Final = 2
REGRESSED: Final = 3

_CODES = """exit codes: 0 all as expected; 1 some models could not run, or are not as expected; 2 the command line
or the manifest is wrong, or a file cannot be written; 3 a regression (check); 130 interrupted: run it again, and it
goes on
"""
_LOCAL = re.compile(r"(localhost|127\.[\d.]+|\[::1\]):\d+|unix:.*")


def add_to(commands: Commands) -> None:
    """Add the command and its actions."""
    parser = commands.add_parser(
        "zoo",
        help="measure all models of a manifest (.toml), report on them, and compare runs",
        description="Measure whole model zoos: what a manifest lists is captured in processes of its own, measured by "
        "the service, and kept as a run.",
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_run(_action(actions, "run", "measure all models, or continue an interrupted run", _run))
    retry = _action(actions, "retry", "try the models again that failed in the newest run", _retry)
    retry.add_argument("--failed", action="store_true", help="those that failed, which is what retry takes anyway")
    _add_run(retry)
    status = _action(actions, "status", "progress of the newest run", _status)
    status.add_argument("--json", action="store_true", help="print JSON")
    report = _action(
        actions, "report", "write a run as a site: index.html, a page for each model, results.json", _report
    )
    report.add_argument("-o", "--output", required=True, metavar="DIR", type=Path, help="folder to write")
    for each in (status, report):
        each.add_argument(
            "--run", dest="chosen", default="latest", metavar="RUN", help="name of the run (default: the newest)"
        )
    diff = _action(actions, "diff", "what changed between two runs", _diff)
    diff.add_argument("before", metavar="A", help="name of a run, the beginning of it, or its folder")
    diff.add_argument("after", metavar="B", nargs="?", default="latest", help="another one (default: the newest)")
    check = _action(actions, "check", "end with 3 if the newest run is worse than an earlier one", _check)
    check.add_argument("--against", required=True, metavar="A", help="name of the earlier run, or its folder")
    check.add_argument(
        "--run", dest="chosen", default="latest", metavar="RUN", help="name of the run (default: the newest)"
    )
    for each in (report, diff, check):
        each.add_argument("--json", action="store_true", help="print JSON")


def _action(
    actions: Commands, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, epilog=_CODES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", metavar="ZOO.toml", type=Path, help="the manifest")
    parser.add_argument(
        "--runs",
        metavar="DIR",
        type=Path,
        help="folder of the runs (default: the manifest's name and .runs, beside it)",
    )
    parser.set_defaults(run_action=run, run=_guarded)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_service(parser, patience_s=5.0)
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="only models of these names; repeatable"
    )
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of N parts")
    parser.add_argument(
        "--max-parallel",
        type=count,
        metavar="N",
        help="models that are captured or measured at a time (default: 8; 1 for a service on this machine, whose "
        "measurements captures would disturb)",
    )
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failure (default: go on)")
    parser.add_argument("--new", action="store_true", help="begin a new run, even if the last one is unfinished")
    parser.add_argument("--fresh", action="store_true", help="measure again, even what is known")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _guarded(options: argparse.Namespace) -> int:
    from fxlib.zoo.manifest import ManifestError
    from fxlib.zoo.runs import RunError

    try:
        action: Callable[[argparse.Namespace], int] = options.run_action
        return action(options)
    except (ManifestError, RunError) as error:
        warn(plain(f"fxlib: {error}"))
        return MISUSED


def _run(options: argparse.Namespace, *, retry: bool = False) -> int:
    from fxlib.zoo.manifest import read_manifest
    from fxlib.zoo.report import results
    from fxlib.zoo.run_zoo import RunOptions, run_zoo

    manifest = read_manifest(options.manifest)
    entries = manifest.chosen(options.only, options.shard)
    runs, names = _runs_of(options), [each.name for each in manifest.entries]
    newest = runs.latest()
    if newest is None or not (retry or _goes_on(newest, options, names, [each.name for each in entries])):
        newest = runs.begin(str(manifest.path), names, fresh=options.fresh)
    chosen, known = len(entries), frozenset(newest.names)
    entries = tuple(each for each in entries if each.name in known)
    warn(f"fxlib: run {newest.name} in {newest.folder}")
    if left := chosen - len(entries):
        warn(f"fxlib: {left} models are not in this run; fxlib zoo run measures them")
    count = options.max_parallel or (1 if _LOCAL.fullmatch(options.service) else 8)
    course = RunOptions(
        service=endpoint_of(options),
        max_parallel=count,
        captures=min(count, max(1, (os.cpu_count() or 1) // 2)),
        fresh=newest.fresh or options.fresh,
        retry_failed=retry,
        fail_fast=options.fail_fast,
    )
    shown = _Lines(len(entries))
    try:
        rows = run_zoo(newest, entries, runs.before(newest), course, shown.show)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"the run is unfinished; to continue: fxlib zoo run {options.manifest}")
        raise
    if options.json:
        say_json(results(newest, next(iter(runs.before(newest)), None)), indent=1)
    else:
        say(_summary(rows))
    return FAILED if any(not row.expected for row in rows) else 0


def _retry(options: argparse.Namespace) -> int:
    return _run(options, retry=True)


def _status(options: argparse.Namespace) -> int:
    from fxlib.zoo.report import results

    run = _runs_of(options).named(options.chosen)
    if options.json:
        say_json(results(run), indent=1)
        return 0
    say(plain(f"run {run.name} of {run.manifest}"))
    say(_summary(run.rows()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from fxlib.zoo.report import write_site

    runs = _runs_of(options)
    run = runs.named(options.chosen)
    written = write_site(run, runs.before(run), options.output)
    size = sum(each.stat().st_size for each in written)
    if options.json:
        say_json({"index": str(written[0]), "files": len(written), "bytes": size})
    else:
        say(f"{written[0]}: {len(written)} files, {size:,} bytes")
    return 0


def _diff(options: argparse.Namespace) -> int:
    return _compared(options, options.before, options.after) and 0


def _check(options: argparse.Namespace) -> int:
    return REGRESSED if _compared(options, options.against, options.chosen) else 0


def _compared(options: argparse.Namespace, before: str, after: str) -> int:
    """Print what changed, and return the number of regressions."""
    from fxlib.spec.report import interval
    from fxlib.utils.text import table
    from fxlib.zoo.compare_runs import compare

    runs = _runs_of(options)
    one, two = runs.named(before), runs.named(after)
    found = compare(one.rows(), two.rows())
    if options.json:
        say_json({"before": one.name, "after": two.name, **found.to_dict()}, indent=1)
        return len(found.regressions)
    say(f"{one.name} to {two.name}: {found.compared} rows have new figures in both")

    def shown(row: Row | None) -> str:
        if row is None or row.gain is None:
            return "-" if row is None else row.failure or row.reason or row.outcome
        return interval(row.gain)

    rows = [[each.name, each.kind, shown(each.before), shown(each.after)] for each in found.changes]
    say("\n".join(table([["model", "change", "before", "now"], *rows], indent="")) if rows else "nothing changed")
    return len(found.regressions)


class _Lines:
    """Writes a line for each finished row, with the number of finished rows."""

    def __init__(self, count: int) -> None:
        self._count, self._over = count, set[str]()

    def show(self, row: Row) -> None:
        """Write the row's line, once."""
        if row.over and row.name not in self._over:
            self._over.add(row.name)
            took = "" if row.seconds is None or row.reused else f" ({row.seconds:.0f} s)"
            warn(plain(f"fxlib: {len(self._over)}/{self._count} {_line(row)}{took}"))


def _line(row: Row) -> str:
    from fxlib.spec.report import interval

    if row.state == "failed":
        return f"{row.name}: {row.failure}: {row.explanation}"
    how = ", from an earlier run" if row.reused else ", from an earlier measurement" if row.cached else ""
    return f"{row.name}: {row.outcome} {interval(row.gain) if row.gain else row.reason}{how}"


def _summary(rows: Sequence[Row]) -> str:
    """Return all rows as a table, and a line that counts them."""
    from collections import Counter

    from fxlib.spec.report import interval
    from fxlib.utils.text import table

    header = ["model", "recipe", "outcome", "gain", "why"]
    lines = [
        [
            row.name,
            row.recipe,
            row.outcome + ("" if row.expected else "!"),
            interval(row.gain),
            row.failure or row.reason,
        ]
        for row in rows
    ]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(row.outcome for row in rows).most_common())
    unexpected = sum(not row.expected for row in rows)
    unlike = f"; {unexpected} not as expected (!)" if unexpected else ""
    return "\n".join([*table([header, *lines], indent=""), "", f"{len(rows)} models: {counts}{unlike}"])


def _runs_of(options: argparse.Namespace) -> Runs:
    from fxlib.zoo.manifest import ManifestError
    from fxlib.zoo.runs import Runs

    manifest: Path = options.manifest
    folder: Path = options.runs or manifest.with_name(f"{manifest.stem}.runs")
    if not (folder.exists() or manifest.exists()):
        raise ManifestError("there is no such manifest", where=str(manifest))
    return Runs(folder)


def _goes_on(run: Run, options: argparse.Namespace, names: list[str], chosen: list[str]) -> bool:
    """Return whether the command continues the newest run, which is unfinished, instead of beginning a new one."""
    if options.new or list(run.names) != names or (options.fresh and not run.fresh):
        return False
    return not all(run.row(name).over for name in chosen)


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, such as 1/4")
    return int(found[1]), int(found[2])
