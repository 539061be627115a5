"""A compiler is given no part of which it would compute other numbers than torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from fxlib.runtime.compiled_numbers import OtherNumbersError, guarded, mend, refuse
from fxlib.runtime.lowering import _kind_of

IDS = torch.tensor([12_345, -3, 7])
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "a hash of ids": (lambda ids: ids * 2_654_435_761 + 1, IDS),
    "a division of ids": (lambda ids: ids // 2, IDS),
    "a limit beyond 32 bits": (lambda ids: ids > 5_000_000_000, IDS),
    "float64": (lambda times: times - 1.7e9, IDS.double()),
    "8 bits": (lambda pixels: pixels - 7, IDS.to(torch.uint8)),
    "float64 that is only moved": (lambda times: times.reshape(3, 1), IDS.double()),
    "a number beyond 32 bits": (lambda ids: torch.full((3,), 1 << 40, device="cpu") + ids, IDS),
    "floats as integers": (lambda x: (x * 1e10).long(), IDS.float()),
    "no elements": (lambda x: x[:0] + 1, IDS.float()),
}
TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "float32": (lambda x: (x * 2 + 1).relu(), IDS.float()),
    "a mask": (lambda ids: (ids != 0).float() * 2, IDS),
    "positions": (lambda ids: torch.arange(3, device="cpu") + ids, IDS),
    "a weighted sum": (lambda mask: (mask * 0.5).sum() / mask.sum(), IDS),
    "the number of ids": (lambda ids: (ids != 0).sum().float(), IDS),
    "values without indices": (lambda x: torch.topk(x, 2)[0] + 1, IDS.float()),
    "float64 as float32": (lambda times: times.float() + 1, IDS.double()),
    "pixels as floats": (lambda pixels: pixels.float() / 255, IDS.to(torch.uint8)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_openvino_computes_otherwise_is_refused(case: str) -> None:
    function, x = REFUSED[case]
    with pytest.raises(OtherNumbersError, match="computes"):
        refuse(symbolic_trace(function), [x], "openvino")
    refuse(symbolic_trace(function), [x], "inductor")


@pytest.mark.parametrize("case", TAKEN)
def test_what_it_computes_alike_is_taken(case: str) -> None:
    function, x = TAKEN[case]
    refuse(symbolic_trace(function), [x], "openvino")


def test_a_division_of_integers_with_a_rounding_mode_is_not_for_onnx_runtime() -> None:
    part = symbolic_trace(lambda ids: torch.div(ids, 2, rounding_mode="floor"))
    with pytest.raises(OtherNumbersError, match="div divides integers"):
        refuse(part, [IDS], "onnxruntime")
    refuse(part, [IDS.float()], "onnxruntime")


def test_a_lookup_of_rows_is_taken() -> None:
    refuse(symbolic_trace(nn.Sequential(nn.Embedding(9, 4), nn.ReLU())), [torch.tensor([1, 2])], "openvino")


@pytest.mark.parametrize(
    "mask", [torch.tensor([[True, True], [False, False]]), torch.tensor([[0.0, 1.0], [-torch.inf] * 2])]
)
def test_attention_gives_zero_where_the_mask_leaves_nothing(mask: Tensor) -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) * 2

    part, x = symbolic_trace(attend), torch.randn(1, 1, 2, 4)
    expected = part(x, mask)
    mend(part, "onnxruntime")
    assert torch.equal(part(x, mask), expected)
    (zeroed,) = [node for node in part.graph.nodes if getattr(node.target, "__name__", "") == "_zero_where_masked"]
    assert torch.equal(zeroed.target(torch.full((1, 1, 2, 4), torch.nan), mask)[..., 1, :], torch.zeros(1, 1, 4))


@pytest.mark.parametrize(
    "value, is_compiled",
    [
        (torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([1.0, torch.inf]), True),
        (torch.tensor([5, 1 << 30]), False),
        (torch.tensor([5, -6]), True),
        (torch.tensor([True]), True),
    ],
)
def test_inputs_for_which_openvino_computes_something_else_go_to_the_part_itself(
    value: Tensor, is_compiled: bool
) -> None:
    part: Any = symbolic_trace(lambda x: x)
    run = guarded(lambda _: "compiled", part, "openvino")
    assert (run(value) is value) is not is_compiled
    assert guarded(len, part, "onnxruntime") is len


def test_nothing_is_compiled_for_inputs_without_elements_or_with_a_sign_to_change() -> None:
    assert _kind_of([torch.ones(2)]) is not None
    assert _kind_of([torch.ones(0)]) is None
    assert _kind_of([torch.tensor([1j]).conj().imag]) is None
