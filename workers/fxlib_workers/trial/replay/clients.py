"""Calls of clients that only the job has, turned into calls of `torch.distributed.rpc`, which replay answers.

A server of the trial stands for what such a client reaches, and is called by its name in escaped form. Handles stay
with the job: of a stub or an actor, servers are told the attribute that holds it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from torch.fx import GraphModule, Node, map_arg

from fxlib import wire
from fxlib.runtime import ops
from fxlib.runtime.ops.calls import CallKind, ClientFunction, client_of, is_call, is_issue, is_wait
from fxlib.spec.profile import Profile

_PREFIX: Final = "client:"

_LONGEST: Final = 120
"""The longest name of a server, in characters: `torch.distributed.rpc` takes 127."""

_HASH_CHARACTERS: Final = 16


def worker_name(reached: str) -> str:
    """Return the name of the server that stands for what a client reaches: different names for different texts.

    Characters that no worker's name may have are escaped. Of a text that is too long, a hash takes the end's place.
    """
    escaped = [re.sub(r"[^0-9A-Za-z_-]", lambda found: f":{ord(found[0]):x}:", character) for character in reached]
    name = _PREFIX + "".join(escaped)
    if len(name) <= _LONGEST:
        return name
    hashed = hashlib.sha256(reached.encode(errors="surrogatepass")).hexdigest()[:_HASH_CHARACTERS]
    head, room = _PREFIX, _LONGEST - len("::") - len(hashed)
    for piece in escaped:
        if len(head) + len(piece) > room:
            break
        head += piece
    return f"{head}::{hashed}"


def reached_by(worker: str) -> str:
    """Return what a client reaches for which a server of this name stands; any other name as it is.

    A name of a server of the workload's own may look like one of these, and so may hold any escape. Only what
    `worker_name` itself makes of a text is taken for that text.
    """
    if not worker.startswith(_PREFIX) or len(worker) > _LONGEST:
        return worker
    try:
        reached = re.sub(r":([0-9a-f]{1,6}):", lambda found: chr(int(found[1], 16)), worker.removeprefix(_PREFIX))
        reached.encode()
    except (ValueError, OverflowError):  # no character has this code, or it is half of a surrogate pair
        return worker
    return reached if worker_name(reached) == worker else worker


def with_remote_calls(profile: Profile | None, graph: bytes) -> Profile | None:
    """Return a profile as it would be if clients of a graph called servers of `torch.distributed.rpc`."""
    functions = {client.function for client in wire.parse(graph).clients}
    if profile is None or not functions:
        return profile
    calls = tuple(
        replace(call, to=worker_name(call.to)) if call.function in functions else call for call in profile.calls
    )
    reached = {worker_name(each.to): each.to for each in profile.calls if each.function in functions}
    known = profile.server_by_name
    renamed = [replace(known[old], name=new) for new, old in reached.items() if old in known]
    others = [each for each in profile.servers if each.name not in reached]
    return replace(profile, calls=calls, servers=(*others, *renamed))


def make_remote_calls(modules: Iterable[GraphModule]) -> None:
    """Have graphs call servers in place of clients whose code, or whose handle, stayed with the job."""
    for module in modules:
        for body in [each for each in module.modules() if isinstance(each, GraphModule)]:
            if _replace_clients(body):
                body.recompile()


def _replace_clients(body: GraphModule) -> bool:
    kinds = {node: kind for node in body.graph.nodes if (kind := client_of(node)) and _stayed_with_job(node, body)}
    for node in kinds:
        if is_wait(node):
            node.target = ops.wait
    for node, kind in kinds.items():
        if is_call(node) or is_issue(node):
            _replace_call(node, kind, body)
    return bool(kinds)


def _stayed_with_job(node: Node, body: GraphModule) -> bool:
    if isinstance(node.target, ClientFunction):
        return True
    issue = node.args[0] if is_wait(node) and node.args else node
    if not isinstance(issue, Node) or client_of(issue) is None:
        return False
    return any(_is_handle(each, body) for each in issue.all_input_nodes)


def _is_handle(node: Node, body: GraphModule) -> bool:
    found: object = body if node.op == "get_attr" else None
    for name in str(node.target).split(".") if found is not None else ():
        found = getattr(found, name, None)
    return isinstance(found, wire.OpaqueAttribute)


def _replace_call(node: Node, kind: CallKind, body: GraphModule) -> None:
    def argument(each: Node) -> Any:
        return str(each.target) if _is_handle(each, body) else each

    args, kwargs = map_arg((node.args, node.kwargs), argument)
    to = worker_name(kind.reached(node))
    node.target = ops.remote_call if is_call(node) else ops.issue_call
    node.args, node.kwargs = (to, kind.function, tuple(args), dict(kwargs), None), {}
