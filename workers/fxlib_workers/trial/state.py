"""All tensors that a module holds, kept so that they can be put back, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxlib.runtime.preserve_state import put_back
from fxlib.utils.compare import same_bits
from fxlib_workers.trial.digests import digest_all


class State:
    """Parameters, buffers and plain tensor attributes of a module, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._flags = [(each, each.training) for each in module.modules()]
        self._places = [
            (table, name, value, value.detach().clone())
            for each in module.modules()
            for table in (each._parameters, each._buffers, vars(each))
            for name, value in table.items()
            if isinstance(value, torch.Tensor)
        ]

    def restore(self) -> None:
        """Put the same tensors back in their places, with the bits and without the gradients."""
        for table, name, tensor, bits in self._places:
            tensor.grad = None
            if not same_bits(tensor.detach(), bits):  # a write, even of the same bits, counts as a change of weights
                put_back(tensor, bits)
            _places_of(table)[name] = tensor
        for each, training in self._flags:
            each.training = training

    def named(self) -> dict[str, torch.Tensor]:
        """Return what the module holds now, by name."""
        named: dict[str, torch.Tensor] = {f"parameter {name}": value for name, value in self._module.named_parameters()}
        named |= {f"buffer {name}": value for name, value in self._module.named_buffers()}
        for path, each in self._module.named_modules():
            plain = ((name, value) for name, value in vars(each).items() if isinstance(value, torch.Tensor))
            named |= {f"attribute {path}.{name}".replace(" .", " "): value for name, value in plain}
        return named

    def digest(self) -> str:
        """Return one digest of all that the module holds now."""
        return digest_all(self.named())


def _places_of(table: Any) -> dict[str, torch.Tensor]:
    places: dict[str, torch.Tensor] = table
    return places
