"""Trial options, to and from protobuf."""

from __future__ import annotations

from fxlib.protocol.converter import Converter
from fxlib.spec.trial import TrialOptions
from fxlib.v1 import jobs_pb2

_OPTIONS = Converter(TrialOptions, jobs_pb2.TrialOptions, number=None)


def trial_to_proto(options: TrialOptions) -> jobs_pb2.TrialOptions:
    """Write trial options."""
    return _OPTIONS.write(options)


def trial_from_proto(proto: jobs_pb2.TrialOptions) -> TrialOptions:
    """Read trial options.

    Raises:
        WorkloadError: a figure is out of its range.
    """
    return _OPTIONS.read(proto)
