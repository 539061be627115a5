"""Ray, and the host on each of its nodes that runs the processes of trials there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fxlib_workers.config import TrialSettings
from fxlib_workers.process.containment import HOST_NETWORK, Network
from fxlib_workers.trial.host import Host

_OBJECT_STORE_BYTES: Final = 256 << 20
_SYSTEM: Final = {"prestart_worker_first_driver": False}
"""Ray's own options: no idle process is started for each CPU, since hosts are all that runs in it."""

_UNUSED: Final = ("start_monitor", "start_log_monitor", "start_api_server")
"""What starts processes of Ray that no trial needs: those of its autoscaler, of its logs and of its dashboard."""

_LONGEST_FOLDER: Final = 43
"""The most bytes of the path of a Ray's folder: Linux takes 107 for a socket's path, of which Ray needs 64."""

_CALLS_AT_ONCE: Final = 4096
"""The calls that a host passes on at the same time: two for each process, at the most."""


class Nodes:
    """The nodes of the Ray to which this process is connected, with a host on each that trials have used.

    Attributes:
        settings: the operator's settings.
    """

    def __init__(self, settings: TrialSettings, network: Network = HOST_NETWORK) -> None:
        self.settings = settings
        self._network = network
        self._hosts: dict[str, Any] = {}

    def host(self, node: str) -> Any:
        """Return the actor that hosts processes of trials on a node, which is started unless it runs."""
        if node not in self._hosts:
            options = {
                "num_cpus": 0,
                "max_concurrency": _CALLS_AT_ONCE,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            settings = self.settings
            given = settings.keep_variables, settings.allowed_modules, settings.node_containment, self._network
            self._hosts[node] = ray.remote(Host).options(**options).remote(*given)
        return self._hosts[node]

    def forget(self, node: str) -> None:
        """Have a new host started when one is asked for next: the present one ended, or does not answer."""
        if (host := self._hosts.pop(node, None)) is not None:
            ray.kill(host)

    def leave(self) -> None:
        """End what runs on each node between trials: an autoscaler takes a node away only once nothing runs there."""
        for node in list(self._hosts):
            self.forget(node)

    def warm_up(self) -> None:
        """Have each node load the libraries that processes of trials need, and return at once."""
        for node in ray.nodes():
            if node["Alive"]:
                self.host(node["NodeID"]).warm_up.remote()


@contextmanager
def connected(settings: TrialSettings, folder: Path, network: Network = HOST_NETWORK) -> Iterator[Nodes]:
    """Connect to Ray for a block: to the operator's cluster, or to a Ray on this host.

    Args:
        settings: the operator's settings.
        folder: where a Ray on this host keeps its files.
        network: the host's network, as processes of trials find it that are to be on it.

    Raises:
        ConnectionError, RuntimeError: there is no Ray at the address, or it cannot be started.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    nodes = Nodes(settings, network)
    if not settings.ray_address and len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise RuntimeError(
            f"Ray's sockets would have longer paths than Linux takes below {folder}: have the worker's TMPDIR name a "
            f"folder whose path is {len(os.fsencode(folder)) - _LONGEST_FOLDER} bytes shorter, such as /tmp"
        )
    if settings.ray_address:
        ray.init(address=settings.ray_address, log_to_driver=False, logging_level=logging.WARNING)
    else:
        with _lean():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
                _system_config=_SYSTEM,
            )
    try:
        yield nodes
    finally:
        ray.shutdown()


@contextmanager
def _lean() -> Iterator[None]:
    """Have a Ray that is started in a block leave out what is not used: half of the processor time of a start.

    No option of `ray.init` does. A version of Ray in which these functions have other names starts all of it.
    """
    try:
        from ray._private.node import Node
    except ImportError:
        yield
        return
    known = {name: getattr(Node, name) for name in _UNUSED if hasattr(Node, name)}
    for name in known:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(Node, name, function)
