"""Trial options, to and from protobuf."""

from __future__ import annotations

from fxlib.spec.trial import TrialOptions
from fxlib.v1 import jobs_pb2


def trial_to_proto(options: TrialOptions) -> jobs_pb2.TrialOptions:
    """Write trial options."""
    return jobs_pb2.TrialOptions(
        min_gain=options.min_gain,
        confidence=options.confidence,
        budget_s=options.budget_s,
        sameness_steps=options.sameness_steps,
        step_timeout_s=options.step_timeout_s,
        max_relative_error=options.max_relative_error,
    )


def trial_from_proto(proto: jobs_pb2.TrialOptions) -> TrialOptions:
    """Read trial options.

    Raises:
        WorkloadError: a figure is out of its range.
    """
    return TrialOptions(
        min_gain=proto.min_gain,
        confidence=proto.confidence,
        budget_s=proto.budget_s,
        sameness_steps=proto.sameness_steps,
        step_timeout_s=proto.step_timeout_s,
        max_relative_error=(
            proto.max_relative_error if proto.HasField("max_relative_error") else TrialOptions().max_relative_error
        ),
    )
