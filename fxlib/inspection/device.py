"""Descriptions of devices: TOML files with what the simulator needs to know about a device.

`devices/` holds those that come with the library; `fxlib calibrate` measures this processor. Figures in a file have
their unit in the name, and `source` says where they come from.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxlib.errors import FxlibError
from fxlib.inspection.operations import WORK
from fxlib.serialization.files import write_whole

FOLDER = Path(__file__).with_name("devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """How fast a device does one kind of work in one dtype."""

    dtype: str
    work: str
    """One of `operations.WORK`; an operator such as "aten.gelu", which takes precedence; or "any" for everything not
    listed."""
    flops_per_s: float = math.inf
    elements_per_s: float = math.inf
    """Elements processed per second, in addition to the arithmetic: laying out, converting, comparing."""
    launch_s: float = 0.0
    """Seconds to start the work on the device, however small it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The rate at which one operator moves a given number of bytes, read or written; few bytes may lie in a cache."""

    bytes: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device. Peaks are for dense work."""

    name: str
    source: str
    memory_bytes: float
    layer_s: float
    """Seconds that the program takes to call a layer."""
    overload_s: float
    """Seconds that the program takes to call an ATen overload, as graphs from `torch.export` do."""
    attribute_s: float
    """Seconds that the program takes to fetch a parameter or buffer of a submodule."""
    dispatch_s: float
    """Seconds that the host takes to launch one operator."""
    asynchronous: bool
    """Whether the host goes on while the device works."""
    memory: tuple[Bandwidth, ...]
    peaks: tuple[Peak, ...]

    def peak(self, dtype: torch.dtype, work: str, operator: str = "") -> Peak:
        """Return the peak for an operator, or for its kind of work; a dtype without one uses the peak for float32."""
        for name in (str(dtype).removeprefix("torch."), "float32"):
            for each in (operator, work, "any"):
                if (name, each) in self._by_kind:
                    return self._by_kind[name, each]
        return self.peaks[0]

    def transfer_s(self, moved_bytes: int) -> float:
        """Return the seconds that an operator takes to move so many bytes, interpolated on logarithmic scales."""
        if not moved_bytes:
            return 0.0
        amounts, rates = self._bandwidths
        return moved_bytes / math.exp(float(np.interp(math.log(moved_bytes), amounts, rates)))

    @cached_property
    def _bandwidths(self) -> tuple[list[float], list[float]]:
        return [math.log(each.bytes) for each in self.memory], [math.log(each.bytes_per_s) for each in self.memory]

    @cached_property
    def _by_kind(self) -> Mapping[tuple[str, str], Peak]:
        return {(each.dtype, each.work): each for each in self.peaks}


def devices() -> tuple[str, ...]:
    """Return the names of the devices that come with the library."""
    return tuple(sorted(each.stem for each in FOLDER.glob("*.toml")))


def load_device(name: str | os.PathLike[str]) -> Device:
    """Read a device that comes with the library, by its name, or one from a file, by its path.

    Raises:
        FxlibError: there is no such device, or the file does not describe one; the message names the field.
    """
    path = FOLDER / f"{name}.toml" if str(name) in devices() else Path(name)
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        known = ", ".join(devices())
        raise FxlibError(
            f"no device has this name, and no file: {error.strerror}", where=str(name), hint=f"There are {known}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise FxlibError(f"is not TOML: {error}", where=str(path)) from error
    return _device(data, str(path))


def save_device(device: Device, path: str | os.PathLike[str]) -> None:
    """Write a device to a file, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(Path(path), [_written(device).encode()])


def _written(device: Device) -> str:
    facts = asdict(device)
    tables = {name: facts.pop(name) for name in _TABLES}
    lines = [f"{name} = {_literal(value)}" for name, value in facts.items()]
    for name, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{name}]]", *(f"{key} = {_literal(value)}" for key, value in row.items())]
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


_TABLES: Mapping[str, type] = {"memory": Bandwidth, "peaks": Peak}
_TYPES: Mapping[str, type] = {"str": str, "float": float, "bool": bool}


def _device(data: Mapping[str, Any], where: str) -> Device:
    tables = {
        name: tuple(_row(kind, each, f"{where}: {name}") for each in _rows(data, name, where))
        for name, kind in _TABLES.items()
    }
    made: Device = _row(Device, {**data, **tables}, where)
    amounts = [each.bytes for each in made.memory]
    if amounts != sorted(set(amounts)):
        raise FxlibError("must be in ascending order of bytes", where=f"{where}: memory")
    if unknown := {each.work for each in made.peaks if not each.work.startswith("aten.")} - {*WORK, "any"}:
        raise FxlibError(f"{unknown.pop()!r} is no kind of work", where=f"{where}: peaks", hint=f"{', '.join(WORK)}.")
    return made


def _rows(data: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    found = data.get(name, [])
    if not (isinstance(found, list) and found and all(isinstance(each, dict) for each in found)):
        raise FxlibError(f"{name} is not an array of tables", where=where, hint=f"Write at least one [[{name}]].")
    return found


def _row(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    """Build a dataclass of plain fields, checking the type of each; rates and sizes must be above zero."""
    fields = kind.__dataclass_fields__
    if unknown := data.keys() - fields.keys():
        raise FxlibError(f"has no field {unknown.pop()!r}", where=where)
    given = dict(data)
    for name, field in fields.items():
        if name not in given:
            if isinstance(field.default, float):
                continue
            raise FxlibError(f"lacks the field {name!r}", where=where)
        expected = _TYPES.get(str(field.type))
        if expected is float and type(given[name]) is int:
            given[name] = float(given[name])
        if expected is not None and type(given[name]) is not expected:
            raise FxlibError(f"{name} is {given[name]!r}, not a valid {expected.__name__}", where=where)
        if expected is float and not _fits(name, given[name]):
            raise FxlibError(f"{name} is {given[name]!r}", where=where, hint="Use a finite number above zero.")
    return kind(**given)


def _fits(name: str, value: float) -> bool:
    """Return whether a figure is allowed: times may be zero and rates infinite, sizes in bytes neither."""
    least = 0.0 if name.endswith("_s") and not name.endswith("_per_s") else math.ulp(0.0)
    return least <= value < math.inf or (value == math.inf and name in ("flops_per_s", "elements_per_s"))
