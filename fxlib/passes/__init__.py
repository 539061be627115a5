"""Transforms of a GraphModule, one to a file. Importing the package registers them all."""

from fxlib.passes.base import REGISTRY, GraphPass, PassResult, register_pass
from fxlib.passes.dead_code import DeadCode
from fxlib.passes.fold_pairs import FoldPairs
from fxlib.passes.overlap_calls import OverlapCalls
from fxlib.passes.split_calls import SplitCalls

__all__ = [
    "REGISTRY",
    "DeadCode",
    "FoldPairs",
    "GraphPass",
    "OverlapCalls",
    "PassResult",
    "SplitCalls",
    "register_pass",
]
