"""The picture of a step: nothing overlaps in a row, nothing is fetched, nothing is interpreted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxlib
from fxlib.render import chrome_trace, lanes, pack, page, svg
from fxlib.spec.report import Report, Span, Timeline

pytestmark = pytest.mark.slow

TIMES = st.floats(0, 10, allow_nan=False)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(TIMES)
    kind = draw(st.sampled_from(["call", "issue", "wait", "in_flight", "forward", "backward", "push"]))
    return Span(kind=kind, name="x", to=draw(st.sampled_from(["ps0", "ps1", ""])), start_s=start, end_s=start + 0.5)


@given(st.lists(spans()))
def test_rows_have_no_overlap_and_lose_no_span(given_spans: list[Span]) -> None:
    rows = pack(given_spans)
    assert sorted(map(repr, given_spans)) == sorted(repr(span) for row in rows for span in row)
    for row in rows:
        assert all(left.end_s <= right.start_s for left, right in pairwise(row))


@given(st.lists(spans()))
def test_any_timeline_can_be_drawn_and_traced(given_spans: list[Span]) -> None:
    timeline = Timeline(spans=tuple(given_spans), step_s=11.0)
    assert page({"before": timeline}, title="t").startswith("<!doctype html>")
    events = json.loads(chrome_trace({"before": timeline}))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) >= len(given_spans)


def test_each_server_has_its_lane() -> None:
    calls = [Span(kind="in_flight", name=f"c{i}", to=f"ps{i % 2}", start_s=0.0, end_s=1.0) for i in range(4)]
    found = {lane.name: len(lane.rows) for lane in lanes(Timeline(spans=tuple(calls), step_s=1.0))}
    assert found == {"trainer": 0, "ps0": 2, "ps1": 2}


def test_two_steps_of_a_loop_have_a_line_between_them_and_reads_ahead_a_row_in_the_legend() -> None:
    read = Span(kind="by_keys", name="lookup", to="ps0", start_s=0.5, end_s=1.5)
    one, two = Timeline(spans=(), step_s=2.0), Timeline(spans=(read,), step_s=1.0, steps=2)
    assert {lane.name for lane in lanes(two)} == {"trainer", "ps0"}
    drawn, plain = svg({"one": one, "two": two}), svg({"one": one})
    assert drawn.count("stroke-dasharray") == 1
    assert "two: 1000.0 ms a step, 2 steps" in drawn
    assert "ahead by keys" in drawn
    assert "ahead by keys" not in plain
    assert "stroke-dasharray" not in plain


def test_names_are_text_not_markup() -> None:
    span = Span(kind="call", name="<script>", to="&", start_s=0.0, end_s=1.0)
    drawn = page({"<b>": Timeline(spans=(span,), step_s=1.0)}, title="<i>")
    assert not any(markup in drawn for markup in ("<script>", "<b>", "<i>"))


@given(st.lists(spans()))
def test_one_svg_shows_every_span_of_every_timeline(given_spans: list[Span]) -> None:
    timeline = Timeline(spans=tuple(given_spans), step_s=11.0)
    root = ET.fromstring(svg({"before": timeline, "after <b>": timeline}))  # noqa: S314 - our own text
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    blocking = sum(span.kind == "call" for span in given_spans)  # on the trainer's row and in flight
    assert len(titles) == 2 * (len(given_spans) + blocking)


def test_an_empty_timeline_is_a_page_too() -> None:
    assert "0.0 ms" in page({"before": Timeline(spans=(), step_s=0.0)}, title="t")


def test_a_result_is_written_as_a_page_with_the_steps_it_knows(tmp_path: Path) -> None:
    before, after, bound = (Timeline(spans=(), step_s=step_s) for step_s in (0.012, 0.007, 0.006))
    report = Report(
        decision="adopt",
        reason=None,
        explanation="<faster>",
        timeline_original=before,
        timeline_optimized=after,
        timeline_bound=bound,
    )
    fxlib.write_report(report, tmp_path / "result.html")
    written = (tmp_path / "result.html").read_text()
    for heading in ("original: 12.0 ms", "optimized: 7.0 ms", "at the bound (by the cost model): 6.0 ms"):
        assert heading in written
    assert "&lt;faster&gt;" in written
