"""The main loop of a worker process: it claims one job after another until it is asked to end."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import grpc
from typing_extensions import override

from fxlib.client.connection import understand
from fxlib.errors import CredentialError, FxlibError, OptionError, RejectedError, RemoteError, of_system
from fxlib.utils.locked_folder import LockedFolder
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_workers import logs
from fxlib_workers.config import LOOPBACK, Config, TrialSettings
from fxlib_workers.lease import ActiveLease, JobCancelledError, LeaseOverError, WorkerShutdownError
from fxlib_workers.process.cgroup import remove_abandoned
from fxlib_workers.process.containment import Containment, Part, module_folders
from fxlib_workers.process.exceptions import HOST_FAULTS, shorten
from fxlib_workers.process.forking import Forker
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.process.linux import address_of
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.process.reaper import delete
from fxlib_workers.process.system_calls import compile_filter
from fxlib_workers.rewrite.sandbox import REWRITING
from fxlib_workers.run_job import JobRunner
from fxlib_workers.service_client import ServiceClient
from fxlib_workers.trial.driver import TrialDriver

_LOG: Final = logs.Log(__name__)

_SET_BACKS: Final = 2
"""The number of times that a job is returned because this worker's host fails; after that, the job fails."""

_HOST_PAUSE_S: Final = 10.0
"""The pause in seconds after a job that the host had no room for, and while the worker's folder cannot be written."""

_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""The pauses in seconds between failed claims; the last one is repeated."""

_REFUSED: Final = frozenset({"INVALID_REQUEST", "INVALID_GRAPH", "MESSAGE_TOO_LARGE"})
"""The service's error codes for an answer that it refuses for what it is, so that the next worker's would be, too."""

_SHARED_NETWORK: Final = "network: the processes of a trial meet on the interface that --interface names"

Nodes = Mapping[str, Available]
"""The containment that the nodes of a cluster allow, by the nodes' names."""


def containment_level(settings: TrialSettings, host: Available, nodes: Nodes | None = None) -> Level:
    """Return the level at which this worker contains a job's graph: the lowest of all hosts that take part.

    Args:
        settings: where trials run.
        host: what the worker's host, where graphs are rewritten, allows.
        nodes: what the nodes of its cluster allow; None if it has none.
    """
    here = host.level(own_network=settings.interface == LOOPBACK)
    if nodes is None:
        return here
    # The processes of a trial on a cluster communicate over the nodes' network.
    there = [each.level(own_network=False) for each in nodes.values()]
    return min(here, *there, key=lambda level: level.rank)


def check_containment(config: Config, host: Available, nodes: Nodes | None = None) -> Level:
    """Return the level that this worker reaches, which is at least the one that its operator requires.

    Raises:
        OptionError: the worker does not reach that level; the error says what is missing.
    """
    level = containment_level(config.trial, host, nodes)
    if level.rank >= config.require_containment.rank:
        return level
    unrelated = {Part.USER, Part.MEMORY}
    why = [f"{part}: {reason}" for part, reason in host.missing if part not in unrelated]
    why += [] if config.trial.interface == LOOPBACK else [_SHARED_NETWORK]
    for node, found in (nodes or {}).items():
        why += [f"node {node}: {part}: {reason}" for part, reason in found.missing if part not in unrelated]
    raise OptionError(
        f"this worker reaches the level {level!s} only ({'; '.join(why)})",
        option="require-containment",
        hint="See how-to/secure.md, or require less.",
    )


def check_host(config: Config) -> None:
    """Check that this host has what the options name, which is needed only when a job is measured.

    Raises:
        OptionError: the host's lock cannot be opened, or trials of the worker's own Ray would meet on an interface that
            the host does not have.
    """
    try:
        HostLock(config.host_lock).check()
    except OSError as error:
        raise OptionError(str(of_system(error)), option="host-lock") from error
    if config.trial.ray_address:  # it is the interface of the cluster's hosts
        return
    try:
        address_of(config.trial.interface)
    except OSError as error:
        raise OptionError(str(error), option="interface") from error


def check_ray(settings: TrialSettings, host: Available, *, root: bool) -> None:
    """Check that the worker's own Ray does not listen on an interface that its operator did not name.

    Ray listens on all interfaces that it has. Root can give it a network of its own and let the processes of trials
    rejoin the host's; other users can do this only on loopback, and there a worker that cannot says so in its log.

    Args:
        settings: where trials run.
        host: what the worker's host allows.
        root: whether the worker runs as root.

    Raises:
        OptionError: it would listen there, and no option permits it.
    """
    if settings.ray_address or settings.interface == LOOPBACK or settings.exposed_ray:
        return
    if not (root and Part.NETWORK in host.parts):
        why = "the worker is not root's" if not root else host.why(Level.ISOLATED)
        raise OptionError(
            f"a Ray of the worker's own would listen on all interfaces of this host ({why})",
            option="interface",
            hint="Leave it out: a trial on one host needs none. Or say --expose-ray.",
        )


def _policy(host: Available, modules: Sequence[str]) -> Containment:
    """Return the containment of rewrites on this host; they may read the operator's modules."""
    program = compile_filter(sockets=False) if Part.FILTER in host.parts else b""
    return Containment(parts=host.parts, readable=tuple(module_folders(modules)), program=program)


class Agent:
    """One worker process.

    Args:
        config: the worker's options.
        host: what this host allows a contained process.
        level: the level at which it contains a job's graph.
    """

    def __init__(self, config: Config, host: Available, level: Level) -> None:
        self._config = config
        self._shutdown = threading.Event()
        self._signalled = False
        self._folder_gone: FxlibError | None = None
        self._set_back: Counter[str] = Counter()
        self._host = host
        self._service = ServiceClient(config, level)

    def run(self) -> None:
        """Work until SIGTERM or SIGINT, or until one job is done if `once` is set; unfinished jobs are returned.

        Raises:
            FxlibError: somebody has deleted the worker's folder.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        remove_abandoned()
        folder = WorkerFolder()
        root = folder.path
        if Part.USER in self._host.parts and Part.FILES not in self._host.parts:
            root.chmod(0o711)  # a contained process enters the job's folder as another user, by its full path
        driver = TrialDriver(self._config.trial, root)
        forker = Forker(REWRITING, root, keep_variables=self._config.trial.keep_variables)
        runner = JobRunner(
            config=self._config,
            service=self._service,
            lock=HostLock(self._config.host_lock),
            driver=driver,
            forker=forker,
            containment=_policy(self._host, self._config.trial.allowed_modules),
            root=root,
        )
        info = self._service.info
        _LOG.info(
            "worker",
            name=info.worker_id,
            service=self._config.service,
            torch=info.torch_version,
            containment=info.containment,
            parts=",".join(sorted(self._host.parts)),
        )
        for part, why in self._host.missing:
            _LOG.info("not contained", part=part, why=why)
        slots = [
            threading.Thread(target=self._run_slot, args=[runner, folder], daemon=True)
            for _ in range(self._config.slots)
        ]
        try:
            forker.start()
            driver.start()
            for slot in slots:
                slot.start()
            while any(slot.is_alive() for slot in slots):
                if self._signalled:
                    self._shutdown.set()
                time.sleep(0.1)
        finally:
            self._shutdown.set()
            for slot in slots:
                slot.join()
            driver.end()
            forker.end()
            self._service.close()
            folder.delete()
            _LOG.info("worker ended", name=info.worker_id)
        if self._folder_gone is not None:
            raise self._folder_gone

    def _note_signal(self, *_: object) -> None:
        """Record a signal. Setting an event here would wait for a lock that the interrupted code may hold."""
        self._signalled = True

    def _run_slot(self, runner: JobRunner, folder: WorkerFolder) -> None:
        while not self._shutdown.is_set():
            message = self._claim() if self._may_write(folder) else None
            if message is None:
                continue
            self._run_job(runner, message, folder)
            if self._config.once:
                self._shutdown.set()

    def _may_write(self, folder: WorkerFolder) -> bool:
        """Return whether the worker's folder can be written; if not, wait, or end the worker if the folder is gone."""
        try:
            folder.touch()
        except FileNotFoundError:
            hint = "Keep programs that clean up temporary files away from it."
            self._folder_gone = FxlibError("the worker's folder was deleted", where=str(folder.path), hint=hint)
            self._shutdown.set()
            return False
        except OSError as error:
            _LOG.warning("takes no job", folder=folder.path, error=error, retry_s=_HOST_PAUSE_S)
            self._shutdown.wait(_HOST_PAUSE_S)
            return False
        return True

    def _claim(self) -> workers_pb2.Lease | None:
        failures = 0
        while not self._shutdown.is_set():
            try:
                return self._service.claim(self._shutdown)
            except (grpc.RpcError, CredentialError) as error:
                pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                problem = understand(error).message if isinstance(error, grpc.RpcError) else error
                _LOG.warning("cannot claim", error=problem, retry_s=pause_s)
                self._shutdown.wait(pause_s)
                failures += 1
        return None

    def _run_job(self, runner: JobRunner, message: workers_pb2.Lease, folder: WorkerFolder) -> None:
        _LOG.info("claimed", job=message.job_id, attempt=message.attempt, model=message.request.name)
        with ActiveLease(self._service, message, self._shutdown) as lease:
            try:
                runner.run(lease)
            except WorkerShutdownError:
                self._service.release(message)
                _LOG.info("given back", job=message.job_id)
            except LeaseOverError as over:
                event = "cancelled" if isinstance(over, JobCancelledError) else "lease lost"
                _LOG.info(event, job=message.job_id, why=over)
            except RemoteError as error:
                if isinstance(error, RejectedError) and error.code in _REFUSED:
                    self._fail(lease, error)
                else:
                    _LOG.warning("answer not delivered", job=message.job_id, error=error)
            except OSError as error:
                of_host = error.errno in HOST_FAULTS or not folder.path.exists()
                if of_host and self._set_back[message.job_id] < _SET_BACKS:
                    self._set_back_job(message, error)
                else:
                    self._fail(lease, error)
            except Exception as error:  # noqa: BLE001 - whatever one job does to a worker must not affect the next one
                self._fail(lease, error)

    def _set_back_job(self, message: workers_pb2.Lease, error: OSError) -> None:
        """Return a job that this worker's host has no room for, and pause before taking another one."""
        self._set_back[message.job_id] += 1
        _LOG.warning("given back, as this host fails", job=message.job_id, error=error)
        self._service.release(message)
        self._shutdown.wait(_HOST_PAUSE_S)

    def _fail(self, lease: ActiveLease, error: Exception) -> None:
        _LOG.warning("worker failed", job=lease.job_id, error=error)
        failure = jobs_pb2.JobFailure(code="WORKER_FAILED", message=shorten(f"{type(error).__name__}: {error}"))
        try:
            self._service.complete(lease.message, failure, lease.check)
        except (RemoteError, LeaseOverError) as over:
            _LOG.warning("failure not delivered", job=lease.job_id, error=over)


class WorkerFolder(LockedFolder):
    """A new folder, which replaces those that killed workers of this user have left behind."""

    def __init__(self) -> None:
        super().__init__("fxlib-w-")

    @override
    def delete(self) -> None:
        """Delete the folder with its contents, and the folders that killed workers have left behind."""
        delete(self.path)  # a reaper, or a process that is about to end, may still write there
        super().delete()
