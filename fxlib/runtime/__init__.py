"""What generated code calls, the module that runs it, and the recording of its timeline."""

from fxlib.runtime.calls import CallKind, is_call, is_issue, is_wait, kind_of, kinds, register
from fxlib.runtime.module import CapturedModule
from fxlib.runtime.ops import create, fetch, issue_call, issue_fetch, remote_call, start_call, track_gradient, wait
from fxlib.runtime.record import Recording, exposed_s, record

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
    "issue_call",
    "issue_fetch",
    "kind_of",
    "kinds",
    "record",
    "register",
    "remote_call",
    "start_call",
    "track_gradient",
    "wait",
]
