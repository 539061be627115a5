"""What is believed of operators, against what they do."""

from __future__ import annotations

import operator
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.nn import functional as F
from torch.nn.modules import module as torchs
from torch.utils import _pytree as pytree

from fxlib.analysis.operators.arguments import operator_of, written_arguments
from fxlib.analysis.operators.schemas import OperatorFacts, facts_of, module_operator
from fxlib.wire.modules import class_name


def facts(target: Any, *args: Any, **kwargs: Any) -> OperatorFacts | None:
    """Facts of one call; strings among the arguments stand for tensors."""
    graph = Graph()
    op = "call_method" if isinstance(target, str) else "call_function"
    values = [graph.placeholder(each) if isinstance(each, str) else each for each in args]
    named = {name: graph.placeholder(each) if isinstance(each, str) else each for name, each in kwargs.items()}
    return operator_of(graph.create_node(op, target, tuple(values), named))


@pytest.mark.parametrize(
    "target", [torch.add, F.linear, torch.cat, F.relu, operator.add, F.layer_norm, torch.matmul, "sum", F.max_pool2d]
)
def test_work_that_makes_memory_of_its_own_shares_none(target: Any) -> None:
    found = facts(target, "x")
    assert found is not None
    assert (found.shares, found.writes, found.random) == (False, frozenset(), False)


@pytest.mark.parametrize("target", [operator.getitem, torch.einsum, torch.reshape, F.dropout, "view", "to", "chunk"])
def test_what_may_be_a_view_shares_memory(target: Any) -> None:
    found = facts(target, "x", 0)
    assert found is not None
    assert found.shares


SPARSE = ["coo_tensor", "csr_tensor", "csc_tensor", "bsr_tensor", "bsc_tensor", "compressed_tensor"]


@pytest.mark.parametrize("target", [getattr(torch, f"sparse_{each}") for each in SPARSE])
def test_a_sparse_tensor_shares_memory_with_its_values(target: Any) -> None:
    found = facts(target, "indices", "others", "values")
    assert found is not None
    assert found.shares


def test_a_sparse_tensor_of_an_export_shares_memory_with_its_values() -> None:
    aten = torch.ops.aten
    for target in (aten.sparse_compressed_tensor, aten._sparse_coo_tensor_with_dims_and_tensors):
        found = facts(getattr(target, target.overloads()[0]), "indices", "values")
        assert found is not None
        assert found.shares


@pytest.mark.parametrize(
    "target, args, kwargs, written",
    [
        ("add_", ("x", 1), {}, ["x"]),
        (operator.setitem, ("x", 0, "y"), {}, ["x"]),
        (operator.imul, ("x", 2), {}, ["x"]),
        (F.relu, ("x",), {"inplace": True}, ["x"]),
        (F.relu, ("x", True), {}, ["x"]),
        (F.relu, ("x", False), {}, []),
        (torch.add, ("x", "y"), {"out": "z"}, ["z"]),
        (torch.ops.aten.add_.Tensor, ("x", "y"), {}, ["x"]),
        (F.embedding, ("ids", "w"), {"max_norm": 1.0}, ["w"]),
        (F.embedding, ("ids", "w"), {}, []),
        (F.batch_norm, ("x", "mean", "var"), {"training": True}, ["mean", "var"]),
        (F.batch_norm, ("x", "mean", "var"), {"training": False}, []),
    ],
)
def test_writes_are_known(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[str]) -> None:
    graph = Graph()
    op = "call_method" if isinstance(target, str) else "call_function"
    values = tuple(graph.placeholder(each) if isinstance(each, str) else each for each in args)
    named = {name: graph.placeholder(each) if isinstance(each, str) else each for name, each in kwargs.items()}
    node = graph.create_node(op, target, values, named)
    found = operator_of(node)
    assert found is not None
    assert sorted({each.name for each in written_arguments(node, found)}) == sorted(written)


def test_a_slice_of_a_tensor_takes_a_gradient_and_a_slice_of_python_none() -> None:
    for target in (torch.ops.aten.slice.Tensor, torch.ops.aten.slice):
        assert _known(facts(target, "x", 0, 1, 2)).gradient
    assert not _known(facts(slice, 0, 1)).gradient
    assert not _known(facts(torch.ops.aten.eq.Tensor, "x", "y")).gradient


def test_random_operators_are_known() -> None:
    for target in (torch.rand_like, torch.bernoulli, F.dropout, "uniform_", torch.multinomial, F.rrelu):
        found = facts(target, "x")
        assert found is not None, target
        assert found.random, target
    assert not _known(facts(F.dropout, "x", training=False)).random
    for attention in (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
        assert _known(facts(attention, "q", "k", "v", dropout_p=0.1)).random
        assert _known(facts(attention, "q", "k", "v", None, 0.1)).random
        assert _known(facts(attention, "q", "k", "v", dropout_p="p")).random
        assert not _known(facts(attention, "q", "k", "v", is_causal=True)).random
        assert not _known(facts(attention, "q", "k", "v", None, 0.0)).random


_ROWS, _ZEROS, _FAR = torch.ones(4, 4), torch.zeros(4, dtype=torch.long), torch.tensor([9])
_COUNTS, _NANS = torch.ones(4, dtype=torch.long), torch.full((4, 4), torch.nan)


@pytest.mark.parametrize(
    "target, args, kwargs",
    [
        ("index_put_", (_ROWS, (_FAR,), torch.ones(1)), {}),
        ("index_copy_", (_ROWS, 0, _FAR, torch.ones(1, 4)), {}),
        (torch.ops.aten.scatter_.value, (_ROWS, 0, _FAR[None], 1.0), {}),
        ("masked_scatter_", (_ROWS, _ROWS > 0, torch.ones(1)), {}),
        ("remainder_", (_COUNTS, _ZEROS), {}),
        (operator.ifloordiv, (_COUNTS, _ZEROS), {}),
        (operator.imod, (_COUNTS, _ZEROS), {}),
        (torch.div, (_COUNTS, _ZEROS), {"rounding_mode": "floor"}),
        ("div_", (_COUNTS, _ZEROS), {"rounding_mode": "trunc"}),
        (torch.ops.aten.div.Tensor_mode, (_COUNTS, _ZEROS), {"rounding_mode": "floor"}),
        (torch.ops.aten._embedding_bag.default, (_ROWS, _FAR, torch.tensor([0])), {}),
        (torch.ops.aten._embedding_bag_forward_only.default, (_ROWS, _FAR, torch.tensor([0])), {}),
        (torch.ops.aten.nll_loss_forward.default, (_ROWS, _FAR.expand(4), None, 1, -100), {}),
        (torch.ops.aten.nll_loss2d_forward.default, (torch.ones(1, 4, 1, 1), _FAR[None, None], None, 1, -100), {}),
        (torch.ops.aten._linalg_svd.default, (_NANS,), {}),
        (torch.ops.aten._linalg_eigh.default, (_NANS,), {}),
        (torch.ops.aten.linalg_lu_factor.default, (torch.zeros(4, 4),), {}),
        (torch.linalg.svdvals, (_NANS,), {}),
        (torch.linalg.matrix_rank, (_NANS,), {}),
        (torch.matrix_power, (torch.zeros(4, 4), -1), {}),
        (torch.linalg.cholesky_ex, (-_ROWS,), {"check_errors": True}),
        (torch.linalg.inv_ex, (torch.zeros(4, 4),), {"check_errors": True}),
        (torch.ops.aten.linalg_lu_factor_ex.default, (torch.zeros(4, 4),), {"check_errors": True}),
        (torch.ops.aten._linalg_check_errors.default, (_COUNTS[0].int(), "inv"), {"is_matrix": True}),
        (torch.histc, (_NANS,), {}),
        (torch.quantile, (_ROWS, torch.tensor(9.0)), {}),
        (torch.ops.aten.nll_loss_nd.default, (_ROWS, _FAR.expand(4)), {}),
        (torch.fake_quantize_per_channel_affine, (_ROWS, torch.ones(4), torch.full((4,), 999).int(), 0, 0, 255), {}),
        (torch.ops.aten.sym_constrain_range.default, (3,), {"min": 4, "max": 5}),
        (torch.ops.aten.sym_constrain_range_for_size.default, (3,), {"min": 4, "max": 5}),
    ],
)
def test_what_raises_for_some_values_is_known(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = ["x" if isinstance(each, torch.Tensor) else each for each in args]
    assert _known(facts(target, *named, **kwargs)).raises
    own = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    with pytest.raises((RuntimeError, IndexError)):
        (getattr(torch.Tensor, target) if isinstance(target, str) else target)(*own, **kwargs)


def test_without_the_argument_with_which_it_does_an_operator_raises_for_no_value() -> None:
    for target in (torch.div, "div_", torch.ops.aten.div.Tensor):
        assert not _known(facts(target, "x", "y")).raises
    assert not _known(facts(torch.div, "x", "y", rounding_mode=None)).raises
    assert not _known(facts(torch.linalg.inv_ex, "x", check_errors=False)).raises
    assert not _known(facts(torch.searchsorted, "x", "y")).raises


@pytest.mark.parametrize(
    "target", [print, torch.save, torch.manual_seed, "backward", "numpy", "append", nn.init.xavier_uniform_, sorted]
)
def test_what_torch_does_not_publish_may_do_anything(target: Any) -> None:
    assert facts(target, "x") is None


def test_modules_are_known_by_what_they_hold() -> None:
    assert not _known(module_operator(nn.Linear(2, 2))).has_effects
    assert _known(module_operator(nn.ReLU(inplace=True))).writes
    assert _known(module_operator(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))).random
    assert _known(module_operator(nn.LSTM(2, 2, num_layers=2, dropout=0.5))).random
    assert len(_known(module_operator(nn.BatchNorm1d(2))).written_state) == 3
    assert _known(module_operator(nn.Embedding(2, 2, max_norm=1.0))).written_state
    assert not _known(module_operator(nn.Sequential(nn.Linear(2, 2)))).shares
    assert _known(module_operator(nn.Sequential())).same
    assert _known(module_operator(nn.Sequential(nn.Sequential()))).same


def test_modules_that_run_anybodys_code_may_do_anything() -> None:
    class Own(nn.Module):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    for module in (Own(), nn.Sequential(nn.Linear(2, 2), Own()), hooked, weighted, nn.LazyLinear(2)):
        assert module_operator(module) is None


@pytest.mark.parametrize(
    "register",
    [
        torchs.register_module_forward_hook,
        torchs.register_module_forward_pre_hook,
        torchs.register_module_full_backward_hook,
        torchs.register_module_full_backward_pre_hook,
    ],
)
def test_where_all_modules_have_hooks_any_module_may_do_anything(register: Callable[[Any], Any]) -> None:
    handle = register(lambda *_: None)
    try:
        assert module_operator(nn.Linear(2, 2)) is None
        assert class_name(nn.Linear(2, 2)) is None
    finally:
        handle.remove()
    assert module_operator(nn.Linear(2, 2)) is not None
    assert class_name(nn.Linear(2, 2)) == "Linear"


def _known(found: OperatorFacts | None) -> OperatorFacts:
    assert found is not None
    return found


@pytest.mark.slow
def test_what_is_believed_holds_for_torchs_own_samples_of_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0
    for name, function, found, inputs in _samples(monkeypatch):
        wrong = list(_lies(function, found, inputs))
        assert not wrong, f"{name}: {wrong}"
        checked += 1
    assert checked > 2_000


def _samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[..., Any], OperatorFacts, Any]]:
    # torch's list of operators lies in its own test-suite, which wants a package for comparing texts; none is compared.
    monkeypatch.setitem(sys.modules, "expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core

        # Before each sample they look for a test of theirs on the stack, with its sources, and seed all devices.
        for module in (common_utils, core):
            monkeypatch.setattr(module, "extract_test_fn", lambda: None)
        monkeypatch.setattr(common_utils, "set_rng_seed", lambda _: torch.default_generator.manual_seed(0))
        for op in op_db:
            dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else None
            if dtype is None:
                continue
            for function, target in ((op.op, op.op), (op.get_inplace(), getattr(op.get_inplace(), "__name__", None))):
                found = facts_of(target) if target is not None else None
                if found is not None:
                    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=False), 4):
                        yield op.name, function, found, (sample.input, sample.args, sample.kwargs)


def _lies(function: Callable[..., Any], found: OperatorFacts, inputs: Any) -> Iterator[str]:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    if any(leaf.layout is not torch.strided for leaf in tensors):
        return
    before = [leaf.clone() for leaf in tensors]
    random = torch.get_rng_state()
    try:
        result = function(inputs[0], *inputs[1], **inputs[2])
    except Exception:  # noqa: BLE001 - not every sample is meant for every variant
        return
    if not found.gradient and not found.writes and _takes_gradient(function, inputs):
        yield "its result takes a gradient"
    results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not found.shares and _memory(results) & _memory(tensors):
        yield "its result shares memory with an argument"
    if not found.same and any(one is other for one in results for other in tensors):
        yield "its result is an argument"
    if not found.random and not torch.equal(random, torch.get_rng_state()):
        yield "it draws random numbers"
    pairs = zip(before, tensors, strict=True)
    if not found.writes and any(not torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in pairs):
        yield "it writes an argument"


def _takes_gradient(function: Callable[..., Any], inputs: Any) -> bool:
    """Return whether a result takes a gradient where the arguments do."""
    own = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), inputs)
    with torch.random.fork_rng(devices=[]):
        result = function(own[0], *own[1], **own[2])
    return any(leaf.requires_grad for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _memory(tensors: list[torch.Tensor]) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tensors if leaf.layout is torch.strided} - {0}


def test_of_a_layer_that_holds_a_function_of_the_programs_nothing_is_known() -> None:
    assert module_operator(nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: (a - b).norm())) is None
    assert module_operator(nn.TripletMarginWithDistanceLoss()) is not None
    assert module_operator(nn.TransformerEncoderLayer(8, 2, 8, activation=F.gelu)) is not None
    assert module_operator(nn.TransformerEncoderLayer(8, 2, 8, activation=lambda x: x.relu())) is None
