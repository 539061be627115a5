"""What a tensor of any kind holds, as plain tensors: those that are dense, strided, and of torch's own class."""

from __future__ import annotations

import torch
from torch.utils import _python_dispatch

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def wraps(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class holds other tensors in its place."""
    return _python_dispatch.is_traceable_wrapper_subclass(tensor)


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that make up a tensor, without gradients; none of one on the meta device.

    Of a sparse tensor that is indices and values, coalesced; of a quantized one integers, scales and zero points; of a
    nested one values and sizes; of a subclass that wraps others what these hold.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if wraps(tensor):
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return [part for name in names for part in plain_parts(getattr(tensor, name))]
        return [] if tensor.is_meta else [part.detach().resolve_conj().resolve_neg() for part in _parts(tensor)]


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor is worth, element by element, as one plain tensor: dense, and dequantized."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if wraps(tensor) or tensor.is_nested:
            flat = [part.reshape(-1) for part in plain_parts(tensor) if part.is_floating_point() or part.is_complex()]
            return torch.cat(flat) if flat else torch.empty(0)
        if tensor.is_quantized:
            return tensor.dequantize()
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return dense.detach().resolve_conj().resolve_neg()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_nested:
        return [tensor.values(), tensor._nested_tensor_size()]
    if tensor.is_quantized:
        return [tensor.int_repr(), *_scales(tensor)]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in _COMPRESSED:
        return [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _scales(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([tensor.q_scale()], dtype=torch.float64), torch.tensor([tensor.q_zero_point()])]
    return [
        tensor.q_per_channel_scales(),
        tensor.q_per_channel_zero_points(),
        torch.tensor([tensor.q_per_channel_axis()]),
    ]
