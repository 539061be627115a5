"""The scheduled program is the program: over TensorPipe, with servers that let calls pass one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from fxlib.recipes import recipes
from fxlib.runtime.ops import issue_call, remote_call
from fxlib.spec.workload import Server
from tests.random_programs.programs import Program, differentiable_program, random_program
from tests.random_programs.running import Outcome, differences, distributed_outcome, outcome, real_servers
from tests.random_programs.simulation import SERVERS
from tests.shared.many import many
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name) for name in SERVERS)):
        yield


def test_scheduled_programs_do_what_the_programs_do() -> None:
    moved, seeds = 0, range(many(20))
    for seed in seeds:
        program = random_program(seed)
        rewrite = recipes.apply(program.module)
        expected = outcome(program, program.module, real_servers())
        found = differences(expected, outcome(program, rewrite.module, real_servers()))
        assert not found, f"seed {seed}: {found}\n{program.module.code}\n{rewrite.module.code}"
        moved += sum(call.action == "moved" for call in rewrite.calls)
    assert moved > 2 * len(seeds)


def _sums_of_many(program: Program, found: Outcome) -> Iterator[str]:
    """Name the gradients that servers add up from three calls or more, in whatever order they come in."""
    calls = Counter(
        node.args[0] if isinstance(node.args[0], str) else "ps1"
        for node in program.module.graph.nodes
        if node.target in {remote_call, issue_call}
    )
    return (name for name in found for server, count in calls.items() if count > 2 and name.startswith(f"{server}'s"))


def test_distributed_autograd_gives_what_programs_reproduce_of_themselves() -> None:
    moved, server_gradients, seeds = 0, 0, range(many(12))
    for seed in seeds:
        program = differentiable_program(seed)
        rewrite = recipes.apply(program.module)
        expected = distributed_outcome(program, program.module)
        again = distributed_outcome(program, program.module)
        unstable = {*differences(expected, again), *_sums_of_many(program, expected)}
        found = set(differences(expected, distributed_outcome(program, rewrite.module))) - unstable
        assert not found, f"seed {seed}: {found}\n{program.module.code}\n{rewrite.module.code}"
        moved += sum(call.action == "moved" for call in rewrite.calls)
        server_gradients += sum("gradient of" in name and name not in unstable for name in expected)
    assert moved > 2 * len(seeds)
    assert server_gradients > len(seeds)
