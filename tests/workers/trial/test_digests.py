"""Digests tell bits apart, and what a module holds is put back, bit for bit, before each arm of a trial."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fxlib_workers.trial.digests import ModuleSnapshot, digest, digest_all, results


@dataclass
class Found:
    """What a model may return, which torch's pytrees take for one leaf."""

    logits: torch.Tensor


def nan(payload: int) -> torch.Tensor:
    return torch.tensor([0x7FC00000 | payload], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    "one, other",
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (nan(1), nan(2)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
        (torch.tensor(1 + 1j), torch.tensor(1 - 1j)),
        (1, True),
        (1.0, 1),
        (None, "None"),
    ],
)
def test_what_differs_in_a_bit_differs(one: object, other: object) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_layout_in_memory_does_not_count(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    assert digest(tensor) == digest(tensor.t().contiguous().t()) == digest(tensor.clone().requires_grad_(False))


def test_lazily_conjugated_tensors_are_digested_by_value() -> None:
    tensor = torch.tensor([1 + 2j])
    assert digest(tensor.conj()) == digest(torch.tensor([1 - 2j]))


def test_sparse_gradients_are_digested() -> None:
    one = torch.tensor([1.0, 2.0, 0.0]).to_sparse()
    other = torch.tensor([1.0, 0.0, 2.0]).to_sparse()
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(other)


def quantized(scale: float = 0.1, zero_point: int = 0) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(torch.tensor([1, 2], dtype=torch.int8), scale, zero_point)


def nested(*rows: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(each) for each in rows], layout=layout)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support", "ignore:.*quantized"
)
def test_tensors_of_several_parts_are_digested_with_all_of_them() -> None:
    found = [
        quantized(),
        quantized(scale=0.2),
        quantized(zero_point=1),
        nested(2, 1),
        nested(1, 2),
        nested(2, 1, layout=torch.strided),
        nested(1, 2, layout=torch.strided),
        torch.eye(2).to_sparse_csr(),
        torch.eye(2).flip(0).to_sparse_csr(),
    ]
    assert len({digest(each) for each in found}) == len(found)
    assert [digest(each) for each in found] == [digest(each.clone()) for each in found]


def test_equal_nans_are_equal() -> None:
    assert digest(nan(5)) == digest(nan(5).clone())


def test_leaves_are_named_by_their_place() -> None:
    containers = "containers of output"
    nested = results("output", {"a": [1, (2,)], "b": 3})
    assert set(nested) == {containers, "output['a'][0]", "output['a'][1][0]", "output['b']"}
    assert set(results("output", torch.zeros(1))) == {containers, "output"}


def test_fields_of_dataclasses_are_leaves() -> None:
    assert set(results("output", (Found(torch.zeros(1)),))) == {"containers of output", "output[0].logits"}


def test_containers_of_results_count() -> None:
    one, other = (results("output", kind([1, 2])) for kind in (list, tuple))
    assert {name for name in one if one[name] != other[name]} == {"containers of output"}


def test_names_count() -> None:
    assert digest_all({"a": torch.zeros(1)}) != digest_all({"b": torch.zeros(1)})


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("bias", torch.ones(1, 4).expand(8, 4))


def test_a_buffer_that_repeats_one_element_is_put_back() -> None:
    module = Repeating()
    state = ModuleSnapshot(module)
    digest = state.digest()
    with torch.no_grad():
        module.weight.add_(1)
        module.get_buffer("bias")[:1].add_(1)
    assert state.digest() != digest
    state.restore()
    assert state.digest() == digest
    assert module.get_buffer("bias").stride() == (0, 1)
