"""Runs calls in processes of their own, and tells which ended one, or wrote beside its tensors.

A process that has collected the samples forks a child for each batch of operators; the child notes in shared memory
what it is about to call. Where it dies, the parent knows of which call, and goes on behind it with a new child.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.out_of_bounds import modules
from benchmarks.out_of_bounds.mutations import cases, placed
from benchmarks.out_of_bounds.samples import Call, Samples, _schema
from fxlib.runtime import bounds
from fxlib.utils.locked_folder import LockedFolder
from fxlib.wire.argument_rules import broken, rules_of
from fxlib.wire.targets import candidates

SOURCE = Path(__file__).with_name("guarded_memory.c")
CPU_SECONDS_PER_CALL = 1.0
SECONDS_PER_CALL = 60.0
DATA_BYTES = 3 << 30
DEATHS = 3
"""Deaths after which an operator is tried no further."""
SLOW = 8
"""Calls that take too long, after which an operator is tried no further."""
BATCH = 50
"""Operators of one child, if none of them ends it."""
LARGEST_BASE = 8
"""Samples that ran, of which changed calls are made."""
_FIELDS = struct.Struct(
    "5q"
)  # the operator, the call, refusals, whether memory was spoiled, the samples that ran (bits)


@dataclass(kw_only=True)
class Trial:
    """What became of the calls of one operator."""

    name: str
    calls: int = 0
    """Calls that were made, as the samples have them and changed."""
    valid: int = 0
    """Of the samples' own calls, those that ran."""
    refused: int = 0
    """Calls that raised."""
    slow: int = 0
    """Calls that were ended because they took too long."""
    deaths: list[str] = field(default_factory=list)
    """Of the calls that ended in a signal or wrote beside their tensors: the signal and the arguments."""


def preload() -> dict[str, str]:
    """Compile the guarded memory, and return the environment in which processes use it."""
    folder = LockedFolder("fxlib-guarded-")
    os.set_inheritable(folder.lock, True)  # the command executes itself, and keeps the folder until it ends
    library = folder.path / "guarded_memory.so"
    compiler = (sysconfig.get_config_var("CC") or "gcc").split()[0]
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def find(name: str) -> Callable[..., Any]:
    """Return what the wire's name stands for."""
    if name.startswith(modules.PREFIX):
        return modules.call(name)
    if "::" not in name:
        return candidates()[name]
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), base), overload or "default")


def run(names: Sequence[str], samples: Samples, count: int, report: Callable[[Trial], None]) -> None:
    """Try each operator with its samples and up to `count` changed calls, and report each."""
    torch.ones(
        (), requires_grad=True
    ).exp().backward()  # what the first backward takes its time for is there in each child
    for start in range(0, len(names), BATCH):
        _batch(names[start : start + BATCH], samples, count, report)


def _batch(names: Sequence[str], samples: Samples, count: int, report: Callable[[Trial], None]) -> None:
    shared = mmap.mmap(-1, _FIELDS.size)
    at, trial, ran = 0, Trial(name=names[0]), 0
    while at < len(names):
        shared[:] = _FIELDS.pack(at, trial.calls, 0, 0, ran)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _child(names, samples, count, shared, write)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                calls, ran, refused = map(int, line.split())
                trial.calls, trial.valid, trial.refused = calls, ran.bit_count(), trial.refused + refused
                report(trial)
                at, ran = at + 1, 0
                trial = Trial(name=names[at]) if at < len(names) else trial
        _, status = os.waitpid(pid, 0)
        if at == len(names):
            return
        found, case, refused, spoiled, ran = _FIELDS.unpack(shared[:])
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if found != at:
            raise RuntimeError(
                f"the child of the trial ended with status {status} at {names[found]}, not at {names[at]}"
            )
        trial.calls, trial.refused, trial.valid = case + 1, trial.refused + refused, ran.bit_count()
        if number in (signal.SIGALRM, signal.SIGPROF, signal.SIGKILL):
            trial.slow += 1
        else:
            how = (
                signal.Signals(number).name
                if number
                else "wrote beside its tensors"
                if spoiled
                else "broke its process"
            )
            trial.deaths.append(f"{how}: {_describe(trial.name, samples, count, case, ran)}")
        if len(trial.deaths) == DEATHS or trial.slow == SLOW:
            report(trial)
            at, ran = at + 1, 0
            trial = Trial(name=names[at]) if at < len(names) else trial


def _child(names: Sequence[str], samples: Samples, count: int, shared: Any, out: int) -> None:
    """Go on where the fields say, and tell of each operator how many calls were made, which samples ran, and refusals.

    A call is the sample of its number, or, behind them, one of the cases that the samples which ran are changed to.
    """
    try:
        memory = _prepare()
        start, first, _, _, known = _FIELDS.unpack(shared[:])
        for at in range(start, len(names)):
            first, known = (first, known) if at == start else (0, 0)
            call, calls, refused, index = find(names[at]), _samples_of(names[at], samples), 0, -1
            rules, ran_so_far = rules_of(names[at]), [known]
            for index, case in enumerate(_all_cases(names[at], calls, count, ran_so_far)):
                if index < first or broken(rules, *case):
                    continue
                shared[:] = _FIELDS.pack(at, index, refused, 0, known)
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_PER_CALL)
                signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CALL)
                ran = attempt(call, case, index, memory)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                refused += not ran
                known |= (1 << index) if ran and index < len(calls) else 0
                ran_so_far[0] = known
                if memory.guarded_check():
                    shared[:] = _FIELDS.pack(at, index, refused, 1, known)
                    os._exit(3)
            os.write(out, f"{index + 1} {known} {refused}\n".encode())
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent hears of it by the status
        sys.excepthook(*sys.exc_info())
        os._exit(4)


def _samples_of(name: str, samples: Samples) -> list[Call]:
    return modules.samples(name) if name.startswith(modules.PREFIX) else samples.of(name)


def _all_cases(name: str, calls: list[Call], count: int, ran: list[int]) -> Iterator[Call]:
    yield from calls
    valid = [call for index, call in enumerate(calls) if ran[0] >> index & 1]
    yield from cases(valid[:LARGEST_BASE], count, name, _schema(name)) if valid else ()


def _prepare() -> Any:
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if not os.environ.get("FXLIB_SHOW_STDERR"):
        os.dup2(null, 2)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    bounds.install()
    memory = ctypes.CDLL(None)
    memory.guarded_set(0, 0)
    return memory


def attempt(call: Callable[..., Any], case: Call, index: int, memory: Any) -> bool:
    """Make one call, every fourth with gradients and backward, in guarded memory; whether it did not raise."""
    memory.guarded_set(1, index % 4 == 3)
    outs: Any = None
    try:
        args, kwargs = placed(case, gradients=index % 3 == 2)
        outs = call(*args, **kwargs)
        if index % 3 == 2:
            found = [each for each in pytree.tree_leaves(outs) if isinstance(each, torch.Tensor) and each.requires_grad]
            torch.autograd.backward(found, [torch.ones_like(each) for each in found])
        for each in pytree.tree_leaves(outs):
            if isinstance(each, torch.Tensor) and each.layout is torch.strided and each.numel() < 1 << 16:
                each.detach().clone()
        return True
    except Exception:  # noqa: BLE001 - a refusal
        return False
    finally:
        memory.guarded_set(0, 0)


def _describe(name: str, samples: Samples, count: int, wanted: int, ran: int) -> str:
    for index, (args, kwargs) in enumerate(_all_cases(name, _samples_of(name, samples), count, [ran])):
        if index == wanted:
            return ", ".join([*map(_text, args), *(f"{key}={_text(each)}" for key, each in kwargs.items())])[:300]
    return "?"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if not value.is_floating_point() and 0 < value.numel() <= 8 and value.layout is torch.strided:
            text += str(value.flatten().tolist())
        return text
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    with suppress(Exception):
        return repr(value)[:40]
    return "?"
