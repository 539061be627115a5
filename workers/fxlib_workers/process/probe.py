"""Finds out by trial what containment a host allows, and the level of containment that results."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fxlib_workers.process.cgroup import CgroupUnavailableError, job_cgroup
from fxlib_workers.process.containment import (
    HOST_NETWORK,
    Containment,
    Network,
    Part,
    contain,
    python_folders,
    run_child,
)

_PROBE_S: Final = 60.0
_PROBE_BYTES: Final = 256 << 20
_PROBE_THREADS: Final = 64


class Level(enum.StrEnum):
    """The degree to which a job's graph is kept from everything else, from the lowest to the highest."""

    NONE = "none"
    """Only limits."""

    FILTERED = "filtered"
    """No privileges, and a filter on system calls."""

    PRIVATE = "private"
    """In addition, its own view of files and processes; the network is the host's."""

    ISOLATED = "isolated"
    """In addition, a network of its own."""

    @property
    def rank(self) -> int:
        """The position in the order of levels, from 0."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """The parts of containment that a host allows.

    Attributes:
        parts: the parts that a contained process can have.
        missing: the parts that it cannot have, with a sentence that says why.
    """

    parts: frozenset[Part]
    missing: tuple[tuple[Part, str], ...] = ()

    @classmethod
    def without(cls, missing: Mapping[str, str]) -> Available:
        """Return what the host allows without these parts, which are missing for the given reasons."""
        reasons = {Part(part): why for part, why in missing.items()}
        return cls(parts=frozenset(Part) - reasons.keys(), missing=tuple(sorted(reasons.items())))

    def level(self, *, own_network: bool = True) -> Level:
        """Return the level that these parts provide. Without a network of its own, it is at most `private`."""
        return level_of(self.parts if own_network else self.parts - {Part.NETWORK})

    def why(self, wanted: Level) -> str:
        """Return why this host does not reach a level; empty if it does."""
        return "; ".join(f"{part}: {why}" for part, why in self.missing if part in _NEEDED[wanted])


_NEEDED: Final = {
    Level.NONE: frozenset[Part](),
    Level.FILTERED: frozenset({Part.FILTER}),
    Level.PRIVATE: frozenset({Part.FILTER, Part.FILES}),
    Level.ISOLATED: frozenset({Part.FILTER, Part.FILES, Part.NETWORK}),
}
"""The parts that each level requires, as do all levels above it."""


def level_of(parts: frozenset[Part]) -> Level:
    """Return the highest level whose parts, and those of the levels below it, are all present."""
    return max((level for level, needed in _NEEDED.items() if needed <= parts), key=lambda level: level.rank)


def available() -> Available:
    """Find out by trial, in another process, what this host allows a process of this user."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=_PROBE_S,
        check=True,
    )
    return Available.without(json.loads(done.stdout))


def missing_parts() -> dict[Part, str]:
    """Return the parts that this host does not allow this process's user, and why. The process has one thread."""
    missing: dict[Part, str] = {}

    def attempt(part: Part, *others: Part, network: Network | None = HOST_NETWORK) -> None:
        wanted = frozenset({part, *(each for each in others if each not in missing)})
        if why := _why_not(lambda: contain(Containment(parts=wanted, network=network))):
            missing[part] = why

    attempt(Part.FILTER)
    if os.geteuid() == 0:
        attempt(Part.USER)
    else:
        missing[Part.USER] = "only root can give a process a user of its own"
    attempt(Part.FILES, Part.USER)
    if Part.FILES in missing:
        missing[Part.NETWORK] = missing[Part.FILES]
        if Part.USER not in missing and (why := _why_not(_import_as_another_user)):
            missing[Part.USER] = why
    else:
        attempt(Part.NETWORK, Part.FILES, Part.USER, network=None)
    try:
        with job_cgroup(_PROBE_BYTES, _PROBE_THREADS) as group:
            if why := _why_not(lambda: contain(Containment(parts=frozenset(), cgroup=group.joins))):
                missing[Part.MEMORY] = why
    except CgroupUnavailableError as error:
        missing[Part.MEMORY] = str(error)
    return missing


def _import_as_another_user() -> None:
    """Check that another user could import what this process can, since its folders may be in a private home."""
    contain(Containment(parts=frozenset({Part.USER})))
    for path in python_folders():
        (path / "." if path.is_dir() else path).stat()


def _why_not(attempt: Callable[[], None]) -> str:
    """Try something in a child; return why it failed, or an empty text."""
    reports, reporting = os.pipe()
    child = os.fork()
    if not child:
        run_child(attempt, reporting)
    os.close(reporting)
    with os.fdopen(reports, "rb") as answer:
        why = answer.read().decode()
    _, status = os.waitpid(child, 0)
    return why or ("" if status == 0 else f"a process that tried it ended with status {status}")


if __name__ == "__main__":
    print(json.dumps(missing_parts()))  # noqa: T201 - the answer to `available`
