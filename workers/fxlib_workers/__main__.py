"""`python -m fxlib_workers`: start a worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fxlib.errors import FxlibError, of_system
from fxlib_workers import logs
from fxlib_workers.config import APPLICATION
from fxlib_workers.process.probe import available


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; return the exit status."""
    try:
        config = APPLICATION.read(arguments)
        # After the options are read: help, and what is wrong with them, need no torch.
        from fxlib.runtime import functions
        from fxlib_workers.agent import Agent, check_containment

        for module in config.trial.allowed_modules:
            functions.allow_module(module)  # a wrong name is better reported now than in a trial
        logs.set_up()
        host = available()
        check_containment(config, host)
        Agent(config, host).run()
    except FxlibError as error:
        print(f"fxlib worker: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    except OSError as error:  # a read-only folder, a full disk, a file where a folder is wanted
        print(f"fxlib worker: {of_system(error)}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
