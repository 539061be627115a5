"""Which process groups the trainers of a trial can stand in for."""

from __future__ import annotations

import pytest

from fxlib.reasons import Reason
from workers.trial.failures import TrialError
from workers.trial.peers import check_groups


def test_as_many_trainers_as_the_job_has_ranks_are_its_group() -> None:
    check_groups({"0": (4,)}, trainers=4)
    check_groups({"0": ()}, trainers=2)
    check_groups({}, trainers=1)


@pytest.mark.parametrize(
    "groups, trainers, said",
    [
        ({"0": ()}, 1, "Workload.trainers"),
        ({"0": (4,)}, 2, "that of 4 ranks, and Workload.trainers is 2"),
        ({"0": (2, 4)}, 2, "that of 4 ranks"),
        ({"0": (2,), "3": ()}, 2, "process group '3'"),
    ],
)
def test_others_are_refused_by_name(groups: dict[str, tuple[int, ...]], trainers: int, said: str) -> None:
    with pytest.raises(TrialError, match=said) as raised:
        check_groups(groups, trainers)
    assert raised.value.reason is Reason.COLLECTIVES
