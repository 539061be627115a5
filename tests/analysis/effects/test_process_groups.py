"""Which process groups the trainers of a trial can stand in for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fxlib.analysis.effects.process_groups import Groups

Sizes = Mapping[str, tuple[int, ...]]


@pytest.mark.parametrize(
    "collectives, reducing, trainers",
    [
        ({"0": (4,)}, {}, 4),
        ({"0": ()}, {}, 2),
        ({}, {}, 1),
        ({}, {"0": (2,)}, 2),
        ({}, {"17": (3,)}, 3),  # of the ranks that train, where servers are ranks, too
        ({"0": (2,)}, {"0": (2,)}, 2),
    ],
)
def test_as_many_trainers_as_the_job_has_ranks_are_its_group(
    collectives: Sizes, reducing: Sizes, trainers: int
) -> None:
    assert not Groups(collectives=collectives, reducing=reducing).misfit(trainers)


@pytest.mark.parametrize(
    "collectives, reducing, trainers, said",
    [
        ({"0": ()}, {}, 1, "Workload.trainers"),
        ({"0": (4,)}, {}, 2, "for 4 ranks, and Workload.trainers is 2"),
        ({"0": (2, 4)}, {}, 2, "for 4 ranks"),
        ({"0": (2,), "3": ()}, {}, 2, "process group '3'"),
        ({}, {"0": (2,)}, 1, "Workload.trainers"),
        ({}, {"0": (4,)}, 2, "for 4 ranks, and Workload.trainers is 2"),
        ({}, {"0": (2,), "3": (2,)}, 2, "several process groups"),
        ({"0": ()}, {"3": (2,)}, 2, "several process groups"),
    ],
)
def test_others_are_refused_by_name(collectives: Sizes, reducing: Sizes, trainers: int, said: str) -> None:
    assert said in Groups(collectives=collectives, reducing=reducing).misfit(trainers)
