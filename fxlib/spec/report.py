"""Reports: the decision on a job, the figures and reasons behind it, and their rendering as text."""

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
MAX_TIMELINE_STEPS = 64
"""Maximum number of steps in one timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A measured figure with the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval of a step, in seconds from the start of the step."""

    kind: str
    name: str
    to: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one trainer, or several consecutive steps of a loop."""

    spans: tuple[Span, ...]
    """Intervals, in seconds from the start of the first step."""
    step_s: float
    """Length of a step in seconds; the mean length if there are several steps."""
    steps: int = 1

    def between(self, begin_s: float, end_s: float, *, steps: int) -> Timeline:
        """Return the part between two moments as a timeline of its own, which covers `steps` steps."""
        spans = (
            replace(each, start_s=max(each.start_s, begin_s) - begin_s, end_s=min(each.end_s, end_s) - begin_s)
            for each in self.spans
            if begin_s < each.end_s and each.start_s < end_s
        )
        in_order = tuple(sorted(spans, key=lambda span: span.start_s))
        return Timeline(spans=in_order, step_s=(end_s - begin_s) / steps, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """The report on one remote call. Its exposed time is how long per step it blocked the trainer's thread."""

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
    """The reason why the remaining time is exposed; None if no time is exposed or the reason is unknown."""
    limit_detail: str = ""
    ahead: Reason | None = None
    """How the call may run ahead of its step, or why it may not; None if the launcher runs no pipeline."""
    ahead_detail: str = ""
    ahead_remedy: str = ""
    """The declaration or change that would let the call run ahead; empty if there is none."""
    way: str = ""
    """How the call ran ahead in the recorded steps: "nothing_written" (as soon as its batch was known), "behind_push",
    "by_keys" or "stale" (it missed pushes); empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeclared:
    """The gain from declaring that one remote function, or several together, only read."""

    functions: tuple[str, ...]
    """Names of the functions; an entry with several names covers all functions that declare nothing."""
    calls: int
    """Number of calls to these functions in the program."""
    gain: float
    """Gain that the cost model expects over the plan without these contracts (0.48: 48% more samples per second)."""
    remedy: str = ""
    """The declaration, ready to be pasted."""
    measured: bool = True
    """Whether the gain comes from a profile of the program; otherwise it is an estimate for the forward alone."""

    @property
    def is_worth_it(self) -> bool:
        """Whether the expected gain is at least half a percent."""
        return self.gain >= _LEAST_GAIN

    def __str__(self) -> str:
        """Return a one-line summary."""
        several = len(self.functions) > 1
        who = f"all {len(self.functions)} undeclared functions" if several else self.functions[0]
        how = "" if self.measured else " of the forward, estimated without a profile"
        text = f"{who} ({self.calls} call{'s' * (self.calls != 1)}): with reads=: {self.gain:+.0%} expected{how}"
        return f"{text} ({self.remedy})" if self.remedy else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The error that a lossy pass causes in some layers while it leaves all others exact."""

    nodes: tuple[str, ...]
    """The layers' nodes: one, or several that were measured together."""
    error: float
    """Largest relative error of the results over the workload's batches, as defined in `utils.compare`."""
    lossy: bool
    """Whether the pass changed these layers; otherwise they stay exact, as their error does not fit the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """The report on one pass: the changes it made, the seconds it took, and what it declined, with reasons."""

    name: str
    changes: int
    seconds: float
    declined: tuple[Declined, ...] = ()
    diff: str = ""
    """Unified diff of the generated code before and after the pass; empty unless it was requested."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """The errors that a lossy pass measured, in the order in which it took layers: the least error first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReport:
    """One of the programs that a worker chose from: what the cost model predicted for it, and what was measured."""

    name: str
    predicted_step_s: float | None = None
    gain: Estimate | None = None
    """Gain over the original as far as it was measured; the chosen candidate was then confirmed on fresh blocks."""
    verdict: str = ""
    """One sentence that says what became of the candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """A part of the graph that a backend was asked to compile, and its outcome in the trial."""

    first: str
    """Name of its first node."""
    nodes: int
    """Number of its nodes, which are consecutive in the graph."""
    backend: str
    """The backend with its version, such as `openvino==2026.4.1`."""
    compile_s: float = 0.0
    """Seconds that compiling the part took."""
    plain_s: float | None = None
    """Seconds that the part takes uncompiled, including its backward if gradients are recorded; None if not
    measured."""
    compiled_s: float | None = None
    """Seconds that the part takes compiled, likewise."""
    compiled: bool = True
    """Whether the adopted graph uses the compiled part."""
    why: str = ""
    """One sentence that says why the part is not compiled; empty if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How often each graph of a module ran, by name ("main" is its own), and how often its original ran, by reason."""

    graphs: Mapping[str, int] = field(default_factory=dict)
    original: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a worker on one job: everything in a `Result` except the module itself.

    QPS are samples per second; `gain` is relative (0.10: 10% more samples per second). `explanation` spells `reason`
    out in a sentence. `not_reproduced` lists the results that are not known to be the same: those that the original
    does not reproduce from run to run, which are therefore excluded from the *bitwise* check, those whose bits depend
    on where memory begins, and those that cannot be measured, which say so. `assumptions` are statements taken on the
    user's word.
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
    """Largest relative error against the original's results, as defined in `utils.compare`; 0 means the same bits, None
    that it was not measured."""
    assumptions: tuple[str, ...] = ()
    timeline_original: Timeline | None = None
    timeline_optimized: Timeline | None = None
    timeline_bound: Timeline | None = None
    """The step as it would run at the bound, according to the cost model."""
    bound_s: float | None = None
    """Seconds per step that no schedule can beat, according to the cost model."""
    pipeline_bound_s: float | None = None
    """Seconds per step that no program can beat under the launcher's pipeline, according to the cost model."""
    pipeline_limit: str = ""
    """The limit that sets that bound: "compute", "server", "transfer", or "conflicts" (work that must follow a push);
    empty if it is unknown."""
    candidates: tuple[CandidateReport, ...] = ()
    undeclared: tuple[Undeclared, ...] = ()
    """Remote functions that declare nothing, and the gain the cost model expects from declaring them; largest first."""
    notes: tuple[str, ...] = ()
    """Caveats for whoever reads the figures, such as that cores were shared during the measurement."""
    pipeline: int = 0
    """Depth of the pipeline under which the module was measured; 0 if there was none."""
    stale: int = 0
    """Number of steps whose pushes a read may miss in that pipeline; above 0, `preserves` is "lossy"."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of reads of the trial that ran ahead in such a pipeline, by the number of steps that they missed."""
    parts: tuple[CompiledPart, ...] = ()
    """The parts that a backend was asked to compile, in graph order."""
    pays_after_steps: int | None = None
    """Number of steps after which the time spent on compiling is recovered; None if it was not measured or never is."""
    instructions: tuple[str, ...] = ()
    """Instruction sets of the processor on which int8 layers or compiled parts were measured (`utils.hardware`): the
    launcher accepts the answer only on a processor that has them. Empty means any processor."""
    blocks: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    hardware: str = ""
    torch_version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` can write, keyed by attribute name.

        Reasons are given by name ("FASTER"), unknown values as None.
        """
        return {each.name: plain(getattr(self, each.name)) for each in fields(Report)}

    variants: Mapping[str, Report] = field(default_factory=dict)
    """The report on each variant of the workload, by its name; each variant has a decision of its own."""

    @property
    def adopts(self) -> bool:
        """Whether to adopt the rewritten graph of the workload's own step or that of any variant."""
        return any(each.decision == "adopt" for each in (self, *self.variants.values()))

    def __str__(self) -> str:
        """Return the report as plain text for a person."""
        return render(self)


def plain(value: object) -> Any:
    """Return dataclasses as dicts, sequences as lists, reasons by name, times in ISO 8601, all else unchanged."""
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
    """Recent figures from real steps. QPS are samples per second; a figure is None if its module did not run.

    Attributes:
        qps_original: QPS of the original module.
        qps_optimized: QPS of the rewritten module.
        gain: relative gain, from steps of the two modules in turn; None if too few of these ran.
        steps: number of steps watched since the launcher began.
        went_back: whether the launcher went back to its original because the gain fell below what it had asked for.
        at: when the service received the figures; None before that.
    """

    qps_original: float | None = None
    qps_optimized: float | None = None
    gain: Estimate | None = None
    steps: int = 0
    went_back: bool = False
    at: datetime | None = None

    def __str__(self) -> str:
        """Return a one-line summary."""
        rates = ((self.qps_optimized, "optimized"), (self.qps_original, "original"))
        parts = [f"{qps:,.1f} samples per second {which}" for qps, which in rates if qps is not None]
        gain = [] if self.gain is None else [f"gain {interval(self.gain)}"]
        back = ["went back to the original"] if self.went_back else []
        return ", ".join([*back, *gain, *parts, f"{self.steps:,} steps"])


TITLES: Final = {"adopt": "ADOPT the rewritten module", "keep_original": "KEEP the original module"}


def render(result: Report, *, origin: str = "") -> str:
    """Render a report in sections, leaving out the empty ones. `origin` says where the report comes from."""
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
    "stale": "read ahead of pushes that they missed",
}
"""Maps a way of running ahead to the phrase for calls that do so."""
_LIMITS: Final = {
    "compute": "the trainer's own work",
    "server": "the servers' work",
    "transfer": "what the links carry",
    "conflicts": "what has to follow a push",
}


def _step(result: Report) -> list[str]:
    """Return one line: the recorded step before and after, and the shortest step that any schedule could have."""
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
    under += f", in which reads may miss the pushes of {_steps(result.stale)}: lossy" if result.stale else ""
    head = "one step" if result.timeline_original is None else "one step, recorded with a clock in it"
    lines = [f"{head}: {', '.join(f'{took} {words}' for took, words in known)}{under}"] if known else []
    if result.staleness:
        counts = [
            f"{reads} missed the pushes of {_steps(missed)}" for missed, reads in sorted(result.staleness.items())
        ]
        lines.append(f"of the reads that ran ahead, {', '.join(counts)}")
    return lines


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def interval(gain: Estimate | None) -> str:
    """Format a gain with the ends of its interval: +60.2% [+49.3%, +67.3%]; a dash if there is none."""
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
    """Return one line for each way of running ahead: how much exposed time it hid."""
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
    """Return lines on what missing declarations are worth; declarations without any value are not asked for."""
    worth = [each for each in undeclared if each.is_worth_it]
    if worth:
        head = "remote functions that declare nothing; what reads= would gain by the cost model, if it is true of them"
        return [head, *(f"  {each}" for each in worth)]
    return ["remote functions declare nothing, and by the cost model reads= would gain nothing"] if undeclared else []


def _limit(call: CallReport) -> str:
    return f"still exposed: {call.limited_by.sentence(call.limit_detail)}" if call.limited_by else ""


def _passes(result: Report) -> list[str]:
    if not result.passes:
        return []
    rows = [
        [each.name, str(each.changes), seconds(each.seconds), _declined(each)]
        for each in result.passes
        if each.changes or each.declined
    ]
    idle = [each.name for each in result.passes if not (each.changes or each.declined)]
    shown = table([["pass", "changes", "time", "declined"], *rows], right=(1, 2)) if rows else []
    errors = [line for each in result.passes for line in _sensitivity(each)]
    return ["passes", *shown, *([f"  without a change: {', '.join(idle)}"] if idle else []), *errors]


def _sensitivity(report: PassReport) -> Iterator[str]:
    """Yield a line on the layers that a lossy pass changed, and one on those that it left exact, by their errors."""
    for lossy, verb in ((True, "changed"), (False, "left exact")):
        found = [f"{', '.join(each.nodes)}: {each.error:.2g}" for each in report.sensitivity if each.lossy is lossy]
        if found:
            yield f"errors of layers that {report.name} {verb}, the least first: {'; '.join(found)}"


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
    """Render what each pass did to the generated code, if that was requested."""
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
    unsure = "not reproduced by the original itself, or not known to be the same"
    lines += [f"{unsure}: {each}" for each in result.not_reproduced]
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
