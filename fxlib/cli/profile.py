"""`fxlib profile pkg.mod:world -o FILE`: measure a model in the RPC group that the user's function starts."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fxlib.cli.options import UsageError, called, output
from fxlib.cli.printing import say, say_json
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from fxlib.cli.options import Commands
    from fxlib.spec.profile import CallProfile, Profile

_HINT = "Write pkg.mod:world, for a context manager that takes nothing and yields (model, workload)."


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "profile",
        help="measure a model's calls and local work, and write them to a file (.fxp)",
        description="Measure a model in its live world. WORLD is a context manager of your own, which takes nothing, "
        "joins or starts the RPC group, and yields (model, workload); it is imported and entered in this process.",
    )
    parser.add_argument("world", metavar="WORLD", help="pkg.mod:function")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", type=output, help="file to write (.fxp)")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="how many steps to measure (default: 10; 1 if a call may write)",
    )
    parser.add_argument(
        "--pushes", action="store_true", help="push gradients to the servers, for good, to measure what that takes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the model, write the profile, and print it.

    Raises:
        FxlibError: there is no such world, the model cannot be profiled, or the file cannot be written.
    """
    import fxlib
    from fxlib.profiling.live_profile import measured

    where = f"WORLD {options.world}"
    world = called(options.world, where, _HINT)
    if not isinstance(world, AbstractContextManager):
        raise UsageError(f"returned {type(world).__name__}, not a context manager", where=where, hint=_HINT)
    with world as made:
        if not (isinstance(made, tuple) and len(made) == 2):
            raise UsageError(f"yielded {type(made).__name__}", where=where, hint=_HINT)
        profile = measured(*made, steps=options.steps, pushes=options.pushes)
    try:
        fxlib.save_profile(profile, options.output)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=options.output) from error
    show(profile, as_json=options.json)
    return 0


def show(profile: Profile, *, as_json: bool) -> None:
    """Print a profile."""
    if not as_json:
        say(text_of(profile))
        return
    from google.protobuf.json_format import MessageToDict

    from fxlib.protocol import profile_to_proto

    say_json(MessageToDict(profile_to_proto(profile), preserving_proto_field_name=True))


def text_of(profile: Profile) -> str:
    """Return a profile as text: the step, the calls, the servers, the longest local work, and notes."""
    from fxlib.utils.text import plain, seconds, table

    local_s = sum(node.seconds for node in profile.nodes)
    parts = [("forward's local work", local_s), ("loss", profile.loss_s), ("backward", profile.backward_s)]
    words = ", ".join(f"{seconds(value)} {name}" for name, value in (*parts, ("rest", profile.rest_s)))
    lines = [f"{len(profile.calls)} remote calls, {len(profile.nodes)} local nodes; {words}"]
    lines.append(plain(f"of {profile.steps} steps on {profile.hardware}, torch {profile.torch_version}"))
    if profile.calls:
        rows = [_call(each) for each in profile.calls]
        lines += ["", "remote calls, alone in flight", *table([_CALL, *rows], right=(3, 4, 5, 6, 7))]
    if profile.servers:
        rows = [
            [
                each.name,
                seconds(each.round_trip_s),
                str(each.concurrency),
                f"{_size(round(each.bytes_per_s))}/s",
                seconds(each.per_item_s),
                seconds(each.per_turn_s),
            ]
            for each in profile.servers
        ]
        heads = ["server", "empty call", "at once", "one way", "per item", "in turn"]
        lines += ["", "servers", *table([heads, *rows], right=(1, 2, 3, 4, 5))]
    longest = sorted(profile.nodes, key=lambda node: node.seconds, reverse=True)[:_LONGEST]
    if longest:
        rows = [[each.node, seconds(each.seconds), _size(each.output_bytes)] for each in longest]
        lines += ["", "the longest local work", *table([["node", "takes", "output"], *rows], right=(1, 2))]
    if profile.notes:
        lines += ["", "notes", *(f"  {plain(note)}" for note in profile.notes)]
    return "\n".join(lines)


_CALL = ["call", "function", "to", "request", "response", "issue", "answer", "push"]
_LONGEST = 10


def _call(call: CallProfile) -> list[str]:
    from fxlib.utils.text import seconds

    push = "-" if call.push is None else seconds(call.push.issue_s + call.push.service_s.median)
    sizes = [_size(call.request_bytes), _size(call.response_bytes)]
    return [call.call, call.function, call.to, *sizes, seconds(call.issue_s), seconds(call.service_s.median), push]


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
