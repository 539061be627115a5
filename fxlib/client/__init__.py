"""The launcher's side of the service: it asks, watches the job, and checks the answer before it binds it.

Nothing here rewrites or measures; workers do. Messages are converted in `fxlib.protocol`, and graphs in `fxlib.wire`.
"""

from fxlib.client.client import Client, Endpoint, connect
from fxlib.client.credentials import Tls
from fxlib.client.handle import Handle

__all__ = ["Client", "Endpoint", "Handle", "Tls", "connect"]
