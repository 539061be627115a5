"""A child for tests of the reaper: it obeys messages, and starts a process that outlives it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from fxlib_workers.process.child import Channel, ChildEndedError

ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


def main() -> int:
    """Serve until a message asks to exit, or the channel closes."""
    with contextlib.suppress(ChildEndedError):
        return serve(Channel.inherited())
    return 0


def serve(channel: Channel) -> int:
    """Obey messages, and return the exit status that one of them asks for."""
    while True:
        message = channel.receive()
        if message is None:
            continue
        if "say" in message:
            channel.send(said=message["say"])
        if "environment" in message:
            channel.send(environment=sorted(os.environ))
        if "breed" in message:
            # Started by a process that ends at once, in a session of its own: nobody's child.
            subprocess.run([sys.executable, "-c", ORPHAN], check=True, start_new_session=True)
            channel.send(bred=True)
        if "exit" in message:
            return int(message["exit"])
        if "kill" in message:
            os.kill(os.getpid(), message["kill"])


if __name__ == "__main__":
    sys.exit(main())
