"""The tracer: torch.fx's own, or the caller's subclass, with remote calls, modes and source lines added."""

from __future__ import annotations

import inspect
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import _RemoteModule
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.immutable_collections import immutable_dict
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from fxlib.capture import source
from fxlib.capture.handled_errors import NOT_OF_TENSORS, capture_error, refuse_guarded
from fxlib.capture.intercept import is_capturing, suspended
from fxlib.capture.recording.recorder import Recorder
from fxlib.capture.rrefs import RRefPaths
from fxlib.capture.trace import value_facts
from fxlib.capture.trace.decided_sizes import UNKNOWN, DecidedSizes, SizedValue, known_iterator
from fxlib.capture.trace.remote import RemoteCalls
from fxlib.capture.trace.restructuring import hands_over, restructured, source_of
from fxlib.capture.trace.traced_through import TracedThrough
from fxlib.capture.trace.value_facts import ParameterMetadata
from fxlib.capture.trace.values import CollectiveValue, StructuredValue, TracedValue
from fxlib.errors import CaptureError
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.capture_facts import Change
from fxlib.runtime.ops import operators
from fxlib.runtime.submodules import local_modules
from fxlib.runtime.tracking import result_structure
from fxlib.utils.generated_code import target_of
from fxlib.utils.pytree import python_number

_DECLARE = (
    "Declare the structure of the remote result: @fxlib.remote(returns=(None, None)), or "
    'contracts={"pkg.mod:function": fxlib.Contract(returns=...)}.'
)
_DECIDE = (
    "Decide with tensors (torch.where), move the decision out of the forward, fix the argument with concrete_args=, or "
    "make the function that decides a leaf with wrap=."
)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_RREF_CALLS = {"rpc_sync": "sync", "rpc_async": "async", "remote": "remote"}


class RemoteTracer(Tracer):
    """Records remote calls wherever they are made, and for each node its origin in the user's program.

    This class is mixed in before the caller's Tracer. `prepare` sets it up for one capture.
    """

    proxy_buffer_attributes = True
    calls: RemoteCalls
    recorder: Recorder
    rref_paths: RRefPaths
    traced_through: TracedThrough
    leaves: Collection[object] = ()
    depth = 0
    """Depth of the tracer's own work, in which computations are not recorded; 0 while the forward runs."""
    end: FrameType | None = None
    """The frame at which the user's frames end."""
    answered = False
    """Whether the forward has read metadata of a tensor, which is a constant in the graph."""
    sizes: DecidedSizes | None = None
    """The sizes that samples have; None if the graph is to be for all sizes."""
    handed_over = 0
    """How often remote results of a declared structure were handed to code that may change them."""
    asked_gradients = False
    """Whether the forward has read which tensors take a gradient."""

    def prepare(
        self,
        calls: RemoteCalls,
        rref_paths: RRefPaths,
        leaves: Collection[object],
        end: FrameType,
        *,
        recorder: Recorder,
        traced_through: TracedThrough,
        changed: Mapping[str, Sequence[Change]],
        samples: Mapping[str, Any] | None,
    ) -> None:
        """Set up one capture.

        Args:
            calls: the recorder of remote calls.
            rref_paths: the locations of RRefs in the model.
            leaves: the modules that are kept as one node each.
            end: the frame at which the user's frames end.
            recorder: the recorder of what Python is asked.
            traced_through: the modules of torch's own classes that are traced through.
            changed: the changes made by code of the program's own, by the nodes that ran it, in their order.
            samples: arguments whose sizes the forward may read; None if the graph is to be for all sizes.
        """
        self._changed = dict(changed)
        self.recorder = recorder
        self.sizes = None if samples is None else DecidedSizes(samples, recorder.decided_by)
        recorder.use(self)
        self.tensor_attrs = {}
        self.calls, self.rref_paths, self.leaves = calls, rref_paths, leaves
        self.end, self.traced_through = end, traced_through
        self.added: list[str] = []
        self._names: dict[int, str] | None = None
        self._attributes_read: set[str] = set()
        """Names of the tensors that were read since the last change."""
        self._constants: dict[int, Proxy] = {}
        self.declared_leaves: set[Node] = set()
        """Elements of remote results that contracts declare to have no structure of their own."""
        self._exchanged: set[Node] = set()
        """Remote results of which the forward has exchanged elements."""
        self._restructured: set[Node] = set()
        """Remote results that the forward has changed, so that they may not have their declared structure any more."""
        self._parameter_metadata = ParameterMetadata()
        self.recorders: dict[object, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {}

    def forget(self) -> None:
        """Drop all references to the objects of one capture."""
        self.calls.forget()
        self.__dict__.clear()

    # These methods serve the recorder of remote calls.

    def rref(self, value: Any) -> Proxy:
        """Return the node that reads a live RRef, by the path under which the model holds it."""
        if (path := self.rref_paths.path_of(value)) is not None:
            return self._attribute(value, path)
        return self.constant(value, self.rref_paths.hint_of(value))

    def constant(self, value: object, hint: str) -> Proxy:
        """Return the node that reads an object kept beside the graph, since it is not an attribute of the model."""
        if id(value) in self._constants:
            return self._constants[id(value)]
        name = hint if not hasattr(self.root, hint) else self.get_fresh_qualname(f"{hint}_")
        setattr(self.root, name, value)
        return self._attribute(value, name)

    def metadata_of(self, proxy: Proxy, name: str) -> Any:
        """Return an attribute of a value that a parametrization computes from parameters, or None if it is unknown."""
        if not self.traced_through.computing:
            return None
        if name == "device":
            seen: Any = self._parameter_metadata.device_of(proxy.node, self.root)
        else:
            seen = (
                None if (found := self._parameter_metadata.of(proxy.node, self.root)) is None else getattr(found, name)
            )
        self.answered |= seen is not None
        return seen

    def note_leaf(self, item: Proxy, of: StructuredValue) -> None:
        """Note an element of a remote result of which nothing is declared, unless the forward may have put it there."""
        if source_of(of.node) not in self._exchanged:
            self.declared_leaves.add(item.node)

    def is_restructured(self, value: StructuredValue) -> bool:
        """Return whether the forward has changed the structure of a remote result, or of a part of it."""
        return source_of(value.node) in self._restructured

    def check_structure(self, value: StructuredValue) -> None:
        """Let each run check that a remote result, or a part of it, has its declared structure."""
        declared = tuple(value.structure) if isinstance(value.structure, Mapping) else len(value.structure)
        self._check(result_structure.check_structure, value, declared)

    def check_plain(self, value: Proxy, declared: float | str) -> None:
        """Let each run check that a part of a remote result is as its contract declares."""
        self._check(result_structure.check_plain, value, (declared,))

    def _check(self, check: Callable[..., None], value: Proxy, declared: object) -> None:
        made = source_of(value.node)
        if "call" in made.meta:
            self.create_proxy("call_function", check, (value, self.calls.called(made), declared), {})

    def _attribute(self, value: object, path: str) -> Proxy:
        if id(value) not in self._constants:
            self._constants[id(value)] = self.create_proxy("get_attr", path, (), {})
        return self._constants[id(value)]

    @contextmanager
    def before_changes(self) -> Iterator[None]:
        """Let the forward find the state that a run found before code of the program's own changed it."""
        if not self._changed:
            yield
            return
        try:
            for each in reversed([each for made in self._changed.values() for each in made]):
                each.undo()
            yield
            if self._changed:
                raise capture_error("the forward does not reach what it ran", hint="Change it between two steps.")
        finally:
            for each in [each for made in self._changed.values() for each in made]:
                each.redo()

    def _change_behind(self, name: str) -> None:
        """Repeat the changes that code of the program's own made when it ran as the node of this name."""
        with self.recorder.unobserved(), suspended():
            for each in self._changed.pop(name):
                each.redo()
            self.recorder.forget_changed()
        self._names, self._attributes_read = None, set()
        self.submodule_paths = {each: path for path, each in local_modules(self.root)}

    # torch.fx calls these methods of a tracer.

    @override
    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        if self.sizes is not None:
            self.sizes.root = self.root
        _refuse_another_signature(root_fn)
        made = super().create_args_for_root(root_fn, is_module, concrete_args)
        if not isinstance(self.graph._codegen, _PyTreeCodeGen):
            _in_order_of_signature(self.graph, inspect.unwrap(root_fn), is_module)
        self.recorder.forward_begins()
        return made

    @override
    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        self.depth += 1
        target = target_of(target, args[0] if args else kwargs.get("args", ()))
        try:
            node = super().create_node(kind, target, *args, **kwargs)
        finally:
            self.depth -= 1
        if kind.startswith("call"):
            reads = kind == "call_method" or target in (getattr, operator.getitem)
            refuse_guarded(sys._getframe(1), self.end, never_raised=() if reads else NOT_OF_TENSORS)
        if frames := tuple(source.user_frames(sys._getframe(1), self.end)):
            node.meta["source"], stack_trace = source.described(frames)
            node.meta.setdefault("stack_trace", stack_trace)
        if node.name in self._changed:
            self._change_behind(node.name)
        return node

    @override
    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind == "call_method" and (target in _RREF_CALLS or target == "to_here"):
            return self._rref_method(target, *args, **kwargs)
        if kind == "call_function" and isinstance(target, _OPERATORS) and target in self.recorders:
            recorded = self.recorders[target](args, kwargs)
            if recorded is not NotImplemented:
                return recorded
        if (changed := restructured(target, args)) is not None:
            self._restructured.add(changed)
        if target is operator.setitem and isinstance(args[0], StructuredValue):
            self._exchanged.add(source_of(args[0].node))
        self.handed_over += hands_over(kind, target, (*args, *kwargs.values()))
        self.depth += 1
        try:
            return super().create_proxy(kind, target, args, kwargs, *rest, **options)
        finally:
            self.depth -= 1

    def _rref_method(self, method: str, rref: Proxy, timeout: Any = None, **options: Any) -> Any:
        if method == "to_here":
            return self.calls.fetch(rref, timeout, **options)
        return self.calls.method_calls(_RREF_CALLS[method], rref, timeout)  # type: ignore[arg-type]

    @override
    def proxy(self, node: Node) -> Proxy:
        made = super().proxy(node)
        made = (TracedValue if self.sizes is None else SizedValue)(node, self) if type(made) is Proxy else made
        self.recorder.note_made(made, str(node.meta.get("source", "")))
        return made

    @override
    def create_arg(self, a: Any) -> Any:
        if type(a) is TracedValue:
            return a.node
        if isinstance(a, CollectiveValue):
            return a.wait().node
        if isinstance(a, rpc.PyRRef):
            return self.rref(a).node
        if isinstance(a, rpc.WorkerInfo):
            return self.create_proxy("call_function", rpc.get_worker_info, (a.name,), {}).node
        if (number := python_number(a)) is not None:  # generated code cannot express those of NumPy and of enums
            return number
        if isinstance(a, (list, dict)):
            self.recorder.handed_on(a)
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            return self._dict_of_a_class(a)
        if isinstance(a, torch.Tensor):
            with self.recorder.unobserved():  # torch.fx searches all parameters and buffers for it
                return super().create_arg(a)
        return super().create_arg(a)

    def _dict_of_a_class(self, given: dict[Any, Any]) -> Node:
        """Return the node that makes an ordered dict; torch.fx would turn any into a plain one."""
        if type(given) is not OrderedDict:
            raise capture_error(
                f"the forward hands on a {type(given).__name__}, which tracing would turn into a dict",
                hint="Give sample_inputs=, for torch.export, which keeps classes that torch's pytree knows.",
            )
        return self.create_proxy("call_function", OrderedDict, (list(given.items()),), {}).node

    @override
    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not is_capturing():  # another thread is running a model of its own
            return forward(*args, **kwargs)
        if isinstance(m, _RemoteModule):
            return self.calls.method_call("sync", m.module_rref, "forward", args, kwargs)
        inner = m._fxlib.original if isinstance(m, CapturedModule) else None
        if inner is not None and not self.is_leaf_module(m, (self.submodule_paths or {}).get(m, "")):
            return inner._call_impl(*args, **kwargs)  # with the hooks, which are those of both
        if self.traced_through.includes(m):
            with self.traced_through.inside(m):
                return super().call_module(m, forward, args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        named = module_qualified_name in self.leaves or m in self.leaves or type(m) in self.leaves
        # Backward hooks act on tensors, and would be lost by tracing through the module.
        hooked = bool(m._backward_hooks or m._backward_pre_hooks)
        # The forward of `DistributedDataParallel` prepares its reducer for the backward of the same step.
        parallel = isinstance(m, DistributedDataParallel)
        if named or hooked or parallel or m in self.traced_through.whole:
            return True
        return super().is_leaf_module(m, module_qualified_name) and not self.traced_through.includes(m)

    @override
    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        if not is_capturing():
            return attr_val
        if type(self).getattr_is_torchs() and isinstance(attr_val, torch.Tensor):
            return self._tensor_attribute(attr_val, parameter_proxy_cache)
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    @override
    def path_of_module(self, mod: nn.Module) -> str:
        with self.recorder.unobserved():
            if self.submodule_paths and mod not in self.submodule_paths:  # it may be the model of one
                held = (each for each in self.submodule_paths if isinstance(each, CapturedModule))
                mod = next((each for each in held if each._fxlib.original is mod), mod)
            return super().path_of_module(mod)

    @classmethod
    def getattr_is_torchs(cls) -> bool:
        """Return whether the caller's Tracer leaves the reading of attributes to torch."""
        after = cls.__mro__[cls.__mro__.index(RemoteTracer) + 1 :]
        return next(base for base in after if "getattr" in base.__dict__) is Tracer

    def _tensor_attribute(self, value: torch.Tensor, cache: dict[str, Proxy]) -> Any:
        # torch.fx itself would search all parameters at each access.
        if self._names is None:
            with self.recorder.unobserved():
                self._names = {id(buffer): name for name, buffer in self.root.named_buffers()}
                self._names |= {id(parameter): name for name, parameter in self.root.named_parameters()}
        name = self._names.get(id(value))
        if name is None or not (isinstance(value, nn.Parameter) or self.proxy_buffer_attributes):
            return value
        if name not in cache or name not in self._attributes_read:
            self._attributes_read.add(name)
            cache[name] = self.create_proxy("get_attr", name, (), {})
        return cache[name]

    # These methods refuse what a graph cannot hold.

    @override
    def to_bool(self, obj: Proxy) -> bool:
        if self.sizes is not None and (known := self.sizes.of(obj.node)) is not UNKNOWN:
            return bool(known)
        return self._decide(super().to_bool, obj, "a traced value decides which way the program goes")

    @override
    def iter(self, obj: Proxy) -> Iterator[Any]:
        if self.sizes is not None and (known := known_iterator(self.sizes, obj)) is not None:
            return known
        return self._decide(super().iter, obj, "a traced value is iterated, and only a run knows its length")

    def _decide(self, stock: Callable[[Proxy], Any], proxy: Proxy, problem: str) -> Any:
        if any("to_bool" in base.__dict__ or "iter" in base.__dict__ for base in self._callers_classes()):
            return stock(proxy)
        return self.refuse(proxy, problem)

    def _callers_classes(self) -> list[type]:
        mro = type(self).__mro__
        return [base for base in mro[mro.index(RemoteTracer) + 1 :] if not base.__module__.startswith("torch.fx.")]

    def class_of(self, proxy: Proxy) -> type:
        """Return the class that the proxy's value surely has.

        Raises:
            CaptureError: only a run knows it.
        """
        relied: dict[Node, type] = {}
        found = value_facts.class_of(proxy.node, self.root, relied)
        for node, kind in relied.items() if found is not None else ():
            self.recorder.rely_on_class(node, kind)
        return found or self.refuse(proxy, "the class of a traced value is asked for, and only a run knows it")

    @staticmethod
    def class_of_value(value: Proxy) -> type:
        """Return the class that a traced value surely has, as declared or as its maker implies.

        Raises:
            CaptureError: only a run knows it.
        """
        return value._class() if isinstance(value, TracedValue) else TracedValue(value.node, value.tracer)._class()

    def container_class(self, value: Proxy) -> type:
        """Return the class of container that a traced value is, or any other class if it surely is none.

        Raises:
            CaptureError: only a run knows it.
        """
        if value.node in self.declared_leaves or value.node.target in (operators.create, operators.make_rref):
            return torch.Tensor  # a leaf, as an RRef is
        if value_facts.is_number(value.node):
            return int
        return self.class_of_value(value)

    def refuse(self, proxy: Proxy, problem: str) -> NoReturn:
        """Raise the error that the program cannot be decided without the proxy's value.

        Raises:
            CaptureError: always.
        """
        remote = "call" in proxy.node.meta
        where = source.here(self.end)
        raise capture_error(
            f"{problem}: {source.line_at(where) or proxy.node.name}",
            where=where,
            hint=_DECLARE if remote else _DECIDE,
        )


def _refuse_another_signature(forward: Any) -> None:
    """Refuse a decorator that takes its arguments differently from the function that it wraps.

    torch.fx reads the names of arguments from the inner function, and passes them to the outer one by position.

    Raises:
        CaptureError: the decorator does so.
    """
    outer, inner = forward.__code__, inspect.unwrap(forward).__code__
    starred = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if not (inner.co_kwonlyargcount or inner.co_flags & starred):
        return  # then Python itself binds the outer function's arguments
    taken = [
        (code.co_argcount, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2], code.co_flags & starred)
        for code in (outer, inner)
    ]
    if outer is not inner and taken[0] != taken[1]:
        raise CaptureError(
            "a decorator of the forward takes its arguments otherwise than the forward, some of which are keyword-only "
            "or starred",
            where=source.of_definition(forward),
            hint="Give sample_inputs=, for torch.export, or capture a module that calls this one.",
        )


def _in_order_of_signature(graph: Graph, forward: Any, is_module: bool) -> None:
    """Put the argument that takes further positional ones before the keyword-only ones, as in Python's signatures.

    torch.fx puts it after them, so that they could be given by position. If the forward has no such argument, and a
    required keyword-only argument follows one with a default, the graph has one that is always empty.
    """
    code = forward.__code__
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = code.co_argcount - is_module
    named = inputs[first : first + code.co_kwonlyargcount]
    if not named:
        return
    further = [node for node in inputs if str(node.target).startswith("*") and not str(node.target).startswith("**")]
    if further:
        named[0].prepend(further[0])
    elif any(node.args for node in inputs[: inputs.index(named[-1])]) and not all(node.args for node in named):
        taken = {str(node.target) for node in inputs}
        with graph.inserting_before(named[0]):
            graph.placeholder("*" + next(name for name in ("_", "_more") if name not in taken))


def tracer_for(tracer_class: Any) -> RemoteTracer:
    """Make a tracer that behaves like the caller's class, and also records remote calls.

    Raises:
        CaptureError: the class is not a `torch.fx.Tracer`, or its constructor needs arguments.
    """
    if tracer_class is None:
        return RemoteTracer()
    if not (isinstance(tracer_class, type) and issubclass(tracer_class, Tracer)):
        raise CaptureError(f"{tracer_class!r} is no subclass of torch.fx.Tracer", where="tracer_class")
    mixed = type(f"Remote{tracer_class.__name__}", (RemoteTracer, tracer_class), {})
    try:
        tracer: RemoteTracer = mixed()
    except TypeError as error:
        raise CaptureError(f"cannot make a {tracer_class.__name__}: {error}", where="tracer_class") from error
    return tracer
