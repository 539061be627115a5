"""Paired conversions between the protocol's messages and the library's dataclasses: the edge of every part.

Each pair is exact: what `X_from_proto` reads from the message that `X_to_proto` wrote is equal to what was written,
except that text for people in jobs, events and reports becomes plain (one line, nothing that steers a terminal). Graphs
and their contracts are converted in `fxlib.wire`.
"""

from fxlib.protocol.jobs import (
    LEASE,
    event_from_proto,
    event_to_proto,
    filter_from_proto,
    filter_to_proto,
    job_from_proto,
    job_to_proto,
    live_to_proto,
)
from fxlib.protocol.profile import profile_from_proto, profile_to_proto
from fxlib.protocol.recipe import (
    RecipeLike,
    catalogue_to_proto,
    check_weights,
    is_auto,
    passes_of,
    passes_that_need,
    recipe_from_proto,
    recipe_to_proto,
)
from fxlib.protocol.report import blob_from_proto, blob_to_proto, check_adoption, report_from_proto, report_to_proto
from fxlib.protocol.values import contract_from_proto, contract_to_proto, value_from_proto, value_to_proto
from fxlib.protocol.workload import (
    EncodedWorkload,
    batch_from_bytes,
    batch_to_bytes,
    blob_ref,
    blobs_of,
    spec_from_proto,
    spec_to_proto,
    trial_from_proto,
    trial_to_proto,
    workload_from_proto,
    workload_to_proto,
)

__all__ = [
    "LEASE",
    "EncodedWorkload",
    "RecipeLike",
    "batch_from_bytes",
    "batch_to_bytes",
    "blob_from_proto",
    "blob_ref",
    "blob_to_proto",
    "blobs_of",
    "catalogue_to_proto",
    "check_adoption",
    "check_weights",
    "contract_from_proto",
    "contract_to_proto",
    "event_from_proto",
    "event_to_proto",
    "filter_from_proto",
    "filter_to_proto",
    "is_auto",
    "job_from_proto",
    "job_to_proto",
    "live_to_proto",
    "passes_of",
    "passes_that_need",
    "profile_from_proto",
    "profile_to_proto",
    "recipe_from_proto",
    "recipe_to_proto",
    "report_from_proto",
    "report_to_proto",
    "spec_from_proto",
    "spec_to_proto",
    "trial_from_proto",
    "trial_to_proto",
    "value_from_proto",
    "value_to_proto",
    "workload_from_proto",
    "workload_to_proto",
]
