"""`fxlib.draw`: a graph as a picture, with what is known of each node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from fxlib.capture.coerce import Model
from fxlib.errors import FxlibError
from fxlib.inspection.analyzing import Analysis, analyze
from fxlib.inspection.graphviz import dot_text, svg
from fxlib.inspection.inputs import Given
from fxlib.inspection.page import page
from fxlib.serialization.files import write_whole

_FORMS: Mapping[str, Callable[[Analysis], str]] = {".html": page, ".svg": svg, ".dot": dot_text}


def draw(drawn: Analysis | Model, path: str | os.PathLike[str], inputs: Given = None) -> None:
    """Write a picture of a graph, with shapes, time, bytes and effects on its nodes. The file appears whole or not.

    Args:
        drawn: an analysis of `fxlib.analyze`; or a model, as that takes it.
        path: where to; its ending says as what: `.html` (needs nothing), `.svg` (by graphviz), or `.dot` (for it).
        inputs: of a model, as `fxlib.analyze` takes them.

    Raises:
        CaptureError: the model cannot be captured.
        FxlibError: the ending is another, inputs are missing, or graphviz is needed and missing, or fails.
        OSError: the file cannot be written.
    """
    target = Path(path)
    if target.suffix not in _FORMS:
        hint = f"Name the file {', '.join(_FORMS)}."
        raise FxlibError(f"nothing is drawn as {target.suffix!r}", where=str(path), hint=hint)
    analysis = drawn if isinstance(drawn, Analysis) else analyze(drawn, inputs)
    write_whole(target, [_FORMS[target.suffix](analysis).encode()])
