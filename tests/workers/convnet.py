"""A convolutional network as packages have them, and the step of whoever serves it."""

from __future__ import annotations

import torch
from torch import nn

from fxlib.spec.workload import Workload


class ConvNet(nn.Module):
    """Blocks of convolution, norm and activation around a sum, as in a residual network, in eval mode."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = _block(3, width)
        self.blocks = nn.ModuleList([_block(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)
        for norm in (each for each in self.modules() if isinstance(each, nn.BatchNorm2d)):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 3, height, width), to scores of shape (batch, 10)."""
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


def images(batch: int = 8, threads: int = 1, **step: object) -> Workload:
    """Forwards of so many images at a time."""
    fields = {"mode": "forward", "threads": threads, **step}
    return Workload.describe([torch.randn(batch, 3, 32, 32)], **fields)  # type: ignore[arg-type]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
