"""The runtime of captured modules: the module itself, calls and their kinds, and the recording of a timeline.

The operators that generated code calls are in `fxlib.runtime.ops`.
"""

from fxlib.runtime.module import CapturedModule
from fxlib.runtime.ops.calls import CallKind, is_call, is_issue, is_wait, kind_of, kinds, register, register_call
from fxlib.runtime.ops.timeline import Recording, exposed_s, record

__all__ = [
    "CallKind",
    "CapturedModule",
    "Recording",
    "exposed_s",
    "is_call",
    "is_issue",
    "is_wait",
    "kind_of",
    "kinds",
    "record",
    "register",
    "register_call",
]
