"""What a program under export holds in place of futures, RRefs, and results of which nothing is known."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from torch.fx import Proxy, Tracer
from torch.utils import _pytree as pytree

from fxlib.capture.faults import fault
from fxlib.capture.trace.remote import RemoteCalls
from fxlib.capture.trace.values import FutureValue, RRefCalls


class Recorder(Protocol):
    """What these values need of the recorder."""

    calls: RemoteCalls

    def value(self, made: Any) -> Any:
        """Return what the program goes on with, in place of a recorded value."""


class Undeclared:
    """A remote result of which no contract says what it is: it may be ignored, and no more."""

    def __init__(self, function: str) -> None:
        self._function = function

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be used."""
        raise fault(
            f"the forward uses the result of {self._function}, of which no contract says what it is",
            hint="Declare it with returns=, a function of the same arguments that makes tensors like the result: "
            "@fxlib.remote(returns=lambda table, rows: torch.empty(*rows.shape, 8)).",
        )

    __getattr__ = __iter__ = __len__ = __getitem__ = __bool__ = __call__ = refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __matmul__ = __truediv__ = refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be given to an operation of torch."""
        found = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))
        found.refuse()


class ExportedFuture:
    """The future of a call that the program issued itself."""

    def __init__(self, recorder: Recorder, made: FutureValue) -> None:
        self._recorder, self._made = recorder, made

    def wait(self) -> Any:
        """Wait for the call; later waits give the same value."""
        return self._recorder.value(self._made.wait())

    def value(self) -> Any:
        """Return the value of a future that was waited for."""
        return self._recorder.value(self._made.value())

    def done(self) -> NoReturn:
        """Refuse: the answer depends on timing."""
        self._made.done()

    def then(self, *_: object) -> NoReturn:
        """Refuse: a callback runs at a moment, and on a thread, that no graph can express."""
        self._made.then()

    add_done_callback = set_result = set_exception = then


class ExportedRRef:
    """What `rpc.remote` returns."""

    def __init__(self, recorder: Recorder, made: Proxy) -> None:
        self._recorder, self._made = recorder, made

    def to_here(self, timeout: Any = None) -> Any:
        """Fetch the value."""
        return self._recorder.value(self._recorder.calls.fetch(self._made, timeout))

    def rpc_sync(self, timeout: Any = None) -> RRefCalls:
        """Return the helper that calls methods and blocks."""
        return self._methods("sync", timeout)

    def rpc_async(self, timeout: Any = None) -> RRefCalls:
        """Return the helper that issues methods."""
        return self._methods("async", timeout)

    def remote(self, timeout: Any = None) -> RRefCalls:
        """Return the helper that leaves results of methods on the server."""
        return self._methods("remote", timeout)

    def _methods(self, style: Any, timeout: Any) -> RRefCalls:
        return self._recorder.calls.method_calls(style, self._made, timeout, then=self._recorder.value)

    def __fx_create_arg__(self, tracer: Tracer) -> Any:
        """Stand among the arguments of another call."""
        return tracer.create_arg(self._made)
