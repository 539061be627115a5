"""Compilers as one would not have them, in the place of the real ones wherever an operator allows this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxlib.runtime.backends import BACKENDS


class Bad:
    """Crashes, hangs, returns results of another shape, or remembers the right ones, as its name has it."""

    keeps_weights = True

    def __init__(self, name: str, package: str = "torch") -> None:
        self.name, self.package = name, package

    def compile(self, part: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Do so."""
        if self.name == "openvino":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.name == "onnxruntime":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as where it does not come back to Python
            time.sleep(3600.0)
        known: list[tuple[tuple[torch.Tensor, ...], Any]] = []

        def run(*values: torch.Tensor) -> Any:
            found = next((made for given, made in known if all(map(torch.equal, given, values))), None)
            if found is None:
                found = part(*values)
                known.append((values, found))
            return tuple(each[:1] for each in found) if self.name == "inductor" else found

        return run


BACKENDS.update({name: Bad(name) for name in BACKENDS})
BACKENDS["absent"] = Bad("absent", "fxlib-absent")
