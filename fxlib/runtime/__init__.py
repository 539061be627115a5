"""What generated code calls, the module that runs it, and the recording of its timeline."""

from fxlib.runtime.module import CapturedModule
from fxlib.runtime.ops.batches import issue_batch, wait_item
from fxlib.runtime.ops.calls import CallKind, is_call, is_issue, is_wait, kind_of, kinds, register
from fxlib.runtime.ops.clients import register_call
from fxlib.runtime.ops.operators import (
    create,
    fetch,
    issue_call,
    issue_fetch,
    limit_in_flight,
    remote_call,
    send_gradient,
    start_call,
    track_gradient,
    wait,
)
from fxlib.runtime.ops.record import Recording, exposed_s, record

__all__ = [
    "CallKind",
    "CapturedModule",
    "Recording",
    "create",
    "exposed_s",
    "fetch",
    "is_call",
    "is_issue",
    "is_wait",
    "issue_batch",
    "issue_call",
    "issue_fetch",
    "kind_of",
    "kinds",
    "limit_in_flight",
    "record",
    "register",
    "register_call",
    "remote_call",
    "send_gradient",
    "start_call",
    "track_gradient",
    "wait",
    "wait_item",
]
