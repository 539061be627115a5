"""A model that looks up what nobody pushes to and what is trained, its loop, and the calls that are made meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from tests.random_programs import simulation
from tests.random_programs.simulation import World
from tests.random_programs.trainings import look_up_table


class Clicks(nn.Module):
    """Looks up what nobody pushes to, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fixed = rpc.rpc_sync("ps0", simulation.count, args=(x,))
        trained = rpc.rpc_sync("ps1", look_up_table, args=(x,))
        return fixed * self.weight + trained


class Sent:
    """The world, and the functions that were called in it, in order."""

    def __init__(self, world: World) -> None:
        self.names: list[str] = []
        self.world = world
        api: Any = rpc.api
        send = api._invoke_rpc

        def noted(to: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(function.__name__)
            return send(to, function, *args, **kwargs)

        api._invoke_rpc = noted

    def since(self) -> list[str]:
        names, self.names = self.names, []
        return names


def batches(count: int = 4) -> list[torch.Tensor]:
    return [torch.full((2, 4), float(place)) for place in range(count)]


def train(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module(batch)
    output.sum().backward()
    fxlib.push_gradients(module)
    return output.detach()


def run(loop: Iterable[torch.Tensor], step: Callable[[torch.Tensor], Any]) -> list[Any]:
    return [step(batch) for batch in loop]


class Stateful:
    """A loader that can be put back to where it was."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 4:
            self.place += 1
            yield batches()[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
