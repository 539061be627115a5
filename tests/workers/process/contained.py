"""A function run in a contained process that is forked from this one, and what it said."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import replace

from fxlib_workers.process.containment import Containment, Part, contain
from fxlib_workers.process.probe import Available, available, missing_parts
from fxlib_workers.process.system_calls import compile_filter

NOBODY = 65534
"""The id of a user without privileges."""

_PR_SET_DUMPABLE = 4

host = functools.cache(available)
"""What this host allows."""


class ChildFailedError(Exception):
    """The contained process ended with another status than 0; the message is what it said."""


def everything(found: Available | None = None, **rest: object) -> Containment:
    """Return a policy that asks for all that this host allows."""
    return Containment(parts=(found or host()).parts, **rest)  # type: ignore[arg-type]


@functools.cache
def unprivileged_host() -> Available:
    """Return what this host allows a user without privileges."""
    if os.geteuid() != 0:
        return host()
    if Part.FILTER in host().parts:  # compiled here, since a user may not be able to import what that needs
        compile_filter(sockets=True)
        compile_filter(sockets=False)
    return Available.without(json.loads(run(lambda: json.dumps(missing_parts()), None, NOBODY)))


def start(work: Callable[[], object], policy: Containment | None, user: int | None = None) -> tuple[int, int]:
    """Fork a process, and run a function in it, contained; return its id, and a pipe that has what it says.

    With `user`, the process becomes that user's before it is contained.
    """
    said, to_say = os.pipe()
    child = os.fork()
    if child:
        os.close(to_say)
        return child, said
    try:
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            _show_memory()
        if policy is not None:
            contain(replace(policy, descriptors=(*policy.descriptors, to_say)))
        os.write(to_say, str(work()).encode())
        os._exit(0)
    except BaseException:  # noqa: BLE001 - this is another process, and must never run the other tests
        os.write(to_say, traceback.format_exc().encode())
        os._exit(1)


def _show_memory() -> None:
    """Be as open to its user as any process that the user started: one that changed its user is not."""
    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0):
        raise OSError("prctl failed")


def finish(child: int, said: int) -> str:
    """Wait for a process that `start` forked; return the function's result as text.

    Raises:
        ChildFailedError: it raised, or a signal ended it.
    """
    with os.fdopen(said, "rb") as pipe:
        text = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise ChildFailedError(f"status {code}: {text}")
    return text


def run(work: Callable[[], object], policy: Containment | None, user: int | None = None) -> str:
    """Run a function in a contained process; return its result as text. For the arguments, see `start`.

    Raises:
        ChildFailedError: it raised, or a signal ended it.
    """
    return finish(*start(work, policy, user))
