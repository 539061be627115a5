"""The process that drives trials: it leaves the host's network and then starts Ray (`drive_trials`).

Ray listens on all interfaces, whatever address it is given. The worker's own Ray is therefore started where loopback is
the only interface: in a network of its own, which no other process of the host is in. If the processes of a trial
communicate over an interface of the host, each of them joins the host's network again.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

from fxlib_workers import logs
from fxlib_workers.config import LOOPBACK, TRIAL_SETTINGS, TrialSettings
from fxlib_workers.process.child import Channel
from fxlib_workers.process.containment import HOST_NETWORK, ContainmentError, keep_network, leave_network
from fxlib_workers.process.probe import Level

_LOG: Final = logs.Log(__name__)


def main() -> int:
    """Run trials until the worker ends; return the exit status."""
    logs.set_up()
    channel = Channel.inherited()
    settings = _settings(os.environ.pop(TRIAL_SETTINGS))
    network = HOST_NETWORK
    if not settings.ray_address:
        try:
            if settings.interface != LOOPBACK:
                network = keep_network()
            leave_network()
        except ContainmentError as error:  # a worker that requires `isolated` was refused before
            network = HOST_NETWORK
            _LOG.warning("Ray listens on all interfaces of the host", why=error)
    # Imported here, since a process that has started threads cannot leave its network.
    from fxlib_workers.trial.drive_trials import drive

    return drive(settings, channel, network)


def _settings(text: str) -> TrialSettings:
    fields = json.loads(text)
    names = {name: tuple(fields[name]) for name in ("allowed_modules", "keep_variables")}
    return TrialSettings(**{**fields, **names, "node_containment": Level(fields["node_containment"])})


if __name__ == "__main__":
    sys.exit(main())
