"""Check what a rewritten graph must satisfy, besides being valid, before a launcher runs it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from fxlib.analysis.effects.resources import COLLECTIVES, ServerState, contract_of_call, destination, states_of
from fxlib.analysis.operators.arguments import operator_of
from fxlib.client.answer_operators import callee, check_draws, check_operators, check_writes, form_of, is_of_form
from fxlib.client.own_objects import CALLS, held_uses
from fxlib.client.value_numbering import Numbers, callable_key
from fxlib.errors import WireError
from fxlib.passes import GraphPass
from fxlib.runtime import bounds, functions, int8, is_call, is_issue, is_wait, kind_of
from fxlib.runtime.lowering import BACKEND
from fxlib.runtime.ops.batches import IN_ORDER
from fxlib.runtime.ops.calls import completes
from fxlib.runtime.ops.registry import CALLS_BY_NAME, CREATIONS, FETCHES, TRACKERS, batched_by_of, is_batch, items_of
from fxlib.runtime.submodules import graph_modules
from fxlib.spec.contract import Contract
from fxlib.wire.callables import known_name
from fxlib.wire.faults import Limits
from fxlib.wire.targets import methods

_LARGER = 16
"""Maximum ratio of an answer's size to its original's; decomposed operators make an answer several times larger."""
_MORE = 4_096
_MORE_BYTES = 4 << 20
_MORE_WEIGHTS_BYTES = 64 << 20
_FEWEST = 256
_NODES_PER_S = 4_000
"""Number of nodes that a slow machine decodes and checks within a second."""

_RELIANT = frozenset(name.partition(".")[0].replace("_", "") for name in bounds.CHECKS)
"""Operators that are checked when others' graphs run, by their names in lower case without underscores."""

_UNCOUNTED = frozenset({"change", "look up"})
"""Kinds of interactions that nobody else notices, no matter how often they happen."""

_MODES = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
_IN_PLACE = ("setitem", "delitem", *(f"i{name}" for name in ("add", "concat", "mul", "or", "and", "sub", "xor")))
_CHANGES = frozenset(f"{form}{name}{form}" for name in _IN_PLACE for form in ("", "__")) | {"sort"}
"""Operators that change a list or a dict from which a server's name may be read afterwards."""
_GROUP_OPERATORS = ("_c10d_functional::", "_c10d_functional_autograd::")
"""Prefixes of torch's operators that communicate with the other ranks, except for those in `_SILENT`."""
_SILENT = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})


def limits_of_answer(original: GraphModule, sent_bytes: int, seconds: float = math.inf) -> Limits:
    """Return how large the graph of an answer may be.

    Args:
        original: the graph that was sent.
        sent_bytes: the size of its message, in bytes.
        seconds: the time that is left to check the answer, in seconds.
    """
    nodes = sum(len(body.graph.nodes) for _, body in graph_modules(original))
    modules = sum(1 for _ in original.modules())
    weights = sum(each.untyped_storage().nbytes() for each in _state(original).values())
    most = _LARGER * nodes + _MORE
    return Limits(
        graph_bytes=_LARGER * sent_bytes + _MORE_BYTES,
        nodes=int(max(_FEWEST, min(most, seconds * _NODES_PER_S))),
        steps=_LARGER * (most + modules),
        modules=_LARGER * modules + _MORE,
        weights_bytes=2 * weights + _MORE_WEIGHTS_BYTES,
    )


def screen(answer: GraphModule, original: GraphModule, *, passes: Sequence[GraphPass] | None = ()) -> None:
    """Check that an answer is called as the original is, and that it communicates only where the original does.

    The check covers all graphs of the module tree. A server, or the RRef that leads to it, must be a constant of the
    original, or be computed as the original computes it; the function called there must be one that the original calls
    on that server, or one that its contract names. It is called no more often than by the original, and exactly as
    often unless its contract says that it only reads. Its arguments have the same form: as many, under the same names,
    and with the same constants. The launcher's own code that is on no list (opaque) must be called with exactly the
    arguments that the original gives it, and the launcher's own objects, which attributes hold or such code returns,
    are used only as the original uses them. Collectives and other operations with other ranks keep their order, and so
    do changes of grad mode and autocast. The operators, and the random numbers that are drawn, are those of the
    original, except for what passes of the recipe declare. Nodes are handed to a compiler only if one of the passes or
    the original does that.

    Args:
        answer: the rewritten graph.
        original: the graph that was sent.
        passes: the passes of the recipe that was asked for; None if they are not known here.

    Raises:
        WireError: the answer takes other arguments, or does something that the original does not.
    """
    found = _state(answer)
    for name, tensor in _state(original).items():
        if found.get(name, tensor) is not tensor:
            raise WireError(f"the rewritten graph has another {name!r} than the original", where="the answer")
    if _arguments(answer) != _arguments(original) or _packing(answer) != _packing(original):
        raise WireError("the rewritten graph takes other arguments than the original", where="the answer")
    names = {each.name for each in passes or ()}
    if "lower" not in names and _has_parts(answer) and not _has_parts(original):
        problem = "the rewritten graph names a compiler for some of its nodes, which the recipe does not"
        raise WireError(problem, where="the answer")
    if "quantize" not in names and _has_integers(answer) and not _has_integers(original):
        problem = "the rewritten graph has layers on int8 weights, which the recipe does not make"
        raise WireError(problem, where="the answer")
    numbers = Numbers()
    answered = _Interactions.of(answer, numbers, contracts=False)
    allowed = _Interactions.of(original, numbers, contracts=True)
    _check_kinds(answered, allowed, original)
    uses = {use for use, _ in held_uses(original, numbers, _is_opaque, contracts=True)}
    for use, words in held_uses(answer, numbers, _is_opaque, contracts=False):
        if use not in uses:
            raise WireError(f"the rewritten graph {words} than the original", where="the answer")
    if _modes(answer) != _modes(original):
        problem = "the rewritten graph changes grad mode or autocast otherwise than the original"
        raise WireError(problem, where="the answer")
    if _collectives(answer, numbers) != _collectives(original, numbers):
        problem = "the rewritten graph meets the other ranks in another order than the original, or not as often"
        raise WireError(problem, where="the answer")
    _check_counts(answered, allowed)
    _check_order(answer, original, numbers)
    check_operators(answer, original, passes)
    check_draws(answer, original, passes)
    check_writes(answer, original, passes)
    if _relies_on_values(answer, original, numbers):
        bounds.install()


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by each of their names."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(named)


def _has_integers(module: GraphModule) -> bool:
    return any(int8.is_operator(node.target) for _, body in graph_modules(module) for node in body.graph.nodes)


def _has_parts(module: GraphModule) -> bool:
    return any(BACKEND in node.meta for _, body in graph_modules(module) for node in body.graph.nodes)


def _packing(module: GraphModule) -> tuple[object, ...]:
    """Return how a graph's arguments and results are packed, and which arguments it was made for."""
    codegen = module.graph._codegen
    info = getattr(codegen, "pytree_info", None)
    if info is None:
        return (type(codegen),)
    return type(codegen), tuple(info.orig_args), info.in_spec, info.out_spec, repr(getattr(codegen, "guards", None))


def _relies_on_values(answer: GraphModule, original: GraphModule, numbers: Numbers) -> bool:
    """Whether the answer may give values of its own to operators that trust offsets and lengths.

    It may if such an operator takes other arguments than in the original, or if more is written in place.
    """
    reliant, written = (_sensitive(answer, numbers, uses) for uses in (_is_reliant, _writes_in_place))
    if not reliant:
        return False
    own, changed = (_sensitive(original, numbers, uses) for uses in (_is_reliant, _writes_in_place))
    return bool(reliant - own or written - changed)


def _sensitive(
    module: GraphModule, numbers: Numbers, is_one: Callable[[Node, GraphModule], bool]
) -> Counter[tuple[Hashable, ...]]:
    known = numbers.of(module)
    return Counter(
        (path, callable_key(node.target), *_given(node, numbers, known))
        for path, body in graph_modules(module)
        for node in body.graph.nodes
        if is_one(node, body)
    )


def _is_reliant(node: Node, body: GraphModule) -> bool:
    if node.op == "call_module":
        called = callee(node, body)
        names = [type(each).__name__ for each in called.modules() if not isinstance(each, GraphModule)]
    elif node.op == "call_method":
        names = [str(node.target)]
    elif node.op == "call_function":
        names = [(known_name(node.target) or ("", ""))[1].rpartition("::")[2].partition(".default")[0]]
    else:
        return False
    plain = [name.lower().replace("_", "") for name in names]
    return any(stem in name for name in plain for stem in _RELIANT)


def _writes_in_place(node: Node, _: GraphModule) -> bool:
    return _is_change(node)


def _modes(module: GraphModule) -> list[Hashable]:
    """Return the changes of grad mode and of autocast in each graph, in order, and the calls of graphs with changes."""
    graphs = dict(graph_modules(module))
    changing = {body for body in graphs.values() if any(node.target in _MODES for node in body.graph.nodes)}
    found: list[Hashable] = []
    for path, body in graphs.items():
        positions: dict[Node, int] = {}
        for node in body.graph.nodes:
            if node.target in _MODES:
                given = [
                    ("block", positions.get(each, -1)) if isinstance(each, Node) else repr(each) for each in node.args
                ]
                positions[node] = len(positions)
                found.append((path, callable_key(node.target), *given, repr(node.kwargs)))
            elif node.op == "call_module" and changing.intersection(body.get_submodule(str(node.target)).modules()):
                found.append((path, str(node.target)))
    return found


def _collectives(module: GraphModule, numbers: Numbers) -> list[Hashable]:
    """Return the operations of forward and backward that other ranks take part in, with their arguments, in order."""
    found = [
        (path, node)
        for path, body in graph_modules(module)
        for node in body.graph.nodes
        if node.target in COLLECTIVES or (node.op == "call_module" and _is_parallel(body, node))
    ]
    known = numbers.of(module) if found else {}
    return [
        (path, node.target if node.op == "call_module" else "", *_given(node, numbers, known)) for path, node in found
    ]


def _is_parallel(body: GraphModule, node: Node) -> bool:
    return isinstance(body.get_submodule(str(node.target)), DistributedDataParallel)


def _arguments(module: GraphModule) -> list[tuple[str, object]]:
    return [(str(node.target), node.args) for node in module.graph.nodes if node.op == "placeholder"]


@dataclass(frozen=True, slots=True)
class _Interactions:
    """The interactions of a module, besides computing on tensors, while it runs once.

    Attributes:
        counts: how often each interaction happens; the first part of its key is its kind.
        words: each interaction in words.
        allowed: how often the contracts of calls let a pass add an interaction.
        needed: how often calls are made that do more than read, as far as their contracts say.
        arguments: the forms of the arguments of each call by name.
    """

    counts: Counter[tuple[Hashable, ...]] = field(default_factory=Counter)
    words: dict[tuple[Hashable, ...], str] = field(default_factory=dict)
    allowed: Counter[tuple[Hashable, ...]] = field(default_factory=Counter)
    needed: Counter[tuple[Hashable, ...]] = field(default_factory=Counter)
    arguments: dict[tuple[Hashable, ...], list[object]] = field(default_factory=dict)

    def most(self, key: tuple[Hashable, ...]) -> int:
        """Return how often an answer may interact in this way."""
        return max(self.counts[key], self.allowed[key])

    @classmethod
    def of(cls, module: GraphModule, numbers: Numbers, *, contracts: bool) -> _Interactions:
        """Return the interactions of all graphs in a module tree; `contracts` says whether their contracts count."""
        found, known = cls(), numbers.of(module)
        graphs = dict(graph_modules(module))
        own = {
            node: list(_interactions_of(node, body, numbers, known))
            for body in graphs.values()
            for node in body.graph.nodes
        }
        interacts: dict[GraphModule, bool] = {}
        runs = _runs(module, graphs)
        for path, body in graphs.items():
            for node in body.graph.nodes:
                for key, words in own[node]:
                    found._add(key, words, runs[body])
                if node.op == "call_module" and not own[node]:
                    child = _joined(path, str(node.target))
                    if any(_interacts(each, own, interacts) for each in _entered(callee(node, body))):
                        key = ("run", child, _given(node, numbers, known))
                        found._add(key, f"calls {child!r} with other arguments", runs[body])
                found._add_calls(node, numbers, known, runs[body], contracts=contracts)
        return found

    def _add(self, key: tuple[Hashable, ...], words: str, count: int) -> None:
        self.counts[key] += count
        self.words[key] = words

    def _add_calls(self, node: Node, numbers: Numbers, known: dict[Node, int], count: int, *, contracts: bool) -> None:
        """Note the form of the arguments of a node's calls, and further interactions that their contracts allow."""
        if node.target in CALLS:
            kind, args = ("push", node.args[1:]) if node.target in TRACKERS else ("call", node.args)
            key = kind, numbers.value(args[0], known), numbers.value(args[1], known)
            self.arguments.setdefault(key, []).append((*args[2:4], args[4]))
            contract = node.meta.get("contract") if contracts else None
            if kind == "call" and not (isinstance(contract, Contract) and contract.is_read):
                self.needed[key] += count
            extra = (contract.gradient, contract.batched_by) if isinstance(contract, Contract) else (None, None)
            for kind, name in zip(("push", "batch"), extra, strict=True):
                if name is not None:
                    key = kind, numbers.value(args[0], known), numbers.value(name, known)
                    self.allowed[key] += count
                    self.arguments.setdefault(key, []).append((*args[2:4], args[4]))
        elif is_batch(node):
            to = node.args[0]
            for item in items_of(node):
                key = "call", numbers.value(to, known), numbers.value(item.function, known)
                self.arguments.setdefault(key, []).append((item.args, item.kwargs, node.args[2]))


def _check_order(answer: GraphModule, original: GraphModule, numbers: Numbers) -> None:
    """Check that calls which may write keep their order, and that the others come after as many writes as before."""
    states: dict[tuple[Hashable, ...], list[_States]] = {}
    before, found = _made(original, numbers, states), _made(answer, numbers, {})
    present = list(dict.fromkeys(each.key for each in found))
    writers = {key for key in present if any(each.writes for each in states.get(key, ()))}
    for writer in present:
        for other in present if writer in writers else ():
            if not _conflict(states.get(writer, []), states.get(other, [])):
                continue
            here, there = ([each for each in calls if each.key in (writer, other)] for calls in (found, before))
            if other in writers:
                kept = [each.key for each in here] == [each.key for each in there]
            else:
                kept = _seen(here, writer) <= _seen(there, writer)
            if not kept or _overlap(here, writer):
                problem = "the rewritten graph makes calls that may write in another order than the original"
                raise WireError(problem, where="the answer")


def _seen(calls: list[_Made], writer: tuple[Hashable, ...]) -> set[int]:
    """Return how many calls of the writer come before the other calls."""
    written = itertools.accumulate(each.key == writer for each in calls)
    return {count for each, count in zip(calls, written, strict=True) if each.key != writer}


def _overlap(calls: list[_Made], writer: tuple[Hashable, ...]) -> bool:
    """Whether a call is made while a call of the writer is in flight, or the writer is called while any call is."""
    over = {True: 0.0, False: 0.0}
    begun = {True: -1, False: -1}
    for each in calls:
        writes = each.key == writer
        for of in (True, False) if writes else (True,):
            if over[of] > each.begun != begun[of]:
                return True
        over[writes], begun[writes] = max(over[writes], each.over), each.begun
    return False


@dataclass(frozen=True, slots=True)
class _States:
    """The states that a call reads and writes on servers, and whether its writes commute with others of their kind."""

    reads: frozenset[ServerState]
    writes: frozenset[ServerState]
    commutes: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """A call by name, the position where it is made, and the position where its answer has arrived."""

    key: tuple[Hashable, ...]
    begun: int
    over: float


def _made(module: GraphModule, numbers: Numbers, states: dict[tuple[Hashable, ...], list[_States]]) -> list[_Made]:
    """Return the calls by name that a module makes, in order, including those of nested graphs.

    The states that their contracts declare are added to `states`.
    """
    known, found, clock = numbers.of(module), list[_Made](), itertools.count()

    def run(body: GraphModule) -> None:
        positions: dict[Node, int] = {}
        for node in body.graph.nodes:
            positions[node] = next(clock)
            for entered in _entered(callee(node, body)) if node.op == "call_module" else ():
                run(entered)
        for node, position in positions.items():
            if not (is_batch(node) or node.target in CALLS_BY_NAME):
                continue
            functions_called = [each.function for each in items_of(node)] if is_batch(node) else [node.args[1]]
            for index, function in enumerate(functions_called):
                waits = [positions[user] for user in node.users if is_wait(user) and user.args[1:] in ((), (index,))]
                over = max(waits, default=math.inf) if is_issue(node) else position
                key = numbers.value(node.args[0], known), numbers.value(function, known)
                found.append(_Made(key, position, over))
                contract = contract_of_call(node)
                said = states_of(contract, destination(node))
                states.setdefault(key, []).append(_States(*said, commutes=contract is not None and contract.commutes))

    run(module)
    return sorted(found, key=lambda each: each.begun)


def _conflict(ones: list[_States], others: list[_States]) -> bool:
    """Whether a call may write a state that another one reads or writes, by everything that is known about both."""
    return any(
        not (one.commutes and other.commutes)
        and (_meet(one.writes, other.writes | other.reads) or _meet(other.writes, one.reads))
        for one in dict.fromkeys(ones)
        for other in dict.fromkeys(others)
    )


def _meet(states: frozenset[ServerState], others: frozenset[ServerState]) -> bool:
    return any(one.meets(other) for one in states for other in others)


def _check_kinds(answer: _Interactions, original: _Interactions, module: GraphModule) -> None:
    """Check that an answer does nothing that neither the original does nor its contracts allow."""
    free = not any(_reads_server(node) for _, body in graph_modules(module) for node in body.graph.nodes)
    for key in sorted(answer.counts, key=lambda each: each[0] == "run"):  # a nested graph's content says more
        if free and key[0] == "change":
            continue
        if not original.most(key):
            problem = f"the rewritten graph {answer.words[key]}, and the original does not"
            raise WireError(problem, where="the answer")


def _check_counts(answer: _Interactions, original: _Interactions) -> None:
    """Check that an answer does nothing more often than the original, omits no write, and widens no arguments."""
    for key, count in answer.counts.items():
        if key[0] not in _UNCOUNTED and count > original.most(key):
            words = answer.words[key].removesuffix(" otherwise")
            problem = f"the rewritten graph {words} {count} times, and the original {original.most(key)} times"
            raise WireError(problem, where="the answer")
    for key, count in original.needed.items():
        if answer.counts[key] < count:
            problem = f"the rewritten graph leaves out that the original {original.words[key]}, and that may write"
            raise WireError(problem, where="the answer")
    for key, found in answer.arguments.items():
        known = original.arguments.get(key, ())
        forms = set(map(form_of, known))  # most arguments are in the original as they are
        if not all(form_of(each) in forms or any(is_of_form(each, other) for other in known) for each in found):
            problem = f"the rewritten graph {answer.words[key]} with other arguments than the original"
            raise WireError(problem, where="the answer")


def _runs(module: GraphModule, graphs: Mapping[str, GraphModule]) -> Counter[GraphModule]:
    """Return how often each graph runs while the module's own runs once.

    A graph that no other one calls may be the argument of an operator, and counts once.
    """
    callers: dict[GraphModule, list[GraphModule]] = {}
    for body in graphs.values():
        for node in body.graph.nodes:
            for entered in _entered(callee(node, body)) if node.op == "call_module" else ():
                callers.setdefault(entered, []).append(body)
    runs = Counter({module: 1})

    def count(body: GraphModule) -> int:
        if body not in runs:
            runs[body] = max(1, sum(map(count, callers.get(body, ()))))
        return runs[body]

    for body in graphs.values():
        count(body)
    return runs


def _entered(module: nn.Module) -> Iterator[GraphModule]:
    """Yield the graphs that run when a module is called, without the graphs that these call in turn."""
    if isinstance(module, GraphModule):
        yield module
        return
    for child in module.children():
        yield from _entered(child)


def _interacts(
    body: GraphModule, own: Mapping[Node, list[tuple[tuple[Hashable, ...], str]]], known: dict[GraphModule, bool]
) -> bool:
    """Whether a graph, or one that it calls, interacts with anything."""
    if body not in known:
        known[body] = any(
            own[node]
            or (node.op == "call_module" and any(_interacts(each, own, known) for each in _entered(callee(node, body))))
            for node in body.graph.nodes
        )
    return known[body]


def _interactions_of(
    node: Node, body: GraphModule, numbers: Numbers, known: dict[Node, int]
) -> Iterator[tuple[tuple[Hashable, ...], str]]:
    if node.target in CALLS:
        kind = "push" if node.target in TRACKERS else "call"
        to, function = (node.args[1:] if node.target in TRACKERS else node.args)[:2]
        yield (kind, numbers.value(to, known), numbers.value(function, known)), f"calls {function!r} on {to!r}"
    elif is_batch(node):
        to, batched_by = node.args[0], batched_by_of(node)
        called = [("call", each.function) for each in items_of(node)]
        called += [("batch", batched_by)] if isinstance(batched_by, str) and batched_by != IN_ORDER else []
        for kind, name in called:
            yield (kind, numbers.value(to, known), numbers.value(name, known)), f"calls {name!r} on {to!r}"
    elif node.target in FETCHES or (node.op == "call_method" and node.target == "to_here"):
        yield ("fetch", numbers.value(node.args[:1], known)), f"fetches {node.args[:1]!r}"
    elif node.target in {functions.resolve, rpc.get_worker_info}:
        yield ("look up", callable_key(node.target), _given(node, numbers, known)), f"looks up {node.args}"
    elif (is_call(node) or is_issue(node)) and (kind_ := kind_of(node)) is not None and kind_.blocking is not None:
        # A collective, or a client of the launcher's own, must be called with exactly the original's arguments.
        made = callable_key(kind_.blocking), _given(node, numbers, known)
        yield ("call of a kind", *made), f"calls {kind_.blocking.__name__} otherwise"
    elif _speaks_to_ranks(node):
        yield ("own", callable_key(node.target), _given(node, numbers, known)), f"calls {node.target} otherwise"
    elif _is_change(node):
        yield ("change", callable_key(node.target), _given(node, numbers, known)), f"changes {node.args[0]!r} otherwise"
    elif _is_opaque(node, body):
        yield ("own", callable_key(node.target), _given(node, numbers, known)), f"calls {node.target!r} otherwise"


def _reads_server(node: Node) -> bool:
    """Whether the node calls a server that may come from a list or a dict, so that changing that redirects the call."""
    if node.target not in CALLS and not is_batch(node):
        return False
    to = node.args[1 if node.target in TRACKERS else 0]
    made = isinstance(to, Node) and to.op in {"call_function", "call_method", "call_module"}
    return made and isinstance(to, Node) and to.target not in {*CREATIONS, rpc.get_worker_info}


def _is_change(node: Node) -> bool:
    if node.op not in {"call_method", "call_function"}:
        return False
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    operator = operator_of(node)  # a tensor may be the index
    return name in _CHANGES or (operator is not None and bool(operator.writes))


def _speaks_to_ranks(node: Node) -> bool:
    """Whether the node is one of torch's own collectives or messages to a rank."""
    if node.op != "call_function" or (known := known_name(node.target)) is None:
        return False
    return known[1].startswith(_GROUP_OPERATORS) and known[1].partition(".")[0] not in _SILENT


def _is_opaque(node: Node, body: GraphModule) -> bool:
    """Whether the node calls the launcher's own code, or a method that is on no list."""
    if node.op == "call_function":
        return not completes(node) if is_wait(node) else known_name(node.target) is None
    if node.op == "call_method":
        return node.target not in methods()
    return node.op == "call_module" and not _is_known(body.get_submodule(str(node.target)))


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, GraphModule) or type(module).__module__.startswith("torch.nn.")


def _given(node: Node, numbers: Numbers, known: dict[Node, int]) -> tuple[int, int]:
    return numbers.value(node.args, known), numbers.value(node.kwargs, known)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
