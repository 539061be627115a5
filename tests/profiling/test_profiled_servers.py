"""What `fxlib.profile` tells of servers."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import batch as batching
from fxlib.profiling import server_probe as probing
from fxlib.spec.profile import Profile
from tests.profiling import remote_functions as far
from tests.shared.undisturbed import undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]


def test_slow_reads_are_not_repeated_as_often_as_fast_ones() -> None:
    class Napping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, rpc.rpc_sync("ps0", far.nap_in_turn, args=(x, 0.55)))

    counted = rpc.rpc_sync("ps0", far.naps)
    found = fxlib.profile(Napping(), [torch.ones(4)], steps=1)
    assert rpc.rpc_sync("ps0", far.naps) - counted <= 8  # two of the steps, and hardly more of the trials
    assert found.servers[0].concurrency == 1
    assert found.servers[0].per_item_s is None
    assert any("no reads in a batch" in note for note in found.notes)


class Napping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side_by_side = rpc.rpc_sync("ps0", far.nap, args=(x, 0.05))
        return cast(torch.Tensor, side_by_side + rpc.rpc_sync("ps1", far.nap_in_turn, args=(x, 0.05)))


def test_servers_are_told_by_how_many_calls_they_work_on_at_once() -> None:
    def are_told(found: Profile) -> bool:
        many, one = found.servers
        assert many.per_item_s is not None
        assert one.per_item_s is not None
        return many.concurrency >= 4 and one.concurrency == 1 and one.per_item_s > 2 * many.per_item_s

    found = undisturbed(lambda: fxlib.profile(fxlib.capture(Napping()), [torch.ones(2)], steps=1), are_told)
    assert are_told(found)
    assert all(
        0 < each.round_trip_s < call.service_s.median for each, call in zip(found.servers, found.calls, strict=True)
    )
    assert found.servers[0].bytes_per_s > 1e6


def test_trainers_that_share_a_server_may_measure_at_once() -> None:
    def both() -> list[Profile]:
        theirs = rpc.rpc_async("ps0", far.profile_shared, timeout=100)
        return [far.profile_shared(), theirs.wait()]

    def see_calls_side_by_side(found: list[Profile]) -> bool:
        return all(each.servers[0].concurrency >= 2 for each in found)

    found = undisturbed(both, see_calls_side_by_side)
    assert see_calls_side_by_side(found)
    for each in found:
        assert [call.to for call in each.calls] == ["ps1", "ps1"]
        assert all(call.issue_s + call.service_s.median >= 0.02 for call in each.calls)
        assert each.servers[0].per_item_s is not None


def test_a_server_without_the_library_is_measured_by_the_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "run", far.absent)
    found = fxlib.profile(fxlib.capture(Napping()), [torch.ones(2)], steps=1)
    server = found.server_by_name["ps0"]
    assert server.round_trip_s == found.calls[0].service_s.quantiles[0]
    assert (server.per_item_s, server.bytes_per_s) == (None, probing.ASSUMED_BYTES_PER_S)
    assert any(note.startswith("ps0: no empty call") and "No module named 'fxlib'" in note for note in found.notes)


def test_calls_of_which_nothing_is_known_are_not_repeated() -> None:
    class Unknown(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, rpc.rpc_sync("ps0", far.unknown, args=(x,)))

    found = fxlib.profile(fxlib.capture(Unknown()), [torch.ones(2)])
    assert found.server_by_name["ps0"].concurrency == 1
    assert any("no call is known to change nothing" in note for note in found.notes)


def test_a_model_is_captured_first_and_one_without_calls_has_no_servers() -> None:
    found = fxlib.profile(nn.Linear(2, 2), [torch.ones(1, 2)], steps=2)
    assert (found.calls, found.servers) == ((), ())
    assert [node.node for node in found.nodes][-1] == "linear" or len(found.nodes) >= 1
