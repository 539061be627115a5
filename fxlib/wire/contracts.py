"""Contracts of remote functions, to and from the wire format."""

from __future__ import annotations

from fxlib.errors import ContractError
from fxlib.runtime.tracking.result_structure import mapped
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.check_values import Place, check_value
from fxlib.wire.faults import Fault
from fxlib.wire.limits import DEFAULT, Limits
from fxlib.wire.names import check_comment
from fxlib.wire.read_values import ValueReader
from fxlib.wire.write_values import ValueWriter


def write_contract(contract: Contract) -> pb.Contract:
    """Return a contract as a message; equal contracts give equal bytes.

    Raises:
        Fault: its `returns` is no nest of tuples, lists and dicts.
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
    )
    if contract.structure is not None:  # a function that makes the result's like stays where it was declared
        ValueWriter().write(message.returns, mapped(contract.structure, lambda _: None))
    return message


def check_contract(message: pb.Contract, limits: Limits = DEFAULT) -> None:
    """Raise Fault unless the message is a contract that does not contradict itself."""
    for text in (*message.reads, *message.writes, message.gradient, message.batched_by, message.part, message.keys):
        check_comment(text, limits)
    if message.HasField("returns"):
        check_value(message.returns, Place(limits=limits, kind="result"))
    read_contract(message)


def read_contract(message: pb.Contract) -> Contract:
    """Return the contract that a message describes.

    Raises:
        Fault: it contradicts itself.
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
            returns=ValueReader().read(message.returns) if message.HasField("returns") else None,
        )
    except ContractError as error:
        raise Fault(str(error)) from None
