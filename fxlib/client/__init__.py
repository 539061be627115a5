"""The launcher's side of the service."""

from fxlib.client.client import DISABLE, Client, connect, disabled
from fxlib.client.connection import Tls
from fxlib.client.handle import Handle

__all__ = ["DISABLE", "Client", "Handle", "Tls", "connect", "disabled"]
