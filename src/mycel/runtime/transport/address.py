"""What a rank says of itself: where it listens, and what tells its machine and its user from others."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mycel.errors import CommunicationError
from mycel.settings import Settings
from mycel.topology.addresses import interface_addresses, is_loopback, own_ip, route_to

__all__ = ["Address", "innermost", "machine_numbers", "names_of_hosts", "own_address", "store_host"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a rank listens, and who it is.

    Attributes:
        host: its machine (the kernel's boot id, which no other machine has, even one of the same name) and, behind a
            slash, its network namespace: ranks of one machine in different ones share no loopback interface.
        ip: address at which the others reach it.
        port: TCP port, the same on every address of the rank.
        pid: its process, for messages.
        name: what its machine is called, for people; machines may have the same.
        local: name of its unix socket for ranks of the same host; empty where it has none.
        user: its user namespace and number there: ranks of other users do not get at its unix socket.
        networks: where ``ip`` is a loopback address: those of its machine, with their networks, to choose from should
            ranks be on several machines.
        serves_store: whether the job's store lives in its process, and ends with the group.
    """

    host: str
    ip: str
    port: int
    pid: int
    name: str = ""
    local: str = ""
    user: str = ""
    networks: tuple[str, ...] = ()
    serves_store: bool = False

    def to_text(self) -> str:
        """The JSON form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Address:
        """Read the JSON form.

        Raises:
            CommunicationError: it is none, or that of another release.
        """
        try:
            data: Any = json.loads(text)
            data["networks"] = tuple(map(str, data["networks"]))
            address = cls(**data)
            ipaddress.ip_address(address.ip)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CommunicationError(
                f"what stands in the store is not an address of this release's: {text[:80]!r}"
            ) from None
        kinds = {"port": int, "pid": int, "serves_store": bool, "networks": tuple}
        if not all(isinstance(getattr(address, f.name), kinds.get(f.name, str)) for f in fields(cls)):
            raise CommunicationError(f"what stands in the store is not an address: {text[:80]!r}")
        return address


def own_address(settings: Settings, global_rank: int, store: object = None) -> Address:
    """What this rank publishes, but for the port: see ``mycel.topology.addresses`` for the rule.

    Args:
        settings: what the environment asks for.
        global_rank: of this process in the job.
        store: the group's store, which may know the machine it is on.

    Raises:
        UsageError: the environment names an address or interface that is not known.
        TopologyError: the wiring is malformed.
    """
    ip = own_ip(settings, global_rank)
    networks: tuple[str, ...] = ()
    if ip is None:
        ip = _towards(store_host(store) or settings.master_address)
        if is_loopback(ip):
            networks = tuple(each.text for each in interface_addresses())
    return Address(
        host=_host(),
        ip=ip,
        port=0,
        pid=os.getpid(),
        name=socket.gethostname(),
        user=f"{_namespace('user')}:{os.geteuid()}",
        networks=networks,
    )


def _towards(host: str | None) -> str:
    if host is None:
        return "127.0.0.1"
    try:
        return route_to(host)
    except OSError:  # the ranks may all be here, or see each other at other addresses
        return "127.0.0.1"


def store_host(store: object) -> str | None:
    """The machine a store was asked to be on, by name or address; ``None`` where it has none, as one in a file."""
    host = getattr(innermost(store), "host", None)
    return host if isinstance(host, str) and host else None


def innermost(store: object) -> object:
    """The store itself, without those that put something before its keys."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _host() -> str:
    return f"{_machine()}/{_namespace('net')}"


@functools.cache  # the kernel writes it anew each time that it is read
def _machine() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def names_of_hosts(addresses: Sequence[Address]) -> list[str]:
    """A name for the host of each rank; hosts that call themselves the same get numbers.

    Examples:
        >>> here = Address(host="1/net:[1]", ip="10.0.0.1", port=1, pid=1, name="gpu")
        >>> there = Address(host="2/net:[1]", ip="10.0.0.2", port=1, pid=1, name="gpu")
        >>> names_of_hosts([here, there, here])
        ['gpu', 'gpu.2', 'gpu']
    """
    names: dict[str, str] = {}
    for address in addresses:
        if address.host not in names:
            name, number = address.name or address.host, 1
            while name in names.values():
                number += 1
                name = f"{address.name or address.host}.{number}"
            names[address.host] = name
    return [names[address.host] for address in addresses]


def machine_numbers(hosts: Sequence[str]) -> tuple[int, ...]:
    """A number for the machine of each rank (``Address.host``); its network namespaces share its processors.

    Examples:
        >>> machine_numbers(["a/net:[1]", "b", "a/net:[2]"])
        (0, 1, 0)
    """
    names = [host.partition("/")[0] for host in hosts]
    known = list(dict.fromkeys(names))
    return tuple(known.index(name) for name in names)
