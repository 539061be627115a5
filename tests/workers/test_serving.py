"""What the servers of a trial cannot serve, in a world that only answers what they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import fxlib
from fxlib.profiles import Profile, TensorShape
from fxlib.reasons import Reason
from fxlib.workload import Server, Workload
from tests.workers.weighed import Weighed, recorded, weighed_profile, workload
from workers.trial.failures import TrialError
from workers.trial.objects import needs_of
from workers.trial.serving import Serving


def nobody_has_any(members: Sequence[Any], method: str, *args: object, **_: object) -> list[Any]:
    """Answer as servers without a module of the operator's do."""
    return [args[0] if method == "not_served" else None for _ in members]


def serve(profile: Profile | None, asked: Workload | None = None) -> None:
    asked = asked or workload()
    needs = needs_of([fxlib.capture(Weighed())], asked)
    serving = Serving(nobody_has_any, asked, profile, (), 1.0)
    servers = [server.name for server in asked.servers]
    serving.stage(servers, ["trainer0"], needs)
    serving.check(servers, needs)


def test_what_the_profile_records_is_served() -> None:
    serve(weighed_profile())


@pytest.mark.parametrize(
    "profile, words",
    [
        (None, "fxlib.profile"),
        (Profile(), "measure the graph anew"),
        (
            Profile(calls=tuple(replace(each, push=None) for each in weighed_profile().calls)),
            "'tests.workers.remote_code:learn' on 'ps0'",
        ),
        (
            Profile(calls=(recorded("weigh", "x:y", "ps0", returns=TensorShape(shape=(1 << 40,), dtype=torch.int8)),)),
            "exceeds the limit",
        ),
    ],
)
def test_what_cannot_be_replayed_is_named_with_a_way_out(profile: Profile | None, words: str) -> None:
    with pytest.raises(TrialError) as caught:
        serve(profile)
    assert caught.value.reason is Reason.NO_SERVER
    assert words in caught.value.detail


def test_calls_to_a_server_that_the_workload_does_not_have_are_named() -> None:
    with pytest.raises(TrialError) as caught:
        serve(None, workload(servers=(Server(name="ps0"),)))
    assert caught.value.reason is Reason.NO_SERVER
    assert "calls to 'ps1', which is none of the workload's servers" in caught.value.detail
