"""The functions that an export replaces: those that make remote calls, and those whose effect a graph would lose."""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import torch
from torch import nn
from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from torch.distributed import rpc
from torch.distributed.rpc import rref_proxy
from torch.nn.modules import activation
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from fxlib.capture import source
from fxlib.capture.export.calls import ExportRecorder
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import Call, Interception, Replace
from fxlib.capture.recording.observers import original_code
from fxlib.capture.trace import refusals
from fxlib.capture.trace.hooks import METHODS, STYLES, hide_remote_modules, rref_to
from fxlib.capture.trace.remote import Style
from fxlib.capture.trace.values import CollectedFutures
from fxlib.runtime.ops.calls import kinds


def install(interception: Interception, remote: ExportRecorder) -> None:
    """Install all replacements for one export."""
    _install_rpc(interception, remote)
    _install_autocast(interception)
    _keep_modes(interception)
    refusals.install_everywhere(interception, users=True, begins=remote.checkpoint_began)
    interception.function(nn.Module.__setattr__, _assignment)
    interception.method(torch.overrides, "has_torch_function", _unasked_by_attention)
    interception.function(activation._is_make_fx_tracing, _fused_attention)
    apply: Any = torch.autograd.Function.apply
    interception.function(apply.__func__, _custom_function)
    interception.function(torch.Tensor.register_hook, _lost("a hook on a tensor, which export would lose"))
    for backward in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
        interception.function(backward, _lost("a backward, which export would lose"))
    interception.function(
        DistributedDataParallel.forward,
        lambda _: lambda module, *args, **kwargs: remote.parallel(module, args, kwargs),
    )
    for kind in kinds():
        if kind.is_client and kind.blocking is not None:
            for function in (kind.blocking, kind.issue):
                interception.function(function, _client(kind.name))


def _install_rpc(interception: Interception, remote: ExportRecorder) -> None:
    calls, value = remote.calls, remote.value

    def call(style: Style) -> Replace:
        return lambda _: (
            lambda to, func, args=None, kwargs=None, timeout=None: value(
                calls.call(style, to, func, args, kwargs, timeout=timeout)
            )
        )

    def methods(style: Style) -> Replace:
        return lambda _: lambda rref, timeout=None: calls.method_calls(style, rref, timeout, then=value)

    def invoke(rref: Any, api: Call, method: str, timeout: Any, *args: Any, **kwargs: Any) -> Any:
        return value(calls.method_call(STYLES[api], rref, method, args, kwargs, timeout=timeout))

    def own(held: Any) -> Any:
        return value(calls.own(held))

    for function, style in STYLES.items():
        interception.function(function, call(style))
    interception.function(rref_proxy._invoke_rpc, lambda _: invoke)
    interception.function(torch.futures.wait_all, lambda _: lambda futures: [each.wait() for each in futures])
    interception.function(torch.futures.collect_all, lambda _: lambda futures: CollectedFutures(list(futures)))
    for name, style in METHODS.items():
        interception.method(rpc.PyRRef, name, methods(style))
    hide_remote_modules(interception)
    interception.method(rpc.RRef, "__new__", lambda original: functools.partial(rref_to, own, original))
    interception.method(rpc.PyRRef, "to_here", lambda _: lambda rref, timeout=None: value(calls.fetch(rref, timeout)))


def _install_autocast(interception: Interception) -> None:
    """Let blocks be recorded with the cache of casts that a run has, although the exporter itself uses none."""
    cached = torch.is_autocast_cache_enabled()
    constructor = torch.autocast.__init__.__code__

    def ask(original: Call) -> Call:
        return lambda: cached if sys._getframe(2).f_code is constructor else original()

    def enter(original: Call) -> Call:
        def replacement(block: Any) -> Any:
            result = original(block)
            torch.set_autocast_cache_enabled(False)
            return result

        return replacement

    interception.method(torch, "is_autocast_cache_enabled", ask)
    interception.function(torch.autocast.__enter__, enter)


def _keep_modes(interception: Interception) -> None:
    """Let nodes enter and leave the blocks of a grad mode and of autocast, as the forward does.

    The exporter would give each block a graph of its own, and lose the grad modes that are set within autocast.
    """
    for divide in (replace_set_grad_with_hop_pass, replace_autocast_with_hop_pass):
        interception.function(divide, lambda _: lambda module, signature: (module, signature))


def _assignment(original: Call) -> Call:
    """Let `self.count += 1` only write to the buffer; the exporter would also copy the buffer to itself."""

    def assign(module: nn.Module, name: str, value: Any) -> None:
        before = module.__dict__.get("_buffers", {}).get(name)
        if before is None or not isinstance(value, torch.Tensor):
            original(module, name, value)
        elif value is not before:
            raise capture_error(
                f"the forward replaces the buffer {type(module).__name__}.{name}, so one step would depend on the last",
                hint="Write to the buffer in place, with copy_().",
            )

    return assign


def _unasked_by_attention(original: Call) -> Call:
    """Let attention make the same decisions as in a run, in which its arguments are plain tensors."""
    forward: Any = nn.MultiheadAttention.forward
    attention = original_code(forward)
    place = attention.co_filename, attention.co_firstlineno  # attention runs from instrumented code

    def asked(arguments: Any) -> Any:
        code = sys._getframe(2).f_code
        return (code.co_filename, code.co_firstlineno) != place and original(arguments)

    return asked


def _fused_attention(_: Call) -> Call:
    """Refuse a forward for which a run would use attention's fused inference kernel."""

    def refuse() -> NoReturn:
        raise capture_error(
            "nn.MultiheadAttention uses a fused kernel here, which export cannot record, and others round otherwise",
            hint='Capture with how="trace", or after torch.backends.mha.set_fastpath_enabled(False).',
        )

    return refuse


def _client(name: str) -> Replace:
    def refuse(*_: object, **__: object) -> None:
        raise capture_error(
            f"the forward calls the client {name!r}, which export cannot record", hint="Make it traceable."
        )

    return lambda _: refuse


def _custom_function(original: Call) -> Call:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.is_grad_enabled():
            raise refusals.reentrant_checkpoint()
        _refuse_lost("a torch.autograd.Function, whose backward export would lose")
        return original(cls, *args, **kwargs)

    return apply


def _refuse_lost(what: str) -> None:
    """Refuse what the user's code calls where gradients are recorded; a replacement asks."""
    if torch.is_grad_enabled() and source.asked_by_users(sys._getframe(4)):  # past it and the interception's frames
        hint = "Move it out of the forward, or capture without grad mode."
        raise capture_error(f"the forward uses {what}", hint=hint)


def _lost(what: str) -> Replace:
    def replace(original: Call) -> Call:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            _refuse_lost(what)
            return original(*args, **kwargs)

        return replacement

    return replace
