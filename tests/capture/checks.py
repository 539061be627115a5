"""One question for all tests of a capture: is it the program that the model is?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import fxlib
from fxlib.runtime import CapturedModule


def same(model: Callable[..., Any], *inputs: Any, **options: Any) -> CapturedModule:
    """Capture, run original and captured on the same fresh inputs, and compare outputs and input mutations bitwise."""
    captured = fxlib.capture(model, **options)
    for seed in (1, 2):
        torch.manual_seed(seed)
        fresh = tree_map(lambda x: _fresh(x) if isinstance(x, torch.Tensor) else x, inputs)
        theirs, ours = (tree_map(_copy, fresh) for _ in range(2))
        torch.manual_seed(seed)
        expected = model(*theirs)
        torch.manual_seed(seed)
        actual = captured(*ours)
        assert_same(actual, expected)
        assert_same(ours, theirs)
    return captured


def assert_same(actual: Any, expected: Any) -> None:
    left, right = tree_leaves(actual), tree_leaves(expected)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad
        elif isinstance(other, (int, float, str, type(None))):
            assert one == other


def targets(captured: torch.fx.GraphModule) -> list[str]:
    """Names of the runtime operators in the graph, in order."""
    names = [getattr(node.target, "__name__", "") for node in captured.graph.nodes if node.op == "call_function"]
    wanted = {"remote_call", "issue_call", "start_call", "wait", "fetch", "create", "track_gradient"}
    return [name for name in names if name in wanted]


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.randint_like(x, 0, 5) if not x.is_floating_point() else torch.randn_like(x)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x
