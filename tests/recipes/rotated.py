"""A model that turns the recording of gradients off and on, as those of transformers with rotary embeddings do."""

import torch
from torch import nn


class Rotated(nn.Module):
    """Computes a part without recording gradients, as rotary embeddings do, and has a norm to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            turned = x.cos()
        return self.norm(self.linear(x)) * turned
