"""The system calls that a contained process may make, as a seccomp filter.

The list starts from the set `@system-service` of systemd 252 (`systemd-analyze syscall-filter`), which its maintainers
keep for ordinary services, without those that a computing process does not need: other processes (fork, exec, ptrace,
signals by descriptor), namespaces and mounts, identities, keys, links and device nodes, io_uring, userfaultfd. A call
that is not on the list fails with EPERM, so that libraries fall back. A call that nobody makes by accident ends the
process.
"""

from __future__ import annotations

import errno
import functools
import socket
import tempfile
from typing import Final

_MEMORY: Final = (
    "brk get_mempolicy madvise mbind membarrier memfd_create migrate_pages mlock mlock2 mlockall mmap mprotect "
    "mremap msync munlock munlockall munmap remap_file_pages set_mempolicy set_mempolicy_home_node"
)
_FILES: Final = (
    "access chdir chmod close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 "
    "fallocate fchdir fchmod fchmodat fchmodat2 fcntl fdatasync fgetxattr flistxattr flock fstat fstatfs fsync "
    "ftruncate futimesat getcwd getdents getdents64 getxattr inotify_add_watch inotify_init inotify_init1 "
    "inotify_rm_watch ioctl lgetxattr listxattr llistxattr lseek lstat mkdir mkdirat newfstatat open openat openat2 "
    "pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename renameat "
    "renameat2 rmdir sendfile splice stat statfs statx sync sync_file_range syncfs tee truncate umask unlink "
    "unlinkat utime utimensat utimes vmsplice write writev"
)
_WAITING: Final = (
    "alarm clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_ctl_old "
    "epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 futex futex_waitv get_robust_list "
    "getitimer gettimeofday io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit nanosleep pause pipe "
    "pipe2 poll ppoll pselect6 restart_syscall select set_robust_list setitimer time timer_create timer_delete "
    "timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times"
)
_SOCKETS: Final = (
    "accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg "
    "sendmsg sendto setsockopt shutdown socketpair"
)
_PROCESS: Final = (
    "arch_prctl capget exit exit_group get_thread_area getcpu getegid geteuid getgid getgroups getpgid getpgrp "
    "getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get "
    "kill prctl prlimit64 rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend "
    "rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity "
    "sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_yield "
    "set_thread_area set_tid_address setpriority setrlimit sigaltstack signalfd signalfd4 sysinfo tgkill tkill "
    "uname wait4 waitid"
)
_FATAL: Final = "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff"
"""The calls that end the process: no library makes them, and each would affect the whole host."""

_CLONE_THREAD: Final = 0x00010000
_NETLINK_ROUTE: Final = 0
_OPTIMIZE_TREE: Final = 2


class FilterUnavailableError(Exception):
    """A filter cannot be made on this host; the message says what is missing."""


@functools.cache
def compile_filter(*, sockets: bool) -> bytes:
    """Return the filter as a program for the kernel's BPF machine, by libseccomp.

    Args:
        sockets: whether the process may open sockets of the internet's families.

    Raises:
        FilterUnavailableError: libseccomp, or its binding, is not installed.
    """
    try:
        import pyseccomp as seccomp  # imported here, since the import runs other programs to find the library
    except ImportError:
        raise FilterUnavailableError("the Python package pyseccomp is not installed") from None
    except RuntimeError:
        raise FilterUnavailableError("libseccomp.so.2 is not installed") from None

    def known(names: str) -> list[str]:
        """Return the calls that this architecture has."""
        return [name for name in names.split() if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) >= 0]

    made = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    made.set_attr(seccomp.Attr.CTL_OPTIMIZE, _OPTIMIZE_TREE)
    for name in known(f"{_MEMORY} {_FILES} {_WAITING} {_SOCKETS} {_PROCESS}"):
        made.add_rule(seccomp.ALLOW, name)
    for name in known(_FATAL):
        made.add_rule(seccomp.KILL_PROCESS, name)
    # Threads are allowed, processes are not. No filter sees the flags of clone3, which are in memory: the C library
    # goes on to clone if the kernel has no clone3.
    made.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    made.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    families = [socket.AF_UNIX, *([socket.AF_INET, socket.AF_INET6] if sockets else [])]
    for family in families:
        made.add_rule(seccomp.ALLOW, "socket", seccomp.Arg(0, seccomp.EQ, family))
    if sockets:  # getifaddrs(3), with which gloo and TensorPipe find an interface's address
        made.add_rule(
            seccomp.ALLOW,
            "socket",
            seccomp.Arg(0, seccomp.EQ, socket.AF_NETLINK),
            seccomp.Arg(2, seccomp.EQ, _NETLINK_ROUTE),
        )
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()
