"""The command `fxlib`: the service, its workers and its jobs from a shell.

Commands only parse, call and print: what they show comes from the folders below.
"""

from fxlib.cli.main import main

__all__ = ["main"]
