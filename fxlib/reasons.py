"""The catalogue of reasons: why a call was left alone, a rewrite declined, an original kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """One named reason. The value is the sentence shown to a person; `{...}` fields are filled in by the reporter."""

    # About one remote call.
    MOVED = "issued early and waited for late"
    ISSUED_EARLY = "issued early; its wait could not move"
    WAITED_LATE = "waited for late; its issue could not move"
    NOTHING_TO_OVERLAP = "no independent work lies between the earliest issue and the latest wait"
    UNKNOWN_CONTRACT = "the remote function declares no contract, so it keeps its order with every other effect"
    WRITES_STATE = "the call writes {detail}; a write is issued where the program issues it"
    ORDERED_AFTER_WRITE = "the call reads state that an earlier call may write"
    UNKNOWN_DESTINATION = "the destination is not a constant, so it may be any server"
    GRADIENT_ORDER = "moving it would change the order in which a tensor's gradients are added up"
    ARGUMENT_WRITTEN = "an argument in flight is written by a later node, which waits for the call"
    OPAQUE_NEIGHBOUR = "an opaque callable stands in the way; nothing crosses it"
    ALREADY_ASYNC = "the program already issues and waits for the call itself"
    NO_ASYNC_FORM = "the call has no asynchronous form"
    RANDOM_ORDER = "random operators keep their relative order"
    ORDERED_BEFORE_WRITE = "a later node writes, on a server or to an input, and does so only after all earlier waits"
    MODE_BLOCK = "a grad-mode or autocast block begins or ends in the way; nothing crosses it"
    NOT_SCHEDULED = "no pass of this recipe schedules calls"

    # About a whole job.
    FASTER = "measured faster: the interval's lower end is above the minimum gain"
    NO_CALLS = "the graph holds no remote call and no pass changed anything"
    NOTHING_CHANGED = "no pass changed anything"
    NOT_FASTER = "the interval's lower end is not above the minimum gain"
    BUDGET_EXHAUSTED = "the time budget ended before the interval was clear of the minimum gain"
    NOT_SAME = "the candidate's results differ from the original's: {detail}"
    ORIGINAL_FAILS = "the original itself fails in the trial: {detail}"
    CANDIDATE_FAILS = "the candidate fails in the trial: {detail}"
    TRIAL_HUNG = "a step did not end within its time limit: {detail}"
    TRIAL_DIED = "a process of the trial died: {detail}"
    OUT_OF_MEMORY = "the trial ran out of memory: {detail}"
    NO_SERVER = "no parameter server of the trial serves {detail}"
    OPAQUE_CODE = "the trial cannot run code that only the job has: {detail}"
    NO_CAPACITY = "the Ray cluster cannot place the trial: {detail}"
    REWRITE_FAILED = "the rewrite failed: {detail}"
    REWRITE_LIMIT = "the rewrite exceeded its time or memory limit: {detail}"
    CANCELLED = "the job was cancelled"

    # Named by a newer service, worker or library than this one.
    OTHER = "{detail}"

    def sentence(self, detail: str = "") -> str:
        """Fill `{detail}` in."""
        return self.value.replace("{detail}", detail) if "{detail}" in self.value else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Something that a pass left alone: the node, the reason, and the declaration or change that would free it."""

    node: str
    reason: Reason
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """One line."""
        text = f"{self.node}: {self.reason.sentence(self.detail)}"
        return f"{text} ({self.remedy})" if self.remedy else text
