"""Transforms of a GraphModule, one pass to a file; importing the package registers them all.

Nothing here decides what is legal or what pays: `fxlib.analysis` does.
"""

from fxlib.passes.infra.base import REGISTRY, Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import Introduced
from fxlib.passes.local.bfloat16 import Bfloat16
from fxlib.passes.local.channels_last import ChannelsLast
from fxlib.passes.local.common_subexpressions import CommonSubexpressions
from fxlib.passes.local.dead_code import DeadCode
from fxlib.passes.local.decompose import Decompose
from fxlib.passes.local.fold_constants import FoldConstants
from fxlib.passes.local.fold_norms import FoldNorms
from fxlib.passes.local.lower import Lower
from fxlib.passes.local.quantize.quantize import Quantize
from fxlib.passes.local.reinplace.reinplace import Reinplace
from fxlib.passes.local.rewrite_rules import RewriteRules
from fxlib.passes.remote.coalesce_calls import CoalesceCalls
from fxlib.passes.remote.coalesce_writes import CoalesceWrites
from fxlib.passes.remote.merge_reads import MergeReads
from fxlib.passes.remote.overlap_calls import OverlapCalls
from fxlib.passes.remote.send_gradients import SendGradients
from fxlib.passes.remote.split_calls import FoldPairs, SplitCalls

__all__ = [
    "REGISTRY",
    "Bfloat16",
    "ChannelsLast",
    "CoalesceCalls",
    "CoalesceWrites",
    "CommonSubexpressions",
    "Context",
    "DeadCode",
    "Decompose",
    "FoldConstants",
    "FoldNorms",
    "FoldPairs",
    "GraphPass",
    "Introduced",
    "Lower",
    "MergeReads",
    "OverlapCalls",
    "PassResult",
    "Quantize",
    "Reinplace",
    "RewriteRules",
    "SendGradients",
    "SplitCalls",
    "register_pass",
]
