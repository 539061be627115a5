"""What a worker found out about a job: the decision, the figures and reasons behind it, and all this as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from fxlib.reasons import Declined, Reason
from fxlib.utils.text import seconds, table

Decision = Literal["adopt", "keep_original"]
Action = Literal["moved", "merged", "left_alone"]
_LEAST_GAIN = 0.005
MAX_STEPS = 64
"""Steps of one timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval of a step, seconds from the step's start."""

    kind: str
    name: str
    to: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one trainer, or several steps of a loop, one after another."""

    spans: tuple[Span, ...]
    """Seconds are from the first step's start."""
    step_s: float
    """The length of a step, in seconds; of several, the mean."""
    steps: int = 1

    def between(self, begin_s: float, end_s: float, *, steps: int) -> Timeline:
        """Return so many steps of it, which are between two moments of it."""
        spans = (
            replace(each, start_s=max(each.start_s, begin_s) - begin_s, end_s=min(each.end_s, end_s) - begin_s)
            for each in self.spans
            if begin_s < each.end_s and each.start_s < end_s
        )
        in_order = tuple(sorted(spans, key=lambda span: span.start_s))
        return Timeline(spans=in_order, step_s=(end_s - begin_s) / steps, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """What became of one remote call. Exposed time: how long per step the trainer's thread stood blocked in it."""

    node: str
    function: str
    to: str
    action: Action
    reason: Reason
    detail: str = ""
    remedy: str = ""
    source: str = ""
    exposed_before_s: float | None = None
    exposed_after_s: float | None = None
    limited_by: Reason | None = None
    """What keeps the rest of its time exposed; None where nothing does, or nobody knows."""
    limit_detail: str = ""
    ahead: Reason | None = None
    """How it may run ahead of its step, or why it may not; None where the launcher runs no pipeline."""
    ahead_detail: str = ""
    ahead_remedy: str = ""
    """The declaration or change that would let it run ahead; empty where there is none."""
    way: str = ""
    """How it did run ahead in the steps that were recorded: "nothing_written" (as soon as its batch was known),
    "behind_push" or "by_keys"; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeclared:
    """What one remote function, or several together, would be worth if their contracts said that they only read."""

    functions: tuple[str, ...]
    """Names of the functions; more than one in one entry: all that declare nothing."""
    calls: int
    """The number of their calls in the program."""
    gain: float
    """Gain that the cost model expects over the plan without these contracts (0.48: 48% more samples per second)."""
    remedy: str = ""
    """The declaration, ready to be pasted."""
    measured: bool = True
    """Whether the gain is by a profile of the program; else it is the forward's, by estimates."""

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is more than nothing: half a percent."""
        return self.gain >= _LEAST_GAIN

    def __str__(self) -> str:
        """One line."""
        several = len(self.functions) > 1
        who = f"all {len(self.functions)} undeclared functions" if several else self.functions[0]
        how = "" if self.measured else " of the forward, by estimates: there is no profile"
        text = f"{who} ({self.calls} call{'s' * (self.calls != 1)}): with reads=: {self.gain:+.0%} expected{how}"
        return f"{text} ({self.remedy})" if self.remedy else text


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """The work of one pass: changes made, seconds taken, and what it declined, with reasons."""

    name: str
    changes: int
    seconds: float
    declined: tuple[Declined, ...] = ()
    diff: str = ""
    """The generated code before and after it, as a unified diff; only where it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReport:
    """One of the programs among which a worker chose: what the cost model expected of it, and what was measured."""

    name: str
    predicted_step_s: float | None = None
    gain: Estimate | None = None
    """Over the original, as far as it was measured; the one chosen was then confirmed on fresh blocks."""
    verdict: str = ""
    """What became of it, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """A part of the graph that a backend was to compile, and what became of it in the trial."""

    first: str
    """Name of its first node."""
    nodes: int
    """Number of its nodes, which stand one after another."""
    backend: str
    """The backend with its version, as `openvino==2026.4.1`."""
    compile_s: float = 0.0
    """Seconds that compiling took."""
    plain_s: float | None = None
    """Seconds that it takes as it is, with its backward where gradients are recorded; None: not measured."""
    compiled_s: float | None = None
    """Seconds that it takes compiled, likewise."""
    compiled: bool = True
    """Whether the graph has it compiled."""
    why: str = ""
    """A sentence that says why it is not; empty if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How often each graph of a module ran, by its name ("main": its own), and its original, by the reason."""

    graphs: Mapping[str, int] = field(default_factory=dict)
    original: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker found out about one job: everything in a `Result` but the module itself.

    QPS are samples per second; `gain` is relative (0.10: 10% more samples per second). `explanation` says in a
    sentence what `reason` names. `not_reproduced` names what the original does not reproduce of itself, and so was
    left out of *bitwise*; `assumptions` are statements taken on the user's word.
    """

    decision: Decision
    reason: Reason | None
    explanation: str
    qps_original: Estimate | None = None
    qps_optimized: Estimate | None = None
    gain: Estimate | None = None
    calls: tuple[CallReport, ...] = ()
    passes: tuple[PassReport, ...] = ()
    not_reproduced: tuple[str, ...] = ()
    preserves: str = "bitwise"
    max_relative_error: float | None = None
    """How far results were from the original's, see `utils.compare`; 0: the same bits. None: it was not measured."""
    assumptions: tuple[str, ...] = ()
    timeline_original: Timeline | None = None
    timeline_optimized: Timeline | None = None
    timeline_bound: Timeline | None = None
    """The step as it would run at the bound, by the cost model."""
    bound_s: float | None = None
    """Seconds per step that no schedule can beat, by the cost model."""
    pipeline_bound_s: float | None = None
    """Seconds per step that no program can beat under the launcher's pipeline, by the cost model."""
    pipeline_limit: str = ""
    """What takes so long: "compute", "server", "transfer", or "conflicts" (what must follow a push); empty where it is
    unknown."""
    candidates: tuple[CandidateReport, ...] = ()
    undeclared: tuple[Undeclared, ...] = ()
    """Remote functions that declare nothing, and what the cost model expects of declaring them; most first."""
    notes: tuple[str, ...] = ()
    """What whoever reads the figures has to know: that cores were shared while they were measured."""
    pipeline: int = 0
    """Depth of the pipeline under which the module was measured; 0: under none."""
    parts: tuple[CompiledPart, ...] = ()
    """The parts that a backend was to compile, in the order of the graph."""
    pays_after_steps: int | None = None
    """Number of steps after which the time that compiling took is saved; None: not measured, or never."""
    instructions: tuple[str, ...] = ()
    """Instructions of the processor on which int8 layers or compiled parts were measured (`utils.hardware`): the
    launcher takes the answer on such a processor alone. Empty: on any."""
    blocks: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    hardware: str = ""
    torch_version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, which `json` can write, under the names of the attributes.

        Reasons are their names ("FASTER"); what is unknown is None.
        """
        return {each.name: plain(getattr(self, each.name)) for each in fields(Report)}

    variants: Mapping[str, Report] = field(default_factory=dict)
    """What was found out about each variant of the workload, by its name; each has a decision of its own."""

    @property
    def adopts(self) -> bool:
        """Whether the rewritten graph of the workload's own step, or that of a variant, is to be adopted."""
        return any(each.decision == "adopt" for each in (self, *self.variants.values()))

    def __str__(self) -> str:
        """Lay everything out as plain text, for a person."""
        return render(self)


def plain(value: object) -> Any:
    """Return dataclasses as dicts, sequences as lists, reasons by name, times as ISO 8601, and the rest as it is."""
    if isinstance(value, Reason):
        return value.name
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFigures:
    """Figures of late, of real steps. QPS are samples per second; one is None where its module did not run.

    Attributes:
        qps_original: of the original module.
        qps_optimized: of the rewritten module.
        gain: relative gain, from steps of both in turn; None where too few ran in turn.
        steps: number of steps that were watched since the launcher began.
        went_back: whether the launcher went back to its original, since the gain fell below what it had asked for.
        at: when the service was told; None before that.
    """

    qps_original: float | None = None
    qps_optimized: float | None = None
    gain: Estimate | None = None
    steps: int = 0
    went_back: bool = False
    at: datetime | None = None

    def __str__(self) -> str:
        """One line."""
        rates = ((self.qps_optimized, "optimized"), (self.qps_original, "original"))
        parts = [f"{qps:,.1f} samples per second {which}" for qps, which in rates if qps is not None]
        gain = [] if self.gain is None else [f"gain {interval(self.gain)}"]
        back = ["went back to the original"] if self.went_back else []
        return ", ".join([*back, *gain, *parts, f"{self.steps:,} steps"])


TITLES: Final = {"adopt": "ADOPT the rewritten module", "keep_original": "KEEP the original module"}


def render(result: Report, *, origin: str = "") -> str:
    """Lay a report out in sections; those with nothing to say are left out. `origin` says where it is from."""
    sections = [
        [f"{TITLES[result.decision]}: {result.explanation}", *([origin] if origin else [])],
        _figures(result),
        _variants(result),
        _candidates(result),
        _calls(result),
        what_to_declare(result.undeclared),
        _passes(result),
        _parts(result),
        _diffs(result),
        _notes(result),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _figures(result: Report) -> list[str]:
    rows = [
        [label, f"{figure.value:,.1f}", f"{figure.low:,.1f} to {figure.high:,.1f}"]
        for label, figure in (("original", result.qps_original), ("optimized", result.qps_optimized))
        if figure is not None
    ]
    if result.gain is not None:
        rows.append(["gain", *_percent(result.gain)])
    lines = table([["samples per second", "", "interval"], *rows], right=(1, 2), indent="") if rows else []
    return [*lines, *_step(result)]


WAYS: Final = {
    "nothing_written": "read ahead, as nothing writes what they read",
    "behind_push": "read behind the push before",
    "by_keys": "read ahead by keys",
}
"""The ways of running ahead, and what a call that does so is."""
_LIMITS: Final = {
    "compute": "the trainer's own work",
    "server": "the servers' work",
    "transfer": "what the links carry",
    "conflicts": "what has to follow a push",
}


def _step(result: Report) -> list[str]:
    """One line: the recorded step before and after, and the shortest that any schedule could have."""
    known = [
        (seconds(timeline.step_s), words)
        for timeline, words in ((result.timeline_original, "original"), (result.timeline_optimized, "optimized"))
        if timeline is not None
    ]
    if result.bound_s is not None:
        known.append((seconds(result.bound_s), "the least that any schedule could take, by the cost model"))
    if result.pipeline_bound_s is not None:
        limit = _LIMITS.get(result.pipeline_limit, result.pipeline_limit)
        known.append((seconds(result.pipeline_bound_s), f"the least under a pipeline, by the cost model, for {limit}"))
    under = f"; measured under a pipeline of depth {result.pipeline}" if result.pipeline else ""
    return [f"one step: {', '.join(f'{took} {words}' for took, words in known)}{under}"] if known else []


def interval(gain: Estimate | None) -> str:
    """Write a gain with the ends of its interval: +60.2% [+49.3%, +67.3%]; a dash when there is none."""
    return "-" if gain is None else f"{gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]"


def _percent(gain: Estimate) -> list[str]:
    return [f"{gain.value:+.1%}", f"{gain.low:+.1%} to {gain.high:+.1%}"]


def _variants(result: Report) -> list[str]:
    if not result.variants:
        return []
    rows = [
        [name, each.decision.replace("_", " "), *(_percent(each.gain) if each.gain else ("-", "")), each.explanation]
        for name, each in result.variants.items()
    ]
    header = ["variant", "decision", "gain", "interval", "why"]
    return ["variants of the step, each with a graph of its own", *table([header, *rows], right=(2,))]


def _candidates(result: Report) -> list[str]:
    if len(result.candidates) < 2:
        return []
    rows = [
        [each.name, seconds(each.predicted_step_s), _percent(each.gain)[0] if each.gain else "-", each.verdict]
        for each in result.candidates
    ]
    header = ["candidate", "predicted", "gain", "verdict"]
    return ["programs tried; predicted: a step by the cost model", *table([header, *rows], right=(1, 2))]


def _calls(result: Report) -> list[str]:
    if not result.calls:
        return []
    actions = Counter(call.action for call in result.calls)
    counted = ", ".join(f"{count} {action.replace('_', ' ')}" for action, count in actions.items())
    rows = [_call(call) for call in result.calls]
    header = ["call", "function", "to", "action", "exposed", "after", "why"]
    return [
        f"remote calls ({counted}); exposed: time per step that the trainer stood blocked",
        *table([header, *rows], right=(4, 5)),
        *_hidden(result.calls),
    ]


def _hidden(calls: Sequence[CallReport]) -> Iterator[str]:
    """Say what each way of running ahead has hidden, in a line each."""
    for way, words in WAYS.items():
        found = [call for call in calls if call.way == way]
        if found:
            before = seconds(sum(call.exposed_before_s or 0.0 for call in found))
            after = seconds(sum(call.exposed_after_s or 0.0 for call in found))
            yield f"{len(found)} call{'s' * (len(found) != 1)} {words}: exposed {before} as written, and {after} now"


def _call(call: CallReport) -> list[str]:
    why = call.reason.sentence(call.detail)
    return [
        call.node,
        call.function,
        call.to,
        call.action.replace("_", " "),
        seconds(call.exposed_before_s),
        seconds(call.exposed_after_s),
        "; ".join(filter(None, [f"{why} ({call.remedy})" if call.remedy else why, _limit(call), _ahead(call)])),
    ]


def _ahead(call: CallReport) -> str:
    if call.ahead is None:
        return ""
    text = call.ahead.sentence(call.ahead_detail)
    return f"{text} ({call.ahead_remedy})" if call.ahead_remedy else text


def what_to_declare(undeclared: Sequence[Undeclared]) -> list[str]:
    """Say what missing declarations are worth, in lines; a declaration that is worth nothing is not asked for."""
    worth = [each for each in undeclared if each.is_worth_it]
    if worth:
        head = (
            "remote functions that declare nothing; what reads= would be worth by the cost model, if it is true of them"
        )
        return [head, *(f"  {each}" for each in worth)]
    return ["remote functions declare nothing, and by the cost model reads= would gain nothing"] if undeclared else []


def _limit(call: CallReport) -> str:
    return f"still exposed: {call.limited_by.sentence(call.limit_detail)}" if call.limited_by else ""


def _passes(result: Report) -> list[str]:
    if not result.passes:
        return []
    rows = [[each.name, str(each.changes), seconds(each.seconds), _declined(each)] for each in result.passes]
    return ["passes", *table([["pass", "changes", "time", "declined"], *rows], right=(1, 2))]


def _declined(report: PassReport) -> str:
    if not report.declined:
        return "-"
    reasons = Counter(each.reason.name.lower() for each in report.declined)
    return ", ".join(f"{count} {name}" for name, count in reasons.most_common())


def _parts(result: Report) -> list[str]:
    if not result.parts:
        return []
    rows = [
        [
            each.first,
            str(each.nodes),
            each.backend,
            *map(seconds, (each.compile_s, each.plain_s, each.compiled_s)),
            each.why or "-",
        ]
        for each in result.parts
    ]
    after = "" if result.pays_after_steps is None else f", which pays after {result.pays_after_steps:,} steps"
    title = f"parts for a compiler, which took {seconds(sum(each.compile_s for each in result.parts))}{after}"
    header = ["first node", "nodes", "backend", "compiling", "as it is", "compiled", "why it is left as it is"]
    return [title, *table([header, *rows], right=(1, 3, 4, 5))]


def _diffs(result: Report) -> list[str]:
    """What passes did to the generated code, where that was asked for."""
    shown = [each.diff for each in result.passes if each.diff]
    return ["what passes changed in the generated code", *shown] if shown else []


def _error(result: Report) -> str:
    error = result.max_relative_error
    return "" if error is None else f"; largest relative error measured: {error:.2g}"


def _notes(result: Report) -> list[str]:
    lines = []
    if result.preserves != "bitwise":
        lines.append(f"preserves: {result.preserves}, not bitwise{_error(result)}")
    lines += [f"on your word: {each}" for each in result.assumptions]
    lines += [f"not reproduced by the original itself, so not compared: {each}" for each in result.not_reproduced]
    lines += result.notes
    if result.blocks:
        lines.append(f"measured in {result.blocks} paired blocks")
    if result.hardware:
        version = f", torch {result.torch_version}" if result.torch_version else ""
        lines.append(f"measured on {result.hardware}{version}")
    if result.phase_seconds:
        longest_first = sorted(result.phase_seconds.items(), key=lambda phase: phase[1], reverse=True)
        lines.append("phases: " + ", ".join(f"{name} {seconds(took)}" for name, took in longest_first))
    return lines
