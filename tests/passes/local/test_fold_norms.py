"""Batch norms become part of the layers beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental import optimization
from torch.nn import functional as F

import fxlib
from fxlib.errors import FxlibWarning, PassError
from fxlib.recipes import recipes
from tests.models.nets import IMAGE, SOUND, applied, assert_as_right, called, changes, made, reasons

ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
VOLUME = torch.randn(2, 4, 5, 5, 5, generator=torch.Generator().manual_seed(4))

FOLDED: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "after a linear layer": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), ROWS, 1),
    "before a linear layer": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8)), ROWS, 1),
    "in one dimension": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)), SOUND, 1),
    "in two": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)), IMAGE, 1),
    "in three": (lambda: nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm3d(8)), VOLUME, 1),
    "without a bias": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)), IMAGE, 1),
    "without affine weights": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, affine=False)), IMAGE, 1),
    "with a large eps": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, eps=0.7)), IMAGE, 1),
    "with groups": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), IMAGE, 1),
    "for each channel": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)), IMAGE, 1),
    "padded by reflection": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8)), IMAGE, 1,
    ),
    "padded to the same size": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding="same"), nn.BatchNorm2d(8)), IMAGE, 1,
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), nn.BatchNorm2d(6)), IMAGE, 1,
    ),
    "transposed, with groups": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), IMAGE, 1,
    ),
    "transposed, in one dimension": (
        lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6)), SOUND, 1,
    ),
    "before and after": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), IMAGE, 2,
    ),
    "one after another": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)), IMAGE, 2,
    ),
    "before what pads with its own values": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")), IMAGE, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDED)
def test_a_norm_becomes_part_of_the_layer_beside_it(case: str) -> None:
    build, inputs, count = FOLDED[case]
    model = made(build())
    rewrite = applied(model, "fold_norms")
    assert (changes(rewrite, "fold_norms"), reasons(rewrite, "fold_norms")) == (count, [])
    assert not any("BatchNorm" in name for name in called(rewrite.module))
    assert_as_right(model, rewrite, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["before and after", "transposed, with groups", "after a linear layer"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_so_it_does_in_exported_graphs(case: str, *, decomposed: bool) -> None:
    build, inputs, _ = FOLDED[case]
    model = made(build())
    program: Any = torch.export.export(model, (inputs,))
    program = program.run_decompositions({}) if decomposed else program
    exported = program.module(check_guards=False)
    exported.training = False
    exported._forward_pre_hooks.clear()
    rewrite = applied(exported, "fold_norms", "dead_code")
    folded = changes(rewrite, "fold_norms")
    assert folded + len(reasons(rewrite, "fold_norms")) >= 1
    with torch.no_grad():
        torch.testing.assert_close(rewrite.module(inputs), model(inputs), rtol=1e-5, atol=1e-5)


class Functional(nn.Module):
    """A convolution and a norm as functions, with arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2, 3, 3))
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(weight=self.weight, input=x, groups=2, padding=1)
        norm = self.norm
        return F.batch_norm(
            y, norm.running_mean, norm.running_var, bias=norm.bias, weight=norm.weight, training=False, eps=0.3
        )


def test_functions_are_folded_like_modules() -> None:
    model = made(Functional())
    rewrite = applied(model, "fold_norms")
    assert called(rewrite.module) == ["conv2d"]
    assert_as_right(model, rewrite, IMAGE)


def test_a_folded_layer_has_the_name_of_the_norm_whose_value_it_gives() -> None:
    rewrite = applied(made(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))), "fold_norms")
    (layer,) = [node for node in rewrite.module.graph.nodes if node.target is F.conv2d]
    assert layer.name == "_2"


class Twice(nn.Module):
    """One convolution that is called twice, each time with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(self.first(self.conv(x))))


def test_a_layer_called_twice_gets_weights_of_its_own_for_each_norm() -> None:
    model = made(Twice())
    rewrite = applied(model, "fold_norms")
    names = {str(node.target) for node in rewrite.module.graph.nodes if node.op == "get_attr"}
    assert (changes(rewrite, "fold_norms"), len(names)) == (2, 4)
    assert_as_right(model, rewrite, IMAGE)


def test_calls_that_are_alike_share_their_weights() -> None:
    layer = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
    model = made(nn.Sequential(layer, nn.ReLU(), layer))
    rewrite = applied(model, "fold_norms")
    names = {str(node.target) for node in rewrite.module.graph.nodes if node.op == "get_attr"}
    assert (changes(rewrite, "fold_norms"), len(names)) == (2, 2)
    assert_as_right(model, rewrite, IMAGE)


class Tied(nn.Module):
    """A linear layer before a norm, whose weight another one uses as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.norm(self.one(x)))


def test_a_weight_that_is_tied_stays_what_it_is_elsewhere() -> None:
    model = made(Tied())
    assert_as_right(model, applied(model, "fold_norms"), ROWS)


def test_a_zero_shift_passes_zero_padding() -> None:
    model: Any = made(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)))
    with torch.no_grad():
        model[0].running_mean.zero_()
        model[0].bias.zero_()
    rewrite = applied(model, "fold_norms")
    assert changes(rewrite, "fold_norms") == 1
    assert_as_right(model, rewrite, IMAGE)


def test_a_batch_is_taken_for_granted_only_where_it_is_one() -> None:
    """Of rows the second dimension is the layer's; of sequences it is not, however many channels there are."""
    model = made(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    rewrite = applied(model, "fold_norms")
    sequences = torch.randn(3, 6, 4)
    with torch.no_grad(), pytest.warns(FxlibWarning, match="2 dimensions"):
        assert torch.equal(rewrite.module(sequences), model(sequences))
    assert_as_right(model, rewrite, ROWS)


class Broadcast(nn.Module):
    """A layer and its norm behind what an input is broadcast together with."""

    def __init__(
        self, layer: nn.Module, norm: nn.Module, join: Callable[[Tensor, Tensor], Tensor], *sizes: int
    ) -> None:
        super().__init__()
        self.layer, self.norm, self.join = layer, norm, join
        self.held = nn.Parameter(torch.randn(sizes))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(self.join(x, self.held)))


@pytest.mark.parametrize("join", [operator.add, lambda x, held: torch.sub(held, x), lambda x, y: x.clamp(max=y)])
def test_a_parameter_of_more_dimensions_gives_a_norm_other_channels(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Rows become a batch of sequences, whose second dimension is no longer the layer's."""
    model = made(Broadcast(nn.Linear(8, 8), nn.BatchNorm1d(8), join, 1, 8, 8))
    rewrite = applied(model, "fold_norms")
    assert (changes(rewrite, "fold_norms"), reasons(rewrite, "fold_norms")) == (0, ["NORM_OTHER_DIMENSION"])
    assert_as_right(model, rewrite, torch.randn(8, 8))


def test_nor_is_it_an_error_where_a_layer_before_has_the_rows_for_sure() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm, self.other = nn.BatchNorm1d(8), nn.BatchNorm1d(5)
            self.held = nn.Parameter(torch.randn(3, 5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.last(self.norm(self.first(x)) + self.held))

    model = made(Both())
    rewrite = applied(model, "fold_norms")
    assert changes(rewrite, "fold_norms") == 1
    assert_as_right(model, rewrite, torch.randn(5, 8))


@pytest.mark.parametrize("sizes", [(1, 4, 1, 1), (4, 1, 1), (1,), ()])
def test_one_of_no_more_dimensions_does_not(sizes: tuple[int, ...]) -> None:
    model = made(Broadcast(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), operator.mul, *sizes))
    rewrite = applied(model, "fold_norms")
    assert changes(rewrite, "fold_norms") == 1
    assert_as_right(model, rewrite, IMAGE)


class ByKeyword(nn.Module):
    """A convolution whose norm is given its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(input=self.conv(input=x))


@pytest.mark.parametrize("case", [ByKeyword, Functional])
def test_what_the_stock_pass_overlooks_is_folded(case: type[nn.Module]) -> None:
    model = made(case())
    assert changes(applied(model, "fold_norms"), "fold_norms") == 1
    stock: Any = optimization.fuse(model)
    assert {"batch_norm", "norm"} & {getattr(node.target, "__name__", node.target) for node in stock.graph.nodes}


def test_what_the_stock_pass_corrupts_is_right() -> None:
    model = made(Twice())
    stock: Any = optimization.fuse(model)
    with torch.no_grad():
        assert not torch.allclose(stock(IMAGE), model(IMAGE), rtol=1e-2, atol=1e-2)
    assert_as_right(model, applied(model, "fold_norms"), IMAGE)


def test_a_plain_graph_module_falls_back_on_itself() -> None:
    model = made(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)))
    plain: Any = symbolic_trace(model)
    rewrite = applied(plain, "fold_norms")
    with torch.no_grad():
        plain.get_submodule("0").weight.mul_(2.0)
    with torch.no_grad(), pytest.warns(FxlibWarning, match="optimize the model again"):
        assert torch.equal(rewrite.module(IMAGE), plain(IMAGE))


class AsksFirst(nn.BatchNorm2d):
    """A norm as many are written: it asks its input for rank and sizes before it works."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        torch._assert(x.size(1) == self.num_features, "other channels")
        held = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.relu(F.batch_norm(x, *held, False, 0.1, self.eps))


class Gated(nn.Module):
    """Squeeze and excitation between layers: a mean that keeps its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3), AsksFirst(8)
        self.gate, self.second, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1), AsksFirst(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(self.second(x))


def _tripled(h: Tensor) -> None:
    h.mul_(3)


@pytest.mark.parametrize("write", [lambda h: h.add_(1), _tripled], ids=["known", "opaque"])
def test_a_norm_does_not_move_behind_a_write_to_its_input(write: Callable[[Tensor], object]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(x)
            y = self.norm(h)
            write(h)
            return self.layer(y) + h

    with torch.no_grad():
        model = made(Net())
        graph = fxlib.capture(model, wrap=[_tripled])
        rewrite = recipes.apply(graph, recipes.from_passes([("fold_norms", {})]))
        assert changes(rewrite, "fold_norms") == 0
        assert reasons(rewrite, "fold_norms")[0] in ("VALUE_WRITTEN", "OPAQUE_NEIGHBOUR")
        assert torch.equal(rewrite.module(ROWS), model(ROWS))


def test_a_question_about_a_layer_s_result_keeps_no_norm_from_it() -> None:
    model = made(Gated())
    rewrite = applied(model, "fold_norms")
    assert (changes(rewrite, "fold_norms"), reasons(rewrite, "fold_norms")) == (2, [])
    assert "batch_norm" not in called(rewrite.module)
    assert called(rewrite.module).count("_assert") == 4
    assert_as_right(model, rewrite, IMAGE)
    with pytest.raises(AssertionError, match="expected 4D input"):
        rewrite.module(IMAGE[0])


def test_a_value_that_something_else_reads_keeps_its_norm() -> None:
    class Reads(Gated):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.norm(x) + x.stride(0)

    rewrite = applied(made(Reads()), "fold_norms")
    assert (changes(rewrite, "fold_norms"), reasons(rewrite, "fold_norms")) == (0, ["NORM_ALONE"])


class Branching(nn.Module):
    """A convolution whose result is used beside its norm, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Writing(nn.Module):
    """A program that writes to a norm's statistics on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("statistics", self.norm.running_mean)
        self.statistics: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.add_(1.0)
        return self.norm(self.conv(x))


class Recording(nn.Module):
    """A program with a block of its own that records gradients, in whichever mode it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.conv(x)
        return self.norm(y)


class OwnStatistics(nn.Module):
    """A norm as a function, on statistics that it would update in training with nobody counting."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.mean, self.variance = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), self.mean, self.variance, training=self.training)


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def _partly_training() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def _overflowing() -> nn.Module:
    model: Any = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, eps=0.0))
    with torch.no_grad():
        model[1].running_var.zero_()
    return model


DECLINED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "a hook on the layer": (_hooked, IMAGE, "OPAQUE_MODULE"),
    "a result used elsewhere": (Branching, IMAGE, "NORM_ALONE"),
    "no layer beside it": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), IMAGE, "NORM_ALONE"),
    "no statistics": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), IMAGE, "NORM_OF_BATCH",
    ),
    "zeros that are not shifted": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)), IMAGE, "NORM_BEFORE_PADDING",
    ),
    "borders of a transposed one": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3)), IMAGE, "NORM_BEFORE_PADDING",
    ),
    "a weight that is written": (Writing, IMAGE, "WEIGHT_WRITTEN"),
    "statistics without a counter": (OwnStatistics, IMAGE, "WEIGHT_UNCOUNTED"),
    "channels of another dimension": (
        lambda: nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(4)), SOUND, "NORM_OTHER_DIMENSION",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECLINED)
def test_what_cannot_be_folded_is_left_alone_and_says_why(case: str) -> None:
    build, inputs, reason = DECLINED[case]
    model = made(build())
    rewrite = applied(model, "fold_norms")
    assert reasons(rewrite, "fold_norms") == [reason]
    assert not rewrite.changed
    if case != "a weight that is written":
        with torch.no_grad():
            assert torch.equal(rewrite.module(inputs), model(inputs))


@pytest.mark.slow
def test_a_program_that_records_gradients_by_itself_keeps_them() -> None:
    model = made(Recording())
    with torch.no_grad():
        assert reasons(applied(model, "fold_norms"), "fold_norms") == ["MODE_BLOCKS"]
    recorded_anyway = applied(model, "fold_norms")
    with torch.no_grad():
        assert recorded_anyway.module(IMAGE).requires_grad == model(IMAGE).requires_grad


def test_a_norm_in_training_mode_is_left_alone() -> None:
    model = made(_partly_training())
    model[1].train()  # type: ignore[index]
    assert reasons(applied(model, "fold_norms"), "fold_norms") == ["NORM_IN_TRAINING"]


def test_weights_that_would_not_be_finite_are_not_folded() -> None:
    model = _overflowing().eval()
    assert reasons(applied(model, "fold_norms"), "fold_norms") == ["NOT_FINITE"]


def test_training_mode_is_refused() -> None:
    graph = fxlib.capture(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(PassError, match="eval mode"):
        recipes.apply(graph, recipes.from_passes([("fold_norms", {})]))


def test_shapes_that_do_not_fit_are_an_error_that_says_where() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(6)).eval()
    graph = fxlib.capture(model)
    before = graph.code
    with pytest.raises(PassError, match=r"node '_1'.*6 channels, and the layer beside it 8"):
        recipes.apply(graph, recipes.from_passes([("fold_norms", {})]))
    assert graph.code == before


def test_missing_weights_are_an_error_that_says_which() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).eval()
    with pytest.raises(PassError, match=r"values of 0\.weight, and they are missing"):
        applied(model, "fold_norms")


def test_operators_of_python_are_not_taken_for_norms() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operator.getitem(torch.split(x, 2, 1), 0) * 2

    rewrite = applied(Picks().eval(), "fold_norms")
    assert not rewrite.changed


def test_an_input_that_the_norm_refuses_is_refused_still() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    with torch.no_grad(), pytest.warns(FxlibWarning), pytest.raises(ValueError, match="expected 4D input"):
        fast(torch.randn(3, 8, 8))
