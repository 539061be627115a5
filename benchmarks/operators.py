"""How many operators a ResNet50 is, in the representations that programs of torch are transformed in.

Case `{model}`. Metric `operators`, all nodes of a graph counted. Arms: `fxlib` (`fxlib.capture`, layers kept whole);
`fxlib_export` (captured by `torch.export`: every function, and every parameter that is read, is a node); `jit_trace`
and `jit_script` (nodes of the inlined TorchScript graph, constants and attribute reads among them, and those in blocks
of other nodes); `paper_fx`, `paper_jit_trace` and `paper_jit_script` are what the paper of torch.fx gives for
torchvision's ResNet50: 445, 860 and 2614.

The paper does not say what it counts. Functions and parameters as nodes, as in `fxlib_export`, come within one of its
445; layers kept whole do not. TorchScript's counts depend on how deep a package nests its layers and how many options
its code asks for, and pytorchcv is not torchvision.

Source of the paper's: J. Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep Learning in
Python", MLSys 2022, https://arxiv.org/abs/2112.08429.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import fxlib
from benchmarks.report import Row, main, row
from tests.models import zoo

MODELS = ("resnet50", "resnet20_cifar10")
QUICK_MODELS = ("resnet20_cifar10",)
PAPER = {"paper_fx": 445, "paper_jit_trace": 860, "paper_jit_script": 2614}
SKIPPED = ("pad", "bn", "activ", "identity_conv")
"""Layers that blocks of pytorchcv do not have where their options leave them out."""


def measure(quick: bool) -> Sequence[Row]:
    """Count every model in every representation."""
    return [
        row(benchmark="operators", case={"model": name}, arm=arm, metric="operators", unit="", samples=[count])
        for name in (QUICK_MODELS if quick else MODELS)
        for arm, count in counts(name)
    ]


def counts(name: str) -> Iterator[tuple[str, int]]:
    """Yield each representation of one model and its operators."""
    model, inputs = zoo.build(name)
    yield "fxlib", len(fxlib.capture(model).graph.nodes)
    yield "fxlib_export", len(fxlib.capture(model, sample_inputs=inputs, how="export").graph.nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is what is compared with
        yield "jit_trace", script_nodes(torch.jit.trace(model, inputs))
        yield "jit_script", script_nodes(torch.jit.script(complete(model)))
    if name == "resnet50":
        yield from PAPER.items()


def complete(model: nn.Module) -> nn.Module:
    """Give blocks the layers that they skip: TorchScript compiles the branches that are never taken, too."""
    blocks = [each for each in model.modules() if type(each).__module__.startswith("pytorchcv.")]
    for block in blocks:
        for missing in SKIPPED:
            if not (isinstance(block, nn.Sequential) or hasattr(block, missing)):
                setattr(block, missing, nn.Identity())
    return model


def script_nodes(module: Any) -> int:
    """Count the nodes of a TorchScript module's inlined graph, those inside of others included."""
    return sum(nodes_within(node) for node in module.inlined_graph.nodes())


def nodes_within(node: Any) -> int:
    """Count a node and those of its blocks."""
    return 1 + sum(nodes_within(each) for block in node.blocks() for each in block.nodes())


if __name__ == "__main__":
    main("operators", measure, about="Operators of a ResNet50, by representation.")
