"""Yield the loop's own batches, in their order, while the calls of the next ones are in flight.

`Puller` brings the batches; the result of a pull is kept until the loop asks for it.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn
from torch.fx.graph import _PyTreeCodeGen

from fxlib.errors import FxlibError, FxlibWarning
from fxlib.pipeline.entry import Entry
from fxlib.pipeline.module_ahead import ModuleAhead, ahead_of, captured_in
from fxlib.pipeline.puller import Pulled, Puller, why_not_ahead
from fxlib.pipeline.reused_memory import leaves_of, still_as_they_are
from fxlib.runtime import CapturedModule
from fxlib.runtime.gradients.pushes import uninterrupted
from fxlib.runtime.tracking.flow_control import tensor_bytes
from fxlib.spec.inputs import Batch

B = TypeVar("B")
Inputs = Callable[[Any], Any]
"""A function that maps a batch to the module's arguments: a tuple, a dict by name, a `fxlib.Batch`, or a single one."""


@dataclass(frozen=True, slots=True)
class _NoState:
    """Stands for the state of a loader that raises where it is asked for it."""

    error: Exception


def _bytes_of(batch: object) -> int:
    return sum(map(tensor_bytes, leaves_of(batch)))


def _steps_stale(stale: object) -> int:
    if not isinstance(stale, int) or isinstance(stale, bool) or stale < 0:
        raise FxlibError(
            f"stale={stale!r}", where="fxlib.pipeline", hint="Give a number of steps; 0 means that no read is stale."
        )
    return stale


def pipeline(
    loader: Iterable[B],
    module: nn.Module | Callable[[], nn.Module],
    *,
    inputs: Inputs | None = None,
    depth: int | None = None,
    memory_bytes: int | None = None,
    ahead: bool = False,
    defer_pushes: bool = False,
    trainers: int | None = None,
    stale: int = 0,
) -> Pipeline[B]:
    """Yield a loader's batches, and make the declared reads of the next ones while the loop works on the current one.

    >>> for dense, sparse, labels in fxlib.pipeline(loader, module):
    ...     loss = criterion(module(dense, sparse), labels)

    The batches are the loader's own objects, in its order. Outputs, gradients and the servers' state are those of the
    plain loop, bit for bit. With a module that was not captured, the function only yields the batches.

    Args:
        loader: any iterable.
        module: the module that the loop calls with the batches, or a function that returns the one in use.
        inputs: a function that maps a batch to the arguments of the module. By default, a `fxlib.Batch` has them; a
            dict gives the entries that the module's forward names; a tuple or list gives as many of its first items as
            the forward takes.
        depth: number of batches that are pulled before the loop asks for them. By default one, and then two, four
            and eight, as long as the loop's steps become shorter by it.
        memory_bytes: limit on what these batches and their results hold; a batch is fetched ahead only within it, and
            one beyond it is pulled at most.
        ahead: whether batches may be pulled early, whatever the loader is: the caller states that it draws from no
            generator of this process, reads nothing that the loop changes, and does not use the memory of a batch
            again for a later one.
        defer_pushes: whether `push_gradients` returns before the servers have answered. They have answered before the
            next forward's first result, any other remote call of this process, `state_dict` of the module or the
            pipeline, the next `push_gradients`, and the end of the loop: a failed push is raised there, with a note
            that names its step.
        trainers: number of processes that write to the servers. If there are several, reads of states that pushes write
            stay in their step. By default, the ranks of the process group count, and RPC workers that the module does
            not call.
        stale: number of steps whose pushes a read may miss. Above 0, results are not those of the plain loop, and may
            differ from run to run; `Pipeline.staleness` counts how stale the reads were.

    Raises:
        FxlibError: `depth` or `trainers` is less than 1, `stale` is no number of steps, or `module` is not a module. In
            the loop: a loader with `ahead=True` has changed a batch that was pulled early.
    """
    return Pipeline(
        loader,
        module,
        inputs=inputs,
        depth=depth,
        memory_bytes=memory_bytes,
        ahead=ahead,
        defer_pushes=defer_pushes,
        trainers=trainers,
        stale=stale,
    )


class Pipeline(Generic[B]):
    """The iterable that `pipeline` returns; each `iter` of it is one epoch.

    Attributes:
        why_not_ahead: why batches are not pulled before the loop asks for them; empty if they are.
        taken: number of calls whose results were fetched ahead and taken, in the epochs that have ended.
        unused: number of calls that were made ahead but not taken, in these epochs.
        staleness: number of calls taken in these epochs that read what pushes write, by the number of steps whose
            pushes they may have missed: {0: 10, 1: 90} after 100 such reads, of which 90 missed the push of one step.
    """

    def __init__(
        self,
        loader: Iterable[B],
        module: nn.Module | Callable[[], nn.Module],
        *,
        inputs: Inputs | None,
        depth: int | None,
        memory_bytes: int | None,
        ahead: bool,
        defer_pushes: bool,
        trainers: int | None,
        stale: int,
    ) -> None:
        if depth is not None and depth < 1:
            raise FxlibError(f"depth={depth} batches", where="fxlib.pipeline", hint="Give a depth of 1 or more.")
        if trainers is not None and trainers < 1:
            raise FxlibError(
                f"trainers={trainers}", where="fxlib.pipeline", hint="This process is one: give 1 or more."
            )
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
        self._trainers = trainers
        self._stale = _steps_stale(stale)
        self._used: dict[ModuleAhead, list[Pulled[B]]] = {}
        """The modules of the epoch for which calls are made ahead, each with the batches of these calls."""
        self.why_not_ahead = "" if ahead else why_not_ahead(loader)
        self.taken = self.unused = 0
        self.staleness = Counter[int]()
        self._unknown: Exception | None = None
        """The first exception that `inputs=` raised."""
        self._knows_some = False
        """Whether the arguments of any batch were known."""
        self._state: Any = None
        self._forward: Callable[..., Any] | None = None
        """The forward whose arguments have the names that follow."""
        self._names: list[str] = []

    def __len__(self) -> int:
        """Return the number of batches of an epoch, if the loader knows it."""
        loader: Any = self._loader
        return len(loader)

    def __iter__(self) -> Iterator[B]:
        """Begin an epoch: the loader's iterator is made here, on the caller's thread."""
        return _Epoch(self._turns(Puller(self._loader, ahead=not self.why_not_ahead)))

    def state_dict(self) -> Any:
        """Return the loader's state as of the last batch that was yielded, after its pushes were answered.

        Raises:
            FxlibError: the loader has no state.
            Exception: whatever a push that was left in flight raises.
        """
        for each in self._used:
            each.settle_pushes()
        if isinstance(self._state, _NoState):
            raise self._state.error
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

    def _state_now(self) -> Any:
        """Return the loader's state, in objects that the next pull does not change."""
        try:
            return copy.deepcopy(self._stateful("state_dict").state_dict())
        except Exception as error:  # noqa: BLE001 - raised where the program asks for the state
            return _NoState(error)

    def _stateful(self, name: str) -> Any:
        if not hasattr(self._loader, name):
            raise FxlibError(f"a {type(self._loader).__name__} has no {name}", where="fxlib.pipeline")
        return self._loader

    def _turns(self, puller: Puller[B]) -> Generator[Pulled[B], None, None]:
        """Yield what the loop asks for: batches, and exceptions of the loader."""
        queue: deque[Pulled[B]] = deque()
        states: deque[Any] = deque()
        keeps_state = hasattr(self._loader, "state_dict")

        def pull(*, early: bool) -> None:
            queue.append(puller.pull(early=early))
            if keeps_state:
                states.append(self._state_now() if puller.ahead else None)

        used = self._used = {}
        try:
            while True:
                if not queue:
                    pull(early=False)
                current = self._due(puller, queue, used)
                if keeps_state:
                    self._state = states.popleft()
                if current.error is not None:
                    for ahead in used:
                        ahead.settle_pushes()
                    if isinstance(current.error, StopIteration):
                        return
                    yield current
                    continue
                found = self._opened(used)
                depth = self._depth or (found[1].depth if found else 1)
                while len(queue) < depth and self._may_follow(queue) and puller.may_pull_early():
                    with (
                        still_as_they_are([each.batch for each in (current, *queue)])
                        if puller.is_stated
                        else nullcontext()
                    ):
                        pull(early=True)
                if current.entry is not None:
                    current.entry.is_due = True
                if found:
                    self._fetch(queue, *found, used)
                yield current
                self._forget(current, used)
        finally:
            self._close(used)

    @staticmethod
    def _due(puller: Puller[B], queue: deque[Pulled[B]], used: Mapping[ModuleAhead, list[Pulled[B]]]) -> Pulled[B]:
        """Return the batch that the loop asks for; if that is not the one that was pulled, forget all that were."""
        pulled = queue.popleft()
        current = puller.as_asked_for(pulled)
        if current is not pulled:
            for ahead, those in used.items():
                ahead.withdraw([each.entry for each in those if each is pulled or each in queue])
                those[:] = [each for each in those if each is not pulled and each not in queue]
            queue.clear()
        return current

    def _may_follow(self, queue: Sequence[Pulled[B]]) -> bool:
        """Return whether there may be a batch behind those that were pulled, and the memory for it."""
        if not queue:
            return True
        limit = self._memory_bytes
        has_room = limit is None or sum(_bytes_of(each.batch) for each in queue) < limit
        return has_room and queue[-1].error is None

    def _close(self, used: Mapping[ModuleAhead, Iterable[Pulled[B]]]) -> None:
        """Leave nothing in flight, and count what the loop took."""
        if self._unknown is not None and not self._knows_some:
            error = f"{type(self._unknown).__name__}: {self._unknown}"
            warnings.warn(
                f"nothing was fetched ahead: inputs= raised for each batch, {error}", FxlibWarning, stacklevel=3
            )
            self._unknown = None
        with ExitStack() as closing:  # an interrupt while one of them waits leaves none of them open
            for ahead, pulled in used.items():
                closing.callback(self._count, ahead)
                closing.callback(
                    ahead.close, leaves_pushes=self._defer_pushes, trainers=self._trainers, stale=self._stale
                )
                closing.callback(ahead.withdraw, [each.entry for each in pulled if each.entry is not None])

    def _count(self, ahead: ModuleAhead) -> None:
        self.taken, self.unused = self.taken + ahead.taken, self.unused + ahead.unused
        ahead.taken = ahead.unused = 0
        self.staleness += ahead.staleness
        ahead.staleness.clear()

    def _opened(self, used: dict[ModuleAhead, list[Pulled[B]]]) -> tuple[CapturedModule, ModuleAhead] | None:
        """Return the current module and what makes its calls ahead, which watches from now on; None if not captured."""
        module = captured_in(self._current_module())
        if module is None:
            return None
        ahead = ahead_of(module)
        if ahead not in used:
            with uninterrupted():  # or nobody would close it
                ahead.open(self._depth, leaves_pushes=self._defer_pushes, trainers=self._trainers, stale=self._stale)
                used[ahead] = []
        return module, ahead

    def _fetch(
        self,
        queue: Iterable[Pulled[B]],
        module: CapturedModule,
        ahead: ModuleAhead,
        used: dict[ModuleAhead, list[Pulled[B]]],
    ) -> None:
        """Make calls for the batches that were pulled, as far as the memory limit allows."""
        held = 0
        for index, each in enumerate(queue):
            if each.error is not None:
                return
            if self._memory_bytes is not None:
                of_results = ahead.result_bytes
                held += _bytes_of(each.batch) + of_results
                if held > self._memory_bytes or (index > 0 and not of_results):
                    return
            if not each.was_tried:
                each.was_tried = True
                each.entry = self._made_ahead(module, ahead, each.batch)
                if each.entry is not None:
                    each.entry.is_due = False
                    used[ahead].append(each)

    def _made_ahead(self, module: CapturedModule, ahead: ModuleAhead, batch: Any) -> Entry | None:
        try:
            args, kwargs = self._arguments(module, batch)
        except Exception as error:  # noqa: BLE001 - `inputs=` may not know a batch that the loop skips
            self._unknown = self._unknown or error
            return None
        self._knows_some = True
        return ahead.add(args, kwargs)

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
        found = module if isinstance(module, nn.Module) else module()
        if not isinstance(found, nn.Module):
            raise FxlibError(
                f"the function that tells the module in use returned a {type(found).__name__}", where="fxlib.pipeline"
            )
        return found

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
        """Return the names of a forward's parameters, read only once because reading them takes as long as a call."""
        forward = module._program.generated
        if forward is not self._forward:
            codegen = module.graph._codegen
            if isinstance(codegen, _PyTreeCodeGen):
                self._names = list(codegen.pytree_info.orig_args)
            else:
                self._names = list(inspect.signature(forward).parameters)[1:]
            self._forward = forward
        return self._names


class _Epoch(Iterator[B]):
    """One run of a loop over its loader; as of the loader's own iterator, an exception of it is not the end."""

    def __init__(self, turns: Generator[Pulled[B], None, None]) -> None:
        self._turns = turns

    def __next__(self) -> B:
        """Return the next batch, after the step of the one before is over."""
        found = next(self._turns)
        if found.error is not None:
            raise found.error
        return found.batch  # type: ignore[return-value]

    def close(self) -> None:
        """Leave nothing in flight; this happens, too, where a loop is left."""
        self._turns.close()
