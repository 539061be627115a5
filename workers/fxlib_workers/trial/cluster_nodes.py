"""What the nodes of an operator's Ray cluster allow a contained process: `python -m fxlib_workers.trial.cluster_nodes`.

It runs in a process of its own, since it connects to Ray, which the worker's own process never does.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from fxlib_workers.process.probe import Available, available

_NODE_S: Final = 60.0
"""The time in which each node is to have answered."""

_ALL_S: Final = 120.0
_SILENT: Final = "filter"


def allowed_on_nodes(address: str) -> Mapping[str, Available]:
    """Return what each node of the cluster at an address allows, by its address; nothing if it is not reached."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"},
            timeout=_ALL_S,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return {}
    told = json.loads(done.stdout.splitlines()[-1])
    return {node: Available.without(missing) for node, missing in told.items()}


def _ask(address: str) -> Mapping[str, Mapping[str, str]]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            only = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(_missing).options(num_cpus=0, max_retries=0, scheduling_strategy=only)
            asked[f"{node['NodeManagerAddress']} {node['NodeID'][:8]}"] = task.remote()
    found = {}
    for node, answer in asked.items():
        try:
            found[node] = ray.get(answer, timeout=_NODE_S)
        except (RayError, TimeoutError) as error:
            found[node] = {_SILENT: f"the node does not say what it allows: {type(error).__name__}"}
    return found


def _missing() -> Mapping[str, str]:
    return {str(part): why for part, why in available().missing}


if __name__ == "__main__":
    print(json.dumps(_ask(sys.argv[1])))  # noqa: T201 - the answer to `allowed_on_nodes`
