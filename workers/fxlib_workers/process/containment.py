"""Containment of a forked process by `contain`, so that a stranger's graph can touch nothing but its own tensors.

`contain` is called in a process that was forked for one job, before it reads anything of that job. It returns in a
grandchild of that process, which has

- a user of its own and no privileges: another user id if the worker is root, else a user namespace;
- no network, or one that only the processes of its trial share (`hold_network`): loopback, and nothing behind it;
- no files but the Python environment and the system's libraries, read-only, the folders that the policy names, and a
  `/tmp` of its own: no home, no sockets of daemons, no other job's folder, no token;
- no view of other processes: it is alone in a PID namespace, below an init of a few lines;
- the system calls of `system_calls`, and no others;
- limits on threads, on what it writes to `/tmp`, and those of the cgroup that the policy names.

The process that called `contain` stays behind and waits. It ends with the same status or signal as the contained one,
which in turn ends when the caller does. `probe` finds out by trial what this host allows; a policy asks for exactly
that, and `contain` raises if it does not get it. Linux only.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import functools
import importlib.util
import json
import os
import pwd
import random
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NoReturn

from fxlib_workers.process import linux
from fxlib_workers.process.system_calls import FilterUnavailableError, compile_filter

MIB: Final = 1 << 20


class Part(enum.StrEnum):
    """A part of containment: something that a contained process has of its own, or does without."""

    USER = "user"
    """A user id of its own; only root can give it."""

    FILTER = "filter"
    """A filter on system calls."""

    FILES = "files"
    """A view of files and processes of its own."""

    NETWORK = "network"
    """A network of its own, or none."""

    MEMORY = "memory"
    """A cgroup that bounds memory and processes of the job as a whole; without it, each process has its own limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network that processes of one host may share, given by the files of /proc for its namespaces.

    Attributes:
        network: the file of the network namespace; empty for the host's own network.
        user: the file of the user namespace that owns it; empty if root made it.
        of_host: whether it is the host's own network, in which names can be looked up.
    """

    network: str = ""
    user: str = ""
    of_host: bool = False


HOST_NETWORK: Final = Network(of_host=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """The policy by which a process is contained.

    Attributes:
        parts: the parts that the host allows (`available().parts`), and that `contain` has to reach.
        readable: folders and files that it may read, in addition to the Python environment and the system's libraries.
        writable: folders that it may also write; its user becomes their owner.
        network: the network that it has, if any.
        user: its user id if the worker is root (`unused_user`).
        descriptors: the open files that it keeps in addition to standard input, output and error.
        cgroup: the files `cgroup.procs` of the cgroups that it joins.
        scratch_bytes: the bytes that it may write to its `/tmp` and to `/dev/shm`, which are memory.
        threads: the number of threads that its user may have.
        program: the filter, if the caller has compiled it; if empty, `contain` compiles it.
    """

    parts: frozenset[Part]
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    network: Network | None = None
    user: int = 0
    descriptors: tuple[int, ...] = ()
    cgroup: tuple[Path, ...] = ()
    scratch_bytes: int = 256 * MIB
    threads: int = 4096
    program: bytes = b""

    def dumps(self) -> str:
        """Write the policy as text, for a process that is not forked."""
        network = self.network
        return json.dumps(
            {
                "parts": sorted(self.parts),
                "readable": [str(each) for each in self.readable],
                "writable": [str(each) for each in self.writable],
                "network": None if network is None else asdict(network),
                "user": self.user,
                "descriptors": self.descriptors,
                "cgroup": [str(each) for each in self.cgroup],
                "scratch_bytes": self.scratch_bytes,
                "threads": self.threads,
                "program": base64.b64encode(self.program).decode(),
            }
        )

    @classmethod
    def loads(cls, text: str) -> Containment:
        """Read what `dumps` wrote."""
        fields = json.loads(text)
        network = fields["network"]
        return cls(
            parts=frozenset(map(Part, fields["parts"])),
            readable=tuple(map(Path, fields["readable"])),
            writable=tuple(map(Path, fields["writable"])),
            network=None if network is None else Network(**network),
            user=fields["user"],
            descriptors=tuple(fields["descriptors"]),
            cgroup=tuple(map(Path, fields["cgroup"])),
            scratch_bytes=fields["scratch_bytes"],
            threads=fields["threads"],
            program=base64.b64decode(fields["program"]),
        )


class ContainmentError(Exception):
    """A process could not be contained; the message says what the kernel refused."""


_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
"""The paths of libraries and locales."""

_SETTINGS: Final = (
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    "/sys/devices/system",
)
_NAMES: Final = ("/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf")
"""The files by which hosts are found by name, for a process on the host's network."""

_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "nvidia*")
_USERS: Final = range(61184, 65520)
"""User ids that no person has: systemd assigns them to its dynamic users, one for each service."""

_OOM_SCORE: Final = 500
"""The preference, out of 1000, with which the kernel ends a contained process when memory runs out."""

_TMP: Final = "/tmp"  # noqa: S108 - in the contained process's own namespace

_READY: Final = b"R"
_FAILED: Final = b"E"
_LONGEST: Final = 4096
"""The longest message of an init, in bytes: a pipe passes this much at once."""


def contain(policy: Containment) -> None:
    """Continue as a contained process below the calling one; the function returns only there.

    The caller has one thread, was forked or started for one job, and has read nothing of it. The contained process
    inherits its memory. The caller becomes the outer process of the contained one, and ends in the same way.

    Raises:
        ContainmentError: the kernel refused a part that the policy asks for. The caller must end.
    """
    if (threads := len(list(Path("/proc/self/task").iterdir()))) != 1:
        raise ContainmentError(f"a process with {threads} threads cannot be contained")
    try:
        program = _program(policy)
        user = (policy.user or unused_user()) if Part.USER in policy.parts else os.getuid()
        for group in policy.cgroup:
            group.write_text(str(os.getpid()))
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        if Part.USER in policy.parts:
            for folder in policy.writable:
                _hand_over(folder, user)
        if Part.FILES in policy.parts:
            _enter_namespaces(policy)
            _continue_below(policy, user)
        else:
            _drop_privileges(policy, user)
        resource.setrlimit(resource.RLIMIT_NPROC, (policy.threads, policy.threads))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _keep_open({0, 1, 2, *policy.descriptors})
        if program:
            linux.load_filter(program)
        if Part.FILES in policy.parts:
            os.environ.update(HOME=_TMP, TMPDIR=_TMP)
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # a folder of the host, which is not visible
    except (OSError, ValueError, FilterUnavailableError) as error:
        raise ContainmentError(str(error)) from error


def unused_user() -> int:
    """Return an unused user id, drawn at random, so that jobs that run at once are unlikely to have the same one."""
    known = {each.pw_uid for each in pwd.getpwall()}
    return random.SystemRandom().choice([each for each in _USERS if each not in known])


@contextlib.contextmanager
def hold_network() -> Iterator[Network]:
    """Make a loopback-only network, which processes of this user on this host may join for the duration of a block.

    Raises:
        ContainmentError: the kernel refused it.
    """
    with contextlib.ExitStack() as open_:
        ready, reporting = os.pipe()
        waiting, to_end = os.pipe()
        for end in (ready, to_end):
            open_.callback(os.close, end)
        child = os.fork()
        if not child:
            os.close(to_end)
            run_child(functools.partial(_make_network, reporting, waiting), reporting)
        os.close(reporting)
        os.close(waiting)
        try:
            if problem := os.read(ready, _LONGEST):
                raise ContainmentError(problem.decode())
            files = {kind: os.open(f"/proc/{child}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "user")}
        finally:
            os.write(to_end, b".")
            os.waitpid(child, 0)
        for descriptor in files.values():
            open_.callback(os.close, descriptor)
        paths = {kind: f"/proc/{os.getpid()}/fd/{descriptor}" for kind, descriptor in files.items()}
        yield Network(network=paths["net"], user="" if _is_root() else paths["user"])


def keep_network() -> Network:
    """Return the host's network, which children may join after this process has left it, for as long as it runs.

    Only root's children can join it again.

    Raises:
        ContainmentError: this process is not root's, or the kernel refused it.
    """
    if not _is_root():
        raise ContainmentError("only root's processes can join the host's network again")
    try:
        descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ContainmentError(str(error)) from error
    return Network(network=f"/proc/{os.getpid()}/fd/{descriptor}", of_host=True)


def leave_network() -> None:
    """Move this process, and those that it starts from now on, to a network with nothing but loopback.

    Raises:
        ContainmentError: the kernel refused it.
    """
    try:
        if not _is_root():
            _enter_user_namespace()
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
        linux.raise_loopback()
        linux.set_host_name("localhost")  # a process that looks up its own name gets an address that exists
    except OSError as error:
        raise ContainmentError(str(error)) from error


def python_folders() -> list[Path]:
    """Return the folders from which this process imports modules and loads libraries."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    named = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *libraries]
    return [Path(each).absolute() for each in dict.fromkeys(filter(None, named)) if os.access(each, os.R_OK)]


def module_folders(modules: Collection[str]) -> list[Path]:
    """Return the folders and files of the packages that these modules belong to, none of which is imported."""
    found: list[Path] = []
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        if (spec := importlib.util.find_spec(name)) is not None:
            folders = spec.submodule_search_locations or filter(None, [spec.origin])
            found += [Path(each).absolute() for each in folders]
    return found


def _is_root() -> bool:
    return os.geteuid() == 0


def _program(policy: Containment) -> bytes:
    if Part.FILTER not in policy.parts:
        return b""
    return policy.program or compile_filter(sockets=policy.network is not None)


def _hand_over(folder: Path, user: int) -> None:
    """Make a user the owner of a folder and everything in it."""
    os.chown(folder, user, user)
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(path) / name, user, user, follow_symlinks=False)


def _enter_namespaces(policy: Containment) -> None:
    """Leave the host's user, network and PID namespaces; the new PID namespace contains only children."""
    network = policy.network
    if not _is_root():
        _enter_user_namespace(network.user if network else "")
    if network and network.network:
        linux.join_namespace(network.network, linux.CLONE_NEWNET)
    own_network = network is None and Part.NETWORK in policy.parts
    linux.unshare(linux.CLONE_NEWPID | (linux.CLONE_NEWNET if own_network else 0))


def _enter_user_namespace(path: str = "") -> None:
    """Enter a user namespace in which this process has all capabilities; a new one unless there is a path."""
    if path:
        linux.join_namespace(path, linux.CLONE_NEWUSER)
        return
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _continue_below(policy: Containment, user: int) -> None:
    """Return in a child of an init in new namespaces. The calling process is its outer process and does not return.

    Raises:
        OSError: a mount, or a change of user, was refused.
    """
    reports, reporting = os.pipe()
    if init := os.fork():
        os.close(reporting)
        _wait_outside(init, reports)
    os.close(reports)
    try:
        _build_root(policy, user)
        _drop_privileges(policy, user)
        _end_with_reader(reporting)
        _reset_handlers()
        child = os.fork()
    except BaseException as error:  # noqa: BLE001 - whatever it is, this process must not continue
        with contextlib.suppress(OSError):  # nobody is there to read it
            os.write(reporting, _FAILED + str(error).encode()[:_LONGEST])
        os._exit(1)
    if not child:
        os.close(reporting)
        return
    try:
        os.write(reporting, _READY)
        _keep_open({2, reporting})
        while True:  # as init, this process has to wait for orphans
            ended, status = os.wait()
            if ended == child:
                os.write(reporting, struct.pack("i", status))
                os._exit(0)
    finally:  # the outer process has ended, and everything here ends with it
        os._exit(1)


def _wait_outside(init: int, reports: int) -> NoReturn:
    """Wait for the end of the contained process, and end in the same way.

    Raises:
        OSError: the process could not be contained.
    """
    first = os.read(reports, _LONGEST)
    if first[:1] != _READY:
        os.waitpid(init, 0)
        raise OSError(first[1:].decode() or "the process ended while it was being contained")
    _reset_handlers()
    _keep_open({2, reports})
    status = first[1:] or os.read(reports, _LONGEST)
    os.waitpid(init, 0)  # otherwise it would be a zombie of its adopter
    code = os.waitstatus_to_exitcode(struct.unpack("i", status)[0]) if status else -signal.SIGKILL
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _end_with_reader(descriptor: int) -> None:
    """End when the parent, which reads the pipe behind `descriptor`, ends."""
    linux.end_with_parent(signal.SIGKILL)
    poll = select.poll()
    poll.register(descriptor, 0)
    if poll.poll(0):
        raise OSError("the outer process ended")


def _reset_handlers() -> None:
    """Remove the signal handlers of the process that this one was forked from; ignored signals stay ignored."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _drop_privileges(policy: Containment, user: int) -> None:
    """Become the user permanently, without any capability."""
    with contextlib.suppress(PermissionError):  # a process without CAP_SETPCAP gains nothing from the set either
        linux.bound_capabilities()
    if Part.USER in policy.parts:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    linux.drop_capabilities()
    linux.gain_no_privileges()
    linux.hide_memory()


def _build_root(policy: Containment, user: int) -> None:
    """Make a root with the paths that the policy shows, and leave the host's.

    The new root is built beside the old one, on a temporary file system over `/tmp` that only this process sees, as
    bubblewrap does. So no folder has to be made on the host.
    """
    shown = list(_shown(policy))
    limits = linux.MS_NOSUID | linux.MS_NODEV
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", _TMP, "tmpfs", limits, "mode=0755,size=1m")
    Path(_TMP, "old").mkdir()
    linux.pivot_root(_TMP, f"{_TMP}/old")
    os.chdir("/")
    old, new = Path("/old"), Path("/new")
    new.mkdir()
    linux.mount("tmpfs", str(new), "tmpfs", limits, "mode=0755,size=4m")
    group = user if Part.USER in policy.parts else os.getgid()
    scratch = f"mode=0700,size={policy.scratch_bytes},uid={user},gid={group}"
    for name in (_TMP, "/dev/shm"):  # noqa: S108 - the process's own
        (folder := _at(new, Path(name))).mkdir(parents=True)
        linux.mount("tmpfs", str(folder), "tmpfs", limits, scratch)
    for name in _SYSTEM:
        if (link := _at(old, Path(name))).is_symlink():  # /bin is a link to usr/bin
            _at(new, Path(name)).symlink_to(link.readlink())
    for each in shown:
        _show(each, old, new)
    (new / "proc").mkdir(exist_ok=True)
    linux.mount("proc", str(new / "proc"), "proc", limits | linux.MS_NOEXEC)
    _write_names(new, user)
    os.chdir(new)
    linux.pivot_root(".", ".")
    linux.detach(".")
    os.chdir(_TMP)
    linux.restrict_mount("/", read_only=True, below=False)
    linux.set_host_name("localhost")
    os.setsid()


@dataclass(frozen=True, slots=True)
class _Shown:
    """A folder or a file of the host that a contained process sees.

    Attributes:
        path: its path for the contained process, which is the same as on the host.
        source: the same path without symbolic links.
        writable: whether the process may write there.
    """

    path: Path
    source: Path
    writable: bool


def _shown(policy: Containment) -> Iterator[_Shown]:
    """Yield the paths that a contained process sees, outer folders first; readable ones are not nested."""
    own = [Path.home(), *policy.writable]
    # A search path may hold a home or `/`: an import never justifies showing everything there.
    imported = [each for each in python_folders() if not any(path.is_relative_to(each) for path in own)]
    of_host = policy.network is not None and policy.network.of_host
    names = _NAMES if of_host or Part.NETWORK not in policy.parts else ()
    devices = [device for name in _DEVICES for device in Path("/dev").glob(name)]
    system = [path for path in map(Path, (*_SYSTEM, *_SETTINGS, *names)) if path.exists()]
    system = [path for path in system if not (path.is_symlink() and str(path) in _SYSTEM)]
    readable = sorted({*system, *devices, *imported, *policy.readable}, key=lambda path: len(path.parts))
    seen: list[Path] = []
    for path in readable:
        if not any(path.is_relative_to(each) for each in seen):
            seen.append(path)
            yield _Shown(path, path.resolve(), writable=False)
    for path in policy.writable:
        yield _Shown(path, path.resolve(), writable=True)


def _show(shown: _Shown, old: Path, new: Path) -> None:
    origin, target = _at(old, shown.source), _at(new, shown.path)
    if origin.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    linux.mount(str(origin), str(target), flags=linux.MS_BIND | linux.MS_REC)
    linux.restrict_mount(str(target), read_only=not shown.writable)


def _at(root: Path, path: Path) -> Path:
    """Return the location of a host's path below another root."""
    return root / path.relative_to("/")


def _write_names(root: Path, user: int) -> None:
    """Write the files in which libraries look up users and hosts, except where the host's own are shown."""
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    names = {
        "passwd": f"fxlib:x:{user}:{user}:fxlib:{_TMP}:/usr/sbin/nologin\n",
        "group": f"fxlib:x:{user}:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    for name, text in names.items():
        if not (etc / name).exists():
            (etc / name).write_text(text)


def _keep_open(descriptors: Collection[int]) -> None:
    """Replace standard input and all open files except these with /dev/null.

    They are not closed, since objects of the forking process still hold their numbers.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in descriptors and number != null:
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
                os.fstat(number)
                os.dup2(null, number, inheritable=False)
    os.close(null)


def _make_network(reporting: int, waiting: int) -> None:
    """Stay in a new network until asked to end; report an error if that fails."""
    leave_network()
    os.close(reporting)
    os.read(waiting, 1)


def run_child(work: Callable[[], None], reporting: int) -> NoReturn:
    """Run work in a child that was just forked, then end it; write any exception to a pipe."""
    try:
        work()
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - this process is forked, and must never return to its caller
        os.write(reporting, str(error).encode() or b"unknown")
        os._exit(1)
