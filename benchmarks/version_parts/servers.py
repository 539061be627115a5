"""Rows with versions, on a server: what a trainer asks for that may have some of them already."""

from __future__ import annotations

import time

import torch

from fxlib import ps

ROWS = 20_000
"""Number of rows of a table."""
SERVICE_S = 0.002
"""What each message takes, in seconds."""


class _Stacked:
    """The rows of all of a server's tables in one tensor, and their versions."""

    rows = torch.empty(0)
    versions = torch.empty(0, dtype=torch.int64)


def prepare() -> None:
    """Stack its tables, and begin all versions at 0."""
    tables = ps._present().tables.values()
    _Stacked.rows = torch.cat([each.weight.detach() for each in tables])
    _Stacked.versions = torch.zeros(len(_Stacked.rows), dtype=torch.int64)


def touch(keys: torch.Tensor) -> None:
    """Note that another trainer has changed these rows."""
    _Stacked.versions[keys] += 1


def read_all(keys: torch.Tensor) -> torch.Tensor:
    """Return rows."""
    time.sleep(SERVICE_S)
    return torch.embedding(_Stacked.rows, keys)


def read_known(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and their versions."""
    return torch.embedding(_Stacked.rows, keys), _Stacked.versions[keys]


def read_changed(keys: torch.Tensor, versions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which rows have other versions, these rows, and their versions."""
    time.sleep(SERVICE_S)
    return _changed(_Stacked.rows, _Stacked.versions, keys, versions)


def read_changed_many(calls: list[tuple[int, torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Do so for each lookup."""
    time.sleep(SERVICE_S)
    rows, versions = _Stacked.rows.split(ROWS), _Stacked.versions.split(ROWS)
    return [_changed(rows[table], versions[table], keys, known) for table, keys, known in calls]


def _changed(
    rows: torch.Tensor, versions: torch.Tensor, keys: torch.Tensor, known: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    now = versions.index_select(0, keys)
    at = (now != known).nonzero().reshape(-1)
    return at, rows.index_select(0, keys.index_select(0, at)), now.index_select(0, at)
