"""A compiler is given no part of which it would compute other numbers than torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from fxlib.capture.coerce import as_graph
from fxlib.runtime.compiled_numbers import OtherNumbersError, beyond_rounding, guarded, mend, refuse
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


@pytest.mark.parametrize("told", [lambda y: y.log(), lambda y: (y.squeeze(0) * 2).log(), lambda y: 1 / y])
@pytest.mark.parametrize("sigmoid", [torch.sigmoid, nn.Sigmoid()], ids=["function", "module"])
def test_small_numbers_of_a_sigmoid_are_not_for_onnx_runtime(
    sigmoid: Callable[[Tensor], Tensor], told: Callable[[Tensor], Tensor]
) -> None:
    class Likelihood(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sigmoid = sigmoid

        def forward(self, x: Tensor) -> Tensor:
            return told(self.sigmoid(x)) + self.sigmoid(x) * 2

    with pytest.raises(OtherNumbersError, match="takes the logarithm of a sigmoid or divides by one"):
        refuse(symbolic_trace(Likelihood()), [X], "onnxruntime")


X = torch.rand(1, 2, 6, 6) + 1
BOTH = ("openvino", "onnxruntime")


def _nearest(padding_mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.grid_sample(x, x.permute(0, 2, 3, 1), "nearest", padding_mode, align_corners=False)


OPERATORS: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "angle": (lambda x: x.angle(), BOTH),
    "angle of a spectrum": (lambda x: torch.fft.rfft(x).angle(), BOTH),
    "atan2": (lambda x: torch.arctan2(x, -x), BOTH),
    "indices of topk": (lambda x: x.topk(2)[1] * 2, BOTH),
    "values of topk": (lambda x: x.topk(2)[0] * 2, ()),
    "remainder": (lambda x: x % 0.7, BOTH),
    "remainder of a power of two": (lambda x: x % 0.5, ()),
    "quotient": (lambda x: x // x.flip(0), BOTH),
    "floor": (lambda x: torch.div(x, 3, rounding_mode="floor"), BOTH),
    "division": (lambda x: x / 0.7, ()),
    "cut": (lambda x: torch.div(x, 2, rounding_mode="trunc"), ("openvino",)),
    "fmod": (lambda x: torch.fmod(x, 0.7), ("openvino",)),
    "softplus": (F.softplus, ()),
    "softplus, beta": (lambda x: F.softplus(x, beta=2), ("openvino",)),
    "softplus, threshold": (nn.Softplus(threshold=1), ("openvino",)),
    "round": (torch.round, ()),
    "round, decimals": (lambda x: x.round(decimals=1), ("openvino",)),
    "round, in place": (lambda x: (x * 1).round_(decimals=1), ("openvino",)),
    "logsigmoid": (F.logsigmoid, ("openvino",)),
    "ceiling": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), ("openvino",)),
    "ceiling, one dimension": (lambda x: F.avg_pool1d(x[0], 3, 2, 1, ceil_mode=True), ("openvino",)),
    "ceiling without padding": (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), ()),
    "divisor": (lambda x: F.avg_pool2d(x, 3, divisor_override=2), ("onnxruntime",)),
    "correction": (lambda x: x.std(-1, correction=2), ("openvino",)),
    "variance": (lambda x: x.var(-1) + x.var(-1, unbiased=False), ()),
    "smoothed labels": (lambda x: F.cross_entropy(x, x, label_smoothing=0.1), ("onnxruntime",)),
    "labels": (lambda x: F.cross_entropy(x, x), ()),
    "distance": (lambda x: F.pairwise_distance(x, x, p=1.0), ("openvino",)),
    "nearest pixels, reflected": (_nearest("reflection"), BOTH),
    "nearest pixels": (_nearest("border"), ()),
    "logaddexp": (lambda x: torch.logaddexp(x, x), ("onnxruntime",)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", OPERATORS)
def test_operators_are_refused_with_the_arguments_for_which_a_compiler_has_others(case: str, inference: bool) -> None:
    function, refused = OPERATORS[case]

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called = function

        def forward(self, x: Tensor) -> Any:
            return self.called(x) * 1

    for part in (symbolic_trace(Calls()), as_graph(torch.export.export(Calls(), (X,)), ())):
        for backend in BOTH:
            with (
                torch.inference_mode(inference),
                nullcontext()
                if backend not in refused
                else pytest.raises(OtherNumbersError, match=r"computes .*, and (OpenVINO|ONNX Runtime) "),
            ):
                refuse(part, [X.clone()], backend)


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


@pytest.mark.filterwarnings("ignore:.* is in beta state:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_nothing_is_compiled_for_sparse_and_nested_inputs() -> None:
    dense = torch.eye(2)
    assert _kind_of([dense.to_sparse()]) is _kind_of([dense.to_sparse_csr()]) is None
    assert _kind_of([torch.nested.nested_tensor([dense, dense[:1]])]) is None


def test_a_dtype_of_autocast_a_default_dtype_and_the_sign_of_zero_are_each_a_kind_of_their_own() -> None:
    kinds = [_kind_of([each]) for each in (0.0, -0.0, 0, False)]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            kinds.append(_kind_of([0.0]))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    kinds.append(_kind_of([0.0]))
    torch.set_default_dtype(default)
    assert len(set(kinds)) == len(kinds)
    assert _kind_of([0.0]) == kinds[0]


FIGURES = torch.tensor([1e3, -1.0, torch.inf, torch.nan])
COMPARED = {
    "rounding": (FIGURES * (1 + 1e-5), FIGURES, True),
    "cancellation": (FIGURES + 1.0, FIGURES, True),
    "other figures": (FIGURES + 20.0, FIGURES, False),
    "rounding of two bytes": (FIGURES.bfloat16() + 20.0, FIGURES.bfloat16(), True),
    "other figures of two bytes": (FIGURES.bfloat16() + 200.0, FIGURES.bfloat16(), False),
    "a lost infinity": (FIGURES.nan_to_num(torch.nan, posinf=3.4e38), FIGURES, False),
    "a lost NaN": (FIGURES.nan_to_num(0.0, posinf=torch.inf), FIGURES, False),
    "all next to zero": (torch.full((2,), 1e-7), -torch.zeros(2), True),
    "no figures": (torch.empty(0), torch.empty(0), True),
    "another index": (torch.tensor([3, 5]), torch.tensor([3, 4]), False),
    "the same indices": (torch.tensor([3, 4]), torch.tensor([3, 4]), True),
    "another mask": (torch.tensor([True]), torch.tensor([False]), False),
    "complex figures": (torch.tensor([1j]), torch.tensor([-1j]), False),
    "with a gradient": (FIGURES.clone().requires_grad_(), FIGURES.clone().requires_grad_(), True),
}


@pytest.mark.parametrize("case", COMPARED)
def test_compiled_results_are_torchs_up_to_rounding(case: str) -> None:
    found, expected, is_rounding = COMPARED[case]
    part = symbolic_trace(lambda x: x)
    assert (beyond_rounding(part, [torch.ones(2)], [found], [expected], "inductor") == "") is is_rounding


def test_inputs_that_openvinos_code_is_not_given_are_not_compared() -> None:
    part, x = symbolic_trace(lambda x: x), torch.tensor([torch.nan])
    assert not beyond_rounding(part, [x], [x * 0 + 1], [x], "openvino")
    assert beyond_rounding(part, [x], [torch.ones(1)], [x], "onnxruntime")
