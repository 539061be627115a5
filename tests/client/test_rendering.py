"""Results and progress print as text that a person can read, with nothing in them for a terminal alone."""

import io
import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from torch import nn

from fxlib import render as pages
from fxlib.client.result import Result
from fxlib.client.watch_job import Lines, display
from fxlib.reasons import Declined, Reason
from fxlib.spec.job import Event
from fxlib.spec.report import (
    CallReport,
    CandidateReport,
    Estimate,
    PassReport,
    Report,
    Span,
    Timeline,
    Undeclared,
    render,
)
from fxlib.utils.text import seconds

REPORT = Report(
    decision="adopt",
    reason=Reason.FASTER,
    explanation="measured faster",
    qps_original=Estimate(value=1234.5, low=1200, high=1270),
    qps_optimized=Estimate(value=2345.6, low=2300, high=2400),
    gain=Estimate(value=0.9, low=0.85, high=0.951),
    calls=(
        CallReport(
            node="lookup",
            function="my.ps:lookup",
            to="ps0",
            action="moved",
            reason=Reason.MOVED,
            exposed_before_s=0.0123,
            exposed_after_s=0.0000004,
            limited_by=Reason.ORDERED_AFTER_WRITE,
        ),
        CallReport(
            node="push",
            function="my.ps:push",
            to="ps1",
            action="left_alone",
            reason=Reason.WRITES_STATE,
            detail="tables",
            remedy="declare commutes=True",
        ),
    ),
    passes=(
        PassReport(
            name="hoist", changes=3, seconds=0.02, declined=(Declined(node="push", reason=Reason.WRITES_STATE),)
        ),
        PassReport(name="fold", changes=0, seconds=0.01),
    ),
    not_reproduced=("server gradients",),
    assumptions=('assume="reads"',),
    timeline_original=Timeline(spans=(), step_s=0.0125),
    timeline_optimized=Timeline(spans=(), step_s=0.007),
    bound_s=0.0065,
    candidates=(
        CandidateReport(
            name="schedule",
            predicted_step_s=0.0071,
            gain=Estimate(value=0.91, low=0.8, high=1.0),
            verdict="chosen, and confirmed on fresh blocks",
        ),
        CandidateReport(name="one by one", verdict="left out: expected to be slower"),
    ),
    blocks=12,
    phase_seconds={"qps": 12.5},
    hardware="2 cores",
    torch_version="2.13.0",
)

EXPECTED = """\
ADOPT the rewritten module: measured faster
job 17, answered from an earlier measurement

samples per second                     interval
original            1,234.5  1,200.0 to 1,270.0
optimized           2,345.6  2,300.0 to 2,400.0
gain                 +90.0%    +85.0% to +95.1%
one step, recorded with a clock in it: 12.5 ms original, 7.0 ms optimized, \
6.5 ms the least that any schedule could take, by the cost model

programs tried; predicted: a step by the cost model
  candidate   predicted    gain  verdict
  schedule       7.1 ms  +91.0%  chosen, and confirmed on fresh blocks
  one by one          -       -  left out: expected to be slower

remote calls (1 moved, 1 left alone); exposed: time per step that the trainer stood blocked
  call    function      to   action      exposed  after  why
  lookup  my.ps:lookup  ps0  moved       12.3 ms   0 us  issued early and waited for late; still exposed: \
the call reads state that an earlier call may write
  push    my.ps:push    ps1  left alone        -      -  the call writes tables; a write is issued where the program \
issues it (declare commutes=True)

passes
  pass   changes     time  declined
  hoist        3  20.0 ms  1 writes_state
  without a change: fold

on your word: assume="reads"
not reproduced by the original itself, or not known to be the same: server gradients
measured in 12 paired blocks
measured on 2 cores, torch 2.13.0
phases: qps 12.50 s"""


def test_a_full_result() -> None:
    assert str(Result.of(REPORT, module=nn.Identity(), job_id="17", cached=True)) == EXPECTED


def test_what_each_way_of_running_ahead_hid_is_told() -> None:
    by_keys = replace(REPORT.calls[0], way="by_keys", exposed_after_s=0.0001)
    shown = render(replace(REPORT, calls=(by_keys, replace(by_keys, way="behind_push"), by_keys)))
    assert "\n2 calls read ahead by keys: exposed 24.6 ms as written, and 200 us now\n" in shown
    assert "\n1 call read behind the push before: exposed 12.3 ms as written, and 100 us now\n" in shown


def test_stale_reads_are_named_and_counted() -> None:
    shown = render(replace(REPORT, pipeline=2, stale=2, preserves="lossy", staleness={1: 5, 2: 80}))
    assert "under a pipeline of depth 2, in which reads may miss the pushes of 2 steps: lossy\n" in shown
    assert "\nof the reads that ran ahead, 5 missed the pushes of 1 step, 80 missed the pushes of 2 steps\n" in shown


def test_what_missing_declarations_are_worth_is_shown() -> None:
    missing = Undeclared(functions=("my.ps:lookup",), calls=26, gain=0.482, remedy="declare it")
    shown = render(replace(REPORT, undeclared=(missing,)))
    assert "\n  my.ps:lookup (26 calls): with reads=: +48% expected (declare it)\n" in shown
    assert Report.to_dict(replace(REPORT, undeclared=(missing,)))["undeclared"][0]["gain"] == 0.482


def test_declarations_that_are_worth_nothing_are_not_asked_for() -> None:
    missing = Undeclared(functions=("my.ps:lookup",), calls=26, gain=0.004, remedy="declare it")
    shown = render(replace(REPORT, undeclared=(missing,)))
    assert "\nremote functions declare nothing, and by the cost model reads= would gain nothing\n" in shown
    assert "declare it" not in shown


def test_diffs_are_shown_where_there_are_any() -> None:
    diff = "--- before hoist\n+++ after hoist"
    shown = render(replace(REPORT, passes=(replace(REPORT.passes[0], diff=diff),)))
    assert f"writes_state\n\nwhat passes changed in the generated code\n{diff}\n\non your word" in shown


def test_a_result_without_an_answer_is_one_sentence() -> None:
    text = str(Result.original(nn.Identity(), "the service is away"))
    assert text == "KEEP the original module: the service is away"


def test_durations_have_a_unit_that_fits() -> None:
    assert [seconds(value) for value in (None, 0.00035, 0.0125, 1.2)] == ["-", "350 us", "12.5 ms", "1.20 s"]


def test_a_result_is_plain_data_under_its_own_names() -> None:
    call = CallReport(node="lookup", function="ps:lookup", to="ps0", action="moved", reason=Reason.MOVED)
    gain = Estimate(value=0.5, low=0.4, high=0.6)
    report = Report(decision="adopt", reason=Reason.FASTER, explanation="faster", gain=gain, calls=(call,))
    result = Result.of(report, module=nn.Identity(), job_id="job-1", cached=False)
    told = json.loads(json.dumps(result.to_dict()))
    assert (told["decision"], told["reason"], told["job_id"]) == ("adopt", "FASTER", "job-1")
    assert (told["gain"]["low"], told["calls"][0]["reason"], told["qps_original"]) == (0.4, "MOVED", None)
    assert told.keys() == {each.name for each in fields(Result)} - {"module", "watcher"}


def test_a_notebook_shows_the_decision_the_figures_the_calls_and_the_step() -> None:
    shown = Result.of(REPORT, module=nn.Identity(), job_id="17", cached=True)._repr_html_()
    words = " ".join(_Words.of(shown).said)
    for part in (
        "ADOPT the rewritten module : measured faster",
        "job 17",
        "+90.0%",
        "+85.0% to +95.1%",
        "12.5 ms a step",
    ):
        assert part in words
    assert "my.ps:push ps1 left alone - - the call writes tables" in words


@pytest.mark.parametrize("step_s", [5e-324, 1e308, float("inf")])
def test_a_time_beyond_all_reason_is_drawn_on_an_axis_that_ends(step_s: float) -> None:
    drawn = pages.page({"original": Timeline(spans=(), step_s=step_s, steps=8)}, title="t")
    assert drawn.count("<line") < 100


@pytest.mark.slow
def test_what_a_notebook_shows_is_a_bounded_page() -> None:
    many = replace(REPORT, calls=REPORT.calls * 5_000)
    shown = Result.of(many, module=nn.Identity(), job_id="17", cached=True)._repr_html_()
    assert len(shown) < 100_000
    assert "and 9900 more calls" in shown


def test_a_notebook_draws_all_steps_of_a_timeline() -> None:
    spans = tuple(
        Span(kind="forward", name="step", to="", start_s=0.01 * step, end_s=0.01 * step + 0.008) for step in range(3)
    )
    report = replace(REPORT, timeline_original=Timeline(spans=spans, step_s=0.01, steps=3))
    shown = Result.of(report, module=nn.Identity(), job_id="17", cached=False)._repr_html_()
    assert pages.figure(pages.timelines_of(report)) in shown
    assert "3 steps" in " ".join(_Words.of(shown).said)


def test_names_in_a_notebook_are_text() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'\u202eright\x1b[31m\nred"
    call = replace(REPORT.calls[1], node=evil, function=evil, to=evil, detail=evil, remedy=evil)
    timeline = Timeline(spans=(Span(kind=evil, name=evil, to=evil, start_s=0.0, end_s=1.0),), step_s=1.0)
    inner = replace(REPORT, explanation=evil)
    report = replace(inner, calls=(call,), notes=(evil,), timeline_original=timeline, variants={evil: inner})
    shown = Result.of(report, module=nn.Identity(), job_id=evil, cached=False)._repr_html_()
    seen = _Words.of(shown)
    assert not seen.tags & {"script", "img"}
    assert [name for name in seen.attributes if name.startswith(("on", "href", "src"))] == []
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    assert "alert(1)" in " ".join(seen.said)


class _Words(HTMLParser):
    """What a page says, and what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.tags, self.attributes = list[str](), set[str](), set[str]()

    @classmethod
    def of(cls, page: str) -> "_Words":
        words = cls()
        words.feed(page)
        return words

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.said += data.split()


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(message: str, progress: float | None = None) -> Event:
    return Event(sequence=1, at=datetime.now(UTC), state="running", phase="qps", message=message, progress=progress)


def test_a_log_gets_a_plain_line_for_each_phase_and_not_for_each_message() -> None:
    log = io.StringIO()
    with display(log) as shown:
        shown.say("sending the graph")
        for number in range(3):
            shown.show(event(f"pair {number}"))
        shown.show(replace(event("adopted"), state="succeeded"))
    assert log.getvalue() == "fxlib: sending the graph\nfxlib: qps: pair 0\nfxlib: qps: adopted\n"


def test_a_long_phase_gets_a_line_now_and_then() -> None:
    log = io.StringIO()
    lines = Lines(log, every_s=0.0)
    for number in (1, 2, 2):
        lines.show(event(f"pair {number}"))
    assert log.getvalue() == "fxlib: qps: pair 1\nfxlib: qps: pair 2\n"


def test_a_terminal_gets_a_display_that_goes_away() -> None:
    terminal = FakeTerminal()
    with display(terminal) as shown:
        shown.say("sending the graph")
        shown.show(event("measuring [bold]block[/bold] 3", 0.5))
        shown.show(event("waiting"))
    assert "\x1b[" in terminal.getvalue()


def test_a_closed_log_stops_nothing() -> None:
    log = io.StringIO()
    log.close()
    Lines(log).say("anything")
