"""Open a channel to the service, and make calls over it that outlast a restart of the service.

A failed call says whether to try again, and what to tell the user; a deadline is the time by which an answer is needed.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fxlib.client.credentials import AuthorizedChannel, Tls, choose, is_loopback
from fxlib.config import read_address
from fxlib.errors import CredentialError, RejectedError, RemoteError, ServiceUnavailableError
from fxlib.utils.text import plain
from fxlib.v1 import blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 30.0
"""Time limit of one call before it is tried again, in seconds."""

OUTAGE_S = 90.0
"""Time in seconds for which a service that was reached before, or its database, may be away. It counts from the
beginning of a call, which may be a stream that was open for a while: so it is more than a minute."""

_LONGEST_S = 1e9
"""Longest time limit in seconds that is given to gRPC, for which one above 2 ** 63 ns has passed: some 30 years."""

_JITTER = random.Random()
"""This module's own random generator, so that the program's is left alone."""
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A service that comes back is found within a second, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A channel opened just after the service came up must not inherit the back-off of one that found it down.
    ("grpc.use_local_subchannel_pool", 1),
)

_REASON_S = 0.5
"""Time limit in seconds of the call that asks only why a service is not reached."""

_CLOSED = "Socket closed|Connection reset|Broken pipe"
_NO_NAME = ("errors resolving", "its host's name is not known", "Is this its HOST:PORT?")
_HANDSHAKES = {
    False: (
        _NO_NAME,
        (_CLOSED, "it ends unencrypted connections", "If it speaks TLS, name its authority (in a shell: --tls-ca)."),
    ),
    True: (
        _NO_NAME,
        ("certificate has expired", "its certificate has expired", ""),
        ("Hostname Verification", "its certificate is for another name", "Connect by a name that it holds."),
        (
            "CERTIFICATE_VERIFY_FAILED",
            "its certificate is not of an authority that is trusted here",
            "Name its authority (in a shell: --tls-ca).",
        ),
        ("WRONG_VERSION_NUMBER", "it does not speak TLS", "Connect without TLS, or to the port that speaks it."),
        (_CLOSED, "it ends the connection", "If it asks for a certificate of yours, name it (in a shell: --tls-cert)."),
    ),
}
"""By whether the connection is encrypted: a pattern of gRPC's message, why the service is not reached, and a hint."""

_AWAY = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED))


class Connection:
    """Stubs of the service's two interfaces for clients, with calls that are retried."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token_file: Path | str | None = None,
        insecure: bool = False,
        token: str = "",
    ) -> None:
        """Prepare a channel; nothing is sent before the first call.

        Args:
            address: "host:port".
            tls: None for an unencrypted channel.
            token_file: the file of the token to send; None: the value of FXLIB_TOKEN_FILE, else the file of this user's
                own service.
            insecure: whether the token may be sent over an unencrypted channel to another machine.
            token: the token itself, to send instead of any file's.

        Raises:
            OSError: a file of `tls` cannot be read.
            CredentialError: a token is given for a socket.
        """
        self.address = address
        target, self._credentials = choose(address, token_file=token_file, tls=tls, insecure=insecure, token=token)
        self._encrypted = tls is not None
        self._channel = AuthorizedChannel(partial(_channel, target, tls), self._credentials, tls)
        self.jobs = jobs_pb2_grpc.OptimizerServiceStub(self._channel)
        self.blobs = blobs_pb2_grpc.BlobServiceStub(self._channel)

    def stub(self, kind: Callable[[Any], T]) -> T:
        """Return a stub of another of the service's interfaces, over the same channel."""
        return kind(self._channel)

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self._channel.close()

    def check_credentials(self) -> None:
        """Check now whether there is a token to show, if one is needed.

        Raises:
            CredentialError: the token cannot be read, or may not be sent.
        """
        self._credentials.token()

    def reach(self, deadline: Deadline) -> jobs_pb2.GetCapabilitiesResponse:
        """Wait until the service answers; return its capabilities, empty if it does not tell them.

        Raises:
            ServiceUnavailableError: the service did not answer by the deadline, or its address is none.
            CredentialError: the token cannot be read, or may not be sent.
        """
        try:
            read_address(self.address)
        except ValueError as error:
            raise ServiceUnavailableError(str(error), where="the service") from None
        request = jobs_pb2.GetCapabilitiesRequest()
        while not deadline.passed:
            try:
                # This does not use grpc.channel_ready_future, whose thread fails loudly when the channel is closed.
                return self.jobs.GetCapabilities(request, timeout=deadline.left_s, wait_for_ready=True)
            except grpc.RpcError as error:
                if not understand(error).may_pass:
                    return jobs_pb2.GetCapabilitiesResponse()  # the next call shows whether it accepts this client
                time.sleep(min(_PAUSES_S[0], deadline.left_s))
        why, hint = self._why_not_reached()
        raise ServiceUnavailableError(
            f"not reached within {deadline.seconds:.3g} s{why and f', as {why}'}",
            where=f"the service at {self.address}",
            hint=hint,
        )

    def _why_not_reached(self) -> tuple[str, str]:
        """Return what the last attempt to connect failed for, if gRPC says more than that nothing listens; and a hint.

        A call that waits until the service is ready ends with its time limit, whatever kept it; one that does not wait
        ends with the reason.
        """
        try:
            self.jobs.GetCapabilities(jobs_pb2.GetCapabilitiesRequest(), timeout=_REASON_S)
        except grpc.RpcError as error:
            if (failure := understand(error)).code:  # it does answer
                return f"it refuses: {failure.message}", ""
            details = error.details() or ""
            for mark, why, hint in _HANDSHAKES[self._encrypted]:
                if re.search(mark, details):
                    return why, hint
        return "", "Is it running (fxlib serve), and is this its HOST:PORT?"

    def call(self, what: str, attempt: Callable[[float], T], deadline: Deadline) -> T:
        """Make a call, and repeat it while its failure may pass, for at most OUTAGE_S.

        Args:
            what: a description of the call, for messages.
            attempt: a function that makes the call once, within the given number of seconds.
            deadline: the deadline for all attempts together.

        Raises:
            ServiceUnavailableError: the service was not reached in time.
            RejectedError: the service refused the call.
        """
        where = f"{what} at {self.address}"
        limit = deadline.within(OUTAGE_S)
        for pause_s in self._pauses():
            if deadline.passed:
                break
            try:
                return attempt(min(ATTEMPT_S, deadline.left_s))
            except grpc.RpcError as error:
                failure = understand(error)
                wait_s = pause_s if failure.retry_after_s is None else max(failure.retry_after_s, _PAUSES_S[0])
                if not failure.may_pass or wait_s >= limit.left_s:
                    raise failure.error(where) from error
                _LOG.info("%s: %s; trying again in %.1f s", where, failure.message, wait_s)
                time.sleep(wait_s)
        raise ServiceUnavailableError(f"no answer within {deadline.seconds:.3g} s", where=where)

    @staticmethod
    def _pauses() -> Iterator[float]:
        """Yield pauses between attempts, in seconds, spread so that many launchers do not come back at once."""
        for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
            yield pause_s * _JITTER.uniform(0.5, 1.0)


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    # Loopback bypasses any proxy that the environment names: it would see the token on another machine.
    options = (*_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_loopback(address) else _OPTIONS
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca), private_key=_read(tls.key), certificate_chain=_read(tls.certificate)
    )
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.secure_channel(address, credentials, options=(*options, *name))


def _read(path: Path | str | None) -> bytes | None:
    """Return what a PEM file holds; None if there is no file.

    Raises:
        CredentialError: it is no PEM file; gRPC would try to connect in vain.
        OSError: it cannot be read.
    """
    if path is None:
        return None
    held = Path(path).read_bytes()
    if b"-----BEGIN " not in held:
        raise CredentialError("holds no certificate or key in PEM form", where=str(path))
    return held


class Deadline:
    """A deadline a given number of seconds (or math.inf) after its creation, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + min(seconds, _LONGEST_S)

    @property
    def left_s(self) -> float:
        """The number of seconds left, not below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0

    def within(self, seconds: float = math.inf) -> Deadline:
        """Return a deadline `seconds` from now, or this one's if that is sooner."""
        return Deadline(min(self.left_s, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """One failed call. `retry_after_s` is the delay after which the call may succeed, if the service named one."""

    status: grpc.StatusCode
    code: str
    message: str
    retry_after_s: float | None

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later."""
        return self.status in _AWAY or self.retry_after_s is not None

    def error(self, where: str) -> RemoteError:
        """Return the exception to raise; `where` identifies the call and the service."""
        if self.status in _AWAY:
            return ServiceUnavailableError(self.message, where=where)
        return RejectedError(self.message, code=self.code, where=where)


def understand(error: grpc.RpcError) -> _Failure:
    """Read the status and the `google.rpc` details of a failed call."""
    code, retry_after_s = "", None
    for detail in _details(error):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        with suppress(DecodeError):
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                code = info.reason
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    status = error.code()
    message = plain(error.details() or "") or status.name.lower().replace("_", " ")
    return _Failure(status=status, code=code, message=message, retry_after_s=retry_after_s)


def _details(error: grpc.RpcError) -> list[Any]:
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):  # the details contradict the status, or are not details: they are a proxy's
        return []
    return list(status.details) if status is not None else []
