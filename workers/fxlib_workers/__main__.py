"""`python -m fxlib_workers`: start a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from fxlib.errors import FxlibError, of_system
from fxlib.utils import tracing
from fxlib_workers import logs
from fxlib_workers.config import APPLICATION
from fxlib_workers.process.probe import available
from fxlib_workers.trial.node_containment import allowed_on_nodes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; return the exit status."""
    try:
        config = APPLICATION.read(arguments)
        # After the options are read: help and errors in options need no torch.
        from fxlib.runtime import functions
        from fxlib_workers.agent import Agent, check_containment, check_host, check_ray

        for module in config.trial.allowed_modules:
            functions.allow_module(module)  # a wrong name is better reported now than in a trial
        check_host(config)
        logs.set_up()
        if notice := tracing.begin_process("fxlib-worker"):
            logs.Log("fxlib_workers").info(notice)
        host, cluster = available(), config.trial.ray_address
        nodes = allowed_on_nodes(cluster) if cluster else None
        level = check_containment(config, host, nodes)
        check_ray(config.trial, host, root=os.geteuid() == 0)
        if nodes is not None:
            config = replace(config, trial=replace(config.trial, node_containment=level))
        Agent(config, host, level).run()
    except FxlibError as error:
        print(f"fxlib worker: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    except OSError as error:  # a read-only folder, a full disk, or a file where a folder should be
        print(f"fxlib worker: {of_system(error)}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before it listens to signals, or in a command that does not
        sys.exit(130)
