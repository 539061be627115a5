"""Immediate values and contracts, to and from protobuf: as in graphs, with errors that name the field."""

from __future__ import annotations

from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2
from fxlib.wire.check_values import Position, check_value
from fxlib.wire.faults import DEFAULT, Fault
from fxlib.wire.remote_functions import check_contract, read_contract, write_contract
from fxlib.wire.values import ValueReader, ValueWriter


def value_to_proto(value: object, where: str) -> graph_pb2.Value:
    """Write an immediate value.

    Raises:
        WireError: the format cannot represent the value; `where` names the field.
    """
    try:
        return write_value(value)
    except Fault as fault:
        raise fault.at(where) from None


def value_from_proto(proto: graph_pb2.Value, where: str) -> object:
    """Read an immediate value.

    Raises:
        WireError: the message holds no value; `where` names the field.
    """
    try:
        return read_value(proto)
    except Fault as fault:
        raise fault.at(where) from None


def write_value(value: object) -> graph_pb2.Value:
    """Write an immediate value.

    Raises:
        Fault: the format cannot represent the value.
    """
    proto = graph_pb2.Value()
    ValueWriter().write(proto, value)
    return proto


def read_value(proto: graph_pb2.Value) -> object:
    """Read an immediate value.

    Raises:
        Fault: the message holds no value.
    """
    check_value(proto, Position(limits=DEFAULT))
    return ValueReader().read(proto)


def contract_to_proto(contract: Contract, where: str = "contract") -> graph_pb2.Contract:
    """Write a contract.

    Raises:
        WireError: the format cannot represent the structure of its result; `where` names the field.
    """
    try:
        return write_contract(contract)
    except Fault as fault:
        raise fault.at(where) from None


def contract_from_proto(proto: graph_pb2.Contract, where: str = "contract") -> Contract:
    """Read a contract.

    Raises:
        WireError: the contract contradicts itself, or is not valid; `where` names the field.
    """
    try:
        check_contract(proto)
        return read_contract(proto)
    except Fault as fault:
        raise fault.at(where) from None
