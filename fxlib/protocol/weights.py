"""Whether a graph was sent with the weights that a recipe's passes need."""

from __future__ import annotations

from collections.abc import Iterator

from fxlib.errors import PassError
from fxlib.passes.infra.base import GraphPass
from fxlib.recipes.recipes import Recipe
from fxlib.v1 import graph_pb2


def check_weights(recipe: Recipe, graph: graph_pb2.Graph) -> None:
    """Check that no pass computes with weights that were not sent; `graph` is a valid one.

    Raises:
        PassError: the values of a tensor are missing; names the pass, the tensor, and the node that uses it.
    """
    wanting = next((step for step in recipe.passes if "weights" in step.needs), None)
    if wanting is None or all(storage.HasField("data") or not storage.bytes for storage in graph.storages):
        return
    for path, tensor in _tensors(graph, len(graph.modules) - 1, ""):
        storage = graph.storages[graph.tensors[tensor].storage]
        if storage.bytes and not storage.HasField("data"):
            raise _missing(wanting, path, graph)


def _tensors(graph: graph_pb2.Graph, index: int, prefix: str) -> Iterator[tuple[str, int]]:
    module = graph.modules[index]
    for slots in (module.parameters, module.buffers):
        yield from ((prefix + slot.name, slot.tensor) for slot in slots if slot.HasField("tensor"))
    for child in module.children:
        if child.HasField("module"):
            yield from _tensors(graph, child.module, f"{prefix}{child.name}.")


def _missing(wanting: GraphPass, path: str, graph: graph_pb2.Graph) -> PassError:
    owner = path.rpartition(".")[0]
    body = graph.modules[-1].graph
    user = next((node for node in body.nodes if graph.targets[node.target].path in {path, owner or path}), None)
    used = f", which node {user.name!r} uses" if user else ""
    source = f" ({graph.texts[user.source]})" if user and user.HasField("source") else ""
    return PassError(
        f"needs the weights, and the graph was sent without the values of {path!r}{used}{source}",
        where=wanting.name,
        hint="Encode the graph with weights=True, as fxlib's client does for a pass that needs them.",
    )
