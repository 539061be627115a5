"""`fxlib analyze`, `fxlib draw`: what a saved graph costs, without running it. `fxlib calibrate`: measure a device."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxlib.cli.options import UsageError, output, seconds, unreadable
from fxlib.cli.printing import say, say_json
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    import torch

    from fxlib.cli.options import Commands
    from fxlib.inspection import Analysis, Device

_FORM = "Write sizes and a dtype: 2x3x224x224, or 8x12:int64."


def add_to(commands: Commands) -> None:
    """Add the commands."""
    _add_analyze(commands)
    _add_draw(commands)
    _add_calibrate(commands)


def add_graph_command(commands: Commands, name: str, *, does: str, about: str) -> argparse.ArgumentParser:
    """Add a command that takes a saved graph."""
    parser = commands.add_parser(name, help=does, description=f"{about}; nothing in it is executed.")
    parser.add_argument("file", metavar="FILE", type=Path, help="file written by fxlib.save")
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
    """Return the analysis that the options of `add_graph_command` request.

    Raises:
        FxlibError: the file, an input or the device is not valid.
    """
    import fxlib
    from fxlib.inspection import analyze

    # torch would log a traceback for what our error says in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    inputs = [_input(each) for each in options.input] or None
    device = None if options.device is None else _device(options.device)
    try:
        module = fxlib.load(options.file)
        profile = None if options.profile is None else fxlib.load_profile(options.profile)
    except OSError as error:
        raise unreadable(error, str(error.filename or options.file)) from error
    return analyze(module, inputs, device=device, profile=profile, symbolic=options.symbolic)


def _device(name: str) -> Device:
    from fxlib.inspection import load_device

    try:
        return load_device(name)
    except FxlibError as error:
        if isinstance(error.__cause__, OSError):
            raise UsageError(str(error), where="--device") from error
        raise


def _input(text: str) -> torch.Tensor:
    import torch

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # a quantized one, of which there are no fakes
        raise UsageError(f"{text!r} is not a tensor", where="--input", hint=_FORM)
    try:
        sizes = [int(each) for each in shape.split("x")] if shape else []
        return torch.empty(sizes, dtype=dtype, device="meta")
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{text!r} is not a tensor", where="--input", hint=_FORM) from error


def _add_analyze(commands: Commands) -> None:
    parser = add_graph_command(
        commands,
        "analyze",
        does="print shapes, arithmetic, memory, time and effects of a saved graph (.fxg)",
        about="Print what a file of fxlib.save costs for inputs of given shapes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, every node")
    parser.set_defaults(run=_analyze)


def _analyze(options: argparse.Namespace) -> int:
    """Analyze the graph and print the analysis.

    Raises:
        FxlibError: the file, an input or the device is not valid.
    """
    found = analysis_of(options)
    say_json(_facts(found)) if options.json else say(found)
    return 0


def _facts(found: Analysis) -> dict[str, Any]:
    from fxlib.inspection.tensor_facts import number
    from fxlib.spec.report import plain

    return {
        "nodes": [
            {
                "name": node.name,
                "makes": list(map(str, each.tensors)),
                "operators": [operation.name for operation in each.operations],
                "flops": number(each.flops),
                "read_bytes": number(each.read_bytes),
                "written_bytes": number(each.written_bytes),
                "live_bytes": each.live_bytes,
                "seconds": each.seconds,
                "effects": list(each.effects),
                "unknown": None if each.unknown is None else str(each.unknown),
            }
            for node, each in found.nodes.items()
        ],
        "flops": found.flops,
        "read_bytes": found.read_bytes,
        "written_bytes": found.written_bytes,
        "state_bytes": found.state_bytes,
        "input_bytes": found.input_bytes,
        "peak_bytes": found.peak_bytes,
        "peak_node": found.peak_node,
        "device": None if found.device is None else found.device.name,
        "seconds": found.seconds,
        "undeclared": plain(found.undeclared),
        "ahead": [
            {
                "call": each.name,
                "way": None if each.way is None else each.way.value,
                "reason": each.reason.name,
                "detail": each.detail,
                "remedy": each.remedy,
            }
            for each in found.ahead
        ],
    }


def _add_draw(commands: Commands) -> None:
    parser = add_graph_command(
        commands,
        "draw",
        does="draw a saved graph (.fxg), with time, bytes and effects on its nodes",
        about="Draw a file of fxlib.save for inputs of given shapes",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=output,
        metavar="PICTURE",
        help="file to write: .html, which needs nothing else, .svg by graphviz, or .dot for it",
    )
    parser.set_defaults(run=_draw)


def _draw(options: argparse.Namespace) -> int:
    """Draw the graph, and write the picture.

    Raises:
        FxlibError: the file, an input or the device is not valid, or the picture cannot be written.
    """
    from fxlib.inspection import draw
    from fxlib.inspection.drawing import check_suffix

    try:
        check_suffix(options.output)
    except FxlibError as error:
        raise UsageError(str(error), where="--output") from None
    found = analysis_of(options)
    try:
        draw(found, options.output)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=options.output) from error
    return 0


def _add_calibrate(commands: Commands) -> None:
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
        "--seconds", type=seconds, default=8.0, metavar="S", help="how long to measure in all (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    """Measure this processor, write its description, and print its name.

    Raises:
        FxlibError: the file cannot be written.
    """
    import torch

    from fxlib.inspection import calibrate, save_device
    from fxlib.spec.report import plain

    if options.threads is not None:
        if options.threads < 1:
            raise UsageError(f"{options.threads} threads are too few", where="--threads", hint="Give 1 or more.")
        torch.set_num_threads(options.threads)
    device = calibrate(seconds=options.seconds)
    try:
        save_device(device, options.output)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=options.output) from error
    if options.json:
        say_json({"output": options.output, **plain(device)})
    else:
        say(f"{device.name}: written to {options.output}")
    return 0
