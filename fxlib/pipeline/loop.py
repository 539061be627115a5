"""The loop's own batches, in their order, with the next ones' calls on their way."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import nn
from torch.fx.graph import _PyTreeCodeGen

from fxlib.errors import FxlibError
from fxlib.pipeline.module_ahead import ModuleAhead, ahead_of, captured_in
from fxlib.pipeline.pulling import Pulled, Puller, why_not_ahead
from fxlib.runtime import CapturedModule
from fxlib.runtime.tracking.flow_control import tensor_bytes
from fxlib.spec.inputs import Batch

B = TypeVar("B")
Inputs = Callable[[Any], Any]
"""From a batch to the arguments of the module: a tuple, a dict of them by name, a `fxlib.Batch`, or a single one."""


def pipeline(
    loader: Iterable[B],
    module: nn.Module | Callable[[], nn.Module],
    *,
    inputs: Inputs | None = None,
    depth: int = 1,
    memory_bytes: int | None = None,
    ahead: bool = False,
    defer_pushes: bool = False,
) -> Pipeline[B]:
    """Yield a loader's batches, and make the declared reads of the next ones while the loop works on this one.

    >>> for dense, sparse, labels in fxlib.pipeline(loader, module):
    ...     loss = criterion(module(dense, sparse), labels)

    The batches are the loader's own objects, in its order. Outputs, gradients and the servers' state are those of the
    plain loop, bit for bit. With a module that was not captured, it only yields.

    Args:
        loader: whatever a `for` takes.
        module: the module that the loop calls with the batches, or a function that returns the one in use.
        inputs: from a batch to the arguments of the module. By default a `fxlib.Batch` has them; of a dict, the module
            gets the entries that its forward names, of a tuple or list, as many of the first as its forward takes.
        depth: number of batches that are pulled before the loop asks for them.
        memory_bytes: limit on what these batches and their results hold; a batch is fetched ahead only within it.
        ahead: batches may be pulled early, whatever the loader: it draws from no generator of this process, and reads
            nothing that the loop changes.
        defer_pushes: `push_gradients` returns before the servers have answered. They have before the next forward's
            first result, any other remote call of this process, `state_dict` of the module or the pipeline, the next
            `push_gradients`, and the end of the loop: there a failed push is raised, with a note that names its step.

    Raises:
        FxlibError: `depth` is less than 1, or `module` is no module.
    """
    return Pipeline(
        loader, module, inputs=inputs, depth=depth, memory_bytes=memory_bytes, ahead=ahead, defer_pushes=defer_pushes
    )


class Pipeline(Generic[B]):
    """What `pipeline` returns: each `iter` of it is one epoch.

    Attributes:
        why_not_ahead: why batches are not pulled before the loop asks for them; empty where they are.
        taken: number of calls so far whose results were fetched ahead and taken.
        unused: number of calls so far that were made ahead in vain.
    """

    def __init__(
        self,
        loader: Iterable[B],
        module: nn.Module | Callable[[], nn.Module],
        *,
        inputs: Inputs | None,
        depth: int,
        memory_bytes: int | None,
        ahead: bool,
        defer_pushes: bool,
    ) -> None:
        if depth < 1:
            raise FxlibError(f"depth={depth} batches", where="fxlib.pipeline", hint="Give a depth of 1 or more.")
        if not callable(module):
            raise FxlibError(
                f"a {type(module).__name__} is no module",
                where="fxlib.pipeline",
                hint="Give it the module that the loop calls.",
            )
        self._loader = loader
        self._module = module
        self._inputs = inputs
        self._depth = depth
        self._memory_bytes = memory_bytes
        self._defer_pushes = defer_pushes
        self._used: dict[ModuleAhead, list[Pulled[B]]] = {}
        """What is made ahead for each module of the epoch, and for which batches."""
        self.why_not_ahead = "" if ahead else why_not_ahead(loader)
        self.taken = self.unused = 0
        self._state: Any = None
        self._forward: Callable[..., Any] | None = None
        """The forward whose arguments have the names that follow."""
        self._names: list[str] = []

    def __len__(self) -> int:
        """Return the number of batches of an epoch, where the loader knows it."""
        loader: Any = self._loader
        return len(loader)

    def __iter__(self) -> Iterator[B]:
        """Begin an epoch: the loader's iterator is made here, on the caller's thread."""
        return self._epoch(Puller(self._loader, ahead=not self.why_not_ahead))

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch that was yielded, its pushes answered.

        Raises:
            FxlibError: the loader has no state.
            Exception: what a push that was left in flight raises.
        """
        for each in self._used:
            each.settle_pushes()
        if self._state is not None:
            return self._state
        return self._stateful("state_dict").state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Put the loader into a state that `state_dict` returned.

        Raises:
            FxlibError: the loader has no state.
        """
        self._state = None
        self._stateful("load_state_dict").load_state_dict(state)

    def _stateful(self, name: str) -> Any:
        if not hasattr(self._loader, name):
            raise FxlibError(f"a {type(self._loader).__name__} has no {name}", where="fxlib.pipeline")
        return self._loader

    def _epoch(self, puller: Puller[B]) -> Iterator[B]:
        queue: deque[Pulled[B]] = deque()
        states: deque[Any] = deque()
        keeps_state = hasattr(self._loader, "state_dict")

        def pull(*, early: bool) -> None:
            queue.append(puller.pull(early=early))
            if keeps_state:
                states.append(self._stateful("state_dict").state_dict() if puller.ahead else None)

        used = self._used = {}
        try:
            while True:
                if not queue:
                    pull(early=False)
                current = queue.popleft()
                if keeps_state:
                    self._state = states.popleft()
                if current.error is not None:
                    for ahead in used:
                        ahead.settle_pushes()
                    if isinstance(current.error, StopIteration):
                        return
                    raise current.error
                while puller.ahead and len(queue) < self._depth and not (queue and queue[-1].error):
                    pull(early=True)
                if current.entry is not None:
                    current.entry.is_due = True
                self._fetch(queue, used)
                yield current.batch  # type: ignore[misc]
                self._forget(current, used)
        finally:
            for ahead, pulled in used.items():
                ahead.withdraw([each.entry for each in pulled])
                ahead.close(leaves_pushes=self._defer_pushes)
                self.taken, self.unused = self.taken + ahead.taken, self.unused + ahead.unused
                ahead.taken = ahead.unused = 0

    def _fetch(self, queue: Iterable[Pulled[B]], used: dict[ModuleAhead, list[Pulled[B]]]) -> None:
        """Make calls for the batches that were pulled, as far as the memory goes."""
        module = captured_in(self._current_module())
        if module is None:
            return
        ahead, held = ahead_of(module), 0
        if ahead not in used:
            used[ahead] = []
            ahead.open(self._depth, leaves_pushes=self._defer_pushes)
        for place, each in enumerate(queue):
            if each.error is not None:
                return
            held += tensor_bytes(each.batch) + ahead.result_bytes
            unknown = place > 0 and not ahead.result_bytes
            if self._memory_bytes is not None and (unknown or held > self._memory_bytes):
                return
            if not each.was_tried:
                each.was_tried = True
                each.entry = ahead.add(*self._arguments(module, each.batch))
                if each.entry is not None:
                    each.entry.is_due = False
                    used[ahead].append(each)

    @staticmethod
    def _forget(current: Pulled[B], used: dict[ModuleAhead, list[Pulled[B]]]) -> None:
        for ahead, pulled in used.items():
            if current in pulled:
                pulled.remove(current)
                ahead.passed(current.entry)
            else:
                ahead.passed(None)

    def _current_module(self) -> nn.Module:
        module = self._module
        return module if isinstance(module, nn.Module) else module()

    def _arguments(self, module: CapturedModule, given: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if self._inputs is not None:
            given = self._inputs(given)
        if isinstance(given, Batch):
            return given.inputs, given.kwargs
        if isinstance(given, Mapping):
            names = self._parameters(module)
            return (), {name: value for name, value in given.items() if self._inputs is not None or name in names}
        if isinstance(given, (tuple, list)):
            return tuple(given) if self._inputs is not None else tuple(given[: len(self._parameters(module))]), {}
        return (given,), {}

    def _parameters(self, module: CapturedModule) -> list[str]:
        """Return the names of what a module's forward takes: read once, since reading them takes as long as a call."""
        forward = module._program.generated
        if forward is not self._forward:
            codegen = module.graph._codegen
            if isinstance(codegen, _PyTreeCodeGen):
                self._names = list(codegen.pytree_info.orig_args)
            else:
                self._names = list(inspect.signature(forward).parameters)[1:]
            self._forward = forward
        return self._names
