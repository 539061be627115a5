"""The loss whose gradient a step takes, and the optimizers that a workload can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch
from torch.fx import GraphModule
from torch.nn import functional as F

from fxlib.errors import WorkloadError
from fxlib.spec.workload import Optimizer
from fxlib.utils.pytree import tensors_in

_WITH_TARGET: Final[Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "cross_entropy": F.cross_entropy,
}


def scalar_loss(loss: str | GraphModule, output: object, target: torch.Tensor | None) -> torch.Tensor:
    """Return the loss of a model's output.

    "mean" and "sum" cover all tensors of the output that can have a gradient; the other names compare the first tensor
    with the target; a graph is called with both.

    Raises:
        WorkloadError: there is no tensor to compare, or no target to compare with.
    """
    if isinstance(loss, GraphModule):
        result: torch.Tensor = loss(output, target)
        return result
    found = [each for each in tensors_in(output) if each.is_floating_point() or each.is_complex()]
    if not found:
        raise WorkloadError("the output holds no floating-point tensor", where=f"loss {loss!r}")
    if loss in ("mean", "sum"):
        parts = [each.mean() if loss == "mean" else each.sum() for each in found]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    if target is None:
        raise WorkloadError("the batch holds no target", where=f"loss {loss!r}")
    return _WITH_TARGET[loss](found[0], target)


def build_optimizer(described: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """Return torch's own optimizer over the parameters that require gradients; None if there are none."""
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
