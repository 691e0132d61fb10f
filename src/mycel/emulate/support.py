"""Whether this machine can emulate a cluster, what is missing if not, and how a plain user gets there.

Emulation needs network namespaces, veth pairs, bridges and the htb queueing discipline. Root has the right to all of
them; so has a plain user inside a user namespace of their own, where the distribution allows making one.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mycel.emulate.namespaces import CLONE_NEWUSER, NamespaceThread
from mycel.errors import EmulationError, UsageError
from mycel.extras import needs

__all__ = ["acquire_privileges", "can_make_user_namespace", "check_support"]

_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21

#: Runs alone in a fresh interpreter, since a process of several threads may not change its user namespace: becomes
#: root of a new user namespace (our own user, mapped to 0) and carries on as the given command.
_ENTER = f"""
import ctypes, os, sys
user, group = os.getuid(), os.getgid()
library = ctypes.CDLL(None, use_errno=True)
if library.unshare({CLONE_NEWUSER}) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {{user}} 1"), ("gid_map", f"0 {{group}} 1")):
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
os.execv(sys.argv[1], sys.argv[1:])
"""


def check_support() -> None:
    """Build the smallest piece of a cluster and throw it away.

    Raises:
        EmulationError: something is missing; the message says what, and what can be done instead.

    Examples:
        Take loopback where links cannot be shaped::

            try:
                check_support()
            except EmulationError as missing:
                print(missing)
                launch(4, command)  # four ranks on 127.0.0.1
    """
    if sys.platform != "linux":
        raise EmulationError(f"emulation needs Linux network namespaces and this is {sys.platform}; {_INSTEAD}")
    _import_pyroute2()
    if not _has_privileges():
        if can_make_user_namespace():
            way = "run the same command under 'unshare -Ur' or with sudo"
        else:
            way = "and this machine lets plain users make no user namespaces: use sudo"
        raise EmulationError(
            f"emulation needs the capabilities NET_ADMIN and SYS_ADMIN (user {os.geteuid()} has not got both); "
            f"{way}; {_INSTEAD}"
        )
    _try_parts()


def can_make_user_namespace() -> bool:
    """Whether a plain user may become root of a user namespace here (what ``unshare -Ur`` does)."""
    if sys.platform != "linux":
        return False
    attempt = subprocess.run(
        [*_enter_command(), sys.executable, "-I", "-S", "-c", ""], capture_output=True, timeout=60, check=False
    )
    return attempt.returncode == 0


def acquire_privileges() -> None:
    """For commands: start this very command line again inside a user namespace, if that is what is missing.

    The process keeps its number, so signals and exit codes need no forwarding. Returns where the privileges are
    there already; does not return where they were acquired.

    Raises:
        EmulationError: as for ``check_support``.

    Examples:
        At the top of a program, before it has done anything::

            acquire_privileges()  # the program begins again, with what emulation needs, or goes on
            with EmulatedCluster(fabric) as cluster:
                ...
    """
    if sys.platform == "linux" and not _has_privileges() and can_make_user_namespace():
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [*_enter_command(), sys.executable, *sys.orig_argv[1:]])
    check_support()


_INSTEAD = "without emulation, ranks can still run on loopback (torchrun --nproc-per-node=N), with no fabric to show"


def _enter_command() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _ENTER]


def _has_privileges() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return bool(effective >> _CAP_NET_ADMIN & 1) and bool(effective >> _CAP_SYS_ADMIN & 1)
    return False


def _import_pyroute2() -> Any:
    try:
        needs("emulation", "pyroute2")
    except UsageError as error:
        raise EmulationError(str(error)) from None
    import pyroute2

    return pyroute2


@functools.cache
def _try_parts() -> None:
    """Cached: what the kernel has does not change while we run. (A failure is raised anew each time.)"""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise EmulationError(f"emulation needs process descriptors (Linux 5.3): {error.strerror}") from None
    with NamespaceThread() as thread:
        namespace = thread.create()
        thread.run(namespace, _try_interfaces)


def _try_interfaces() -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    with _import_pyroute2().IPRoute() as netlink:

        def attempt(what: str, module: str, work: Callable[[], object]) -> None:
            try:
                work()
            except (NetlinkError, OSError) as error:
                raise EmulationError(
                    f"this kernel makes no {what} ({error}); load the module (modprobe {module}) or use a kernel "
                    f"that has it; {_INSTEAD}"
                ) from None

        attempt("veth pairs", "veth", lambda: netlink.link("add", ifname="a", kind="veth", peer={"ifname": "b"}))
        attempt("bridges", "bridge", lambda: netlink.link("add", ifname="c", kind="bridge"))
        index = netlink.link_lookup(ifname="a")[0]
        attempt("htb queueing discipline", "sch_htb", lambda: netlink.tc("add", "htb", index, 0x10000, default=1))
