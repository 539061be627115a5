"""Convolutional nets work channels last inside, and look from outside as they did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxlib.errors import FxlibWarning
from tests.models.nets import applied, assert_as_right, called, changes, graph_runs, made, reasons

IMAGE = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def _conv(inputs: int = 4, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Residual(nn.Module):
    """Two branches, one of them written in place, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = _conv(), _conv(), _conv()
        self.down, self.head = nn.Conv2d(8, 4, 2, stride=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        y = torch.cat([self.left(x), F.interpolate(F.max_pool2d(self.right(x), 2), scale_factor=2.0)], 1)
        y = self.down(y)
        y += 1.0
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Picture(nn.Module):
    """Returns what its convolutions make, twice, and its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _conv(), nn.ReLU(inplace=True), _conv(), nn.SiLU(), _conv(), nn.ConvTranspose2d(4, 4, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Viewed(nn.Module):
    """Writes to a convolution's result through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(_conv(), _conv(), _conv(), _conv())
        self.last = _conv()

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.layers(x))
        y.view(-1).mul_(2.0)
        return y + 1


class Shuffling(nn.Module):
    """Few convolutions between views, for each of which the layout would have to change."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _conv(), _conv()

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = y.view(2, 2, 2, 8, 8).transpose(1, 2).reshape(2, 4, 8, 8)
        return self.other(y)


@pytest.mark.parametrize("build", [Residual, Picture])
@pytest.mark.parametrize("folded", [(), ("fold_norms",)], ids=["alone", "after folding"])
def test_a_net_computes_the_same_and_returns_the_same_strides(
    build: Callable[[], nn.Module], folded: tuple[str, ...]
) -> None:
    model = made(build())
    rewrite = applied(model, *folded, "channels_last")
    assert changes(rewrite, "channels_last") == 4
    assert_as_right(model, rewrite, IMAGE)


def test_layouts_change_at_the_borders_alone() -> None:
    rewrite = applied(made(Residual()), "channels_last")
    assert [name for name in called(rewrite.module) if name in ("contiguous", "clone")] == ["contiguous"] * 2
    weights = [value for name, value in rewrite.module.named_buffers() if name.endswith("channels_last")]
    assert len(weights) == 4
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in weights)


def test_convolutions_inside_get_and_give_channels_last() -> None:
    module = graph_runs(applied(made(Picture()), "channels_last"))
    seen: list[bool] = []

    class Watching(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Tensor:
            value: Tensor = super().run_node(n)
            if getattr(n.target, "__name__", "").startswith("conv"):
                seen.append(value.is_contiguous(memory_format=torch.channels_last))
            return value

    with torch.no_grad():
        Watching(module).run(IMAGE)
    assert seen == [True] * 4


def test_a_result_written_through_a_view_keeps_its_layout() -> None:
    model = made(Viewed())
    rewrite = applied(model, "channels_last")
    assert reasons(rewrite, "channels_last") == ["VALUE_WRITTEN"]
    assert_as_right(model, rewrite, IMAGE)


def test_where_too_little_gains_nothing_changes() -> None:
    rewrite = applied(made(Shuffling()), "channels_last")
    assert set(reasons(rewrite, "channels_last")) <= {"LAYOUT_MIXED", "LAYOUT_OTHER", "RANK_UNKNOWN"}
    assert not rewrite.changed


def test_a_single_image_runs_the_original() -> None:
    model = made(Picture())
    rewrite = applied(model, "channels_last")
    with torch.no_grad(), pytest.warns(FxlibWarning, match="4 dimensions"):
        assert torch.equal(rewrite.module(IMAGE[0]), model(IMAGE[0]))


class Ordered(nn.Module):
    """Convolutions that meet values of another order, before them or after."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.convolutions = nn.Sequential(*(_conv() for _ in range(4)))
        if case == "weights":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # which torch documents and its stubs lack

    def forward(self, x: Tensor) -> Tensor:
        if self.case == "entry":
            return self.convolutions(x.contiguous(memory_format=torch.channels_last))
        if self.case == "transposed":
            return x.transpose(2, 3) * torch.sigmoid(self.convolutions(x))
        if self.case == "channels last":
            return x.contiguous(memory_format=torch.channels_last) + self.convolutions(x)
        return self.convolutions(x)


@pytest.mark.parametrize("case", ["entry", "transposed", "channels last", "weights"])
def test_what_lies_in_another_order_keeps_its_strides(case: str) -> None:
    model = made(Ordered(case))
    assert_as_right(model, applied(model, "channels_last"), IMAGE)


class Sparse(nn.Module):
    """Mixes what convolutions make by a sparse matrix, which lies in no order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*(_conv() for _ in range(4)))
        self.register_buffer("mixing", torch.eye(8).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return self.mixing @ self.convolutions(x).flatten(0, 2)[:8]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_buffer_beside_convolutions_is_left_alone() -> None:
    model = made(Sparse())
    rewrite = applied(model, "channels_last")
    assert rewrite.changed
    with torch.no_grad():
        assert torch.allclose(rewrite.module(IMAGE), model(IMAGE), atol=1e-5)
