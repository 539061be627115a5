"""System calls for namespaces, mounts and privileges for which Python has no functions. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

import psutil

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000

_MNT_DETACH: Final = 2
_SYS_MOUNT_SETATTR: Final = 442
"""The number of mount_setattr(2), the same on all architectures (Linux 5.12)."""

_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 0x1
_MOUNT_ATTR_NOSUID: Final = 0x2
_MOUNT_ATTR_NODEV: Final = 0x4

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_SECCOMP_MODE_FILTER: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522

_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 0x1

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones; a new PID namespace contains only children."""
    _check(_LIBC.unshare(flags), "unshare")


def join_namespace(path: str, flag: int) -> None:
    """Enter the namespace behind a file of /proc."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.setns(descriptor, flag), f"setns {path}")
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or an existing folder at a second path (`MS_BIND`)."""
    done = _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(done, f"mount {target}")


def restrict_mount(target: str, *, read_only: bool, below: bool = True) -> None:
    """Keep programs on a mount from gaining privileges, and make it read-only, or else deny opening devices there.

    With `below`, the same goes for all mounts below it.
    """
    attributes = _MOUNT_ATTR_NOSUID | (_MOUNT_ATTR_RDONLY if read_only else _MOUNT_ATTR_NODEV)
    packed = struct.pack("=4Q", attributes, 0, 0, 0)
    done = _LIBC.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE if below else 0),
        ctypes.c_char_p(packed),
        ctypes.c_size_t(len(packed)),
    )
    _check(done, f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    """Make the mount at `new` the root, and move the old root to the folder `old` below it."""
    _check(_LIBC.pivot_root(new.encode(), old.encode()), f"pivot_root {new}")


def set_host_name(name: str) -> None:
    """Set the host name in this process's UTS namespace."""
    _check(_LIBC.sethostname(name.encode(), len(name)), "sethostname")


def detach(target: str) -> None:
    """Remove a mount, with all mounts below it, from this process's view."""
    _check(_LIBC.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def raise_loopback() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def address_of(interface: str) -> str:
    """Return the first IPv4 address of a network interface.

    Raises:
        OSError: this host has no such interface, or it has no such address.
    """
    found = next((each for each in psutil.net_if_addrs().get(interface, []) if each.family == socket.AF_INET), None)
    if found is None:
        raise OSError(f"this host has no interface {interface!r} with an IPv4 address")
    return str(found.address)


def adopt_orphans() -> None:
    """Become the parent of processes that descendants of this one leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when its parent ends. A change of user undoes this."""
    _prctl(_PR_SET_PDEATHSIG, number)


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and environment, and prevent core dumps."""
    _prctl(_PR_SET_DUMPABLE, 0)


def gain_no_privileges() -> None:
    """Keep this process, and all that it starts, from ever gaining privileges, whatever they execute."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def bound_capabilities() -> None:
    """Empty the sets from which a program could take capabilities. Needs CAP_SETPCAP."""
    for capability in range(_last_capability() + 1):
        _prctl(_PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Give up all capabilities."""
    with contextlib.suppress(OSError):  # kernels before 4.3 have no ambient capabilities
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))), "capset")


def load_filter(program: bytes) -> None:
    """Make the kernel apply a seccomp program to each system call of this thread and of those that it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, eight bytes each, and where they are
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header))


def _last_capability() -> int:
    return int(Path("/proc/sys/kernel/cap_last_cap").read_text())


def _prctl(option: int, value: int, argument: ctypes.c_char_p | int = 0) -> None:
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), argument, 0, 0), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
