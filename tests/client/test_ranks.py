"""Trainers that ask as one: rank 0 speaks with the service, and all ranks adopt its answer, or none does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from torch import distributed as dist
from typing_extensions import override

import fxlib
from fxlib import wire
from fxlib.client import group_consensus
from fxlib.errors import WireError, WorkloadError
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted
from tests.collectives.world import on_all_ranks

pytestmark = pytest.mark.slow


class Other(Clicks):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids) * 2


def rewritten() -> bytes:
    return wire.encode(fxlib.optimize(fxlib.capture(Clicks()))).graph.SerializeToString()


def told(result: fxlib.Result, captured: torch.fx.GraphModule) -> dict[str, Any]:
    parameters = dict(result.module.named_parameters())
    return {
        "decision": result.decision,
        "explanation": result.explanation,
        "job": result.job_id,
        "original": result.module is captured,
        "bound": parameters["top.weight"] is captured.get_parameter("top.weight"),
        "code": getattr(result.module, "code", ""),
    }


def ask(address: str, models: tuple[type[Clicks], ...] = (Clicks, Clicks), deadline_s: float = 60.0) -> dict[str, Any]:
    captured = fxlib.capture(models[dist.get_rank()]())
    with fxlib.connect(address, patience_s=60) as client:
        found = client.optimize(captured, workload(), group="world", progress=False, deadline_s=deadline_s)
    return told(found, captured)


def test_one_rank_asks_and_all_adopt(service: Scripted, address: str) -> None:
    service.adopt(rewritten())
    first, second = on_all_ranks(ask, address)
    assert service.calls["Optimize"] == 1
    assert first == second
    assert (first["decision"], first["job"], first["original"]) == ("adopt", "job-1", False)
    assert first["bound"]
    assert "issue_call" in first["code"]


def test_what_the_service_keeps_all_keep(service: Scripted, address: str) -> None:
    first, second = on_all_ranks(ask, address)
    assert first == second
    assert (first["decision"], first["original"], first["explanation"]) == ("keep_original", True, "no gain")


def test_ranks_with_other_programs_adopt_nothing_and_ask_nothing(service: Scripted, address: str) -> None:
    service.adopt(rewritten())
    for found in on_all_ranks(ask, address, (Clicks, Other)):
        assert (found["decision"], found["original"]) == ("keep_original", True)
        assert "rank 1: its graph is another one than that of rank 0" in found["explanation"]
    assert service.calls["Optimize"] == 0


def ask_and_fail_to_bind(address: str) -> dict[str, Any]:
    refuse = mock.Mock(side_effect=WireError("not here") if dist.get_rank() == 1 else None)
    with mock.patch("fxlib.client.session.screen", refuse):
        return ask(address)


def test_an_answer_that_one_rank_cannot_bind_is_adopted_by_none(service: Scripted, address: str) -> None:
    service.adopt(rewritten())
    for found in on_all_ranks(ask_and_fail_to_bind, address):
        assert (found["decision"], found["original"]) == ("keep_original", True)
        assert "rank 1 cannot take the answer" in found["explanation"]
        assert "not here" in found["explanation"]


def test_a_service_that_fails_is_told_to_all(service: Scripted, address: str) -> None:
    service.fail("Optimize", grpc.StatusCode.INVALID_ARGUMENT)
    for found in on_all_ranks(ask, address):
        assert found["original"]
        assert "Optimize fails as told" in found["explanation"]


def ask_and_read_late(address: str) -> dict[str, Any]:
    read_at_once = group_consensus._read_answer

    def read_late(*args: Any) -> Any:
        time.sleep(2.0)
        return read_at_once(*args)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(group_consensus, "_read_answer", read_late)
        else:
            patch.setattr(group_consensus, "_verdict", lambda *_: b"no rank 1 is late")
        return ask(address)


def test_a_rank_that_reads_the_answer_after_the_verdict_is_told_it(service: Scripted, address: str) -> None:
    service.adopt(rewritten())
    for found in on_all_ranks(ask_and_read_late, address, timeout_s=60.0):
        assert found["original"]
        assert "rank 1 is late" in found["explanation"]


def ask_twice_and_once_in_vain(address: str) -> list[dict[str, Any]]:
    first = ask(address)
    if dist.get_rank() == 0:
        alone = ask(address, deadline_s=1.0)
        return [first, alone]
    captured = fxlib.capture(Clicks())
    with fxlib.connect(address, patience_s=60) as client, pytest.raises(WorkloadError):
        client.optimize(captured, workload(), group="world", min_gain=-5.0)
    return [first]


def test_a_rank_that_does_not_ask_leaves_the_others_with_their_originals(service: Scripted, address: str) -> None:
    service.adopt(rewritten())
    (first, alone), (second,) = on_all_ranks(ask_twice_and_once_in_vain, address)
    assert first["decision"] == second["decision"] == "adopt"
    assert alone["original"]
    assert "rank 1" in alone["explanation"]


def ask_but_for(address: str, rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setenv("FXLIB_DISABLE", "1")
        begun = time.monotonic()
        found = ask(address, deadline_s=150.0)
    return {"waited_s": time.monotonic() - begun, **found}


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_that_is_disabled(service: Scripted, address: str, rank: int) -> None:
    service.adopt(rewritten())
    found = on_all_ranks(ask_but_for, address, rank)
    assert all(each["original"] for each in found)
    assert all("FXLIB_DISABLE is set" in each["explanation"] for each in found)
    assert all(each["waited_s"] < 140.0 for each in found)  # and not until the deadline


# Submitting: ranks swap at the same step.


class Slow(Scripted):
    @override
    def WatchJob(self, request: Any, context: Any) -> Iterator[Any]:
        time.sleep(1.0)
        yield from super().WatchJob(request, context)


def submit_and_swap(address: str) -> dict[str, Any]:
    captured = fxlib.capture(Clicks())
    current: torch.nn.Module = captured
    swapped_at, rank = -1, dist.get_rank()
    with fxlib.connect(address, patience_s=60) as client:
        handle = client.submit(captured, workload(), group="world")
        for step in count():
            before, current = current, handle.swap(current)
            swapped_at = step if current is not before else swapped_at
            if step % 7 == 0:  # as a collective in the step would
                dist.barrier()
            time.sleep(0.002 if rank == step // 16 % 2 else 0.0)
            if 0 <= swapped_at < step - 10:
                break
    return {"step": swapped_at, **told(handle.result(), captured)}


def test_submitted_modules_are_swapped_at_the_same_step() -> None:
    from tests.client.scripted import serving

    service = Slow()
    service.adopt(rewritten())
    with serving(service) as address:
        first, second = on_all_ranks(submit_and_swap, address)
    assert first == second
    assert first["step"] > 0
    assert first["decision"] == "adopt"
    assert service.calls["Optimize"] == 1


# Without ranks.


def test_a_group_without_ranks_is_a_mistake(address: str) -> None:
    with fxlib.connect(address, patience_s=60) as client, pytest.raises(WorkloadError, match="not initialized"):
        client.optimize(fxlib.capture(Clicks()), workload(), group="world")


def test_disabled_no_ranks_are_asked(address: str, service: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXLIB_DISABLE", "1")
    captured = fxlib.capture(Clicks())
    with fxlib.connect(address, patience_s=60) as client:
        assert client.optimize(captured, workload(), group="world").module is captured
    assert not service.calls
