"""`python -m fxlib_service`: run the service until SIGTERM or SIGINT, or make or restore a backup."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from fxlib.errors import FxlibError, of_system
from fxlib.utils import tracing
from fxlib_service import audit
from fxlib_service.config import APPLICATION, MIB, Address, Config

_CLOSE_S: Final = 10.0
"""Seconds that the service has to end after it was asked to, beyond the grace period for calls."""
_ALLOCATION: Final = {-3: 1 * MIB, -1: 1 * MIB, -8: 2}
"""Values by parameter of `mallopt`: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, in bytes, and M_ARENA_MAX."""


def main() -> int:
    """Run the service; return the exit status."""
    return_freed_memory()
    os.umask(0o077)  # only this user may read weights and the tokens of leases, whatever folder they are written to
    handler = logging.StreamHandler()
    handler.setFormatter(tracing.TracedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if sys.argv[1:2] in (["backup"], ["restore"]):
        from fxlib_service import backup  # here: it imports torch

        return backup.main(sys.argv[1], sys.argv[2:])
    try:
        config = APPLICATION.read()
        audit.write_to(config.audit_log)
        if notice := tracing.begin_process("fxlib-service"):
            logging.getLogger(__name__).info("%s", notice)
        asyncio.run(_run(config))
    except FxlibError as error:
        sys.stderr.write(f"fxlib service: {error}\n")
        return 2
    except OSError as error:  # a read-only folder, a full disk, or a file where a folder should be
        sys.stderr.write(f"fxlib service: {of_system(error)}\n")
        return 2
    return 0


def return_freed_memory() -> None:
    """Return the memory of large messages to the kernel as soon as it is freed.

    By default, glibc takes the freeing of a large block as a reason to keep later ones on its heap, where one small
    object behind them keeps all of them from being returned. Under a flood of messages of 5 MiB, the heap grew for as
    long as the flood went on.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is not None:
        for parameter, value in _ALLOCATION.items():
            mallopt(parameter, value)


async def _run(config: Config) -> None:
    from fxlib_service.server import Server  # after the options are read: help and errors in options need no torch

    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = Server(config)
    if any(each is not None for each in (config.policy, config.token_file, config.tls)):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reread)
    try:
        listen, metrics = await server.start()
        gc.collect()
        gc.freeze()  # imported modules stay; scanning them again would stop every call for up to half a second
        _announce(config, listen, metrics, server.token_file)
        await ended.wait()
        _end_at_last(config.shutdown_grace_s + _CLOSE_S)
    finally:
        await server.stop()


def _end_at_last(within_s: float) -> None:
    """End this process if it has not ended in time. A database that does not respond blocks the threads that query it.

    Nothing is lost by this, just as nothing is lost by killing the process.
    """

    def end() -> None:
        logging.getLogger(__name__).warning("not everything has ended within %.0f s; ending without it", within_s)
        os._exit(1)

    timer = threading.Timer(within_s, end)
    timer.daemon = True
    timer.start()


def _announce(config: Config, listen: Address, metrics: Address, token_file: Path) -> None:
    """Write one line of JSON with the addresses, for programs that wait until the service is ready.

    Raises:
        FxlibError: the ready file cannot be written.
    """
    fields = {"listen": str(listen), "metrics": str(metrics), "token_file": str(token_file), "pid": os.getpid()}
    line = json.dumps({"ready": True, **fields})
    if config.ready_file is not None:
        unfinished = config.ready_file.with_name(f"{config.ready_file.name}.{os.getpid()}")
        try:
            unfinished.write_text(f"{line}\n")
            unfinished.replace(config.ready_file)
        except OSError as error:
            raise FxlibError(f"cannot write {config.ready_file}: {error.strerror}", where="--ready-file") from error
    sys.stdout.write(f"{line}\n")  # after the file: a reader of this line may open it at once
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before it listens to signals, or in a command that does not
        sys.exit(130)
