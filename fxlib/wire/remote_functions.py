"""Declarations of remote functions in the wire format: contracts, and clients of the program's own.

A client is described for readers that lack its code.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from fxlib.errors import ContractError
from fxlib.runtime.ops.calls import Client, ClientFunction, client_of
from fxlib.runtime.tracking.result_structure import mapped
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import bodies
from fxlib.wire.check_values import Position, check_value
from fxlib.wire.faults import DEFAULT, Fault, Limits
from fxlib.wire.names import check_comment, check_label, check_name, check_remote_function
from fxlib.wire.values import ValueReader, ValueWriter

_KINDS = frozenset(map(int, inspect._ParameterKind))
_MOST_PARAMETERS = 100


def write_contract(contract: Contract) -> pb.Contract:
    """Return a contract as a message; equal contracts give equal bytes.

    Raises:
        Fault: its `returns` does not consist of tuples, lists and dicts.
    """
    message = pb.Contract(
        pure=contract.pure,
        reads=sorted(contract.reads),
        writes=sorted(contract.writes),
        commutes=contract.commutes,
        part=contract.part or "",
        gradient=contract.gradient or "",
        batched_by=contract.batched_by or "",
        batchable=contract.batchable,
        part_at=contract.part_at,
        keys=contract.keys or "",
        keys_at=contract.keys_at,
        concurrent=contract.concurrent,
        with_state=contract.with_state or "",
        update=contract.update or "",
    )
    if contract.structure is not None:  # a function that makes tensors like the result's stays where it was declared
        ValueWriter().write(message.returns, mapped(contract.structure, lambda _: None))
    return message


def check_contract(message: pb.Contract, limits: Limits = DEFAULT) -> None:
    """Raise Fault unless the message is a contract that does not contradict itself."""
    named = (message.gradient, message.batched_by, message.with_state, message.update)
    for text in (*message.reads, *message.writes, *named, message.part, message.keys):
        check_comment(text, limits)
    if message.HasField("returns"):
        check_value(message.returns, Position(limits=limits, kind="result"))
    read_contract(message)


def read_contract(message: pb.Contract) -> Contract:
    """Return the contract that a message describes.

    Raises:
        Fault: the contract contradicts itself.
    """
    try:
        return Contract(
            pure=message.pure,
            reads=frozenset(message.reads),
            writes=frozenset(message.writes),
            commutes=message.commutes,
            part=message.part or None,
            part_at=message.part_at if message.HasField("part_at") else None,
            keys=message.keys or None,
            keys_at=message.keys_at if message.HasField("keys_at") else None,
            concurrent=message.concurrent,
            gradient=message.gradient or None,
            batched_by=message.batched_by or None,
            batchable=message.batchable,
            with_state=message.with_state or None,
            update=message.update or None,
            returns=ValueReader().read(message.returns) if message.HasField("returns") else None,
        )
    except ContractError as error:
        raise Fault(str(error)) from None


def write_client(message: pb.Client, client: Client) -> None:
    """Write the description of a client.

    Raises:
        Fault: the client cannot travel.
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
        raise Fault(f"{message.function[:80]!r} is not a client of three functions")
    if message.to and message.to not in names:
        raise Fault(f"{message.function[:80]!r} has no parameter {message.to[:80]!r}")
    try:
        if not _KINDS.issuperset(each.kind for each in message.parameters):
            raise ValueError("a parameter has an unknown kind")
        ClientFunction(read_client(message), 0).__signature__  # noqa: B018 - raises where it contradicts itself
    except ValueError as error:
        raise Fault(f"{message.function[:80]!r}: {error}") from None


def read_client(message: pb.Client) -> Client:
    """Return the client that a checked message describes."""
    return Client(
        name=message.name,
        function=message.function,
        labels=(message.blocking, message.issue, message.wait),
        parameters=tuple((each.name, each.kind, each.optional, each.text) for each in message.parameters),
        to=message.to or None,
    )


def functions_of(client: Client) -> dict[str, ClientFunction]:
    """Return stand-ins for the functions of a client, by label."""
    return {label: ClientFunction(client, index) for index, label in enumerate(client.labels)}


def client_functions(root: nn.Module) -> Mapping[str, ClientFunction]:
    """Return stand-ins for the functions of the clients whose calls a module tree's graphs make, by label."""
    found: dict[str, ClientFunction] = {}
    for body in bodies(root):
        for node in body.graph.nodes:
            if isinstance(node.target, ClientFunction) and (kind := client_of(node)) is not None:
                found |= functions_of(Client.of(kind))
    return found
