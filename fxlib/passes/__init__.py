"""Transforms of a GraphModule, one to a file. Importing the package registers them all."""

from fxlib.passes.base import REGISTRY, GraphPass, PassResult, register_pass
from fxlib.passes.channels_last import ChannelsLast
from fxlib.passes.coalesce_calls import CoalesceCalls
from fxlib.passes.coalesce_writes import CoalesceWrites
from fxlib.passes.common_subexpressions import CommonSubexpressions
from fxlib.passes.dead_code import DeadCode
from fxlib.passes.decompose import Decompose
from fxlib.passes.fold_constants import FoldConstants
from fxlib.passes.fold_norms import FoldNorms
from fxlib.passes.fold_pairs import FoldPairs
from fxlib.passes.merge_reads import MergeReads
from fxlib.passes.overlap_calls import OverlapCalls
from fxlib.passes.reinplace import Reinplace
from fxlib.passes.rewrite_rules import RewriteRules
from fxlib.passes.send_gradients import SendGradients
from fxlib.passes.split_calls import SplitCalls

__all__ = [
    "REGISTRY",
    "ChannelsLast",
    "CoalesceCalls",
    "CoalesceWrites",
    "CommonSubexpressions",
    "DeadCode",
    "Decompose",
    "FoldConstants",
    "FoldNorms",
    "FoldPairs",
    "GraphPass",
    "MergeReads",
    "OverlapCalls",
    "PassResult",
    "Reinplace",
    "RewriteRules",
    "SendGradients",
    "SplitCalls",
    "register_pass",
]
