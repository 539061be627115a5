"""Diffs of generated code: readable, and of bounded size whatever the graph."""

from fxlib import protocol
from fxlib.passes.infra.diff import MAX_ALIGNED, MAX_COLUMNS, MAX_LINES, diff_of
from fxlib.spec.report import PassReport, Report


def lines(count: int) -> list[str]:
    return [f"v{index} = f(v{index - 1})" for index in range(count)]


def test_what_is_the_same_has_no_diff() -> None:
    assert diff_of(lines(3), lines(3), name="none") == ""


def test_a_change_is_shown_in_its_place() -> None:
    before = lines(3)
    assert diff_of(before, [before[0], "v1 = g()", before[2]], name="swap").splitlines() == [
        "--- before swap",
        "+++ after swap",
        "@@ -1,3 +1,3 @@",
        " v0 = f(v-1)",
        "-v1 = f(v0)",
        "+v1 = g()",
        " v2 = f(v1)",
    ]


def test_lines_beyond_the_limit_are_counted() -> None:
    shown = diff_of([], lines(1_000), name="add").splitlines()
    assert len(shown) == MAX_LINES + 1
    assert shown[-1] == f"... and {1_000 + 3 - MAX_LINES:,} more lines"


def test_a_long_line_is_cut() -> None:
    shown = diff_of([], ["f(" + "x, " * 1_000 + ")"], name="add").splitlines()
    assert len(shown[-1]) == MAX_COLUMNS
    assert shown[-1].endswith("...")


def test_of_very_many_lines_those_that_came_and_went_are_told_without_their_places() -> None:
    before = lines(MAX_ALIGNED + 2)
    after = [*reversed(before[1:]), "v0 = g()"]
    assert diff_of(before, after, name="turn").splitlines() == [
        "--- before turn",
        "+++ after turn",
        "@@ 10,002 lines, now 10,002: their positions are not shown @@",
        "-v0 = f(v-1)",
        "+v0 = g()",
    ]


def test_an_answer_has_as_many_diffs_as_fit_into_a_message_and_says_what_it_left_out() -> None:
    diff = "+" * 600_000
    passes = tuple(PassReport(name=name, changes=1, seconds=0.0, diff=diff) for name in ("first", "second"))
    report = Report(decision="keep_original", reason=None, explanation="", passes=(*passes, passes[0]))
    message = protocol.report_to_proto(report)
    assert [each.diff[:15] for each in message.passes] == ["+" * 15, "... left out: t", "... left out: t"]
    assert protocol.report_to_proto(protocol.report_from_proto(message)) == message


def test_a_diff_from_elsewhere_has_nothing_for_a_terminal() -> None:
    report = Report(
        decision="keep_original",
        reason=None,
        explanation="",
        passes=(PassReport(name="first", changes=1, seconds=0.0, diff="-a\n+\x1b[31mb\r"),),
    )
    read = protocol.report_from_proto(protocol.report_to_proto(report))
    assert read.passes[0].diff == "-a\n+ [31mb "
