"""A running service: its sockets, health and reflection, its periodic cleanup, and its orderly shutdown.

Over HTTP, it serves the metrics to those who may read them, and says whether it is alive and ready.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import Metric
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.utils.local_service import RUNTIME_DIR, LocalService, make_folder, remove_dead
from fxlib.v1 import blobs_pb2_grpc, jobs_pb2_grpc, workers_pb2_grpc
from fxlib_service.authentication import Authenticator
from fxlib_service.clock import Clock, SharedTime
from fxlib_service.config import Address, Config
from fxlib_service.core import Core, make_core
from fxlib_service.errors import ServiceError
from fxlib_service.followed_files import AccessFiles, TlsFiles
from fxlib_service.interceptor import CallInterceptor
from fxlib_service.open_stores import DatabaseLock, DataLock, Lock, blob_store, job_store, sqlite_path, sqlite_url
from fxlib_service.reserve import Reserve
from fxlib_service.roles import Role
from fxlib_service.stores.postgres import PostgresJobStore

_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_OF_MODELS: Final = "fxlib_model_"
_SCHEME: Final = "bearer "
_PLAIN: Final = ("Content-Type", "text/plain; charset=utf-8")
SERVICES: Final = ("fxlib.v1.OptimizerService", "fxlib.v1.BlobService", "fxlib.v1.WorkerService")
_TIDY_S: Final = 600.0
_WAKE_S: Final = 0.02
"""Seconds after which the event loop wakes at the latest. Under a storm of calls, gRPC's own wake-up is lost now and
then, and all calls wait for whatever wakes the loop next: for half a second, where nothing else did."""
_DEAD_S: Final = 3 * _TIDY_S
"""Seconds after which files that a running service would have touched are taken to be those of a killed one."""
_LOOKAHEAD_BYTES: Final = 16 << 10
_READ_BYTES: Final = 64 << 10

logger = logging.getLogger(__name__)


async def _wake() -> None:
    """Wake the event loop again and again."""
    while True:  # noqa: ASYNC110 - there is nothing to wait for: waking is what it is for
        await asyncio.sleep(_WAKE_S)


def _end_http(server: WSGIServer, thread: Thread) -> None:
    """End a server that runs on a thread. It checks for this twice a second, and whenever somebody connects."""
    asked = Thread(target=server.shutdown)
    asked.start()
    while thread.is_alive():
        with suppress(OSError), socket.create_connection(server.server_address[:2], timeout=1.0):  # type: ignore[arg-type]
            thread.join(0.01)
    asked.join()
    server.server_close()


def pages(metrics: _App, not_ready: Callable[[], str]) -> _App:
    """Return the WSGI application that serves `/metrics`, `/healthz` and `/readyz`, and nothing else.

    `/healthz` answers 200 for as long as the process answers, since a restart would not bring a database back.
    `/readyz` answers 200 while the service can serve calls, and otherwise 503 with the reason. Neither asks for a
    token, as probes have none.

    Args:
        metrics: serves the metrics; see `metrics_app`.
        not_ready: returns why the service cannot serve calls now; "" if it can.
    """

    def routed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "")
        if path not in ("/metrics", "/healthz", "/readyz"):
            start_response("404 Not Found", [_PLAIN])
            return [b"There are /metrics, /healthz and /readyz.\n"]
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [_PLAIN, ("Allow", "GET, HEAD")])
            return [b""]
        if path == "/metrics":
            return metrics(environ, start_response)
        why = "" if path == "/healthz" else not_ready()
        start_response("503 Service Unavailable" if why else "200 OK", [_PLAIN])
        return [f"not ready: {why}\n".encode() if why else b"ok\n"]

    return routed


def metrics_app(registry: CollectorRegistry, authenticator: Authenticator | None) -> _App:
    """Return the WSGI application that serves the metrics.

    Without an authenticator, anybody who reaches the address may read everything. With one, operators may read
    everything, viewers of all namespaces may read everything except the figures that name models, and others may read
    nothing.
    """
    everything: _App = make_wsgi_app(registry)
    if authenticator is None:
        return everything
    nameless: _App = make_wsgi_app(_WithoutModels(registry))

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        shown = environ.get("HTTP_AUTHORIZATION", "")
        token = shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
        try:
            caller = authenticator.bearer(token)
        except ServiceError:
            start_response("401 Unauthorized", [_PLAIN, ("WWW-Authenticate", "Bearer")])
            return [b"Send the bearer token of an operator or a viewer.\n"]
        if Role.OPERATOR in caller.roles:
            return everything(environ, start_response)
        if Role.VIEWER in caller.roles and caller.namespace is None:
            return nameless(environ, start_response)
        start_response("403 Forbidden", [_PLAIN])
        return [b"Metrics are for operators, and for viewers of all namespaces.\n"]

    return guarded


class _WithoutModels(CollectorRegistry):
    """A registry that collects the metrics of another one, except for those that name models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._all = registry

    @override
    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._all.collect() if not metric.name.startswith(_OF_MODELS))


class Server:
    """One service process: `start` opens it, and `stop` shuts it down in order."""

    def __init__(self, config: Config) -> None:
        """Read the policy and the owner's token, and lock the data folder and an SQLite database.

        Raises:
            FxlibError: the policy or the token cannot be used, or another service holds the lock.
        """
        self._config = config
        self._folder = make_folder()
        self._access = AccessFiles(config)
        self._authenticator = self._access.authenticator
        self._tls: TlsFiles | None = None
        self._local: LocalService | None = None
        self._locks: list[Lock] = [DataLock(config.data)]
        if re.match(r"sqlite(\+\w+)?:///", sqlite_url(config)):  # which may name its driver
            try:
                self._locks.append(DatabaseLock(sqlite_path(config)))
            except BaseException:
                self._unlock()  # the caller gets no server to stop
                raise
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack it
        self._accepts = False
        self._shared_time: SharedTime | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._core: Core | None = None
        self._grpc: grpc.aio.Server | None = None
        self._metrics: tuple[WSGIServer, Thread] | None = None

    async def start(self) -> tuple[Address, Address]:
        """Open the stores, recover the running jobs, and listen; return the addresses of service and metrics.

        Raises:
            FxlibError: an address, a file or the database cannot be used.
        """
        config = self._config
        reserve = Reserve(config.data, config.reserve_bytes)
        store = await asyncio.to_thread(reserve.within, partial(job_store, config))
        await asyncio.to_thread(reserve.begin)
        if isinstance(store, PostgresJobStore):
            self._shared_time = await asyncio.to_thread(SharedTime, store.now)
        clock = Clock(config.data) if self._shared_time is None else Clock(config.data, wall=self._shared_time)
        blobs, policy = await asyncio.to_thread(blob_store, config, clock), self._authenticator.policy
        core = self._core = await make_core(config, store, blobs, policy, clock=clock, reserve=reserve)
        timeout_s = config.limits.call_timeout_s
        calls = CallInterceptor(core.metrics, self._authenticator, core.in_flight, timeout_s=timeout_s)
        self._tls = None if config.tls is None else TlsFiles(config.tls)
        listen = await self._listen(core, calls)
        metrics = self._serve_metrics(core)
        self._tasks = [
            asyncio.create_task(each)
            for each in (
                core.dispatcher.sweep(),
                *(
                    ()
                    if core.sharing is None
                    else (core.sharing.follow(), core.sharing.recall(), core.figures.follow())
                ),
                self._tidy(core),
                core.checks.warm(),
                _wake(),
                self._access.follow(calls.recheck),
                *(() if self._tls is None else (self._tls.follow(),)),
            )
        ]
        self._accepts = True
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return listen, metrics

    def reread(self) -> None:
        """Read policy, token and certificates again now, instead of at the next look at their files."""
        self._access.files.asked.set()
        if self._tls is not None:
            self._tls.files.asked.set()

    @property
    def token_file(self) -> Path:
        """The file that holds the owner's token. The service must have been started."""
        assert self._local is not None  # noqa: S101 - it was started
        return self._config.token_file or self._local.token

    async def stop(self) -> None:
        """Shut down: report NOT_SERVING, give calls under way `shutdown_grace_s` to finish, and close the stores."""
        self._accepts = False
        await self._health.enter_graceful_shutdown()
        if self._core is not None:
            self._core.dispatcher.close()
            self._core.broker.close()
        if self._local is not None:
            self._local.remove()  # while this service holds the port: afterwards, the files may be another's
        if self._grpc is not None:
            await self._grpc.stop(self._config.shutdown_grace_s)
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                logger.error("a task of the service had failed", exc_info=ended)
        if self._metrics is not None:
            await asyncio.to_thread(_end_http, *self._metrics)
        if self._core is not None:
            await self._core.close()
        self._unlock()

    def _unlock(self) -> None:
        for lock in self._locks:
            lock.release()

    async def _listen(self, core: Core, calls: CallInterceptor) -> Address:
        config, limits = self._config, self._config.limits
        server = self._grpc = grpc.aio.server(
            interceptors=[calls],
            options=[
                ("grpc.so_reuseport", 0),  # a second service on this port must fail, not share it
                ("grpc.max_receive_message_length", limits.message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", limits.streams_per_connection),
                ("grpc.max_allowed_incoming_connections", limits.connections),
                ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
                # The bytes that gRPC holds of a message that nobody reads yet. By default, they grow to megabytes for
                # each call.
                ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
                ("grpc.http2.bdp_probe", 0),
                # The bytes that it reads from a connection at once: by default, up to 4 MiB for each one that sends
                # much.
                ("grpc.experimental.tcp_max_read_chunk_size", _READ_BYTES),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ],
        )
        jobs_pb2_grpc.add_OptimizerServiceServicer_to_server(core.optimizer, server)
        blobs_pb2_grpc.add_BlobServiceServicer_to_server(core.blobs, server)
        workers_pb2_grpc.add_WorkerServiceServicer_to_server(core.workers, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            if self._tls is None:
                port = server.add_insecure_port(str(config.listen))
            else:
                port = server.add_secure_port(str(config.listen), self._tls.credentials)
        except RuntimeError as error:
            raise FxlibError(f"cannot listen on {config.listen}", where="--listen", hint="Is it in use?") from error
        self._meet_locally(server, LocalService(folder=self._folder, port=port))
        await server.start()
        return Address(host=config.listen.host, port=port)

    def _meet_locally(self, server: grpc.aio.Server, local: LocalService) -> None:
        """Write the owner's token into the user's folder and, if wanted, also listen on a Unix socket there.

        Raises:
            FxlibError: the files belong to another running service, which has the same port on another address.
        """
        if local.answers():
            raise FxlibError(
                "another service of this user's listens there",
                where=str(local.socket),
                hint=f"Give each a port, or a {RUNTIME_DIR}, of its own.",
            )
        self._local = local
        local.remove()  # a killed service left files for this port behind
        remove_dead(self._folder, older_than_s=_DEAD_S)
        if self._config.token_file is None:
            local.write_token(self._access.owner_token)
        if self._config.tls is not None or self._config.tcp_only:
            return
        if not local.target:
            logger.warning(
                "the path %s is too long for a Unix socket; the service listens on its port alone", local.socket
            )
            return
        try:
            server.add_insecure_port(local.target)
        except RuntimeError:  # not all file systems can hold a socket
            logger.warning("cannot listen on %s; the service listens on its port alone", local.socket)

    def _serve_metrics(self, core: Core) -> Address:
        address, tls = self._config.metrics, self._config.tls
        try:
            # Its registry is empty until `set_app` installs the page that checks tokens.
            self._metrics = start_http_server(address.port, address.host, CollectorRegistry())
        except OSError as error:
            raise FxlibError(f"cannot listen on {address}: {error.strerror}", where="--metrics") from error
        if self._tls is not None:
            self._tls.protect(self._metrics[0])
        certified = tls is not None and tls.client_ca is not None
        asks = self._authenticator.policy is not None or not (address.loopback or certified)
        metrics = metrics_app(core.registry, self._authenticator if asks else None)
        self._metrics[0].set_app(pages(metrics, partial(self._not_ready, core)))
        return Address(host=address.host, port=self._metrics[0].server_port)

    def _not_ready(self, core: Core) -> str:
        if not self._accepts:
            return "the service starts, or shuts down"
        return "" if core.probe.answers() else "the database does not answer"

    async def _tidy(self, core: Core) -> None:
        while True:
            if self._local is not None:
                self._local.touch()
            try:
                if self._shared_time is not None:
                    await asyncio.to_thread(self._shared_time.ask)
                core.clock.observe()
                dropped = await asyncio.to_thread(core.blob_store.abandon, older_than_s=self._config.abandon_uploads_s)
                if dropped:
                    logger.info("dropped %d unfinished uploads", dropped)
                if core.retention is not None and (found := await core.retention.sweep()).some:
                    logger.info("deleted %d expired jobs and %d unused blobs", found.jobs, found.blobs)
            except ServiceError:
                logger.exception("the periodic cleanup failed; it runs again in %.0f s", _TIDY_S)
            await asyncio.sleep(_TIDY_S)
