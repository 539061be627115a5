"""The trainers' side of replay: each call is one of RPC, and names its function and the call of the program.

Calls of clients that only the job has are turned into calls of `torch.distributed.rpc`. A server of the trial stands
for the target of such a client, and has the target's name in escaped form. Handles stay with the job: for a stub or an
actor, servers get the name of the attribute that holds it.

A server sees a function and its arguments, whereas a profile lists calls. So the graphs of a trial name each replayed
function together with the call, `pkg.mod:function#call`, and that name resolves to a stand-in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from torch.fx import GraphModule, Node, map_arg

from fxlib import wire
from fxlib.errors import ContractError
from fxlib.runtime import functions, ops
from fxlib.runtime.ops.batches import IN_ORDER
from fxlib.runtime.ops.calls import CallKind, ClientFunction, client_of, is_call, is_issue, is_wait
from fxlib.runtime.ops.registry import CREATIONS, REPEATABLE, TRACKERS, is_batch, items_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.profile import Profile
from fxlib.spec.report import Timeline
from fxlib_workers.trial.replay.plan import ReplayPlan
from fxlib_workers.trial.replay.server import ReplayedBatch, ReplayedFunction
from fxlib_workers.trial.requirements import fetches_of

_PREFIX: Final = "client:"

_LONGEST: Final = 120
"""The longest name of a server, in characters: `torch.distributed.rpc` takes 127."""

_HASH_CHARACTERS: Final = 16


def worker_name(reached: str) -> str:
    """Return the name of the server that stands for a client's target; different texts have different names.

    Characters that are not allowed in a worker's name are escaped. In a text that is too long, a hash replaces the end.
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
    """Return the client's target that a server of this name stands for; any other name is returned unchanged.

    The name of one of the workload's own servers may look like one of these, and may hold any escape. So a name is
    decoded only if `worker_name` produces it.
    """
    if not worker.startswith(_PREFIX) or len(worker) > _LONGEST:
        return worker
    try:
        reached = re.sub(r":([0-9a-f]{1,6}):", lambda found: chr(int(found[1], 16)), worker.removeprefix(_PREFIX))
        reached.encode()
    except (ValueError, OverflowError):  # no character has this code, or it is a lone surrogate
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
    """Make graphs call servers in place of clients whose code or handle stayed with the job."""
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


def stand_in(module: GraphModule, plan: ReplayPlan) -> None:
    """Replace every replayed function in a module's graphs by a stand-in for that particular call."""
    for body in [each for each in module.modules() if isinstance(each, GraphModule)]:
        renaming = _Renaming(plan)
        for node in body.graph.nodes:
            renaming.rename(node)
        if renaming.count:
            body.recompile()


def as_captured(timeline: Timeline) -> Timeline:
    """Return a timeline in which remote functions and clients' targets have their own names again."""
    spans = (replace(each, name=each.name.partition("#")[0], to=reached_by(each.to)) for each in timeline.spans)
    return replace(timeline, spans=tuple(spans))


class _Renaming:
    """Renames functions node by node, and registers a stand-in for each."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self.count = 0

    def rename(self, node: Node) -> None:
        if node.target in REPEATABLE:
            node.args = self._renamed(node.args, 1, call_name(node), to=node.args[0])
        elif node.target in CREATIONS:
            call = next(iter(fetches_of(node)), "")
            node.args = self._renamed(node.args, 1, call, to=node.args[0])
        elif node.target in TRACKERS:
            result = node.args[0]
            call = call_name(result) if isinstance(result, Node) else ""
            node.args = self._renamed(node.args, 2, call, to=node.args[1])
        elif is_batch(node):
            self._rename_batch(node)
        elif node.target is functions.resolve:
            self._register_argument(str(node.args[0]))

    @staticmethod
    def _register_argument(function: str) -> None:
        """Register a stand-in for a function that no process has and that the graph sends as an argument."""
        try:
            functions.resolve(function)
        except ContractError:
            functions.register(ReplayedFunction(function), function)

    def _renamed(self, args: tuple[Any, ...], index: int, call: str, *, to: object) -> tuple[Any, ...]:
        name = self._name(str(args[index]), call, to)
        return (*args[:index], name, *args[index + 1 :])

    def _rename_batch(self, batch: Node) -> None:
        to, _, timeout, batched_by = batch.args
        waits = {wait.args[1]: wait for wait in batch.users}
        calls = [call_name(waits[index]) if index in waits else "" for index in range(len(items_of(batch)))]
        items = items_of(batch)
        named = tuple(
            (self._name(item.function, call, to), item.args, item.kwargs)
            for item, call in zip(items, calls, strict=True)
        )
        if (
            isinstance(batched_by, str)
            and batched_by != IN_ORDER
            and any(name != item.function for (name, _, _), item in zip(named, items, strict=True))
        ):
            stand_ins = tuple(ReplayedFunction(item.function, call) for item, call in zip(items, calls, strict=True))
            batched_by = functions.register(ReplayedBatch(stand_ins), f"{batched_by}#{batch.name}")
        batch.args = (to, named, timeout, batched_by)

    def _name(self, function: str, call: str, to: object) -> str:
        if isinstance(to, Node) and function.startswith("."):
            replayed = _rref_name(to) in self._plan.objects
        else:
            replayed = self._plan.replays(to if isinstance(to, str) else None, function, call)
        if not replayed:
            return function
        self.count += 1
        name = f"{function}#{call}"
        if not function.startswith("."):
            functions.register(ReplayedFunction(function, call, self._plan.contract_of(function, call)), name)
        return name


def _rref_name(node: Node) -> str:
    return str(node.target) if node.op in ("placeholder", "get_attr") else ""
