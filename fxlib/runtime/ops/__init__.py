"""The operators that generated code calls, their registered properties, and the recording of calls.

The state of a running forward is in `fxlib.runtime.tracking`; the module that runs the code is above both folders.
"""

from fxlib.runtime.ops.batches import issue_batch, wait_item
from fxlib.runtime.ops.operators import (
    create,
    fetch,
    issue_call,
    issue_fetch,
    limit_in_flight,
    make_rref,
    remote_call,
    send_gradient,
    start_call,
    track_gradient,
    wait,
)

__all__ = [
    "create",
    "fetch",
    "issue_batch",
    "issue_call",
    "issue_fetch",
    "limit_in_flight",
    "make_rref",
    "remote_call",
    "send_gradient",
    "start_call",
    "track_gradient",
    "wait",
    "wait_item",
]
