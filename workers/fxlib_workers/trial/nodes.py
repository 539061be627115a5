"""The connection to Ray, with a host actor on each node that runs the processes of trials there."""

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
"""Ray's own options. No idle process is started for each CPU, since only hosts run in it."""

_UNUSED: Final = ("start_monitor", "start_log_monitor", "start_api_server")
"""The functions that start processes of Ray that no trial needs: for its autoscaler, its logs and its dashboard."""

_LONGEST_FOLDER: Final = 43
"""The longest path of Ray's folder, in bytes: Linux accepts 107 for the path of a socket, of which Ray needs 64."""

_CALLS_AT_ONCE: Final = 4096
"""The number of calls that a host passes on at the same time: at most two for each process."""


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
        """Return the actor that hosts processes of trials on a node, starting it unless it is running."""
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
        """Forget a host that has ended or does not answer, so that the next request starts a new one."""
        if (host := self._hosts.pop(node, None)) is not None:
            ray.kill(host)

    def leave(self) -> None:
        """End the hosts that run between trials, since an autoscaler removes a node only when nothing runs on it."""
        for node in list(self._hosts):
            self.forget(node)

    def warm_up(self) -> None:
        """Make each node load the libraries that processes of trials need; return at once."""
        for node in ray.nodes():
            if node["Alive"]:
                self.host(node["NodeID"]).warm_up.remote()


@contextmanager
def connected(settings: TrialSettings, folder: Path, network: Network = HOST_NETWORK) -> Iterator[Nodes]:
    """Connect to Ray for the duration of a block: to the operator's cluster, or to a Ray on this host.

    Args:
        settings: the operator's settings.
        folder: the folder in which a Ray on this host keeps its files.
        network: the host's network, for processes of trials that have to join it.

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
    """Make a Ray that starts within a block leave out unused parts, which are half of the processor time of a start.

    No option of `ray.init` does this. A version of Ray in which these functions have other names starts everything.
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
