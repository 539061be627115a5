"""The table of what may travel, out of what became of the calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.out_of_bounds import modules
from benchmarks.out_of_bounds.trials import Trial
from fxlib.wire import targets
from fxlib.wire.argument_rules import RULES
from fxlib.wire.memory_safety import UNRUN

NOT_STRIDED = re.compile(
    r"sparse|mkldnn|nested|jagged|crow_|ccol_|col_indices|row_indices|coalesce|::_?indices\b|r\._?indices\b|^torch\.Tensor\.sspaddmm|hspmm|smm\b|saddmm|to_padded"
)
"""Operators of tensors that hold indices of their own: no graph makes such a tensor."""


def candidates() -> list[str]:
    """Return the wire's names of what may be tried."""
    overloads = [f"{packet}.{each}" for packet, found in targets.registered_operators().items() for each in found]
    functions = [
        name for name in targets.candidates() if name.startswith("torch.") and not name.startswith(targets.NO_TENSORS)
    ]
    return sorted(overloads) + sorted(functions) + sorted(modules.names())


_BACKWARD = re.compile(r"_backward|^torch\.batch_norm_")
"""Operators that autograd calls with what their forward saved, and that trust it; no graph of a model names them."""
_PRIVATE = re.compile(r"::_(?!_)")
_PRIVATE_USED = frozenset(
    {
        # What torch.export and its decompositions put into the graphs of models.
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_assert_tensor_metadata", "_cdist_forward", "_conj"),
        *("_embedding_bag", "_embedding_bag_forward_only", "_local_scalar_dense", "_log_softmax", "_softmax"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
        *("_to_copy", "_trilinear", "_unsafe_index", "_unsafe_index_put", "_unsafe_view", "_weight_norm"),
        *("_weight_norm_interface", "_ctc_loss", "_assert_async", "_assert_scalar", "_is_all_true", "_shape_as_tensor"),
    }
)
_WITHOUT_INDICES = frozenset(
    {
        *(
            "torch.Size",
            "torch.autocast",
            "torch.device",
            "torch.finfo",
            "torch.iinfo",
            "torch.sym_ite",
            "torch.is_nonzero",
        ),
        *("torch.Tensor.backward", "torch.Tensor.is_coalesced", "torch.Tensor.is_nonzero", "torch.Tensor.retain_grad"),
        *(f"torch.Tensor.{device}" for device in ("cuda", "ipu", "mtia", "pin_memory", "xpu")),
    }
)
"""Functions that look nothing up, of which no call runs here: they ask for devices, or for what is no tensor."""
_COLLECTIVES = "_c10d_functional"
"""Namespaces of operators that need other processes, and move tensors as a whole."""
_SPACES = {"torch.special": "special_", "torch.linalg": "linalg_", "torch.fft": "fft_"}


def build(trials: Iterable[Trial]) -> dict[str, Any]:
    """Return the table: a name is tried if some call ran and none reached outside of its tensors."""
    merged: dict[str, Trial] = {}
    known = candidates()
    for each in trials:
        if each.name not in known:
            continue
        found = merged.setdefault(each.name, Trial(name=each.name))
        found.calls += each.calls
        found.valid += each.valid
        found.refused += each.refused
        found.slow += each.slow
        found.deaths += each.deaths
    untried = sorted(name for name in known if name in _WITHOUT_INDICES or name.startswith(_COLLECTIVES))
    for name in known:
        merged.setdefault(name, Trial(name=name))
    for name in untried:
        merged.pop(name)
    tried: list[str] = []
    ruled: list[str] = []
    refused: dict[str, str] = {}
    outside = {
        name.partition(".")[0] for name, each in merged.items() if each.deaths and "out" not in name.partition(".")[2]
    }
    for name, trial in sorted(merged.items()):
        if NOT_STRIDED.search(name):
            refused[name] = "its tensors hold indices that operators trust"
        elif _BACKWARD.search(name):
            refused[name] = "it trusts what its forward saved"
        elif _PRIVATE.search(name) and name.partition("::")[2].partition(".")[0] not in _PRIVATE_USED:
            refused[name] = "it is private to torch, and no model names it"
        elif trial.deaths:
            refused[name] = trial.deaths[0][:160]
        elif (
            "::" not in name and f"aten::{_SPACES.get(name.rpartition('.')[0], '')}{name.rpartition('.')[2]}" in outside
        ):
            refused[name] = "so reaches the operator of this name"
        elif not trial.valid:
            refused[name] = UNRUN
        else:
            (ruled if name in RULES else tried).append(name)
    return {
        "torch": torch.__version__.partition("+")[0],
        "calls": sum(each.calls for each in merged.values()),
        "tried": tried,
        "ruled": ruled,
        "untried": untried,
        "refused": refused,
    }


def written(table: dict[str, Any]) -> str:
    """Return the text of the file: a line for each name."""
    return json.dumps(table, indent=0) + "\n"
