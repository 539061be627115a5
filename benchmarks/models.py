"""Models that nobody here wrote: whether they are captured, sent and rewritten as the programs that they are.

Each model is small, with weights and statistics drawn from a seed, and is checked in a process of its own, which may
take 120 s of processor time and 6 GiB. `captured` says how, and `problem` what is not as it should be: a refusal has
its line. Metrics, 1 where it is so: `same_bits` of the graph that was sent and decoded (arm `wire`), and of outputs,
gradients and buffers after the recipe `training`, with the model in training mode; `within`, for the results of the
recipe `inference`: their `error` beside the model in float64 is at most 8 times the `model`'s own and 64 roundings, or
1e-4 beside the model where that has no result in float64. `us` are those of a forward without gradients, on one thread,
of `eager` and of the `captured` model, and of one check of all conditions (`guards`); ratios are of paired blocks. Rows
of `all` count models, and have the median of these ratios. Packages that are not installed are left out:
`pip install --no-deps torchvision timm vit-pytorch einops deepctr-torch torch-rechub pillow` brings all (torchvision
0.28), beside pytorchcv and transformers. `--quick` checks the first model of each package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Final

from benchmarks.report import Case, Row, main, median_interval, ratio_interval, row
from benchmarks.zoo_parts.check_model import CPU_S, Found
from tests.models.zoo import models

MODELS: Final = {
    "pytorchcv": [
        *("resnet10", "preresnet10", "seresnet10", "resnext14_16x4d", "dla34", "dpn68", "peleenet", "bninception"),
        *("mobilenetv2_wd4", "efficientnet_b0", "mnasnet_small", "ghostnet", "igcv3_wd4", "shufflenetv2_wd2"),
        *("squeezenet_v1_1", "mobilenet_wd4", "shufflenet_g1_wd4", "resnet20_cifar10", "densenet40_k12_cifar10"),
        *("diaresnet20_cifar10", "nin_cifar10"),
    ],
    "torchvision": [
        *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5"),
        *("regnet_y_400mf", "swin_t", "googlenet", "densenet121", "convnext_tiny", "lraspp_mobilenet_v3_large"),
    ],
    "timm": [
        *("test_resnet", "test_vit", "test_vit2", "test_vit4", "test_convnext", "test_convnext2", "test_convnext3"),
        *("test_byobnet", "test_efficientnet", "test_efficientnet_gn", "test_nfnet", "test_mambaout"),
        "mobilenetv3_small_050",
    ],
    "vit_pytorch": [
        *("vit.ViT", "simple_vit.SimpleViT", "deepvit.DeepViT", "parallel_vit.ViT", "vit_for_small_dataset.ViT"),
        *("simple_vit_with_register_tokens.SimpleViT", "learnable_memory_vit.ViT", "cait.CaiT", "xcit.XCiT"),
        *("pit.PiT", "cct.cct_2", "levit.LeViT", "nest.NesT", "max_vit.MaxViT", "cvt.CvT", "t2t.T2TViT"),
    ],
    "transformers": models(family="transformer"),
    "deepctr_torch": [
        *("WDL", "DeepFM", "xDeepFM", "DCN", "DCNMix", "AFM", "NFM", "PNN", "AutoInt", "FiBiNET", "IFM", "DIFM"),
        *("AFN", "CCPM", "ONN", "MLR"),
    ],
    "torch_rechub": [
        *("DeepFM", "WideDeep", "DCN", "DCNv2", "EDCN", "AFM", "AutoInt", "FiBiNet", "DIN", "BST"),
        *("SharedBottom", "MMOE", "PLE", "ESMM"),
    ],
}
"""Names of models by the package that has them."""
WAIT_S: Final = 20 * CPU_S
"""Seconds after which a model is given up: the machine may be others', too."""


def check(family: str, net: str) -> Found:
    """Check one model in a process of its own; whatever ends that is a problem of the model's."""
    command = [sys.executable, "-m", "benchmarks.zoo_parts.check_model", family, net]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Found(captured="ended", problems=[f"not over within {WAIT_S:g} s"])
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        return Found(captured="ended", problems=[f"its process ended with {ended.returncode}: {last}"])
    return Found(**json.loads(lines[-1]))


def rows(name: str, found: Found) -> Iterator[Row]:
    """Return the figures of one model."""
    case: Case = {"model": name, "captured": found.captured, "problem": "; ".join(found.problems)}
    figure = partial(row, benchmark="models", case=case)
    yield figure(arm="wire", metric="same_bits", unit="", samples=[found.same_on_wire])
    yield figure(arm="training", metric="same_bits", unit="", samples=[found.same_in_training])
    yield figure(arm="inference", metric="within", unit="", samples=[found.within])
    for arm, error in (("inference", found.error), ("model", found.own_error)):
        if error is not None:
            yield figure(arm=arm, metric="error", unit="", samples=[error])
    if not found.guards_us:
        return
    arms = {"eager": found.eager_us, "captured": found.captured_us, "guards": found.guards_us}
    for arm, samples in arms.items():
        yield figure(arm=arm, metric="us", unit="us", samples=samples)
    for arm in ("captured", "guards"):
        value, low, high = ratio_interval(arms[arm], arms["eager"])
        yield Row(
            benchmark="models", case=case, arm=f"{arm}/eager", metric="ratio", value=value, unit="", low=low,
            high=high, runs=len(found.eager_us),
        )  # fmt: skip


def summary(measured: Sequence[Row]) -> Iterator[Row]:
    """Count the models of each package, and of all."""
    families = list(dict.fromkeys(str(each.case["model"]).partition("/")[0] for each in measured))
    for family in [*families, "all"]:
        own = [each for each in measured if family in ("all", str(each.case["model"]).partition("/")[0])]
        ways = [str(each.case["captured"]) for each in own if each.arm == "wire"]
        counts = {
            "models": len(ways),
            "traced": ways.count("traced"),
            "exported": ways.count("exported"),
            "refused": len(ways) - ways.count("traced") - ways.count("exported"),
        } | {
            f"{arm} {metric}": sum(each.value for each in own if (each.arm, each.metric) == (arm, metric))
            for arm, metric in (("wire", "same_bits"), ("training", "same_bits"), ("inference", "within"))
        }
        case: Case = {"package": family}
        for metric, value in counts.items():
            yield row(benchmark="models", case=case, arm="models", metric=metric, unit="", samples=[value])
        for arm in ("captured/eager", "guards/eager"):
            if ratios := [each.value for each in own if each.arm == arm]:
                value, low, high = median_interval(ratios)
                yield Row(
                    benchmark="models", case=case, arm=arm, metric="median ratio", value=value, unit="", low=low,
                    high=high, runs=len(ratios),
                )  # fmt: skip


def measure(name: str, _: bool) -> Sequence[Row]:
    """Check one model, if its package is installed."""
    family, net = name.split("/")
    return [] if find_spec(family) is None else list(rows(name, check(family, net)))


NAMES: Final = [f"{family}/{net}" for family, nets in MODELS.items() for net in nets]

if __name__ == "__main__":
    parts = {name: partial(measure, name) for name in NAMES}
    firsts = [f"{family}/{nets[0]}" for family, nets in MODELS.items()]
    told = "Models that nobody here wrote, captured, sent and rewritten."
    main("models", parts, summary=lambda measured: list(summary(measured)), quick=firsts, about=told)
