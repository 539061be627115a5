"""Clients of the program's own, to and from the wire format: described, for whoever lacks their code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from fxlib.runtime.ops.calls import Client, ClientFunction, client_of
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import bodies
from fxlib.wire.faults import Fault
from fxlib.wire.limits import DEFAULT, Limits
from fxlib.wire.names import check_comment, check_label, check_name, check_remote_function

_KINDS = frozenset(map(int, inspect._ParameterKind))
_MOST_PARAMETERS = 100


def write_client(message: pb.Client, client: Client) -> None:
    """Write what there is to know of a client.

    Raises:
        Fault: it cannot travel.
    """
    message.name, message.function, message.to = client.name, client.function, client.to or ""
    message.blocking, message.issue, message.wait = client.labels
    for name, kind, optional, text in client.parameters:
        message.parameters.add(name=name, kind=kind, optional=optional, text=text)
    check_client(message)


def check_client(message: pb.Client, limits: Limits = DEFAULT) -> None:
    """Raise Fault unless a message describes a client."""
    for text in (message.name, *(each.text for each in message.parameters)):
        check_comment(text, limits)
    check_remote_function(message.function)
    labels = (message.blocking, message.issue, message.wait)
    for label in labels:
        check_label(label)
    names = [each.name for each in message.parameters]
    for name in names:
        check_name(name, "parameter")
    if message.function.startswith(".") or len(set(labels)) < len(labels) or len(names) > _MOST_PARAMETERS:
        raise Fault(f"{message.function[:80]!r} is no client of three functions")
    if message.to and message.to not in names:
        raise Fault(f"{message.function[:80]!r} has no parameter {message.to[:80]!r}")
    try:
        if not _KINDS.issuperset(each.kind for each in message.parameters):
            raise ValueError("there is no such kind of parameter")
        ClientFunction(read_client(message), 0).__signature__  # noqa: B018 - raises where it contradicts itself
    except ValueError as error:
        raise Fault(f"{message.function[:80]!r}: {error}") from None


def read_client(message: pb.Client) -> Client:
    """Return what a checked message describes."""
    return Client(
        name=message.name,
        function=message.function,
        labels=(message.blocking, message.issue, message.wait),
        parameters=tuple((each.name, each.kind, each.optional, each.text) for each in message.parameters),
        to=message.to or None,
    )


def functions_of(client: Client) -> dict[str, ClientFunction]:
    """Return what stands for the functions of a client, by label."""
    return {label: ClientFunction(client, place) for place, label in enumerate(client.labels)}


def client_functions(root: nn.Module) -> Mapping[str, ClientFunction]:
    """Return what stands for functions of clients whose calls the graphs of a module tree make, by label."""
    found: dict[str, ClientFunction] = {}
    for body in bodies(root):
        for node in body.graph.nodes:
            if isinstance(node.target, ClientFunction) and (kind := client_of(node)) is not None:
                found |= functions_of(Client.of(kind))
    return found
