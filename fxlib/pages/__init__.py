"""Provide what all sites of fxlib share: the environment of their templates, their style, and their tables.

From these it also makes the HTML of a result in a notebook. The pages themselves, and their data, are in `fxlib.zoo`
and `fxlib.dashboard`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fxlib.reasons import Reason
from fxlib.render import figure
from fxlib.spec.report import TITLES, Span, Timeline, interval
from fxlib.utils.text import plain, plain_lines, seconds

_TIMELINES: Final = {
    "original": "timeline_original",
    "optimized": "timeline_optimized",
    "at the bound (by the cost model)": "timeline_bound",
}
_CALLS: Final = 100
"""Maximum number of remote calls that a notebook shows."""
_SPANS: Final = 2_000
"""Maximum number of timeline spans that a notebook draws."""


def environment(package: str) -> Environment:
    """Return the environment of the templates in a package's folder `pages`; they may include and import ours.

    All text is escaped, and its control characters and marks of direction are made harmless; an undefined name in a
    template is an error.
    """
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, "pages"), PackageLoader("fxlib", "pages")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "interval": interval,
        "seconds": seconds,
        "percent": "{:+.1%}".format,
        "qps": "{:,.1f}".format,
        "sentence": _sentence,
        "steps": _steps,
    }
    return made


def style() -> str:
    """Return the style sheet that all pages share."""
    return (files("fxlib.pages") / "style.css").read_text(encoding="utf-8")


def fragment(result: Mapping[str, Any]) -> str:
    """Return a result in the form of `Result.to_dict` as HTML for a notebook, without scripts and with scoped style.

    Its text is plain: it contains no markup, no control characters, and no marks that change the direction of text.
    """
    plain_result = inert(result)
    spans = sum(len(timeline["spans"]) for key in _TIMELINES.values() if (timeline := plain_result.get(key)))
    shown = {
        "result": plain_result,
        "title": TITLES[plain_result["decision"]],
        "calls": _CALLS,
        "drawn": spans <= _SPANS,
    }
    return environment("fxlib").get_template("result.html").render(shown)


def inert(value: Any) -> Any:
    """Return plain data whose texts have no control characters, and no marks that change the direction of text."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(key): inert(each) for key, each in value.items()}
    return [inert(each) for each in value] if isinstance(value, list) else value


def _shown(value: Any) -> Any:
    """Return a value as a template shows it: text as plain lines, unless it is our own markup."""
    return plain_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _sentence(entry: Mapping[str, Any]) -> str:
    """Return the reason of a report's entry about a call as a sentence; an unknown reason as its name."""
    reason = Reason.__members__.get(entry["reason"])
    return entry["reason"] if reason is None else reason.sentence(entry.get("detail", ""))


def _steps(report: Mapping[str, Any]) -> Markup:
    """Draw the step of a report before, after and at the bound; return nothing if the report has none of them."""
    timelines = {}
    for name, key in _TIMELINES.items():
        if timeline := report.get(key):
            spans = tuple(Span(**span) for span in timeline["spans"])
            timelines[name] = Timeline(spans=spans, step_s=timeline["step_s"], steps=timeline.get("steps", 1))
    return Markup(figure(timelines)) if timelines else Markup("")  # noqa: S704 - `figure` escapes all names
