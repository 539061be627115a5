"""Refuse what a forward must not do during a capture because no graph can hold it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Node, Proxy
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import Call, Interception, Replace
from fxlib.capture.trace.tracer import RemoteTracer
from fxlib.capture.trace.value_facts import asked_by_the_program
from fxlib.capture.trace.values import IN_PLACE
from fxlib.errors import CaptureError

_ISSUE = "Issue calls with rpc_async instead."
_WRITTEN_IN_CPP = "__torch__.torch.classes."
"""The beginning of the names that torch gives to classes that are written in C++."""
_BEFORE = "Set it before the forward."
_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (threading.Thread.start, "the forward starts a thread", _ISSUE),
    (ThreadPoolExecutor.submit, "the forward hands work to threads", _ISSUE),
    (torch.random.manual_seed, "the forward seeds the random generator", "Seed it before the forward."),
    (torch.random.set_rng_state, "the forward sets the state of the random generator", _BEFORE),
    (torch.set_default_dtype, "the forward sets the default dtype", _BEFORE),
    (torch.set_default_device, "the forward sets the default device", _BEFORE),
    (torch.use_deterministic_algorithms, "the forward sets whether algorithms are deterministic", _BEFORE),
    (torch.set_float32_matmul_precision, "the forward sets the precision of matrix products", _BEFORE),
    (torch.backends.cudnn.set_flags, "the forward sets flags of a backend", _BEFORE),
    (torch.backends.mkldnn.set_flags, "the forward sets flags of a backend", _BEFORE),
    (torch.backends.cuda.enable_flash_sdp, "the forward chooses a backend of attention", _BEFORE),
    (torch.backends.cuda.enable_math_sdp, "the forward chooses a backend of attention", _BEFORE),
    (torch.backends.cuda.enable_mem_efficient_sdp, "the forward chooses a backend of attention", _BEFORE),
    (torch.nn.attention._sdpa_kernel, "the forward chooses a backend of attention", _BEFORE),
    (torch.inference_mode.__enter__, "the forward enters inference_mode", "Use torch.no_grad()."),
)


CHECKPOINT_WRITES = "the forward checkpoints a part that writes to buffers, and its recomputation writes to them again"
"""The problem of a checkpointed block whose second run, in backward, no graph has."""
CHECKPOINT_HINT = "Keep this part whole with leaf_modules= or wrap=, or take the checkpoint away."


def reentrant_checkpoint() -> CaptureError:
    """Return the refusal of a checkpoint whose backward enters autograd again, for gradients that no graph records."""
    return capture_error(
        "the forward checkpoints a part with re-entry (use_reentrant=True), whose backward no graph can hold",
        hint="Give torch.utils.checkpoint use_reentrant=False.",
    )


def install(interception: Interception, tracer: RemoteTracer) -> None:
    """Install all refusals for one trace."""
    begun: dict[int, Node | None] = {}
    install_everywhere(
        interception, begins=lambda block: begun.update({id(block): next(reversed(tracer.graph.nodes), None)})
    )
    interception.function(torch.autograd.graph.saved_tensors_hooks.__exit__, _checkpoint_end(tracer, begun))
    interception.function(torch.is_tensor, _tensor_question(tracer))
    interception.function(pytree._get_node_type, _container_question(tracer))
    interception.function(torch.broadcast_shapes, _shapes_question(tracer))
    interception.method(torch.autograd.Variable, "__new__", _legacy_tensor)
    interception.function(nn.Module.__setattr__, _assignment(tracer))


def install_everywhere(
    interception: Interception, *, users: bool = False, begins: Callable[[object], None] = lambda _: None
) -> None:
    """Refuse what neither a trace nor an export can record.

    Args:
        interception: what the refusals are installed in.
        users: whether they are for the user's own code alone.
        begins: a function that is called when a checkpointed block begins.
    """
    for function, problem, hint in _FUNCTIONS:
        interception.function(function, (_users_refusal if users else _refusal)(problem, hint))
    interception.function(torch.autograd.graph.saved_tensors_hooks.__enter__, _saved_tensors(begins))
    interception.method(rpc.PyRRef, "backward", _refusal("the forward runs a backward", "Run it in the training step."))
    interception.method(
        rpc.PyRRef, "__init__", _refusal("the forward makes an RRef to a value", "Send the value itself.")
    )
    for scripted in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
        interception.method(scripted, "__call__", _scripted)


def _refusal(problem: str, hint: str) -> Replace:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise capture_error(f"{problem}, which no graph can hold", hint=hint)

    return lambda _: refuse


def _users_refusal(problem: str, hint: str) -> Replace:
    def replace(original: Call) -> Call:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if source.asked_by_users(sys._getframe(3)):  # past the two frames of the interception
                raise capture_error(f"{problem}, which no graph can hold", hint=hint)
            return original(*args, **kwargs)

        return refuse

    return replace


def _scripted(original: Call) -> Call:
    """Refuse calls of TorchScript: what it returns may be detached, and its grad modes and decisions are not seen.

    Methods of classes that are written in C++, as torch's packed weights are, are no TorchScript.
    """

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function.owner, "qualified_name", "") if isinstance(function, torch._C.ScriptMethod) else ""
        if owner.startswith(_WRITTEN_IN_CPP):
            return original(function, *args, **kwargs)
        name = f"{owner.rpartition('.')[2]}.{function.name}" if owner else function.name
        made_from = "nn.Module" if owner else "Python function"
        raise capture_error(
            f"the forward calls {name}, a function of TorchScript, which no graph can hold",
            hint=f"Call the {made_from} that it was scripted or traced from, or keep what calls it whole with wrap=.",
        )

    return call


def _tensor_question(tracer: RemoteTracer) -> Replace:
    def replace(original: Call) -> Call:
        def is_tensor(value: object) -> bool:
            asked = isinstance(value, Proxy) and source.is_users(sys._getframe(3))
            return issubclass(tracer.class_of(value), torch.Tensor) if asked else original(value)  # type: ignore[arg-type]

        return is_tensor

    return replace


def _container_question(tracer: RemoteTracer) -> Replace:
    """Let torch's pytree take a traced value for what it surely is where the program asks it (`tree_map`)."""

    def replace(original: Call) -> Call:
        def node_type(value: object) -> Any:
            asked = isinstance(value, Proxy) and asked_by_the_program(sys._getframe(3))
            return tracer.container_class(value) if asked else original(value)  # type: ignore[arg-type]

        return node_type

    return replace


def _shapes_question(tracer: RemoteTracer) -> Replace:
    """Record the call: the forward might catch an error about the class of a traced shape, which no run raises."""

    def replace(original: Call) -> Call:
        def broadcast_shapes(*shapes: Any) -> Any:
            if not any(isinstance(each, Proxy) for each in shapes):
                return original(*shapes)
            return tracer.create_proxy("call_function", torch.broadcast_shapes, shapes, {})

        return broadcast_shapes

    return replace


def _saved_tensors(begins: Callable[[object], None]) -> Replace:
    def replace(original: Call) -> Call:
        def enter(block: object) -> Any:
            if type(block).__module__ == "torch.utils.checkpoint":  # it recomputes the same values, so it may go
                begins(block)
                return original(block)
            raise capture_error(
                "the forward sets hooks on the tensors saved for backward, which no graph can hold",
                hint="Set them around the whole forward, or keep this part whole with leaf_modules= or wrap=.",
            )

        return enter

    return replace


def _checkpoint_end(tracer: RemoteTracer, begun: dict[int, Node | None]) -> Replace:
    """Refuse a checkpointed block that writes to the model's state, which its recomputation in backward does again."""

    def replace(original: Call) -> Call:
        def leave(block: object, *details: Any) -> Any:
            found = original(block, *details)
            before = begun.pop(id(block), None)
            nodes = list(tracer.graph.nodes)
            within = nodes[nodes.index(before) + 1 :] if before is not None else []
            if any(_writes_state(node, tracer.root) for node in within):
                raise capture_error(CHECKPOINT_WRITES, hint=CHECKPOINT_HINT)
            return found

        return leave

    return replace


def _writes_state(node: Node, root: nn.Module) -> bool:
    """Return whether a node surely writes to a buffer: a norm with statistics, or an operator in place on one."""
    if node.op == "call_module":
        called = root.get_submodule(str(node.target)).modules()
        return any(isinstance(each, _NormBase) and each.training and each.track_running_stats for each in called)
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
    written = node.args[0] if node.args else None
    in_place = node.target in IN_PLACE or name.endswith("_")
    return in_place and isinstance(written, Node) and written.op == "get_attr"


def _legacy_tensor(original: Call) -> Call:
    def construct(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):  # it would be taken for a tensor
            raise capture_error("the forward calls Variable, which no graph can hold", hint="Use the tensor itself.")
        return original(*args, **kwargs)

    return construct


def _assignment(tracer: RemoteTracer) -> Replace:
    """Refuse an assignment of Python state: it would happen once, during the capture, and never in a run."""

    def replace(original: Call) -> Call:
        def assign(module: nn.Module, name: str, value: object) -> None:
            caller = sys._getframe(3)  # past the two frames of the interception
            if not isinstance(value, Proxy) and not source.is_users(caller):
                _assign_for_torch(tracer, original, module, name, value)
            elif not _is_written_in_place(getattr(module, name, None), value):
                raise _kept(module, name)

        return assign

    return replace


def _assign_for_torch(tracer: RemoteTracer, original: Call, module: nn.Module, name: str, value: object) -> None:
    """Let torch's own code assign a constant kept beside the graph by torch.fx, or a value that changes nothing."""
    is_new = not hasattr(module, name)
    if not is_new and module in getattr(tracer, "submodule_paths", ()) and getattr(module, name) is not value:
        if name == "training":
            raise capture_error(
                f"the forward switches the training mode of {type(module).__name__}, which no graph can hold",
                hint="Call train() or eval() before the forward.",
            )
        raise _kept(module, name)
    if is_new and module is tracer.root:
        tracer.added.append(name)
    original(module, name, value)


def _kept(module: nn.Module, name: str) -> CaptureError:
    return capture_error(
        f"the forward assigns {type(module).__name__}.{name}, so one step would depend on the last",
        hint="Return the value instead, or write to a buffer in place.",
    )


def _is_written_in_place(before: object, value: object) -> bool:
    """Return whether a buffer is assigned to itself, as `self.count += 1` and `self.u = f(..., out=self.u)` do."""
    if not (isinstance(before, Proxy) and isinstance(value, Proxy)):
        return before is value and value is not None
    node: Any = value.node
    if node.kwargs.get("out") is before.node:
        return True
    while node is not before.node and node.target in IN_PLACE:
        node = node.args[0]
    return node is before.node
