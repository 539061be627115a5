"""The optimizers that a workload can name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxlib.spec.workload import Optimizer


def build(described: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """Return torch's own optimizer over the parameters that take gradients; None if there is nothing to do."""
    trained = [each for each in parameters if each.requires_grad]
    lr, decay = described.lr, described.weight_decay
    if not trained or described.name == "none":
        return None
    match described.name:
        case "adagrad":
            return torch.optim.Adagrad(trained, lr=lr, weight_decay=decay)
        case "adam":
            return torch.optim.Adam(trained, lr=lr, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(trained, lr=lr, weight_decay=decay)
        case _:
            return torch.optim.SGD(trained, lr=lr, momentum=described.momentum, weight_decay=decay)
