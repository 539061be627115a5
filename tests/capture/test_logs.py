"""What a capture decided is logged at DEBUG, and that an original runs in place of a graph at INFO."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import FxlibWarning

X = torch.linspace(-1, 1, 6).view(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.scale


class Sized(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.shape[0] > 1 else -x)


def test_a_capture_tells_the_size_of_the_graph_and_of_its_guards(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxlib.capture")
    module = fxlib.capture(Net())
    (text,) = caplog.messages
    assert text.startswith(f"captured Net: {len(module.graph.nodes)} nodes, 0 remote calls, ")


def test_a_capture_tells_why_it_exports(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxlib.capture")
    fxlib.capture(Sized(), sample_inputs=[X])
    assert caplog.messages[0].startswith("Sized is exported, since it cannot be traced: ")
    assert "a traced value decides" in caplog.messages[0]


def test_the_first_run_of_an_original_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fxlib.runtime")
    module = fxlib.capture(model := Net())
    module(X)
    assert not caplog.messages
    model.scale = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)
        for _ in range(3):
            module(X)
    assert caplog.messages == ["the original of Net runs: Net.scale is not what it was at capture"]
