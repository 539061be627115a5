"""A result as a page: the step before and after and at the bound, drawn, and all that the result has to say."""

from __future__ import annotations

import os
from pathlib import Path

from fxlib.render.timeline import page, timelines_of
from fxlib.serialization.files import write_whole
from fxlib.spec.report import Report, render

_TITLES = {"adopt": "fxlib: the rewritten module, measured faster", "keep_original": "fxlib: the original module, kept"}


def write_report(result: Report, path: str | os.PathLike[str]) -> None:
    """Write a result as an HTML page that needs nothing else. The file appears whole, or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    text = page(timelines_of(result), title=_TITLES[result.decision], text=render(result))
    write_whole(Path(path), [text.encode()])
