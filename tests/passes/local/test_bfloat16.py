"""Layers run in bfloat16, within its rounding, and the module looks from outside as it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F
from typing_extensions import override

import fxlib
from fxlib import wire
from fxlib.client.answer_policy import screen
from fxlib.errors import FxlibWarning
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.lowering import ASSERTION
from fxlib.utils.compare import relative_error
from tests.models.nets import applied, changes, graph_runs, made, reasons
from tests.passes.local.test_quantize import Net, images, rows

pytestmark = pytest.mark.usefixtures("seeded")


class Dtypes(Interpreter):
    """Notes the dtypes of what nodes take."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.taken: dict[str, torch.dtype] = {}

    @override
    def run_node(self, n: Node) -> object:
        for each in n.all_input_nodes[:1]:
            if isinstance(value := self.env[each], Tensor):
                self.taken[n.name] = value.dtype
        return super().run_node(n)


@torch.no_grad()
def test_layers_and_the_relus_between_them_run_in_bfloat16_and_the_rest_as_it_was() -> None:
    model, x = made(Net()), images(4)
    rewrite = recipes.get("bfloat16").run(fxlib.capture(model))
    assert changes(rewrite, "bfloat16") == 4  # the stem has too few weights
    found, expected = graph_runs(rewrite)(x), model(x)
    assert 1e-5 < relative_error(found, expected) < 0.02
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert rewrite.module.state_dict().keys() == model.state_dict().keys()
    run = Dtypes(rewrite.module)
    run.run(x)
    layers = {name: run.taken[name] for name in ("left", "right", "relu_1", "relu_2", "hidden", "head")}
    assert layers["relu_1"] is torch.bfloat16, "it stands between two layers"
    assert {layers[name] for name in ("left", "right", "hidden", "head")} == {torch.bfloat16}


class Functions(nn.Module):
    """Layers that are called as functions, in other forms than modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))
        self.around = nn.Conv1d(4, 64, 3, padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose1d(64, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(input=x, weight=self.weight, bias=self.bias)
        y = self.up(F.relu(self.around(y.reshape(-1, 4, 16)), inplace=True))
        return F.linear(y.mean(2), self.weight)


@torch.no_grad()
def test_functions_keywords_paddings_and_transposed_convolutions_do_the_same() -> None:
    model, x = Functions().eval(), rows(2, 64)
    rewrite = applied(model, "bfloat16", least_weights=1)
    assert changes(rewrite, "bfloat16") == 4
    assert 1e-5 < relative_error(graph_runs(rewrite)(x), model(x)) < 0.02


class Written(nn.Module):
    """Two layers, and a write to what one gives and the other takes."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.write(y)
        return self.last(y)


def _opaque(y: Tensor) -> None:
    y.mul_(3)


@pytest.mark.parametrize(
    "write",
    [lambda y: y[:, :32].zero_(), lambda y: y.add_(1), lambda y: F.relu(y, inplace=True), _opaque],
    ids=["through a view", "of it all", "by a relu whose result nobody takes", "by opaque code"],
)
@torch.no_grad()
def test_a_layer_takes_what_was_written_to_the_result_of_the_one_before(write: Callable[[Tensor], object]) -> None:
    model, x = Written(write).eval(), rows(2, 64)
    rewrite = recipes.apply(
        fxlib.capture(model, wrap=[_opaque]), recipes.from_passes([("bfloat16", {"least_weights": 1})])
    )
    assert changes(rewrite, "bfloat16") >= 1
    assert relative_error(graph_runs(rewrite)(x), model(x)) < 0.02


@pytest.mark.parametrize("write", [lambda h: h.add_(1), lambda h: h[:, :32].zero_(), _opaque])
@torch.no_grad()
def test_so_it_does_behind_a_relu_with_memory_of_its_own(write: Callable[[Tensor], object]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            write(h)
            return self.last(h)

    model, x = Net().eval(), rows(2, 64)
    rewrite = recipes.apply(
        fxlib.capture(model, wrap=[_opaque]), recipes.from_passes([("bfloat16", {"least_weights": 1})])
    )
    assert relative_error(graph_runs(rewrite)(x), model(x)) < 0.02


@torch.no_grad()
def test_a_layer_in_a_block_of_autocast_gives_that_block_s_dtype() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.inside(x)
            return y, self.outside(x)

    model, x = Net().eval(), rows(2, 64)
    for name in ("bfloat16", "quantize"):
        rewrite = applied(model, name, least_weights=1)
        assert (changes(rewrite, name), reasons(rewrite, name)) == (1, ["AUTOCAST"])
        assert [each.dtype for each in graph_runs(rewrite)(x)] == [torch.bfloat16, torch.float32]


@torch.no_grad()
def test_weights_of_another_dtype_are_left_alone() -> None:
    rewrite = applied(nn.Linear(8, 8).eval().double(), "bfloat16", least_weights=1)
    assert reasons(rewrite, "bfloat16") == ["NOT_BFLOAT16"]


@torch.no_grad()
def test_it_travels_and_a_launcher_takes_it_and_weights_that_change_bring_the_original_back() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), rows(2, 64)
    captured = fxlib.capture(model)
    sent = wire.encode(fxlib.optimize(captured, "bfloat16"), beside=captured)
    bound = wire.decode(wire.parse(wire.serialize(sent.graph)), blobs=sent.blobs, root=captured)
    assert isinstance(bound, CapturedModule)
    screen(bound, captured, passes=recipes.get("bfloat16").passes)
    assert 0.0 < relative_error(bound(x), model(x)) < 0.02
    model.get_parameter("0.weight").mul_(2)
    with pytest.warns(fxlib.errors.FxlibWarning, match="have changed: optimize the model again"):
        assert torch.equal(bound(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_under_autocast_the_original_runs_whose_results_have_its_dtype(dtype: torch.dtype) -> None:
    model, x = made(Net()), images(4)
    module = recipes.get("bfloat16").run(fxlib.capture(model)).module
    with torch.autocast("cpu", dtype), pytest.warns(FxlibWarning, match="autocast is on"):
        found, expected = module(x), model(x)
    assert found.dtype is dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("behind", [nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(64, 64))], ids=["one", "two"])
@torch.no_grad()
def test_a_layer_refuses_an_input_that_the_original_refuses(dtype: torch.dtype, behind: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(64, 64), behind).eval()
    rewrite = applied(model, "bfloat16", least_weights=1)
    (check,) = rewrite.module.graph.find_nodes(op="call_function", target=ASSERTION)
    assert check.args[0].op == "placeholder", "a layer's own result has its dtype"
    for each in (model, rewrite.module):
        with pytest.raises(RuntimeError, match="dtype"):
            each(torch.ones(2, 64, dtype=dtype))
