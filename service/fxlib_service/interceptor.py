"""The edge of every call: who calls is told, requests are parsed, time is limited, errors become statuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status
from typing_extensions import override

from fxlib_service import audit
from fxlib_service.authentication import Gate
from fxlib_service.errors import Code, ServiceError
from fxlib_service.quotas import Quotas
from fxlib_service.servicers.context import Call
from fxlib_service.status import STATUS, to_status

M = TypeVar("M", bound=Message)

_OURS: Final = "/fxlib.v1."

logger = logging.getLogger(__name__)

Observer = Callable[[str, str, float], None]
"""Hears of every ended call: method, status, seconds."""


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # is generic in its stubs only
    """Wraps the methods of the fxlib services; health and reflection stay as they are.

    Args:
        observe: hears of every ended call.
        gate: tells who calls; a caller whose role may not call the method is refused before its request is parsed.
        timeout_s: the longest that a call with one request and one response may take.
    """

    def __init__(self, observe: Observer, gate: Gate, *, timeout_s: float) -> None:
        self._observe = observe
        self._gate = gate
        self._quotas = Quotas() if gate.policy is None else gate.policy.quotas
        self._timeout_s = timeout_s

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        name = handler_call_details.method.removeprefix(_OURS)
        if handler is None or name == handler_call_details.method:
            return handler
        parse = _parser(handler.request_deserializer)
        if handler.unary_unary:
            serve, wrap = self._unary(name, handler.unary_unary, parse), grpc.unary_unary_rpc_method_handler
        elif handler.stream_unary:
            serve, wrap = self._upload(name, handler.stream_unary, parse), grpc.stream_unary_rpc_method_handler
        else:
            serve, wrap = self._stream(name, handler.unary_stream, parse), grpc.unary_stream_rpc_method_handler
        return wrap(serve, response_serializer=handler.response_serializer)

    def _unary(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raw: bytes, context: Any) -> Message:
            async with self._edge(name, context) as passage, asyncio.timeout(self._timeout_s):
                request = passage.concerns(parse(raw))
                response: Message = await method(request, passage.call)
                return passage.concerns(response)

        return serve

    def _upload(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raws: AsyncIterator[bytes], context: Any) -> Message:
            async with self._edge(name, context) as passage:
                response: Message = await method((passage.concerns(parse(raw)) async for raw in raws), passage.call)
                return response

        return serve

    def _stream(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raw: bytes, context: Any) -> AsyncIterator[Message]:
            async with self._edge(name, context) as passage:
                async for message in method(passage.concerns(parse(raw)), passage.call):
                    yield message

        return serve

    @asynccontextmanager
    async def _edge(self, name: str, context: Any) -> AsyncIterator[_Passage]:
        """Let a call in, if its caller may make it now, and turn what goes wrong into a status.

        UNAUTHENTICATED, PERMISSION_DENIED and QUOTA_EXCEEDED are decided before anything is parsed.
        """
        began, status, code, caller = time.monotonic(), "OK", "OK", None
        peer = context.peer()  # asked for now: gRPC lets go of a call that its client has left
        passage = _Passage()
        try:
            caller = self._gate.caller(context)
            caller.check(name)
            with self._quotas.in_flight(caller.namespace):
                passage.call = Call(caller=caller, clock=context, peer=peer)
                yield passage
        except Exception as error:  # noqa: BLE001  # whatever it is, it leaves as a status
            refusal = _as_refusal(name, error)
            status, code = STATUS[refusal.code].name, refusal.code.name
            told = rpc_status.to_status(to_status(refusal))
            await context.abort(told.code, told.details, told.trailing_metadata)
        except BaseException:
            status = code = "CANCELLED"
            raise
        finally:
            self._observe(name, status, time.monotonic() - began)
            audit.write(method=name, code=code, caller=caller, peer=peer, about=passage.about)


class _Passage:
    """One call on its way through: `call` is what its method hears of it, `about` the job or blob that it is about."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.about = ""

    def concerns(self, message: M) -> M:
        """Note what a message is about, if that is not known yet; return the message."""
        self.about = self.about or _object_of(message)
        return message


def _object_of(message: Any) -> str:
    named = message.DESCRIPTOR.fields_by_name
    if "job_id" in named:
        return str(message.job_id)
    if "blob" in named:
        return str(message.blob.sha256)
    if "job" in named:
        return str(message.job.id)
    return str(message.lease.job_id) if "lease" in named else ""


def _parser(deserialize: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    def parse(raw: bytes) -> Message:
        try:
            return deserialize(raw)
        except DecodeError as error:
            raise ServiceError(Code.INVALID_REQUEST, f"the message cannot be read: {error}") from error

    return parse


def _as_refusal(name: str, error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, TimeoutError):
        return ServiceError(Code.CALL_TIMEOUT, retry_after_s=5.0)
    logger.error("%s failed", name, exc_info=error)
    return ServiceError(Code.INTERNAL, f"{name} failed; the service's log has the details")
