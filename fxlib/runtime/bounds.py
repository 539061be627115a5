"""Checks of values on which operators of torch rely, for processes that run the graphs of others.

Some operators read offsets and lengths from tensors without checking them. No rule about a graph says what a tensor
will hold, so the values are checked when the operator is called, in front of its kernel, however it was reached. A
process that runs only its own graphs needs no such checks, and pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

_LSTM_GATES = 4
_INCLUDES_LAST = 4
"""The position of `include_last_offset` among the arguments that follow the offsets."""
_LEAST_SCALE = 1e-9
"""The least scale of an upsampling; the inverse of a smaller one, times a position, may exceed all integers."""


@cache
def install() -> torch.library.Library:
    """Check these operators in this process from now on; the checks stay until the process ends.

    An operator that is called out of bounds raises IndexError, as operators do that check by themselves.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, check in CHECKS.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload)
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
            for key in ("AutogradCPU", "CPU"):  # autograd enters the operator's parts before any later key is asked
                library.impl(operator, _checked_parts(operator, check), key)
        else:
            library.impl(operator, _checked(operator, check), "BackendSelect", with_keyset=True)
    return library


def _checked(operator: Any, check: Callable[..., None]) -> Callable[..., Any]:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        check(*args)
        return operator.redispatch(keyset & below, *args, **kwargs)

    return kernel


def _checked_parts(operator: Any, check: Callable[..., None]) -> Callable[..., Any]:
    """Check an operator that is made of others."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        check(*args)
        return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return kernel


def _check_bags(_: Tensor, indices: Tensor, offsets: Tensor, *rest: Any) -> None:
    _check_offsets(indices, offsets)
    ends = len(rest) > _INCLUDES_LAST and rest[_INCLUDES_LAST] and offsets.device.type == "cpu" and offsets.numel()
    if ends and int(offsets[-1]) != indices.numel():  # the indices left would belong to a bag that the gradient lacks
        raise IndexError(f"the last offset of embedding bags is {int(offsets[-1])}, and not {indices.numel()}")


def _check_offsets(indices: Tensor, offsets: Tensor) -> None:
    _within(offsets, indices.numel(), "offsets of an embedding bag")
    if indices.numel() and not offsets.numel():
        raise IndexError(f"{indices.numel()} indices belong to no embedding bag")


def _check_bags_again(
    gradient: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, _: Tensor, __: Tensor, rows: int, *___: Any
) -> None:
    _check_saved_bags(gradient, rows, indices, offsets, bags)


def _check_weighted_bags_again(
    gradient: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, *_: Any
) -> None:
    _check_saved_bags(gradient, weight.shape[0], indices, offsets, bags)


def _check_saved_bags(gradient: Tensor, rows: int, indices: Tensor, offsets: Tensor, bags: Tensor) -> None:
    _within(indices, rows - 1, "indices of an embedding bag")
    _check_offsets(indices, offsets)
    _within(offsets[:1], 0, "the first offset of embedding bags")
    _within(bags, gradient.shape[0] - 1, "bags of indices")


def _check_rows_again(_: Tensor, indices: Tensor, rows: int, *__: Any) -> None:
    _within(indices, rows - 1, "indices of an embedding")


def _check_counted_rows_again(_: Tensor, indices: Tensor, rows: int, __: int, counted: bool) -> None:
    if counted:  # otherwise, the kernel skips what is no row
        _check_rows_again(_, indices, rows)


def _check_gathered_again(values: Tensor, dim: int, indices: Tensor, *_: Any) -> None:
    if values.dim():
        _within(indices, values.shape[dim] - 1, "indices of a gather")


def _check_maxima(dims: int, _: Tensor, values: Tensor, *rest: Any) -> None:
    """Check the positions of maxima: they are a result of the forward, and a graph may have written over them."""
    _within(rest[-1], prod(values.shape[-dims:]) - 1, "positions of the maxima of a pooling")


def _check_alignment_again(_: Tensor, *rest: Any) -> None:
    _check_alignment(*rest)


def _check_packed(values: Tensor, sizes: Tensor, *_: Any) -> None:
    """Check the lengths of a packed sequence, which the kernel reads one beside the other in memory."""
    steps = sizes.tolist() if sizes.dim() == 1 and sizes.is_contiguous() else []
    if not steps or min(steps) < 0 or steps != sorted(steps, reverse=True) or sum(steps) != values.shape[0]:
        raise IndexError("the lengths of a packed sequence are not those of its values")


def _check_scales(_: Tensor, __: Any, *rest: Any) -> None:
    if any(isinstance(each, float) and 0.0 < each < _LEAST_SCALE for each in rest):
        raise IndexError(f"the scales {rest} lead beyond all positions of an image")


def _check_alignment(scores: Tensor, targets: Tensor, scored: Any, wanted: Any, *_: Any) -> None:
    _within(targets, scores.shape[-1] - 1, "targets of a CTC loss")
    steps, classes = _list(scored), _list(wanted)
    batch = scores.shape[1] if scores.dim() == 3 else 1
    fits = len(steps) == len(classes) == batch and all(0 <= each <= scores.shape[0] for each in steps)
    if targets.dim() == 2:  # targets have a row for each sequence, or else stand one after another
        fits = fits and targets.shape[0] == batch and all(0 <= each <= targets.shape[1] for each in classes)
    else:
        fits = fits and min(classes, default=0) >= 0 and sum(classes) <= targets.numel()
    if not fits:
        raise IndexError("the lengths of a CTC loss do not fit its scores and targets")


def _check_statistics(values: Tensor, *rest: Any) -> None:
    if values.dim() < 2 or any(tuple(each.shape) != (values.shape[1],) for each in rest if isinstance(each, Tensor)):
        raise IndexError("weights and statistics of a batch norm are not as many as its channels")


def _check_groups(_: Tensor, weight: Tensor | None, bias: Tensor | None, *__: Any) -> None:
    if any(each is not None and not each.is_contiguous() for each in (weight, bias)):
        raise IndexError("a group norm reads weight and bias beside each other: make them contiguous first")


def _check_own_statistics(values: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, *_: Any) -> None:
    _check_statistics(values, weight, bias)
    if not training:
        raise IndexError("a batch norm without statistics uses those of its batch, in training alone")


def _check_recurrent(
    gates: int, values: Tensor, hidden: Any, weights: Sequence[Tensor], biases: bool, *rest: Any
) -> None:
    """Check that states and weights have the sizes of `torch.nn.RNNBase`, by which the kernels index."""
    layers, _, _, bidirectional, *first = rest
    directions = 2 if bidirectional else 1
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    cells = layers * directions
    projects = gates == _LSTM_GATES and len(weights) == cells * (3 + 2 * biases)
    per_cell = 2 + 2 * biases + projects
    fits = values.dim() == 3 and layers > 0 and len(weights) == cells * per_cell and states[0].dim() == 3
    if fits:
        batch, out, size = values.shape[0 if first[:1] == [True] else 1], states[0].shape[2], states[-1].shape[-1]
        fits = tuple(states[0].shape) == (cells, batch, out) and tuple(states[-1].shape) == (cells, batch, size)
        for cell in range(cells if fits else 0):
            width = values.shape[2] if cell < directions else out * directions
            wanted = [(gates * size, width), (gates * size, out), *[(gates * size,)] * (2 * biases)]
            wanted += [(out, size)] * projects
            given = weights[cell * per_cell : (cell + 1) * per_cell]
            fits = fits and [tuple(each.shape) for each in given] == wanted and (projects or out == size)
    if not fits:
        raise IndexError("states and weights of a recurrent operator do not have the sizes of its layers")


def _check_weight_norm(values: Tensor, magnitudes: Tensor, dim: int = 0) -> None:
    if dim == -1:  # there is one norm for all elements, in plain arithmetic
        return
    wanted = [1] * values.dim()
    if 0 <= dim < values.dim():
        wanted[dim] = values.shape[dim]
    if values.dim() < 2 or not values.numel() or not 0 <= dim < values.dim() or list(magnitudes.shape) != wanted:
        raise IndexError(f"magnitudes of a weight norm have the shape {tuple(magnitudes.shape)}, and not {wanted}")


def _check_median(values: Tensor, dim: int, *_: Any) -> None:
    # The kernel steps through memory as if elements that share an address had addresses of their own.
    if any(step == 0 and size > 1 for step, size in zip(values.stride(), values.shape, strict=True)):
        raise IndexError(f"a median along dimension {dim} of an expanded tensor: make it contiguous first")


def _within(values: Tensor, last: int, what: str) -> None:
    if values.device.type == "cpu" and values.numel():
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > last:
            raise IndexError(f"{what} reach from {low} to {high}, and may from 0 to {last}")


def _list(lengths: Tensor | Sequence[int]) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


CHECKS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("_embedding_bag.default", "_embedding_bag_forward_only.default"), _check_bags),
    **dict.fromkeys(("_ctc_loss.default", "_ctc_loss.Tensor"), _check_alignment),
    "_native_batch_norm_legit.default": _check_statistics,
    "_native_batch_norm_legit_functional.default": _check_statistics,
    "_native_batch_norm_legit_no_training.default": _check_statistics,
    "_native_batch_norm_legit.no_stats": _check_own_statistics,
    "native_group_norm.default": _check_groups,
    "lstm.input": partial(_check_recurrent, _LSTM_GATES),
    "gru.input": partial(_check_recurrent, 3),
    "rnn_tanh.input": partial(_check_recurrent, 1),
    "rnn_relu.input": partial(_check_recurrent, 1),
    **dict.fromkeys(("_weight_norm.default", "_weight_norm_interface.default"), _check_weight_norm),
    **dict.fromkeys(("median.dim", "nanmedian.dim"), _check_median),
    **dict.fromkeys((f"{name}.data" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")), _check_packed),
    **dict.fromkeys(
        (
            f"upsample_{name}.{overload}"
            for name in ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
            for overload in ("default", "out")
        ),
        _check_scales,
    ),
    # What a backward trusts may have been written over since, by another tensor of the same memory.
    "max_pool2d_with_indices_backward.default": partial(_check_maxima, 2),
    "max_pool3d_with_indices_backward.default": partial(_check_maxima, 3),
    "adaptive_max_pool2d_backward.default": partial(_check_maxima, 2),
    "adaptive_max_pool3d_backward.default": partial(_check_maxima, 3),
    "embedding_dense_backward.default": _check_counted_rows_again,
    "embedding_sparse_backward.default": _check_rows_again,
    "_embedding_bag_backward.default": _check_bags_again,
    "_embedding_bag_per_sample_weights_backward.default": _check_weighted_bags_again,
    "_gather_sparse_backward.default": _check_gathered_again,
    **dict.fromkeys(("_ctc_loss_backward.default", "_ctc_loss_backward.Tensor"), _check_alignment_again),
}
"""The checked operators of `torch.ops.aten`. Those that `torch.batch_norm` calls are absent: it checks by itself."""
