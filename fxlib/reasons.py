"""The reasons why a call was left alone, a rewrite declined, or an original kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """One named reason. The value is the sentence shown to a person; `{...}` fields are filled in by the reporter."""

    # Reasons about one remote call.
    MOVED = "issued early and waited for late"
    ISSUED_EARLY = "issued early; its answer is needed where it is waited for"
    WAITED_LATE = "waited for late; it is issued as soon as it can be"
    NOTHING_TO_OVERLAP = "no independent work lies between the earliest issue and the latest wait"
    UNKNOWN_CONTRACT = "the remote function declares no contract, so it keeps its order with every other effect"
    WRITES_STATE = "the call writes {detail}; a write is issued where the program issues it"
    ORDERED_AFTER_WRITE = "the call reads state that an earlier call may write"
    UNKNOWN_DESTINATION = "the destination is not a constant, so it may be any server"
    GRADIENT_ORDER = "moving it would change the order in which a tensor's gradients are summed"
    ARGUMENT_WRITTEN = "a later node writes an argument in flight, so it waits for the call"
    OPAQUE_NEIGHBOUR = "an opaque callable stands in the way; nothing crosses it"
    ALREADY_ASYNC = "the program already issues and waits for the call itself"
    NO_ASYNC_FORM = "the call has no asynchronous form"
    RANDOM_ORDER = "random operators keep their relative order"
    ORDERED_BEFORE_WRITE = (
        "a later node writes on a server or to an input, which it may do only after all earlier waits"
    )
    COLLECTIVE_ORDER = "collectives keep their order, and come after all earlier calls, any of which may fail"
    MODE_BLOCK = "a grad-mode or autocast block begins or ends in the way; nothing crosses it"
    COALESCED = "travels in one message with {detail}"
    MOVED_TOGETHER = "issued early, in one message with {detail}, and waited for late"
    MERGED = "the same read as {detail}, whose result it shares"
    BATCH_SLOWER = "the server is expected to take longer for a batch than for single calls in parallel"
    BATCH_UNMEASURED = "it was never measured which answer comes first, and some are needed before the others"
    RESULT_CHANGED = "the same read as {detail}, but one of the results is changed, or may be, where it is used"
    RESULT_ESCAPES = "the same read as {detail}, but one of the results leaves the module"
    RESULT_TAKES_GRADIENT = "the same read as {detail}, but the results take, or may take, gradients of their own"
    HELD_BACK = "a limit on memory, or on calls or bytes in flight, held its issue back"
    LIMIT_KEEPS_ORDER = "the limits leave no order but the program's own"
    NOT_SCHEDULED = "no pass of this recipe schedules calls"

    # Reasons about work in this process that a pass left alone.
    OPAQUE_MODULE = "it carries hooks or a forward of its own, which may do anything"
    WEIGHT_WRITTEN = "the program writes to the memory of its weights"
    WEIGHT_COMPUTED = "its weights are computed, not held by the module"
    WEIGHT_UNCOUNTED = (
        "torch does not show when its weights change: made in inference mode, or statistics without a counter"
    )
    NORM_IN_TRAINING = "the norm takes its statistics from the batch, in training mode"
    NORM_OF_BATCH = "the norm keeps no statistics, and uses those of the batch"
    NORM_ALONE = "no linear layer or convolution is right before or after it, without another user in between"
    NORM_BEFORE_PADDING = "its shift would have to reach the zeros with which the next layer pads"
    NORM_OTHER_DIMENSION = "its channels are not those of the layer: {detail}"
    RANK_UNKNOWN = "the number of dimensions of its input is unknown"
    NOT_FINITE = "the folded weights would not be finite numbers of their dtype"
    NOT_INT8 = "int8 supports linear layers and two-dimensional float32 convolutions, depthwise ones only beside others"
    ERROR_BOUND = "on int8 weights it changes the results too much: {detail}"
    CALIBRATION_NOT_FINITE = "its input is not finite on the workload's batches"
    CALIBRATION_TOO_SMALL = "the workload has too few batches to know the range of its input: {detail}"
    NOT_BFLOAT16 = "only layers with float32 weights on the CPU run in bfloat16"
    MODE_BLOCKS = "the graph turns the recording of gradients on: capture the model under torch.no_grad()"
    AUTOCAST = "a block of autocast in the program decides the dtype of its result"
    TOO_LARGE = "the value would take more memory than the pass may use: {detail}"
    SUM_ORDER = "its summation order depends on the machine and its threads, so the bits may differ elsewhere"
    ROUNDED_OTHERWISE = "other processors, and other numbers of threads, may round it otherwise"
    AMBIENT_DEFAULT = "it depends on the default dtype or device at the time it runs"
    VALUE_WRITTEN = "its value is written to, or may be"
    VALUE_ESCAPES = "its value leaves the module, and the caller may write to it"
    SENT_TOGETHER = "one call sends both values, and torch sends one tensor only once, to which the function may write"
    TAKES_GRADIENT = "it may take a gradient, whose sum would be rounded differently"
    LAYOUT_MIXED = "it would have to change between layouts too often to gain: {detail}"
    LAYOUT_OTHER = "its input or weight may be in another memory order than torch's default, and so its result"
    LAYOUT_UNKNOWN = "shape and strides are unknown: its value or its argument has no metadata"
    OTHER_LAYOUT = "its result differs from {detail} in shape, dtype, device or strides, and cannot replace it"
    MAY_BE_SAVED = "gradients are recorded, and backward may need the value that would be overwritten"
    ARGUMENT_SHARED = "another argument may share the memory of {detail}, which it would write"
    MEMORY_HELD = "other code may hold the memory of {detail}"
    INPUT_KEPT = "the memory of {detail} is the caller's or the module's, and the program does not overwrite it in time"
    STILL_USED = "{detail} later uses the memory that it would overwrite"
    OUTPUTS_WOULD_SHARE = "two values that the program returns would come to share memory"
    USED_OUTSIDE = "a value inside the rule's match is used elsewhere: {detail}"
    USED_BEFORE = "it has no legal position: {detail}"
    USED_WHOLE = "its results are not taken one by one, as its decomposition returns them"
    LITERAL_UNFIT = "the replacement needs a value of the program in place of a literal: {detail}"
    GUARD = "the rule's guard rejects the match: {detail}"
    MATCH_AMBIGUOUS = "the rule could be applied in too many ways to try them all: {detail}"

    # Reasons why the rest of a call's time is exposed.
    LIMITED_BY_DATA = "its arguments are ready late: it needs {detail}"
    LIMITED_BY_EFFECT = "an effect that it may not cross: {detail}"
    LIMITED_BY_SERVER = "it queues on {detail}, which works on other calls first: more servers or threads would help"
    LIMITED_BY_BANDWIDTH = "the link to {detail} is busy: smaller dtypes, fewer rows or a faster link would help"
    LIMITED_BEYOND_MODEL = "the cost model expects it to be hidden: processes may share cores, and times vary"
    LIMITED_BY_WORK = "no independent work is left to hide it behind"

    # Reasons about the gradient of one remote result.
    GRADIENT_CARRIED = "distributed autograd carries gradients to the servers by itself"

    # Reasons about running ahead of the step, under `fxlib.pipeline`.
    RUNS_AHEAD = "may run ahead of its step: it only needs inputs and constants, and no push writes what it reads"
    RUNS_BEHIND_PUSH = "may run ahead of its step, behind the push of the step before: {detail} writes what it reads"
    RUNS_BY_KEYS = "may run ahead of its step: {detail} writes rows of what it reads, and those are read again"
    AHEAD_KIND = "calls of this kind do not run ahead of their step: {detail}"
    AHEAD_WRITTEN = "{detail} writes what it reads, or may, so it stays in its step"
    AHEAD_NEEDS_STATE = "its arguments are computed from {detail}, which a step may change"
    AHEAD_NEEDS_RESULT = "its arguments are computed from the result of {detail}"
    AHEAD_RANDOM = "its arguments depend on what {detail} draws at random"
    AHEAD_OPAQUE = "its arguments come from {detail}, or may be changed by it, which may do anything"
    AHEAD_ARGUMENT_WRITTEN = "its arguments lie in memory that the program writes: {detail}"
    AHEAD_DISTRIBUTED = "under distributed autograd no call runs ahead: the context of a step does not exist before it"
    AHEAD_SEVERAL_TRAINERS = (
        "with several trainers, no read of what pushes write runs ahead: the order of theirs is unknown"
    )
    AHEAD_NO_ROWS = "the rows of its result are not those of its keys, so it stays behind pushes: {detail}"
    AHEAD_NOT_UPDATED = "a push's update of its rows could not be computed here, so they are read again: {detail}"
    AHEAD_OTHER_INPUTS = "the forward is not called with the batch that was pulled: {detail}"

    # Reasons about a part that a backend compiles.
    PART_NOT_COMPILED = "it runs uncompiled: {detail}"
    PART_NOT_FASTER = "it is not faster compiled: {detail}"

    # Reasons about a whole job.
    FASTER = "measured faster: the interval's lower end is above the minimum gain"
    NO_CALLS = "the graph holds no remote call and no pass changed anything"
    NOTHING_CHANGED = "no pass changed anything"
    NOTHING_TO_GAIN = "by the profile of the request, no legal order of the program gains more than {detail}"
    NOT_FASTER = "the interval's lower end is not above the minimum gain"
    BUDGET_EXHAUSTED = "the time budget ended before the interval was clear of the minimum gain"
    NO_PART_FASTER = "no part of it is faster compiled: {detail}"
    OTHER_MACHINE = "it was measured on a machine of another kind: {detail}"
    NOT_SAME = "the candidate's results differ from the original's: {detail}"
    ORIGINAL_FAILS = "the original itself fails in the trial: {detail}"
    STAND_IN_FAILS = "the model runs in the launcher, but not in the trial among fxlib's stand-ins: {detail}"
    CANDIDATE_FAILS = "the candidate fails in the trial: {detail}"
    TRIAL_HUNG = "the trial made no progress within its time limit: {detail}"
    TRIAL_DIED = "a process of the trial died: {detail}"
    OUT_OF_MEMORY = "the trial ran out of memory: {detail}"
    NO_SERVER = "no parameter server of the trial serves {detail}"
    OPAQUE_CODE = "the trial cannot run code that only the job has: {detail}"
    COLLECTIVES = "the trial cannot hold the collectives of the job: {detail}"
    NO_DEVICE = "trials only run on CPUs, and the job's tensors are elsewhere: {detail}"
    NO_CAPACITY = "the Ray cluster cannot place the trial: {detail}"
    REWRITE_FAILED = "the rewrite failed: {detail}"
    REWRITE_LIMIT = "the rewrite exceeded its time or memory limit: {detail}"
    CANCELLED = "the job was cancelled"

    # A reason named by a newer service, worker or library than this one.
    OTHER = "{detail}"

    def sentence(self, detail: str = "") -> str:
        """Return the sentence with `{detail}` filled in."""
        return self.value.replace("{detail}", detail) if "{detail}" in self.value else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A node that a pass left alone, the reason, and the declaration or change that would free it."""

    node: str
    reason: Reason
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return it as one line."""
        text = f"{self.node}: {self.reason.sentence(self.detail)}"
        return f"{text} ({self.remedy})" if self.remedy else text
