"""Wraps every call: it authenticates the caller, receives and parses messages, limits, and turns errors into statuses.

Only this file maps errors of the catalogue to gRPC, with their status and google.rpc details.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import cache
from typing import Any, Final, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typing_extensions import override

from fxlib.utils import tracing
from fxlib.utils.text import plain
from fxlib_service import audit
from fxlib_service.authentication import Authenticator, Proof
from fxlib_service.errors import Code, ServiceError
from fxlib_service.in_flight import InFlight
from fxlib_service.metrics import Metrics
from fxlib_service.quotas import Quotas
from fxlib_service.roles import Caller
from fxlib_service.servicers.context import Call

_DOMAIN: Final = "fxlib"

_MAX_MESSAGE: Final = 1_000
_MAX_TEXT: Final = 160
_MAX_VIOLATIONS: Final = 20

STATUS: Final = {
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Code.INVALID_GRAPH: grpc.StatusCode.INVALID_ARGUMENT,
    Code.BLOB_MISSING: grpc.StatusCode.FAILED_PRECONDITION,
    Code.BLOB_CORRUPT: grpc.StatusCode.DATA_LOSS,
    Code.BLOB_OFFSET: grpc.StatusCode.OUT_OF_RANGE,
    Code.BLOB_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.UPLOAD_STALLED: grpc.StatusCode.ABORTED,
    Code.STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.STORAGE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.REQUEST_ID_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    Code.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.SERVICE_BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.JOB_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.SEQUENCE_AHEAD: grpc.StatusCode.OUT_OF_RANGE,
    Code.LEASE_LOST: grpc.StatusCode.FAILED_PRECONDITION,
    Code.WORKER_LOST: grpc.StatusCode.ABORTED,
    Code.CALL_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}
M = TypeVar("M", bound=Message)

_OURS: Final = "/fxlib.v1."
_ANYBODY: Final = ""
"""The tenant of callers that are not authenticated."""

logger = logging.getLogger(__name__)

Serve = Callable[[AsyncIterator[bytes], Any], Awaitable[bytes]]
"""A handler as gRPC calls it: it reads the incoming messages and returns the answer."""
ServeStream = Callable[[AsyncIterator[bytes], Any], Awaitable[None]]
"""A handler that writes its answers to the context."""


def to_status(error: ServiceError) -> status_pb2.Status:
    """Return an error as a google.rpc.Status, with ErrorInfo, and with BadRequest and RetryInfo where they apply."""
    metadata = {key: _short(value) for key, value in error.metadata.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.code.name, domain=_DOMAIN, metadata=metadata)]
    if error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=_short(violation.field), description=_short(violation.problem)
            )
            for violation in error.violations[:_MAX_VIOLATIONS]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = STATUS[error.code].value[0]
    message = _short(str(error), _MAX_MESSAGE)
    return status_pb2.Status(code=number, message=message, details=[_packed(detail) for detail in details])


def _short(text: str, limit: int = _MAX_TEXT) -> str:
    """Return text, which may quote a request, truncated so that all details fit into the trailers of a call."""
    return plain(text if len(text) <= limit else text[: limit - 3] + "...")


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in its stubs
    """Wraps every method, so that room is reserved for each message before gRPC assembles it.

    For gRPC, each method becomes one that reads a stream; on the wire there is no difference. Calls and bytes in flight
    count for the tenant of their caller; all callers of health and reflection count as one tenant.

    Args:
        metrics: counts calls and refusals.
        authenticator: identifies the caller; a caller whose role may not call the method is refused before parsing.
        in_flight: the budgets of calls and bytes.
        timeout_s: longest duration of a call with one request and one response, in seconds.
    """

    def __init__(
        self, metrics: Metrics, authenticator: Authenticator, in_flight: InFlight, *, timeout_s: float
    ) -> None:
        self._metrics = metrics
        self._authenticator = authenticator
        self._quotas = Quotas() if authenticator.policy is None else authenticator.policy.quotas
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._running = set[_Intercepted]()

    def recheck(self) -> int:
        """End the calls whose callers have changed, and return their number.

        It is called when the policy or the owner's token has changed, since a stream may run for hours.
        """
        revoked = [each for each in self._running if not self._still(each)]
        for each in revoked:
            each.revoke()
        return len(revoked)

    def _still(self, call: _Intercepted) -> bool:
        try:
            return self._authenticator.caller(call.proof) == call.caller
        except ServiceError:
            return False

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        name = handler_call_details.method.removeprefix(_OURS)
        if handler is None:
            return handler
        if name == handler_call_details.method:
            return self._bounded(name, handler)
        parse = _parser(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._stream(name, handler.unary_stream, parse))
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._upload(name, handler.stream_unary, parse))
        return grpc.stream_unary_rpc_method_handler(self._unary(name, handler.unary_unary, parse))

    def _unary(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Serve:
        async def handle(context: Any, call: _Intercepted) -> Message:
            # A function of its own, so that the frame that holds the message has ended and is cleared when an error is
            # reported.
            async with (
                asyncio.timeout(self._timeout_s),
                self._in_flight.request(name, call.tenant, context.read) as raw,
                self._in_flight.turn(name, call.tenant),
            ):
                message = call.noted(parse(raw))
                with call.traced(name, message):
                    answer: Message = await method(message, call.call)
            return answer

        async def serve(_: AsyncIterator[bytes], context: Any) -> bytes:
            async with self._intercepted(name, context) as call:
                answer = await handle(context, call)
                return await self._ending(call, call.noted(answer), context)

        return serve

    def _upload(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> Serve:
        async def serve(messages: AsyncIterator[bytes], context: Any) -> bytes:
            async with self._intercepted(name, context) as call:
                async with self._in_flight.upload(name, call.tenant, messages) as raws:
                    answer: Message = await method((call.noted(parse(raw)) async for raw in raws), call.call)
                return await self._ending(call, answer, context)

        return serve

    def _stream(self, name: str, method: Callable[..., Any], parse: Callable[[bytes], Message]) -> ServeStream:
        async def serve(_: AsyncIterator[bytes], context: Any) -> None:
            async with self._intercepted(name, context) as call:
                async with self._in_flight.request(name, call.tenant, context.read) as raw:
                    request = call.noted(parse(raw))
                async with aclosing(method(request, call.call)) as answers:
                    async for answer in answers:
                        await self._in_flight.send(call.tenant, answer.SerializeToString(), context.write)

        return serve

    async def _ending(self, call: _Intercepted, answer: Message, context: Any) -> bytes:
        """Return the bytes of a call's only answer. gRPC sends them together with the status, after the handler."""
        data = answer.SerializeToString()
        context.add_done_callback(await self._in_flight.ending(call.tenant, len(data)))
        return data

    def _bounded(self, name: str, handler: Any) -> Any:
        """Return a handler for health or reflection, whose methods call gRPC directly and do not know callers."""
        parse = _parser(handler.request_deserializer)

        async def unary(_: AsyncIterator[bytes], context: Any) -> None:
            async with self._refusing(context), self._in_flight.request(name, _ANYBODY, context.read) as raw:
                await context.write(await handler.unary_unary(parse(raw), context))

        async def watch(_: AsyncIterator[bytes], context: Any) -> None:
            async with self._refusing(context):
                async with self._in_flight.request(name, _ANYBODY, context.read) as raw:
                    request = parse(raw)
                await handler.unary_stream(request, context)

        async def converse(messages: AsyncIterator[bytes], context: Any) -> None:
            async with self._refusing(context), self._in_flight.upload(name, _ANYBODY, messages) as raws:
                async for answer in handler.stream_stream((parse(raw) async for raw in raws), context):
                    await context.write(answer)

        serve = converse if handler.request_streaming else watch if handler.response_streaming else unary
        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    @asynccontextmanager
    async def _refusing(self, context: Any) -> AsyncIterator[None]:
        """Count an anonymous call as open, and turn a refusal into a status."""
        try:
            async with self._in_flight.call(_ANYBODY):
                yield
        except ServiceError as refusal:
            traceback.clear_frames(refusal.__traceback__)
            self._metrics.refused(refusal)
            await _abort(context, refusal)

    @asynccontextmanager
    async def _intercepted(self, name: str, context: Any) -> AsyncIterator[_Intercepted]:
        """Admit a call if its caller may make it now, and turn any error in it into a status.

        UNAUTHENTICATED, PERMISSION_DENIED, QUOTA_EXCEEDED and, for calls, SERVICE_BUSY are decided before any message
        is received.
        """
        began, status, code, caller, why = time.monotonic(), "OK", "OK", None, ""
        peer = context.peer()  # asked for now, since gRPC forgets a call after its client has left
        intercepted = _Intercepted(Proof.of(context))
        try:
            caller = intercepted.caller = self._authenticator.caller(intercepted.proof)
            caller.check(name)
            self._running.add(intercepted)
            async with self._quotas.in_flight(caller.namespace), self._in_flight.call(caller.tenant):
                intercepted.call = Call(caller=caller, clock=context, peer=peer)
                intercepted.tenant = caller.tenant
                yield intercepted
        except BaseException as error:  # every error becomes a status
            self._running.discard(intercepted)
            if not (intercepted.revoked or isinstance(error, Exception)):
                status = code = "CANCELLED"
                raise
            refusal = _revoked() if intercepted.revoked else _as_refusal(name, error)
            traceback.clear_frames(error.__traceback__)  # they hold the message, whose room has been freed
            error.__traceback__ = None  # the traceback holds this frame, which holds the error
            status, code, why = STATUS[refusal.code].name, refusal.code.name, _short(str(refusal))
            self._metrics.refused(refusal)
            await _abort(context, refusal)
        finally:
            self._running.discard(intercepted)
            self._metrics.rpc(name, status, time.monotonic() - began)
            audit.write(
                method=name,
                code=code,
                caller=caller,
                peer=peer,
                about=intercepted.about,
                trace_id=intercepted.trace_id,
                why=why,
                facts=intercepted.call.facts if intercepted.call else None,
            )


class _Intercepted:
    """A call under way.

    Attributes:
        proof: the evidence of its caller's identity.
        caller: the caller, once known.
        call: the context that is passed to its method.
        tenant: the tenant that it counts for.
        about: the job or blob that it concerns.
        trace_id: the trace that it is part of, if it is traced.
        revoked: whether it was ended because its caller has changed.
    """

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        self.caller: Caller | None = None
        self.call: Call | None = None
        self.tenant = _ANYBODY
        self.about = ""
        self.trace_id = ""
        self.revoked = False
        self._task = asyncio.current_task()

    def revoke(self) -> None:
        """End the call with UNAUTHENTICATED."""
        self.revoked = True
        if self._task is not None:
            self._task.cancel()

    def noted(self, message: M) -> M:
        """Record the job or blob that a message names, unless one is recorded already; return the message."""
        self.about = self.about or _naming(message.DESCRIPTOR)(message)
        return message

    @contextmanager
    def traced(self, name: str, message: Any) -> Iterator[None]:
        """Trace the block as a span, which continues the caller's, if the call submits a job."""
        if "traceparent" not in message.DESCRIPTOR.fields_by_name:
            yield
            return
        with tracing.span(f"service.{name}", message.traceparent) as span:
            self.trace_id = span.trace_id
            yield


async def _abort(context: Any, refusal: ServiceError) -> None:
    status = rpc_status.to_status(to_status(refusal))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError as error:  # nobody is left to hear it
        raise asyncio.CancelledError from error


_OBJECTS: Final[tuple[tuple[str, Callable[[Any], str]], ...]] = (
    ("job_id", lambda message: str(message.job_id)),
    ("blob", lambda message: str(message.blob.sha256)),
    ("job", lambda message: str(message.job.id)),
    ("lease", lambda message: str(message.lease.job_id)),
)


@cache
def _naming(kind: Descriptor) -> Callable[[Any], str]:
    """Return a function that reads the job or blob that a message of this kind names; "" if it names none."""
    named = kind.fields_by_name
    return next((name for field, name in _OBJECTS if field in named), lambda _: "")


def _parser(deserialize: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    def parse(raw: bytes) -> Message:
        try:
            return deserialize(raw)
        except DecodeError as error:
            raise ServiceError(Code.INVALID_REQUEST, f"the message cannot be read: {error}") from error

    return parse


def _revoked() -> ServiceError:
    return ServiceError(Code.UNAUTHENTICATED, "what the service knows of this caller has changed")


def _as_refusal(name: str, error: BaseException) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, TimeoutError):
        return ServiceError(Code.CALL_TIMEOUT, retry_after_s=5.0)
    if isinstance(error, MemoryError):
        logger.error("%s failed for want of memory", name)
        return ServiceError(Code.SERVICE_BUSY, retry_after_s=5.0)
    logger.error("%s failed", name, exc_info=error)
    return ServiceError(Code.INTERNAL, f"{name} failed; the service's log has the details")
