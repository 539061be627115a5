"""`fxlib calibrate -o FILE`: measure this processor, for `fxlib analyze --device FILE`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxlib.cli.options import output
from fxlib.cli.printing import say
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from fxlib.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this processor, and write its description to a file (.toml)",
        description="Measure how fast this processor computes and moves memory, and write that to a file that "
        "fxlib analyze takes as a device. Let nothing else run meanwhile.",
    )
    parser.add_argument("-o", "--output", required=True, type=output, metavar="FILE", help="file to write (.toml)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of torch to measure with (default: torch's own choice)"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, metavar="S", help="how long to measure in all (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure this processor, write its description, and print its name.

    Raises:
        FxlibError: the file cannot be written.
    """
    import torch

    from fxlib.inspection import calibrate, save_device

    if options.threads is not None:
        if options.threads < 1:
            raise FxlibError(f"{options.threads} threads are too few", where="--threads", hint="Give 1 or more.")
        torch.set_num_threads(options.threads)
    device = calibrate(seconds=options.seconds)
    try:
        save_device(device, options.output)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=options.output) from error
    say(f"{device.name}: written to {options.output}")
    return 0
