"""GraphModules on the wire: exact, deterministic, without pickle, and without executing anything received.

The messages of jobs, reports and profiles are not converted here but in `fxlib.protocol`.
"""

from fxlib.wire.decode import decode
from fxlib.wire.encode import FORMAT, Encoded, digest, encode, parse, serialize, values_of
from fxlib.wire.faults import Limits
from fxlib.wire.opaque import OpaqueAttribute, OpaqueFunction, OpaqueModule, OpaqueRRef, handles_in
from fxlib.wire.remote_functions import client_functions
from fxlib.wire.validate import validate
from fxlib.wire.values import decode_value, encode_value

__all__ = [
    "FORMAT",
    "Encoded",
    "Limits",
    "OpaqueAttribute",
    "OpaqueFunction",
    "OpaqueModule",
    "OpaqueRRef",
    "client_functions",
    "decode",
    "decode_value",
    "digest",
    "encode",
    "encode_value",
    "handles_in",
    "parse",
    "serialize",
    "validate",
    "values_of",
]
