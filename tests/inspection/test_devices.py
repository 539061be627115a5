"""Devices are data, and what the simulator makes of them can be reckoned by hand."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import fxlib
from fxlib.errors import FxlibError
from fxlib.inspection import Device, analyze, calibrate, devices, load_device, save_device
from fxlib.inspection.calibrate import fit
from fxlib.inspection.device import Bandwidth, Peak
from fxlib.inspection.operations import WORK
from fxlib.spec.profile import Profile
from tests.passes.reads import call, coalesced, three_reads

PLAIN = Device(
    name="plain",
    source="made up",
    memory_bytes=1e9,
    layer_s=0.0,
    overload_s=0.0,
    attribute_s=0.0,
    dispatch_s=1.0,
    asynchronous=False,
    memory=(Bandwidth(bytes=1.0, bytes_per_s=1e9),),
    peaks=(Peak(dtype="float32", work="any", flops_per_s=1e3, launch_s=10.0),),
)
X = torch.zeros(8, 10)


def products(count: int) -> GraphModule:
    return fxlib.capture(nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(count))))


def seconds(module: GraphModule, device: Device) -> float:
    found = analyze(module, [X], device=device).seconds
    assert found is not None
    return found


def test_an_operator_takes_its_launch_and_then_its_arithmetic() -> None:
    # A transposed view, and one product of 2 * 8 * 10 * 10 FLOPs.
    assert seconds(products(1), PLAIN) == pytest.approx(2 * 1.0 + 10.0 + 1.6)


def test_or_its_bytes_if_these_take_longer() -> None:
    slow = replace(PLAIN, memory=(Bandwidth(bytes=1.0, bytes_per_s=1.0),))
    assert seconds(products(1), slow) == pytest.approx(2 * 1.0 + 10.0 + 4 * (80 + 100 + 80), rel=1e-3)


def test_going_through_elements_comes_on_top_of_arithmetic() -> None:
    device = replace(PLAIN, peaks=(Peak(dtype="float32", work="any", flops_per_s=1e3, elements_per_s=100.0),))
    assert seconds(products(1), device) == pytest.approx(2 * 1.0 + 1.6 + (80 + 100 + 80) / 100)


def test_an_operator_that_is_described_by_itself_goes_before_its_kind() -> None:
    kinds = {"any": 9.0, "elementwise": 5.0, "aten.relu": 3.0}
    device = replace(
        PLAIN, peaks=tuple(Peak(dtype="float32", work=work, launch_s=each) for work, each in kinds.items())
    )
    assert seconds(fxlib.capture(nn.ReLU()), device) == pytest.approx(1.0 + 3.0)
    assert seconds(fxlib.capture(nn.LeakyReLU()), device) == pytest.approx(1.0 + 5.0)
    assert seconds(fxlib.capture(nn.Softmax(dim=0)), device) == pytest.approx(1.0 + 9.0)


def test_calls_of_layers_and_overloads_and_reads_of_parameters_take_the_hosts_time() -> None:
    device = replace(PLAIN, peaks=(Peak(dtype="float32", work="any"),), layer_s=100.0, overload_s=10.0, attribute_s=5.0)
    model = nn.Linear(10, 10, bias=False)
    assert seconds(fxlib.capture(nn.Sequential(model)), device) == pytest.approx(2 * 1.0 + 100.0)
    exported = fxlib.capture(model, sample_inputs=[X], how="export")
    assert seconds(exported, device) == pytest.approx(2 * 1.0 + 10.0 + 5.0)


def test_a_pool_goes_through_its_windows() -> None:
    analysis = analyze(fxlib.capture(nn.MaxPool2d(3, stride=2)), [torch.zeros(2, 4, 9, 9)])
    (pool,) = [each for figures in analysis.nodes.values() for each in figures.operations]
    assert (pool.work, pool.elements) == ("pooling", 2 * 4 * 4 * 4 * 9)


def test_the_calls_of_a_batch_take_as_long_as_the_longest_of_them() -> None:
    profile = Profile(calls=tuple(call(name, service_s=each) for name, each in (("a", 1.0), ("b", 3.0), ("c", 2.0))))
    rewrite, batches = coalesced(three_reads())
    assert batches == [["a", "b", "c"]]
    analysis = analyze(rewrite.module, [torch.arange(3)], device=PLAIN, profile=profile)
    assert analysis.seconds == pytest.approx(1e-4 + 3.0 + 3 * 1e-5)


def test_the_host_goes_on_while_a_device_works() -> None:
    device = replace(PLAIN, asynchronous=True)
    assert seconds(products(5), PLAIN) == pytest.approx(5 * 13.6)
    assert seconds(products(5), device) == pytest.approx(2.0 + 5 * 11.6)
    idle = replace(device, peaks=(Peak(dtype="float32", work="any", flops_per_s=1e9),))
    assert seconds(products(5), idle) == pytest.approx(10.0, rel=1e-3)


def test_bandwidth_lies_between_those_measured() -> None:
    device = replace(PLAIN, memory=(Bandwidth(bytes=100.0, bytes_per_s=400.0), Bandwidth(bytes=1e4, bytes_per_s=100.0)))
    assert device.transfer_s(0) == 0
    assert device.transfer_s(10) == pytest.approx(10 / 400)
    assert device.transfer_s(1000) == pytest.approx(1000 / 200)
    assert device.transfer_s(10**6) == pytest.approx(10**6 / 100)


@pytest.mark.parametrize("name", devices())
def test_a_device_that_comes_with_the_library_names_its_source(name: str) -> None:
    device = load_device(name)
    assert "datasheet" in device.source
    assert device.peak(torch.bfloat16, "matmul").flops_per_s > device.peak(torch.float32, "matmul").flops_per_s


def test_an_h200_is_an_h100_with_more_and_faster_memory() -> None:
    less, more = load_device("h100"), load_device("h200")
    assert less.peaks == more.peaks
    assert (less.memory_bytes, more.memory_bytes) == (80e9, 141e9)
    assert seconds(products(3), more) <= seconds(products(3), less)


def test_costs_are_found_again_in_the_times_that_they_make() -> None:
    amounts = [(1.0, 0.0, 10.0), (1.0, 50.0, 10.0), (1.0, 0.0, 1000.0), (1.0, 900.0, 20.0)]
    taken_s = [3.0 * one + 0.5 * first + 0.01 * second for one, first, second in amounts]
    assert fit(amounts, taken_s) == pytest.approx((3.0, 0.5, 0.01))


def test_no_cost_is_below_zero_even_where_that_would_fit_better() -> None:
    launch_s, element_s = fit([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)], [4.0, 2.0, 1.0])
    assert launch_s > 0
    assert element_s == 0


@pytest.mark.slow
def test_this_processor_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fxlib.inspection.calibrate"), "_FEWEST_ROUNDS", 1)
    device = calibrate(seconds=0.0)
    save_device(device, tmp_path / "here.toml")
    read = load_device(tmp_path / "here.toml")
    assert (read.name, read.source, read.asynchronous) == (device.name, device.source, False)
    assert [each.work for each in read.peaks] == [each.work for each in device.peaks]
    assert [each.launch_s for each in read.peaks] == pytest.approx([each.launch_s for each in device.peaks], rel=1e-4)
    assert {*WORK} <= {each.work for each in device.peaks}
    assert seconds(products(9), device) > seconds(products(2), device)
    assert seconds(products(2), read) == pytest.approx(seconds(products(2), device), rel=1e-3)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("memory_bytes = 1e+09", "", "lacks the field 'memory_bytes'"),
        ("memory_bytes = 1e+09", "memory_bytes = -1", "memory_bytes is -1.0"),
        ("memory_bytes = 1e+09", 'memory_bytes = "much"', "not a valid float"),
        ("memory_bytes = 1e+09", "memory_bytes = 1\ncores = 4", "has no field 'cores'"),
        ('work = "any"', 'work = "magic"', "'magic' is no kind of work"),
        ("[[memory]]", "[[peaks]]", "Write at least one"),
        ("layer_s = 0", "layer_s =", "is not TOML"),
        ("layer_s = 0", f"layer_s = {'9' * 5_000}", "is not TOML"),
        ("layer_s = 0", f"layer_s = {'[' * 5_000}", "is not TOML"),
        ("flops_per_s = 1000", "flops_per_s = 0", "flops_per_s is 0.0"),
    ],
)
def test_a_file_that_describes_no_device_names_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "device.toml"
    save_device(PLAIN, path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FxlibError, match=message):
        load_device(path)


def test_a_device_that_is_not_there_is_told_from_those_that_are() -> None:
    with pytest.raises(FxlibError, match="There are h100, h200"):
        load_device("b9000")
