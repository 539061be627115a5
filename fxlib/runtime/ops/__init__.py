"""The operators that generated code calls, what is known of each, and how calls are recorded.

How a forward keeps its remote results is in `fxlib.runtime.tracking`, and the module that runs the code above both.
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
