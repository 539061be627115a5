"""Checks of how a received graph packs its arguments and results."""

from __future__ import annotations

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.check_values import Place, check_value
from fxlib.wire.faults import Fault
from fxlib.wire.guards import check_guards
from fxlib.wire.limits import Limits
from fxlib.wire.names import check_name


def check_pytree(tree: pb.Pytree, limits: Limits) -> None:
    """Raise Fault unless the structures are well-formed, and their guards and names are those of their parts."""
    for position, name in enumerate(tree.arguments):
        if position or name != "self":
            check_name(name, "argument")
    place = Place(limits=limits, kind="structure")
    check_value(tree.inputs, place)
    if tree.HasField("outputs"):
        check_value(tree.outputs, place)
    # Code generation writes the names of keyword arguments between quotes as they are.
    parts = tree.inputs.tuple.items
    if len(parts) == 2 and parts[1].WhichOneof("kind") == "dict":
        for entry in parts[1].dict.items:
            check_name(entry.key.text, "keyword argument")
    if tree.HasField("guards"):
        check_guards(tree.guards, _leaves(tree.inputs), limits)
        if [part.WhichOneof("kind") for part in parts] != ["tuple", "dict"]:
            raise Fault("the guarded arguments are not (args, kwargs)")
        if len(tree.arguments) != len(parts[0].tuple.items) + len(parts[1].dict.items):
            raise Fault("the guarded arguments have other names than parts")


def _leaves(structure: pb.Value) -> int:
    """Return how many leaves a checked structure has."""
    kind = str(structure.WhichOneof("kind"))
    if kind == "none":
        return 1
    items = getattr(structure, kind).items
    return sum(_leaves(each.value if "dict" in kind else each) for each in items)
