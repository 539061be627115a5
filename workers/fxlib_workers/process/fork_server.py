"""Forks processes with their libraries loaded: it imports a module once, and runs the module's `main` in each child.

    python -m fxlib_workers.process.fork_server MODULE

A child starts in milliseconds, whereas a fresh interpreter takes seconds to import torch. A child inherits only what
the imports left behind: this process has one thread (it refuses to serve with more, since a fork copies no other
thread, but the locks that it held), computes nothing, never touches an accelerator, and holds only the sockets
described here.

Requests come over the socket that it inherits (`child.CHANNEL`), as whole messages (SOCK_SEQPACKET) of JSON, in which
each child has its own key:

    <- {"ready": true} or {"failed": "why"}        after the module is imported
    -> {"fork": KEY, "name": NAME, ...}, a socket  `main(socket, policy)` runs in a child, which `ps` calls NAME
    <- {"forked": KEY, "pid": PID}
    -> {"end": [KEY, ...]}                         they are killed
    <- {"ended": KEY, "status": STATUS}            the exit status; a signal's number, negative, if one ended it

A `fork` also has "containment", the policy by which the child contains itself, and "network", a name. Children with the
same name share a network of their own; with an empty name, the policy's network is used.

The children are killed on an "end" message, when the other end of that socket is closed, or when this process ends in
any way. The processes that they started are killed with them. Linux only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fxlib_workers.process import linux
from fxlib_workers.process.child import inherited_socket
from fxlib_workers.process.containment import Containment, Network, Part, hold_network
from fxlib_workers.process.exceptions import shorten
from fxlib_workers.process.reaper import children_of_this_process, end_descendants

Main = Callable[[socket.socket, Containment], None]
"""The function that a child runs: it takes the child's socket, and the policy by which the child contains itself."""

_LONGEST_MESSAGE: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """A network that children share.

    Attributes:
        shared: the network, as a policy names it.
        open: the context that keeps it open.
        keys: the keys of the children.
    """

    shared: Network
    open: contextlib.ExitStack
    keys: set[str] = field(default_factory=set)


class ForkServer:
    """Forks children, and reports how they ended.

    Args:
        control: the socket over which requests come.
        main: the function that each child runs.
    """

    def __init__(self, control: socket.socket, main: Main) -> None:
        self._control = control
        self._main = main
        self._children: dict[int, str] = {}
        self._pids: dict[str, int] = {}
        self._networks: dict[str, _Network] = {}

    def run(self) -> None:
        """Serve until the other end of the socket is closed, then end all remaining children."""
        try:
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            end_descendants()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in self._children:
                    poll.unregister(descriptor)
                    self._reap(descriptor)
                    continue
                data, sockets, *_ = socket.recv_fds(self._control, _LONGEST_MESSAGE, 1)
                if not data:
                    return
                message = json.loads(data)
                if "fork" in message:
                    poll.register(self._fork(message, sockets[0]), select.POLLIN)
                for key in message.get("end", ()):
                    self._kill(key)

    def _fork(self, message: Mapping[str, Any], end: int) -> int:
        """Fork a child, and return a descriptor that becomes ready when the child ends."""
        server = os.getpid()
        policy = self._policy(message)
        if (pid := os.fork()) == 0:
            self._run_child(message, replace(policy, descriptors=(end,)), server)
        os.close(end)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor], self._pids[message["fork"]] = message["fork"], pid
        self._send(forked=message["fork"], pid=pid)
        return descriptor

    def _run_child(self, message: Mapping[str, Any], policy: Containment, server: int) -> None:
        status = 1
        try:
            os.setsid()
            _end_with(server)
            Path("/proc/self/comm").write_text(message["name"])  # the kernel keeps only 15 bytes
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self._control.close()
            for descriptor in self._children:
                os.close(descriptor)
            _reseed()
            with socket.socket(fileno=policy.descriptors[0]) as connection:
                self._main(connection, policy)
            status = 0
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:  # noqa: BLE001 - a child never returns into the loop above
            traceback.print_exc()
        finally:
            os._exit(status)

    def _policy(self, message: Mapping[str, Any]) -> Containment:
        """Return the policy of a child, with the network that it shares."""
        policy = Containment.loads(message["containment"])
        if not (name := message["network"]) or Part.NETWORK not in policy.parts:
            return policy
        if name not in self._networks:
            open_ = contextlib.ExitStack()
            self._networks[name] = _Network(shared=open_.enter_context(hold_network()), open=open_)
        self._networks[name].keys.add(message["fork"])
        return replace(policy, network=self._networks[name].shared)

    def _leave_network(self, key: str) -> None:
        for name, network in list(self._networks.items()):
            network.keys.discard(key)
            if not network.keys:
                self._networks.pop(name).open.close()

    def _kill(self, key: str) -> None:
        with contextlib.suppress(KeyError):  # it has ended on its own
            os.kill(self._pids[key], signal.SIGKILL)

    def _reap(self, descriptor: int) -> None:
        key = self._children.pop(descriptor)
        _, status = os.waitpid(self._pids.pop(key), 0)
        os.close(descriptor)
        self._end_orphans()
        self._leave_network(key)
        self._send(ended=key, status=os.waitstatus_to_exitcode(status))

    def _end_orphans(self) -> None:
        """Kill the processes that a child left behind, which this process has adopted, and their descendants."""
        while orphans := children_of_this_process() - set(self._pids.values()):
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _send(self, **message: object) -> None:
        self._control.send(json.dumps(message).encode())


def _end_with(server: int) -> None:
    """Make the kernel kill this process when the fork server ends, which may already have happened."""
    linux.end_with_parent(signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _reseed() -> None:
    """Reseed random generators that would otherwise draw the same numbers in each child.

    `random` reseeds itself, and torch starts with the same seed in every process.
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _check_threads(module: str) -> None:
    more = len(list(Path("/proc/self/task").iterdir())) - 1
    if more:
        raise RuntimeError(f"the import of {module} started threads: {more}")


def main(module: str) -> int:
    """Import the module and serve; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # other processes handle a terminal's Ctrl-C
    linux.adopt_orphans()
    with inherited_socket() as control:
        try:
            run_child: Main = importlib.import_module(module).main
            _check_threads(module)
        except Exception as error:  # noqa: BLE001 - the requester is told, whatever it is
            control.send(json.dumps({"failed": shorten(f"{type(error).__name__}: {error}")}).encode())
            return 1
        control.send(json.dumps({"ready": True}).encode())
        ForkServer(control, run_child).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
