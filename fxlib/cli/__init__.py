"""The command `fxlib`: the service, its workers and its jobs from a shell."""

from fxlib.cli.main import main

__all__ = ["main"]
