"""`python -m fxlib_workers.trial.node_containment`: find out what containment the nodes of a Ray cluster allow.

It runs in a separate process, since it connects to the operator's Ray, which the worker's own process never does.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from fxlib.errors import OptionError, of_system
from fxlib_workers.process.exceptions import shorten
from fxlib_workers.process.probe import Available, available

_NODE_S: Final = 60.0
"""The time in seconds in which each node has to answer."""

_ALL_S: Final = 120.0
_REACH_S: Final = 5.0
"""The time in seconds in which the cluster's head has to accept a connection."""

_SILENT: Final = "filter"
_HOST_AND_PORT: Final = re.compile(r"(?:ray://)?\[?([^\[\]]+?)\]?:(\d+)")
_TRIES: Final = {"RAY_NUM_REDIS_GET_RETRIES": "3"}
"""Ray's own option for the number of attempts, one a second, to reach a head that refuses it."""

_OTHER_TOKEN: Final = re.compile(r"InvalidAuthToken|Unauthenticated|AuthenticationError")
_VERSIONS: Final = r".*?(Ray: \S+\s+Python: \S+)"
_OTHER_VERSION: Final = re.compile(f"Version mismatch: {_VERSIONS}{_VERSIONS}", re.DOTALL)
_NO_NODE_HERE: Final = re.compile(r"No node info found|none of these match this node")


def allowed_on_nodes(address: str) -> Mapping[str, Available]:
    """Return what each node of the cluster at an address allows, by the node's name.

    Raises:
        OptionError: the worker cannot connect to the cluster. The error says whether nothing answers there, or the
            cluster expects another token, runs another version of Ray or Python, or has no node on this host.
    """
    _reach(address)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={
                **_TRIES,
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            text=True,
            timeout=_ALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OptionError(
            f"no Ray has answered at {address} within {_ALL_S:.0f} s",
            option="ray-address",
            hint="See that this is the port of the cluster's head (6379 unless you chose another).",
        ) from None
    if done.returncode:
        raise _explain(address, done.stderr)
    sys.stderr.write(done.stderr)
    missing_by_node = json.loads(done.stdout.splitlines()[-1])
    return {node: Available.without(missing) for node, missing in missing_by_node.items()}


def _reach(address: str) -> None:
    """Open a connection to the head and close it, since Ray itself takes minutes to find that nobody is there."""
    if (found := _HOST_AND_PORT.fullmatch(address)) is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        why = of_system(error) if isinstance(error, OSError) else error
        raise OptionError(
            f"nothing can be reached at {address}: {why}",
            option="ray-address",
            hint="See that the cluster's head runs, and that this host may connect to it.",
        ) from None


def _explain(address: str, said: str) -> OptionError:
    """Return the error that explains, from the process's output, why it could not connect."""
    if found := _OTHER_VERSION.search(said):
        theirs, ours = (" ".join(each.replace(":", "").split()).replace(" P", ", P") for each in found.groups())
        message = f"the cluster at {address} runs {theirs}, and this worker {ours}"
        hint = "Run the worker with the cluster's versions of Ray and Python."
    elif _OTHER_TOKEN.search(said):
        message = f"the cluster at {address} does not take this worker's token"
        hint = (
            "Give the worker the cluster's token: RAY_AUTH_MODE=token with RAY_AUTH_TOKEN, or with the file that "
            "RAY_AUTH_TOKEN_PATH names."
        )
    elif _NO_NODE_HERE.search(said):
        message = f"no node of the cluster at {address} is on this host"
        hint = f"Start one beside the worker: ray start --address={address} --num-cpus=0."
    else:
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it ended without a word"]
        message = f"the worker cannot connect to {address}: {shorten(lines[-1])}"
        hint = ""
    return OptionError(message, option="ray-address", hint=hint)


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
