"""`fxlib jobs`: list, show, watch and cancel jobs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from fxlib.cli.options import add_service, count, endpoint_of, label
from fxlib.cli.printing import say, say_json, warn

NAME = "jobs"

if TYPE_CHECKING:
    from fxlib.cli.options import Commands
    from fxlib.client import Client
    from fxlib.spec.job import Job

_SHOWN = 5
"""Number of jobs that the error names when an abbreviated id is ambiguous."""

_STATES = ("queued", "running", "succeeded", "failed", "cancelled")


def add_to(commands: Commands) -> None:
    """Add the command and its actions."""
    parser = commands.add_parser(
        NAME,
        help="list the service's jobs; show, watch or cancel one",
        description="Without an action, list the jobs.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_list(actions.add_parser("list", help="jobs, the newest first"))
    _add_action(actions, "show", "one job, with its result", _show)
    _add_action(actions, "watch", "follow a job to its end", _watch)
    _add_action(actions, "cancel", "cancel a job", _cancel)


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the command line with the action `list` where it names none, as in `fxlib jobs --json`."""
    name, *rest = arguments
    listing = not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help"))
    return [name, "list", *rest] if listing else [name, *rest]


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_list)
    add_service(parser)
    parser.add_argument("--namespace", default="", help="only jobs of this namespace")
    parser.add_argument("--name", default="", help="only jobs of the model of this name")
    parser.add_argument(
        "--label",
        type=label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only jobs with this label; repeatable",
    )
    parser.add_argument(
        "--state", choices=_STATES, action="append", default=[], help="only jobs in this state; repeatable"
    )
    parser.add_argument("--limit", type=count, default=50, help="at most so many (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, one job a line")


def _add_action(actions: Commands, name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> None:
    parser = actions.add_parser(name, help=summary)
    parser.add_argument("job", metavar="JOB", type=_beginning, help="its id, or how that begins")
    add_service(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _list(options: argparse.Namespace) -> int:
    from fxlib.utils.text import table

    with endpoint_of(options).connect() as client:
        found = client.jobs(
            namespace=options.namespace,
            name=options.name,
            labels=dict(options.label),
            states=options.state,
            limit=options.limit,
        )
    if options.json:
        for job in found:
            say_json(_facts(job), indent=None)
    elif not found:
        warn("no jobs")
    else:
        header = ["job", "model", "namespace", "state", "phase", "decision", "gain", "live", "created", "took"]
        say("\n".join(table([header, *(_row(job) for job in found)], indent="")))
    return 0


def _row(job: Job) -> list[str]:
    from fxlib.spec.report import interval
    from fxlib.utils.text import seconds

    decision, gain = ("-", "-") if job.report is None else (job.report.decision, interval(job.report.gain))
    took = (job.finished_at - job.created_at).total_seconds() if job.finished_at and job.created_at else None
    phase = "no worker" if job.waits_for else job.phase
    state = f"{job.state} (cached)" if job.cached else job.state
    live = "-" if job.live is None else "went back" if job.live.went_back else interval(job.live.gain)
    created = _local(job.created_at)
    return [job.id, job.name, job.namespace, state, phase, decision, gain, live, created, seconds(took)]


def _show(options: argparse.Namespace) -> int:
    with endpoint_of(options).connect() as client:
        job = client.job(_id_of(options.job, client))
    _print(job, as_json=options.json)
    return 0


def _watch(options: argparse.Namespace) -> int:
    from fxlib.client.watch_job import display

    with endpoint_of(options).connect() as client, display() as shown:
        job = client.watch(_id_of(options.job, client), shown.show)
    _print(job, as_json=options.json)
    return 0 if job.state == "succeeded" else 1


def _cancel(options: argparse.Namespace) -> int:
    with endpoint_of(options).connect() as client:
        job = client.cancel(_id_of(options.job, client))
    if options.json:
        say_json(_facts(job), indent=None)
    else:
        say(f"job {job.id}: {job.state}")
    return 0


def _beginning(text: str) -> str:
    if not text:  # each id begins so: a script whose variable is unset would name any job
        raise argparse.ArgumentTypeError("it is empty, and no beginning of an id")
    return text


def _id_of(given: str, client: Client) -> str:
    """Return the id of the only job whose id begins with `given`; without such a job, return `given` itself."""
    from fxlib.errors import FxlibError

    ids = [job.id for job in client.jobs(id_prefix=given, limit=_SHOWN) if job.id.startswith(given)]
    if given in ids or not ids:
        return given
    if len(ids) > 1:
        more = ", ..." if len(ids) == _SHOWN else ""
        raise FxlibError(f"several jobs begin with {given!r}: {', '.join(ids)}{more}", hint="Give more of the id.")
    return ids[0]


def _print(job: Job, *, as_json: bool) -> None:
    from fxlib.spec.labels import show_labels
    from fxlib.spec.report import render

    if as_json:
        say_json(_facts(job), indent=None)
        return
    say(f"job {job.id}: {job.state}")
    facts = {
        "model": job.name,
        "namespace": job.namespace,
        "labels": show_labels(job.labels),
        "measured where": show_labels(job.where),
        "waits for a worker": job.waits_for,
        "phase": "" if job.done else job.phase,
        "asked by": job.asked_by,
        "worker": f"{job.worker_id} ({job.measured_by})" if job.worker_id and job.measured_by else job.worker_id,
        "attempts": str(job.attempts) if job.attempts > 1 else "",
        "created": _local(job.created_at),
        "finished": _local(job.finished_at),
        "seen in training": str(job.live) if job.live else "",
        "failure": f"{job.failure.message} ({job.failure.code})" if job.failure else "",
    }
    say("\n".join(f"  {name}: {value}" for name, value in facts.items() if value))
    if job.report is not None:
        say(f"\n{render(job.report)}")


def _facts(job: Job) -> object:
    from fxlib.spec.report import plain

    return plain(job)


def _local(at: datetime | None) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S") if at else ""
