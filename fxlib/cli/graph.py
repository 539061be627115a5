"""The arguments that `fxlib analyze` and `fxlib draw` share: a saved graph, its inputs, and a device."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fxlib.errors import FxlibError

if TYPE_CHECKING:
    import torch

    from fxlib.cli.options import Commands
    from fxlib.inspection import Analysis

_FORM = "Write sizes and a dtype: 2x3x224x224, or 8x12:int64."


def add_graph_command(commands: Commands, name: str, *, does: str, about: str) -> argparse.ArgumentParser:
    """Add a command that takes a saved graph."""
    parser = commands.add_parser(name, help=does, description=f"{about}; nothing in it is executed.")
    parser.add_argument("file", metavar="FILE", type=Path, help="what fxlib.save wrote")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help="shape and dtype of one input, such as 2x3x224x224 or 8x12:int64; repeat it for each, in order "
        "(an exported graph of fixed sizes needs none)",
    )
    parser.add_argument("--device", metavar="NAME", help="h100, h200, or a file that fxlib calibrate wrote")
    parser.add_argument("--profile", metavar="FILE", help="what fxlib profile measured of the model (.fxp)")
    parser.add_argument("--symbolic", action="store_true", help="keep the sizes of inputs as symbols")
    return parser


def analysis_of(options: argparse.Namespace) -> Analysis:
    """Return the analysis that the options of `add_graph_command` ask for.

    Raises:
        FxlibError: the file, an input or the device is not valid.
    """
    import fxlib
    from fxlib.inspection import analyze

    # torch logs a traceback for what our error says in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    inputs = [_input(each) for each in options.input] or None
    try:
        module = fxlib.load(options.file)
        profile = None if options.profile is None else fxlib.load_profile(options.profile)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=str(error.filename or options.file)) from error
    return analyze(module, inputs, device=options.device, profile=profile, symbolic=options.symbolic)


def _input(text: str) -> torch.Tensor:
    import torch

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise FxlibError(f"{text!r} is no tensor", where="--input", hint=_FORM)
    try:
        sizes = [int(each) for each in shape.split("x")] if shape else []
        return torch.empty(sizes, dtype=dtype, device="meta")
    except (ValueError, TypeError, RuntimeError) as error:
        raise FxlibError(f"{text!r} is no tensor", where="--input", hint=_FORM) from error
