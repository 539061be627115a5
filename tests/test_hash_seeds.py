"""What Python's hashes decide, the order of sets, shows in no schedule, no message and no weights that are drawn."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEEDS = ("1", "2")

PROGRAM = """
import hashlib, random
from torch import nn
from torch.fx import symbolic_trace
from fxlib import recipes, wire
from tests.analysis.cost.test_bound import random_profile, random_program
from tests.analysis.cost.test_simulate import SCHEDULE
from tests.random_programs import programs

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    def forward(self, x):
        return {"y": self.net(x), 1: {"a", "b"} and None}

graph = wire.encode(symbolic_trace(Model())).graph
state = wire.decode(graph, seed=3).state_dict()
print(wire.digest(graph), hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest())
print([recipes.apply(programs.random_program(seed).module).module.code for seed in range(5)])
for seed in range(30):
    dice = random.Random(seed)
    module = random_program(dice)
    print(recipes.apply(module, SCHEDULE, profile=random_profile(module, dice)).module.code)
"""


@pytest.mark.slow
def test_digests_schedules_and_drawn_weights_are_the_same_for_every_hash_seed() -> None:
    said = set()
    for seed in SEEDS:
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "PATH": "", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True)
        said.add(ran.stdout)
    assert len(said) == 1
