"""What surrounds every call: it authenticates the caller, parses, limits time, and turns errors into statuses."""

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
from fxlib_service.authentication import Authenticator
from fxlib_service.errors import Code, ServiceError
from fxlib_service.quotas import Quotas
from fxlib_service.servicers.context import Call
from fxlib_service.status import STATUS, to_status

M = TypeVar("M", bound=Message)

_OURS: Final = "/fxlib.v1."

logger = logging.getLogger(__name__)

Observer = Callable[[str, str, float], None]
"""A function that is called when a call ends, with its method, its status and its duration in seconds."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # is generic in its stubs only
    """Wraps the methods of the fxlib services; health and reflection are left as they are.

    Args:
        observe: is called when a call ends.
        authenticator: identifies the caller; one whose role may not call the method is refused before parsing.
        timeout_s: longest duration of a call with one request and one response, in seconds.
    """

    def __init__(self, observe: Observer, authenticator: Authenticator, *, timeout_s: float) -> None:
        self._observe = observe
        self._authenticator = authenticator
        self._quotas = Quotas() if authenticator.policy is None else authenticator.policy.quotas
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
            async with self._intercepted(name, context) as intercepted, asyncio.timeout(self._timeout_s):
                request = intercepted.noted(parse(raw))
                response: Message = await method(request, intercepted.call)
                return intercepted.noted(response)

        return serve

    def _upload(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raws: AsyncIterator[bytes], context: Any) -> Message:
            async with self._intercepted(name, context) as intercepted:
                response: Message = await method(
                    (intercepted.noted(parse(raw)) async for raw in raws), intercepted.call
                )
                return response

        return serve

    def _stream(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Callable[..., Any]:
        async def serve(raw: bytes, context: Any) -> AsyncIterator[Message]:
            async with self._intercepted(name, context) as intercepted:
                async for message in method(intercepted.noted(parse(raw)), intercepted.call):
                    yield message

        return serve

    @asynccontextmanager
    async def _intercepted(self, name: str, context: Any) -> AsyncIterator[_Intercepted]:
        """Admit a call if its caller may make it now, and turn whatever goes wrong in it into a status.

        UNAUTHENTICATED, PERMISSION_DENIED and QUOTA_EXCEEDED are decided before anything is parsed.
        """
        began, status, code, caller = time.monotonic(), "OK", "OK", None
        peer = context.peer()  # asked for now, since gRPC forgets a call once its client has left
        intercepted = _Intercepted()
        try:
            caller = self._authenticator.caller(context)
            caller.check(name)
            with self._quotas.in_flight(caller.namespace):
                intercepted.call = Call(caller=caller, clock=context, peer=peer)
                yield intercepted
        except Exception as error:  # noqa: BLE001  # every error becomes a status
            refusal = _as_refusal(name, error)
            status, code = STATUS[refusal.code].name, refusal.code.name
            told = rpc_status.to_status(to_status(refusal))
            await context.abort(told.code, told.details, told.trailing_metadata)
        except BaseException:
            status = code = "CANCELLED"
            raise
        finally:
            self._observe(name, status, time.monotonic() - began)
            audit.write(method=name, code=code, caller=caller, peer=peer, about=intercepted.about)


class _Intercepted:
    """A call under way: `call` is the context that its method gets, `about` the job or blob that it concerns."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.about = ""

    def noted(self, message: M) -> M:
        """Note the job or blob that a message names, unless one is noted already; return the message."""
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
