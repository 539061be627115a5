"""The edge of every call: who calls is told, requests are parsed, time is limited, errors become statuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status
from typing_extensions import override

from fxlib_service.authentication import Gate
from fxlib_service.errors import Code, ServiceError
from fxlib_service.servicers.context import Call
from fxlib_service.status import STATUS, to_status

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
            async with self._edge(name, context), asyncio.timeout(self._timeout_s):
                call = self._admit(name, context)
                response: Message = await method(parse(raw), call)
            return response

        return serve

    def _upload(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raws: AsyncIterator[bytes], context: Any) -> Message:
            async with self._edge(name, context):
                call = self._admit(name, context)
                response: Message = await method((parse(raw) async for raw in raws), call)
            return response

        return serve

    def _stream(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raw: bytes, context: Any) -> AsyncIterator[Message]:
            async with self._edge(name, context):
                call = self._admit(name, context)
                async for message in method(parse(raw), call):
                    yield message

        return serve

    def _admit(self, name: str, context: Any) -> Call:
        """Return the call with its caller.

        Raises:
            ServiceError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        caller = self._gate.caller(context)
        caller.check(name)
        return Call(caller=caller, clock=context, peer=context.peer())

    @asynccontextmanager
    async def _edge(self, name: str, context: Any) -> AsyncIterator[None]:
        began, code = time.monotonic(), "OK"
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, it leaves as a status
            refusal = _as_refusal(name, error)
            code = STATUS[refusal.code].name
            status = rpc_status.to_status(to_status(refusal))
            await context.abort(status.code, status.details, status.trailing_metadata)
        except BaseException:
            code = "CANCELLED"
            raise
        finally:
            self._observe(name, code, time.monotonic() - began)


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
