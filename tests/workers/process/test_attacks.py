"""What an attacker who runs code in a contained process tries: all of it fails, for root's processes and for others'.

This process stands for the worker, with a token, a home, another job's folder and a port.
"""

# ruff: noqa: PTH116, PTH208, PTH211, S108, S606, SIM115 - attacks speak to the system directly, in a process of their own

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fxlib_workers.process.probe import Available, Level
from tests.workers.process.contained import NOBODY, ChildFailedError, everything, host, run, unprivileged_host

pytestmark = pytest.mark.slow

seccomp = pytest.importorskip("pyseccomp")

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
SIOCGIFCONF = 0x8912


@dataclass(frozen=True)
class Worker:
    """What a worker has, and an attacker would like to have."""

    pid: int
    token: Path
    other_job: Path
    own_job: Path
    port: int
    path: str
    abstract: str


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with (
        TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as name,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
    ):
        folder = Path(name)
        folder.chmod(0o755)  # what keeps the attacker out is not that it is closed
        (token := folder / "token").write_text("secret")
        for job in ("own", "other"):
            (folder / job).mkdir(mode=0o777)
            (folder / job / "graph").write_text("graph")
        by_path.bind(path := str(folder / "socket"))
        by_name.bind(abstract := f"\0fxlib-test-{os.getpid()}")
        by_path.listen()
        by_name.listen()
        yield Worker(
            pid=os.getpid(),
            token=token,
            other_job=folder / "other" / "graph",
            own_job=folder / "own",
            port=server.getsockname()[1],
            path=path,
            abstract=abstract,
        )


@pytest.fixture(params=["root", "nobody"])
def attacker(request: pytest.FixtureRequest) -> Available:
    """What this host allows processes of root, and of a user without privileges."""
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("this user is not root")
    found = host() if request.param == "root" else unprivileged_host()
    if found.level() is not Level.ISOLATED:
        pytest.skip(f"this host isolates no process of {request.param}: {dict(found.missing)}")
    return found


def call(name: str, *args: object) -> int:
    """Call a function of the C library; raise OSError where it says that it failed."""
    result: int = getattr(LIBC, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def system_call(name: str, *args: int) -> int:
    """Make a system call by its name."""
    return call("syscall", seccomp.resolve_syscall(seccomp.Arch.NATIVE, name), *args)


def connect(family: int, address: tuple[str, int] | str) -> None:
    with socket.socket(family) as client:
        client.settimeout(5.0)
        client.connect(address)


def start_threads(count: int) -> None:
    done = threading.Event()
    try:
        for _ in range(count):
            threading.Thread(target=done.wait, daemon=True).start()
    finally:
        done.set()


def fill_scratch(size: int) -> None:
    with Path("/tmp/large").open("wb") as file:
        file.writelines(bytes(1 << 20) for _ in range(size >> 20))


# Each returns if the attack succeeded. All that they need is imported and looked up before: no exec, no search.
ATTACKS: dict[str, Callable[[Worker], object]] = {
    "reads the passwords": lambda _: Path("/etc/shadow").read_bytes(),
    "lists a home": lambda _: [os.stat(each) for each in ("/root/.bashrc", "/home")],
    "reads the token": lambda worker: worker.token.read_text(),
    "reads another job": lambda worker: worker.other_job.read_text(),
    "lists all jobs": lambda worker: list((worker.own_job.parent / "other").iterdir()),
    "reads the worker's environment": lambda worker: Path(f"/proc/{worker.pid}/environ").read_bytes(),
    "reads its init's environment": lambda _: Path("/proc/1/environ").read_bytes(),
    "opens its init's root": lambda _: os.listdir("/proc/1/root/"),
    "reads its init's memory": lambda _: Path("/proc/1/mem").open("rb"),
    "connects to the service": lambda worker: connect(socket.AF_INET, ("127.0.0.1", worker.port)),
    "connects to the service over IPv6": lambda worker: connect(socket.AF_INET6, ("::1", worker.port)),
    "connects to a socket by its path": lambda worker: connect(socket.AF_UNIX, worker.path),
    "connects to a socket by its name": lambda worker: connect(socket.AF_UNIX, worker.abstract),
    "connects to the internet": lambda _: connect(socket.AF_INET, ("8.8.8.8", 53)),
    "speaks to the hypervisor": lambda _: socket.socket(socket.AF_VSOCK),
    "sees packets": lambda _: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "speaks to the kernel's cryptography": lambda _: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET),
    "traces the worker": lambda worker: call("ptrace", PTRACE_SEIZE, worker.pid, 0, 0),
    "traces its init": lambda _: call("ptrace", PTRACE_ATTACH, 1, 0, 0),
    "signals the worker": lambda worker: os.kill(worker.pid, 0),
    "reads memory of its init": lambda _: system_call("process_vm_readv", 1, 0, 0, 0, 0, 0),
    "writes to the system": lambda _: Path("/usr/fxlib-was-here").write_text(""),
    "writes beside the root": lambda _: Path("/fxlib-was-here").write_text(""),
    "changes Python": lambda _: Path(os.__file__).open("a"),
    "changes the kernel's settings": lambda _: Path("/proc/sys/kernel/core_pattern").write_text("|/tmp/x"),
    "asks the kernel to act": lambda _: Path("/proc/sysrq-trigger").write_text("b"),
    "forks": lambda _: os.fork(),
    "starts threads without end": lambda _: start_threads(300),
    "fills its scratch space": lambda _: fill_scratch(64 << 20),
    "mounts": lambda _: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "unmounts": lambda _: call("umount2", b"/proc", 2),
    "changes its root": lambda _: os.chroot("/tmp"),
    "makes a device": lambda _: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)),
    "makes a link": lambda _: os.symlink("/etc/shadow", "/tmp/link"),
    "becomes root": lambda _: os.setuid(0),
    "becomes root in a namespace of its own": lambda _: call("unshare", 0x10000000),
    "enters another namespace": lambda _: call("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0),
    "runs a program as root": lambda _: os.execv("/usr/bin/su", ["su"]),
    "runs a program": lambda _: os.execv("/bin/sh", ["sh", "-c", "true"]),
    "uses io_uring": lambda _: system_call("io_uring_setup", 1, 0),
    "uses BPF": lambda _: system_call("bpf", 0, 0, 0),
    "handles page faults": lambda _: system_call("userfaultfd", 0),
    "watches the processor": lambda _: system_call("perf_event_open", 0, 0, -1, -1, 0),
    "asks for keys": lambda _: system_call("keyctl", 0, -3, 0),
    "opens a file by its handle": lambda _: system_call("open_by_handle_at", -1, 0, 0),
    "sets the clock": lambda _: system_call("settimeofday", 0, 0),
    "raises its limits": lambda _: resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20)),
    "turns to 32-bit calls": lambda _: system_call("personality", 8),
}


GREEDY = ["starts threads without end", "fills its scratch space"]
"""Attacks that use up what others need, which might fail for want of it: each has a process of its own."""


@pytest.mark.parametrize("names", [[each for each in ATTACKS if each not in GREEDY], *([each] for each in GREEDY)])
def test_it_fails(names: list[str], worker: Worker, attacker: Available) -> None:
    policy = everything(attacker, writable=(worker.own_job,), threads=64, scratch_bytes=16 << 20)
    user = None if attacker is host() else NOBODY
    begun = mmap.mmap(-1, 1)  # shared with the process

    def attempt() -> str:
        succeeded = []
        for index, name in enumerate(names):
            begun[0] = index
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                ATTACKS[name](worker)
                succeeded.append(name)
        return f"succeeded: {succeeded}"

    assert run(attempt, policy, user) == "succeeded: []", f"the last attack that began: {names[begun[0]]}"


@pytest.mark.parametrize("name", ["init_module", "finit_module", "kexec_load", "reboot"])
def test_who_would_change_the_kernel_is_ended(name: str, attacker: Available) -> None:
    with pytest.raises(ChildFailedError, match=f"status {-signal.SIGSYS}"):
        run(lambda: system_call(name, 0, 0, 0, 0), everything(attacker), None if attacker is host() else NOBODY)


def test_what_ends_its_init_ends_itself_alone(attacker: Available) -> None:
    def attempt() -> str:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            os.kill(1, number)
        return "init lives"

    assert run(attempt, everything(attacker), None if attacker is host() else NOBODY) == "init lives"


def test_the_attacks_succeed_in_a_process_that_is_not_contained(worker: Worker) -> None:
    """Without this, an attack that fails for a reason of its own would prove nothing."""
    harmless = [
        *("reads the token", "reads another job", "lists all jobs", "reads the worker's environment"),
        *("connects to the service", "connects to a socket by its path", "connects to a socket by its name"),
        *("signals the worker", "makes a link", "forks", "runs a program"),
    ]
    for name in harmless:
        with contextlib.suppress(FileNotFoundError):
            Path("/tmp/link").unlink()
        run(lambda name=name: ATTACKS[name](worker), None)  # type: ignore[misc]
