"""What a host allows a contained process, found out by trying it, and the level of containment that this makes."""

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
    """How far a job's graph is kept from everything else, from the least to the most."""

    NONE = "none"
    """Limits alone."""

    FILTERED = "filtered"
    """No privileges, and a filter on system calls."""

    PRIVATE = "private"
    """Moreover, files and processes of its own; the host's network."""

    ISOLATED = "isolated"
    """Moreover, a network of its own."""

    @property
    def rank(self) -> int:
        """The place in the order of levels, from 0."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """What a host allows.

    Attributes:
        parts: what a contained process can have.
        missing: what it cannot, with a sentence that says why.
    """

    parts: frozenset[Part]
    missing: tuple[tuple[Part, str], ...] = ()

    @classmethod
    def without(cls, missing: Mapping[str, str]) -> Available:
        """Return what a host allows that does not allow these parts, for the reasons given."""
        reasons = {Part(part): why for part, why in missing.items()}
        return cls(parts=frozenset(Part) - reasons.keys(), missing=tuple(sorted(reasons.items())))

    def level(self, *, own_network: bool = True) -> Level:
        """Return the level that these parts make; without a network of its own, it is `private` at most."""
        return level_of(self.parts if own_network else self.parts - {Part.NETWORK})

    def why(self, wanted: Level) -> str:
        """Return what keeps this host from a level; empty if nothing does."""
        return "; ".join(f"{part}: {why}" for part, why in self.missing if part in _NEEDED[wanted])


_NEEDED: Final = {
    Level.NONE: frozenset[Part](),
    Level.FILTERED: frozenset({Part.FILTER}),
    Level.PRIVATE: frozenset({Part.FILTER, Part.FILES}),
    Level.ISOLATED: frozenset({Part.FILTER, Part.FILES, Part.NETWORK}),
}
"""The parts that a level has, and all levels above it."""


def level_of(parts: frozenset[Part]) -> Level:
    """Return the highest level whose parts, and those of the levels below it, are all there."""
    return max((level for level, needed in _NEEDED.items() if needed <= parts), key=lambda level: level.rank)


def available() -> Available:
    """Find out what this host allows a process of this user, by trying it in another process."""
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
    """See that another user could import what this process can: its folders may lie in a home that is closed."""
    contain(Containment(parts=frozenset({Part.USER})))
    for path in python_folders():
        (path / "." if path.is_dir() else path).stat()


def _why_not(attempt: Callable[[], None]) -> str:
    """Try something in a child; return why it failed, or nothing."""
    told, to_tell = os.pipe()
    child = os.fork()
    if not child:
        run_child(attempt, to_tell)
    os.close(to_tell)
    with os.fdopen(told, "rb") as answer:
        why = answer.read().decode()
    _, status = os.waitpid(child, 0)
    return why or ("" if status == 0 else f"a process that tried it ended with status {status}")


if __name__ == "__main__":
    print(json.dumps(missing_parts()))  # noqa: T201 - the answer to `available`
