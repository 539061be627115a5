"""Find where a graph would not do what the program does: exception handlers, `out=`, and in-place changes of numbers.

An `except` of the user's around a remote call would be lost, because a graph cannot catch errors. torch refuses at run
time to write by `out=` to a remote result that takes a gradient. And for `offset += 1` torch.fx generates `offset += 1;
iadd = offset`, which is what the program does with a tensor; of a number, whoever reads the old value later gets the
new one.
"""

from __future__ import annotations

import dis
import functools
import operator
from types import CodeType, FrameType

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxlib.capture import source
from fxlib.capture.trace.values import IN_PLACE
from fxlib.capture.unswallowed import capture_error
from fxlib.runtime.ops.registry import TRACKERS

_NOT_OF_TENSORS = frozenset(
    {"AttributeError", "KeyError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError"}
    | {"StopIteration", "OSError", "FileNotFoundError", "UnicodeError"}
)
"""Names of the exceptions that no operation on tensors raises."""
_ENDS = ("RERAISE", "POP_EXCEPT")


def guarding_handler(frame: FrameType | None, end: FrameType | None, *, of_tensors: bool = False) -> str:
    """Return file:line of the user's innermost statement under a `try` with `except` that is running, or "".

    Args:
        frame: the innermost frame.
        end: the frame at which the user's end.
        of_tensors: count only handlers that may catch what an operation on tensors raises.
    """
    while frame is not None and frame is not end:
        code = frame.f_code
        if source.is_users(code) and any(
            start <= frame.f_lasti < stop and not (of_tensors and names and names.isdisjoint(frame.f_globals))
            for start, stop, names in _guarded(code)
        ):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=1024)
def _guarded(code: CodeType) -> tuple[tuple[int, int, frozenset[str]], ...]:
    """Return the ranges of the code in a `try` with an `except`; `with` and `finally` only pass exceptions on.

    Each range comes with the classes that it catches, if no operation on tensors raises any of them.
    """
    instructions = list(dis.get_instructions(code))
    place = {instruction.offset: index for index, instruction in enumerate(instructions)}
    # `dis` shows the table, and has no public way to read it.
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return tuple(
        (entry.start, entry.end, _caught(instructions[place[entry.target] :]))
        for entry in table
        if _catches([each.opname for each in instructions[place[entry.target] :]])
    )


def _caught(handler: list[dis.Instruction]) -> frozenset[str]:
    """Return the names of the classes that a handler catches, if they are all known to be none of a tensor's errors."""
    found: set[str] = set()
    waiting: set[str] = set()
    for each in handler:
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            waiting.add(each.argval)
        elif each.opname == "CHECK_EXC_MATCH":
            if not waiting or not waiting <= _NOT_OF_TENSORS:
                return frozenset()
            found, waiting = found | waiting, set()
        elif each.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "CHECK_EG_MATCH"):
            waiting.add(each.opname)
        elif each.opname == "POP_EXCEPT":
            waiting = set()
        elif each.opname == "RERAISE" and found:
            break
    return frozenset(found)


def _catches(handler: list[str]) -> bool:
    if handler[:1] != ["PUSH_EXC_INFO"]:
        return False
    if handler[1] == "POP_TOP":  # `except:`
        return True
    for name in handler[1:]:
        if name in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
            return True
        if name in _ENDS or name == "WITH_EXCEPT_START":
            return False
    return False


_WITHOUT_HISTORY = frozenset({"detach", "detach_"})


def refuse_out(graph: Graph, *, grad_enabled: bool) -> None:
    """Refuse to write by `out=` to a remote result whose gradient is to be pushed, or to what is made of it.

    Raises:
        CaptureError: an operator does so in grad mode; torch writes by `out=` to nothing that takes a gradient.
    """
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            grad_enabled = bool(node.args[0])
        if not grad_enabled or node.kwargs.get("out") is None:
            continue
        written: list[Node] = []
        map_arg(node.kwargs["out"], written.append)
        for tracked in filter(None, map(_tracked_behind, written)):
            raise capture_error(
                f"out= of {node.name} is a remote result whose gradient is to be pushed by {tracked.args[2]!r}, and "
                "torch writes by out= to nothing that takes a gradient",
                hint="Write with copy_ or another method that works in place, or to a new tensor.",
                where=str(node.meta.get("source", "")),
            )


def _tracked_behind(node: Node) -> Node | None:
    """Follow what a node is made of, its first argument, up to a tracked result."""
    value: object = node
    while isinstance(value, Node) and value.target not in TRACKERS:
        value = value.args[0] if value.args and value.target not in _WITHOUT_HISTORY else None
    return value if isinstance(value, Node) else None


def protect_old_values(graph: Graph) -> None:
    """Let in-place operators work under a second name, where the first is read again and may be that of a number."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in IN_PLACE or not isinstance(node.args[0], Node):
            continue
        old = node.args[0]
        if not _is_tensor(old) and any(place[user] > place[node] for user in old.users):
            with graph.inserting_before(node):
                second = graph.call_function(operator.getitem, ((old,), 0))
            second.meta.update({key: node.meta[key] for key in ("source", "stack_trace") if key in node.meta})
            place[second] = place[node]
            node.update_arg(0, second)


def _is_tensor(node: Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return node.op in ("get_attr", "call_module") or (node.op == "call_function" and module.startswith("torch."))
