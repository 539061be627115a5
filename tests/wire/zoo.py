"""A module of each torch.nn class, and inputs on which it runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Case = tuple[Callable[[], nn.Module], tuple[Any, ...]]


def _cases() -> dict[str, Case]:
    vector, image, volume, sequence = (2, 6), (2, 4, 8, 8), (2, 4, 8, 8, 8), (2, 4, 8)
    cases: dict[str, Case] = {}

    def add(shape: tuple[int, ...], *names: str, args: tuple[Any, ...] = (), more: tuple[Any, ...] = ()) -> None:
        for name in names:
            cls = getattr(nn, name)
            cases[name] = (partial(cls, *args), (torch.randn(shape), *more))

    add(vector, "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU")
    add(vector, "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus")
    add(vector, "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Identity", "Flatten", "CosineSimilarity", more=())
    add(vector, "LogSoftmax", "Softmax", "Softmin", args=(1,))
    add(image, "Softmax2d")
    add(vector, "Threshold", args=(0.1, 20))
    add(vector, "Dropout", "AlphaDropout", "FeatureAlphaDropout")
    add(sequence, "Dropout1d")
    add(image, "Dropout2d")
    add(volume, "Dropout3d")
    add(vector, "Linear", args=(6, 3))
    add(vector, "Bilinear", args=(6, 6, 3), more=(torch.randn(vector),))
    cases["CosineSimilarity"] = (nn.CosineSimilarity, (torch.randn(vector), torch.randn(vector)))
    cases["PairwiseDistance"] = (nn.PairwiseDistance, (torch.randn(vector), torch.randn(vector)))
    for shape, dim in ((sequence, 1), (image, 2), (volume, 3)):
        add(shape, f"BatchNorm{dim}d", f"InstanceNorm{dim}d", args=(4,))
        add(shape, f"Conv{dim}d", f"ConvTranspose{dim}d", args=(4, 6, 3))
        add(shape, *(f"{kind}Pad{dim}d" for kind in ("Circular", "Reflection", "Replication", "Zero")), args=(1,))
        add(shape, f"ConstantPad{dim}d", args=(1, 0.5))
        add(shape, f"AdaptiveAvgPool{dim}d", f"AdaptiveMaxPool{dim}d", f"AvgPool{dim}d", f"MaxPool{dim}d", args=(2,))
        add(shape, f"LPPool{dim}d", args=(2, 2))
    for dim, shape in ((2, image), (3, volume)):
        add(shape, f"FractionalMaxPool{dim}d", args=(2, 3))
    for dim, shape in ((1, (2, 4, 4)), (2, (2, 4, 4, 4)), (3, (2, 4, 4, 4, 4))):
        pooled, indices = getattr(torch.nn.functional, f"max_pool{dim}d")(torch.randn(shape), 2, return_indices=True)
        cls = getattr(nn, f"MaxUnpool{dim}d")
        cases[cls.__name__] = (partial(cls, 2), (pooled, indices))
    add(image, "ChannelShuffle", "PixelShuffle", "PixelUnshuffle", args=(2,))
    add(image, "GroupNorm", args=(2, 4))
    add(vector, "LayerNorm", "RMSNorm", args=(6,))
    add(image, "LocalResponseNorm", "CrossMapLRN2d", args=(2,))
    add(image, "Unfold", args=(2,))
    add((2, 16, 9), "Fold", args=((4, 4), (2, 2)))
    add((2, 6), "Unflatten", args=(1, (2, 3)))
    add(image, "UpsamplingBilinear2d", "UpsamplingNearest2d", "Upsample", args=(None, 2))
    _losses(cases)
    tokens = torch.randint(0, 10, (2, 5))
    cases["Embedding"] = (lambda: nn.Embedding(10, 4, padding_idx=0), (tokens,))
    cases["EmbeddingBag"] = (lambda: nn.EmbeddingBag(10, 4, mode="sum"), (tokens,))
    add((2, 5, 6), "RNN", "GRU", "LSTM", args=(6, 4, 2))
    add(vector, "RNNCell", "GRUCell", "LSTMCell", args=(6, 4))
    cases["MultiheadAttention"] = (lambda: nn.MultiheadAttention(8, 2), tuple(torch.randn(3, 5, 2, 8)))
    cases["TransformerEncoderLayer"] = (lambda: nn.TransformerEncoderLayer(8, 2, 16), (torch.randn(5, 2, 8),))
    cases["TransformerDecoderLayer"] = (lambda: nn.TransformerDecoderLayer(8, 2, 16), tuple(torch.randn(2, 5, 2, 8)))
    cases["TransformerEncoder"] = (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
        (torch.randn(5, 2, 8),),
    )
    cases["TransformerDecoder"] = (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
        tuple(torch.randn(2, 5, 2, 8)),
    )
    cases["Sequential"] = (lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU()), (torch.randn(vector),))
    return cases


def _losses(cases: dict[str, Case]) -> None:
    scores, other, classes = torch.randn(4, 5), torch.randn(4, 5), torch.randint(0, 5, (4,))
    signs = torch.tensor([1.0, -1, 1, -1])
    for name in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss", "BCEWithLogitsLoss", "KLDivLoss"):
        cases[name] = (partial(getattr(nn, name), reduction="sum"), (scores, other.sigmoid()))
    for name in ("SoftMarginLoss", "HingeEmbeddingLoss"):
        cases[name] = (getattr(nn, name), (scores, other.sign()))
    for name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"):
        cases[name] = (getattr(nn, name), (scores, classes))
    cases["CrossEntropyLoss"] = (lambda: nn.CrossEntropyLoss(weight=torch.rand(5)), (scores, classes))
    cases["BCELoss"] = (nn.BCELoss, (scores.sigmoid(), other.sigmoid()))
    cases["MultiLabelMarginLoss"] = (nn.MultiLabelMarginLoss, (scores, torch.randint(0, 5, (4, 5))))
    cases["MultiLabelSoftMarginLoss"] = (nn.MultiLabelSoftMarginLoss, (scores, other.sigmoid()))
    cases["CosineEmbeddingLoss"] = (nn.CosineEmbeddingLoss, (scores, other, signs))
    cases["MarginRankingLoss"] = (nn.MarginRankingLoss, (scores[:, 0], other[:, 0], signs))
    cases["TripletMarginLoss"] = (nn.TripletMarginLoss, (scores, other, scores + other))
    cases["TripletMarginWithDistanceLoss"] = (nn.TripletMarginWithDistanceLoss, (scores, other, scores + other))
    cases["GaussianNLLLoss"] = (nn.GaussianNLLLoss, (scores, other, torch.rand(4, 5)))
    cases["CTCLoss"] = (
        nn.CTCLoss,
        (torch.randn(8, 2, 5).log_softmax(2), torch.randint(1, 5, (2, 3)), torch.tensor([8, 8]), torch.tensor([3, 3])),
    )
    cases["AdaptiveLogSoftmaxWithLoss"] = (lambda: nn.AdaptiveLogSoftmaxWithLoss(5, 8, [3]), (scores, classes))


CASES = _cases()
