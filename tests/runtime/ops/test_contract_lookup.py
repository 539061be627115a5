"""Contracts of methods of objects behind RRefs: calls give these methods no object."""

from __future__ import annotations

import torch

import fxlib
from fxlib.runtime.ops.contract_lookup import of_method


class Rows:
    @fxlib.remote(reads="rows", part="table", keys="ids")
    def look_up(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    @fxlib.remote(reads="rows", part="table", keys="ids")
    def look_up_anywhere(table: int, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_part_and_keys_are_those_of_a_call_without_the_object() -> None:
    ids = torch.arange(3)
    for method in ("look_up", "look_up_anywhere"):
        found = of_method(Rows, method, lambda _: None)
        assert found is not None
        assert found.part_of((7, ids), {}) == 7
        assert found.keys_of((7, ids), {}) is ids
