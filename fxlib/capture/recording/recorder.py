"""Record the Python state that a forward reads while it is captured, and detect its changes to this state.

All of the user's functions that run meanwhile run from instrumented code (`observers`). What they read from objects
that existed before becomes a fact (`observations`, `record`), which a captured module checks before each run. Whatever
differs when the capture ends has been changed by the forward: it is put back, and the capture is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import is_capturing, suspended
from fxlib.capture.recording.argument_assumptions import ArgumentAssumptions
from fxlib.capture.recording.called import Calls
from fxlib.capture.recording.observations import Observations
from fxlib.capture.recording.observers import ObservedFunctions, all_functions, functions_in, is_a
from fxlib.capture.recording.record import ExportedTensors, Record, Tracer, modules_of
from fxlib.capture.recording.sent_objects import SentObjects
from fxlib.errors import CaptureError
from fxlib.runtime.guards.capture_facts import Fact, Kind
from fxlib.runtime.guards.fact_table import Facts


class StuckError(CaptureError):
    """The error for a change that a capture cannot put back; another attempt would not find the program as it was."""


class Recorder:
    """Records everything that instrumented functions do while the forward of one capture runs.

    Args:
        model: the model, or a function. Its own modules are watched by `state.unchanged`, too.
        also: the functions that an earlier attempt met too late.
    """

    def __init__(self, model: object, also: tuple[FunctionType, ...] = ()) -> None:
        self.disturbed = ""
        """A description of what another thread has changed that the forward has read; empty if there is nothing."""
        self._model = model
        self._functions = ObservedFunctions(also)
        self._record = Record(model, self._functions)
        self._arguments = ArgumentAssumptions(model, self._record)
        self._observations = Observations(self._record, self._functions, self._arguments)
        self._sent = SentObjects(self._record.knows)
        self._calls = Calls(model, self._record, self._functions, self._arguments, self._observations, sent=self._sent)
        forward = type(model).forward if isinstance(model, nn.Module) else model
        self._roots = set(functions_in(forward))
        for function in self._roots:
            for each in function.__defaults__ or ():
                self._record.see(each)
                self._observations.deep(each)
        self._busy = False
        self.active = False
        """Whether the forward is running."""
        self._stop_noting: Callable[[], None] | None = None
        self._changed: list[Fact] = []
        self._changed_when_sent: CaptureError | None = None
        self._returned: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        other = self._record.leave()
        if error is None and other is not None:
            raise CaptureError(
                f"the forward asks for {other}, which is another during a capture",
                where=source.of_definition(getattr(type(self._model), "forward", self._model)),
                hint="Ask before the forward, and keep the answer as an attribute of the model.",
            )
        if self._record.stuck and (error is None or isinstance(error, Exception)):
            fact = self._record.stuck[0]
            raise StuckError(
                f"the forward changes {fact}, and a capture cannot put it back",
                where=fact.where or source.of_definition(getattr(type(self._model), "forward", self._model)),
                hint="Do this outside of the forward, and capture a new model.",
            ) from error
        if error is None and self._changed_when_sent is not None:
            raise self._changed_when_sent
        if error is None and self._changed:
            fact = self._changed[0]
            if fact.kind is Kind.MEMO:
                raise CaptureError(
                    "the forward fills a cache with something that the first run would keep for all others",
                    where=fact.where or source.of_definition(getattr(type(self._model), "forward", self._model)),
                    hint="Call the cached function once before the capture.",
                )
            raise CaptureError(
                f"the forward changes {fact}, so one step would depend on the last",
                where=fact.where or source.of_definition(getattr(type(self._model), "forward", self._model)),
                hint="Return the value instead, or do this outside of the forward.",
            )

    def use(self, tracer: Tracer) -> None:
        """Record for a trace made by this tracer; an export has no tracer."""
        self._record.tracer = tracer

    def use_stand_ins(self, stand_ins: ExportedTensors) -> None:
        """Record for an export with these stand-ins for tensors."""
        self._record.stand_ins = stand_ins

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Let the user's functions run from instrumented code during the block."""
        with self._functions.listening(self):
            try:
                yield
            finally:
                self.forward_ends()

    def forward_begins(self) -> None:
        """Attribute what happens from now on to the forward."""
        self._record.begin()
        self.active, self._stop_noting = True, self._functions.note_others()

    def forward_ends(self) -> None:
        """Put back what the forward has changed, while all of the capture's replacements are still in place."""
        if self._stop_noting is not None:
            self._stop_noting()
            self.active, self._stop_noting = False, None
            with self.unobserved(), suspended(), _disable_current_modes():
                self._changed_when_sent = self._sent.changed()
                self._changed, self.disturbed = self._record.restore()
                self._observations.hold(self._sent.kept)

    def begin(self) -> None:
        """Look for functions in the model."""
        self._functions.discover_class(nn.Module)
        if isinstance(self._model, nn.Module):
            self._observations.on_class("forward", type(self._model))
            for module in modules_of(self._model):
                self._functions.discover_class(type(module))
        else:
            self._record.see(self._model)

    def listens(self) -> bool:
        """Return whether the forward is running, so that observations count."""
        return self.active and not self._busy and is_capturing()

    def observe(self, name: str, operands: tuple[Any, ...]) -> Any:
        """Handle one observation; the recorder's own work meanwhile is not observed."""
        self._busy = True
        try:
            return getattr(self._calls if name == "called" else self._observations, name)(*operands)
        finally:
            self._busy = False

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Attribute what happens in the block to the capture itself."""
        busy, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = busy

    # The tracer calls these methods.

    def hold_to(self, table: dict[str, Any], name: str) -> None:
        """Note that the graph reads a tensor from one of the model's tables; the program gets it in another way."""
        self._record.hold_to(table, name)

    def forget_changed(self) -> None:
        """Drop facts that the forward has read but that no longer hold, as something else has changed the state."""
        self._record.forget_changed()

    def handed_on(self, container: Any) -> None:
        """Note a container that becomes part of the graph in its present state.

        Raises:
            CaptureError: the caller gets the container, and would get another one from a graph.
        """
        with self.unobserved():
            self._observations.deep(container)
            if self.active and is_a(container, (list, dict)) and not self._is_running():
                if self._record.knows(container) or id(container) in self._returned:
                    twice = "twice" if id(container) in self._returned else "that was there before"
                    raise capture_error(
                        f"the forward returns a {type(container).__name__} {twice}, and a graph would return a copy",
                        where=source.of_definition(next(iter(self._roots))),
                        hint="Return a copy of it, or a tuple.",
                    )
                self._returned[id(container)] = container

    def sent(self, value: Any, *, by_client: bool = False) -> None:
        """Note the contents of an object that is sent and becomes part of the graph.

        Args:
            value: the object.
            by_client: whether a registered client gets it, which may write to it, as a remote function cannot.

        Raises:
            CaptureError: the object's contents cannot be known, and the forward has made it.
        """
        with self.unobserved(), suspended(), _disable_current_modes():
            self._sent.note(value, by_client=by_client)

    def given(self, values: Iterable[Any]) -> None:
        """Note the contents of the forward's arguments, which the graph of an export leaves unchanged."""
        where = source.of_definition(next(iter(self._roots), None))
        with self.unobserved(), suspended(), _disable_current_modes():
            for each in values:
                self._sent.note_argument(each, where)

    def opened(self, container: Any) -> None:
        """Note the contents of a container whose elements become arguments of a call one by one."""
        with self.unobserved(), suspended(), _disable_current_modes():
            self._observations.contents(container)

    def _is_running(self) -> bool:
        """Return whether the forward has begun and has not returned."""
        codes = {each.__code__ for each in self._roots}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        return frame is not None or not codes

    def value_asked(self, tensor: torch.Tensor) -> None:
        """Note that the elements of a tensor were read without a node of the graph."""
        with self.unobserved(), suspended(), _disable_current_modes():
            self._record.value_asked(tensor)

    def history_asked(self, tensor: torch.Tensor, name: str) -> None:
        """Note that a tensor was asked about its history, for example for its gradient, which it did not have."""
        with self.unobserved(), suspended(), _disable_current_modes():
            self._record.history_asked(tensor, name)

    def note_made(self, stand_in: Any, where: str) -> None:
        """Note a stand-in for a value and the statement that made it; nothing may keep it after the capture."""
        self._record.note_made(stand_in, where)

    def rely_on_class(self, node: Node, kind: type) -> None:
        """Note that an argument is assumed to be an instance of a class."""
        self._arguments.rely_on_class(node, kind)

    def decided_by(self, place: tuple[str, tuple[tuple[str, Any], ...], Node | None], value: Any) -> None:
        """Note that the program branched on a size."""
        self._arguments.decided_by(place, value)

    # These members give the result.

    @property
    def asked_grad_mode(self) -> bool:
        """Whether the forward may behave differently when no gradients are recorded."""
        return self._calls.asked_grad_mode

    @property
    def asked_classes(self) -> bool:
        """Whether the forward may behave differently with parameters or buffers of other classes."""
        return self._record.asked_classes

    def changed_at(self, module: nn.Module, name: str) -> str:
        """Return where the forward wrote to a module's attribute, or where it is defined if that is unknown."""
        return self._record.written.get((id(module), name)) or source.of_definition(type(module).forward)

    @property
    def writes_out(self) -> str:
        """The file:line of the forward's first statement that prints or logs; empty if none does."""
        return self._calls.writes_out

    def slow_checks(self) -> tuple[str, ...]:
        """Return the warnings about slow checks, each with its line and a remedy."""
        return tuple(self._record.large.values())

    def facts(self, graph: Graph) -> Facts:
        """Return the facts to watch about the state that was read while `graph` was made.

        Raises:
            CaptureError: the program branches on an argument that it also writes to.
        """
        return Facts(
            self._record.facts(), tuple(self._arguments.facts(graph)), cached_calls=tuple(self._record.cached_calls)
        )

    def sharing(self) -> dict[str, str]:
        """Return the tensors in the graph that share memory with Python objects: their paths, and what made each."""
        paths = [(self._record.path_in_graph(tensor), where) for tensor, where in self._record.sharing]
        return {path: where for path, where in paths if path is not None}

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether an exporter's stand-in shares its memory with a Python object."""
        storages = [shared.untyped_storage()._cdata for shared, _ in self._record.sharing]
        return bool(storages) and tensor.untyped_storage()._cdata in storages

    def met_late(self) -> tuple[FunctionType, ...] | None:
        """Return the functions to observe from the start of another attempt, or None if this one has seen all.

        Finders of modules run when torch imports a module for the first time, and are not part of the program.
        """
        others = (*sys.meta_path, *([] if self._record.tracer is None else [self._record.tracer]))
        bases = [base for each in others for base in (each if isinstance(each, type) else type(each)).__mro__]
        return self._functions.met_late({id(each.__code__) for base in bases for each in all_functions(base)})

    def refuse_leaks(self) -> None:
        """Check that no stand-in is left in the program, where the original forward would find it.

        Raises:
            CaptureError: an object still refers to a stand-in.
        """
        self._returned.clear()
        self._sent.forget()
        self._calls.forget()
        self._observations.forget()
        self._record.refuse_leaks()
