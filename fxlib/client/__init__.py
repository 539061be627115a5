"""The launcher's side of the service."""

from fxlib.client.client import Client, Endpoint, connect
from fxlib.client.credentials import Tls
from fxlib.client.handle import Handle

__all__ = ["Client", "Endpoint", "Handle", "Tls", "connect"]
