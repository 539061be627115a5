"""Snapshots of all tensors of a module, which can be restored bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxlib.runtime.preserve_state import put_back
from fxlib.utils.compare import same_bits
from fxlib_workers.trial.digests import digest_all


class ModuleSnapshot:
    """The parameters, buffers and plain tensor attributes of a module at the time of construction."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._flags = [(each, each.training) for each in module.modules()]
        self._saved = [
            (table, name, value, value.detach().clone())
            for each in module.modules()
            for table in (each._parameters, each._buffers, vars(each))
            for name, value in table.items()
            if isinstance(value, torch.Tensor)
        ]

    def restore(self) -> None:
        """Put the same tensors back under their names, with their bits and without gradients."""
        for table, name, tensor, bits in self._saved:
            tensor.grad = None
            if not same_bits(
                tensor.detach(), bits
            ):  # a write, even of equal bits, would count as a change of the weights
                put_back(tensor, bits)
            _tensors_of(table)[name] = tensor
        for each, training in self._flags:
            each.training = training

    def named(self) -> dict[str, torch.Tensor]:
        """Return the module's present tensors, by name."""
        named: dict[str, torch.Tensor] = {f"parameter {name}": value for name, value in self._module.named_parameters()}
        named |= {f"buffer {name}": value for name, value in self._module.named_buffers()}
        for path, each in self._module.named_modules():
            plain = ((name, value) for name, value in vars(each).items() if isinstance(value, torch.Tensor))
            named |= {f"attribute {path}.{name}".replace(" .", " "): value for name, value in plain}
        return named

    def digest(self) -> str:
        """Return one digest of the module's present tensors."""
        return digest_all(self.named())


def _tensors_of(table: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = table
    return tensors
