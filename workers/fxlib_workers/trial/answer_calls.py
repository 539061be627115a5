"""The main loop of a trial's process, which a fork server forks: it makes a trainer or a server, and answers calls.

The calls come pickled from the driver. The answers are plain data (see `answers`), since a graph runs in here.
"""

from __future__ import annotations

import pickle
import signal
import socket
from typing import IO, Any, Final

import torch._dynamo  # noqa: F401 - otherwise the first optimizer would import it in each process

from fxlib_workers.process import linux
from fxlib_workers.process.containment import Containment, ContainmentError, contain
from fxlib_workers.process.exceptions import shorten
from fxlib_workers.trial.answers import write_answer, write_failure
from fxlib_workers.trial.frames import HEADER, MAKE, framed
from fxlib_workers.trial.trainer import Trainer
from fxlib_workers.trial.trial_process import ServerProcess

_ROLES: Final = {"server": ServerProcess, "trainer": Trainer}


def main(connection: socket.socket, policy: Containment) -> None:
    """Contain this process, and answer calls until the host closes the connection."""
    try:
        contain(policy)
    except ContainmentError as error:
        connection.sendall(framed(write_failure(f"a process could not be contained: {error}")))
        return
    linux.end_with_parent(signal.SIGKILL)  # again, since the parent or the user has changed
    calls = connection.makefile("rb")
    process: Any = None
    while (call := _receive(calls)) is not None:
        try:
            method, args = pickle.loads(call)  # noqa: S301 - the driver sent it
            if method == MAKE:
                role, *rest = args
                process, answer = _ROLES[role](*rest), None
            else:
                answer = getattr(process, method)(*args)
            message = write_answer(method, answer)
        except Exception as error:  # noqa: BLE001 - the driver is told and ends the trial
            message = write_failure(shorten(f"{type(error).__name__}: {error}"))
        connection.sendall(framed(message))


def _receive(calls: IO[bytes]) -> bytes | None:
    """Return the next call, or None if the host has closed the connection."""
    header = calls.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    call = calls.read(size)
    return call if len(call) == size else None
