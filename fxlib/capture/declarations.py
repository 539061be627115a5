"""Find the contract of a remote call: stated in the request, declared by the function's author, or known for torch."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import rpc
from torch.fx import Node, Proxy

from fxlib.capture import builtin_contracts, source
from fxlib.capture.intercept import suspended
from fxlib.errors import CaptureError
from fxlib.runtime import ops
from fxlib.runtime.ops import contract_lookup
from fxlib.runtime.ops.calls import CallKind
from fxlib.spec.contract import Contract

_TYPE_QUERY_TIMEOUT_S = 10.0


class Declarations:
    """Finds the contract of each remote call of one capture.

    Args:
        stated: contracts by "package.module:qualname", by ".method" for methods of objects behind any RRef, or by
            "attribute.method" for methods of the object behind one RRef.
        forward: the function to be captured. Its signature may name classes: `table: RRef[Embedding]`.
    """

    def __init__(self, stated: Mapping[str, Contract], forward: Callable[..., Any]) -> None:
        for name, contract in stated.items():
            if not isinstance(contract, Contract):
                raise CaptureError(
                    f"{contract!r} is no Contract", where=f"contracts[{name!r}]", hint="Use fxlib.Contract."
                )
        self._stated = stated
        self._asked: set[str] = set()
        self.unpushed: dict[str, str] = {}
        """Warnings about functions whose results have a gradient and are fetched by `to_here()`, by name."""
        self._hints = _hints(forward)
        self._classes: dict[object, type | None] = {}
        self._values: dict[Node, Contract | None] = {}
        self._alive: list[object] = []

    def of_function(self, name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Contract | None:
        """Return the contract of a function called by name, or None if it is unknown."""
        found = contract_lookup.of_function(name, function, self._stated_for)
        return found or builtin_contracts.of_function(name, kwargs)

    def of_client(self, kind: CallKind) -> Contract | None:
        """Return the contract of a registered client's calls, or None if it is unknown."""
        return self._stated_for(kind.function) or kind.contract

    def of_method(self, rref: Any, method: str, holder: str) -> Contract | None:
        """Return the contract of a method of the object behind an RRef found at `holder`, or None if it is unknown."""
        if (stated := self._stated_for(f"{holder}.{method}") or self._stated_for(f".{method}")) is not None:
            return stated
        kind = self._class_behind(rref)
        found = contract_lookup.of_method(kind, method, self._stated_for)
        return found or (None if kind is None else builtin_contracts.of_method(kind, method))

    def of_method_called(self, method: Callable[..., Any], helpers: Contract | None) -> Contract | None:
        """Return the contract of a method that an RRef's helper calls on the object behind it."""
        return contract_lookup.of_method_called(method, helpers, self._stated_for, builtin_contracts.of_method)

    def of_value(self, rref: Any) -> Contract | None:
        """Return the contract of fetching an RRef's value: that of the read that made it, or None if it is unknown."""
        made = self._values.get(rref.node) if isinstance(rref, Proxy) else None
        return made if made is not None and made.is_read else None

    def note_created(self, function: Callable[..., Any], node: Node, contract: Contract | None) -> None:
        """Remember the contract of a call that left its result on the server, and the class of that result."""
        self._values[node] = contract
        if isinstance(function, type):
            self._classes[node] = function

    def note_fetched(self, rref: Any) -> None:
        """Record, once for each function, that the gradient of a fetched value is not pushed."""
        made = rref.node if isinstance(rref, Proxy) else None
        if made is None or made.target is not ops.create or not torch.is_grad_enabled():
            return
        contract, function = made.meta.get("contract"), str(made.args[1])
        if contract is not None and contract.gradient is not None and function not in self.unpushed:
            self.unpushed[function] = (
                f"no gradient is pushed of what to_here() brings at {source.here()}, though {function!r} declares "
                f"gradient={contract.gradient!r}. Where the model trains, call rpc_sync instead of remote and to_here."
            )

    def unused(self) -> list[str]:
        """Return the names that have a stated contract but were not called."""
        return [name for name in self._stated if name not in self._asked]

    def _stated_for(self, name: str) -> Contract | None:
        self._asked.add(name)
        return self._stated.get(name)

    def _class_behind(self, rref: Any) -> type | None:
        key = rref.node if isinstance(rref, Proxy) else id(rref)
        if key not in self._classes:
            self._classes[key] = self._annotated(rref.node) if isinstance(rref, Proxy) else _asked(rref)
            self._alive.append(rref)  # an id is valid only as long as the object lives
        return self._classes[key]

    def _annotated(self, node: Node) -> type | None:
        arguments = typing.get_args(self._hints.get(str(node.target))) if node.op == "placeholder" else ()
        return arguments[0] if arguments and isinstance(arguments[0], type) else None


def _hints(forward: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(forward)
    except Exception:  # noqa: BLE001 - annotations may hold anything, and may be missing
        return {}


def _asked(rref: Any) -> type | None:
    """Ask the owner for the class; this is the only request that a capture may make to a server."""
    if not rpc.api._is_current_rpc_agent_set():
        return None
    with suspended():
        try:
            if rref.is_owner():
                return type(rref.local_value())
            # After a blocking request, a later asynchronous one would get the class where it expects a future.
            found = rref._get_type(_TYPE_QUERY_TIMEOUT_S, blocking=False).wait()
        except Exception:  # noqa: BLE001 - if an owner does not answer, only the contract is unknown
            return None
    return found if isinstance(found, type) else None
