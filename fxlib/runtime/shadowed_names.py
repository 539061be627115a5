"""Arguments that bear the name of something that generated code calls, such as `inf` or `slice`.

torch.fx gives their nodes other names, and keeps the arguments' own in the signature, where they hide what the code
means by these names: `x.clamp(max=float("inf"))` is `x.clamp(max = inf)` there.
"""

from __future__ import annotations

import ast
import re
import textwrap

from torch.fx import Graph


def shadowed(graph: Graph, code: str) -> str:
    """Return the name of an argument that hides what the generated `code` of a graph uses; empty if none does."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    renamed = {name for node in placeholders if (name := str(node.target).lstrip("*")) != node.name}
    renamed = {name for name in renamed if _may_be_used(name, code)}
    if not renamed:
        return ""
    (function,) = (each for each in ast.parse(textwrap.dedent(code)).body if isinstance(each, ast.FunctionDef))
    parts = (each for statement in function.body if not _is_entry(statement) for each in ast.walk(statement))
    used = {each.id for each in parts if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    return min(renamed & used, default="")


def _may_be_used(name: str, code: str) -> bool:
    """Whether a name stands in code beside where it is taken in, as far as the text tells, without parsing it all."""
    alone, taken_in = re.compile(rf"(?<![\w.]){name}(?!\w)"), re.compile(rf"\s*(def .*|\w+ = {name})")
    return any(alone.search(line) and not taken_in.fullmatch(line) for line in code.splitlines() if name in line)


def _is_entry(statement: ast.stmt) -> bool:
    """Whether a statement only takes arguments in: `inf_1 = inf`, or the flattening of nested ones."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    flattens = isinstance(value, ast.Call) and ast.unparse(value.func) == "fx_pytree.tree_flatten_spec"
    return flattens or isinstance(value, ast.Name)
