"""A recording that lets a module run its instrumented code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule
from typing_extensions import override

from fxlib.profiling.instrument import Instrumented
from fxlib.runtime.ops.record import Recording


class Stopwatch(Recording):
    """A recording in which one module runs its instrumented code."""

    def __init__(self, module: GraphModule, instrumented: Instrumented) -> None:
        """Have `module` run `instrumented`, which was made from it."""
        super().__init__()
        self.cpu_s: dict[str, float] = {}
        """Processor time of the thread in the spans of each kind."""
        self._module = module
        self._instrumented = instrumented

    @override
    def instrument(self, module: GraphModule, generated: Callable[..., Any]) -> Callable[..., Any]:
        return self._instrumented if module is self._module else generated

    @override
    @contextmanager
    def span(self, kind: str, name: str = "", to: str = "") -> Iterator[None]:
        with super().span(kind, name, to):
            if kind == "backward":
                self._instrumented.backward_begins()
            start = time.thread_time()
            yield
            self.cpu_s[kind] = self.cpu_s.get(kind, 0.0) + time.thread_time() - start
