"""At which address others reach this rank: one rule, for process groups and probes.

1. What a wiring file or ``MYCEL_ADDRESS`` says.
2. The address of the interface that ``MYCEL_INTERFACE`` names.
3. The local address of the route to the store's machine, whatever form its name has.
4. Where that is a loopback address though ranks are on several machines (a name that the own machine maps to
   127.0.1.1, a store in a file): an address in a network that another rank is in too, or else the local address of
   the route to one.

The first three need nobody else and are here; the fourth needs what the others have published, and its two halves,
``interface_addresses`` before and ``address_towards`` after, are here as well.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from mycel.errors import UsageError
from mycel.settings import Settings
from mycel.topology.wiring import read_wiring

__all__ = [
    "InterfaceAddress",
    "address_towards",
    "family_of",
    "interface_addresses",
    "is_loopback",
    "own_ip",
    "resolve",
    "route_to",
]

#: A port to ask for the route to; nothing is sent there.
_DISCARD = 9
_UP = 0x1  # IFF_UP, Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceAddress:
    """An address of a network interface of this machine.

    Attributes:
        name: of the interface.
        ip: the address.
        prefix_bits: length of its network's prefix.
    """

    name: str
    ip: str
    prefix_bits: int

    @property
    def text(self) -> str:
        """The address with its network, as ``10.0.0.1/24``."""
        return f"{self.ip}/{self.prefix_bits}"


def family_of(ip: str) -> socket.AddressFamily:
    """``AF_INET6`` or ``AF_INET``."""
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def is_loopback(ip: str) -> bool:
    """Whether an address leads nowhere but to the machine that uses it.

    Examples:
        >>> [is_loopback(ip) for ip in ("127.0.1.1", "::1", "10.0.0.1", "fd00::1")]
        [True, True, False, False]
    """
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def resolve(host: str) -> tuple[str, ...]:
    """Addresses of a name, or the address that it is; those that lead elsewhere before those of loopback.

    Raises:
        OSError: nobody knows the name.
    """
    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except UnicodeError:
        raise OSError(f"{host!r} is not a name of a machine") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return tuple(sorted(addresses, key=is_loopback))


def route_to(host: str) -> str:
    """Local address of the route to a host, by name or address; no packet is sent.

    Raises:
        OSError: the name is not known, or there is no route.

    Examples:
        >>> route_to("127.0.1.1")
        '127.0.0.1'
    """
    error: OSError | None = None
    for ip in resolve(host):
        try:
            return _source_towards(ip)
        except OSError as refused:
            error = error or refused
    raise error or OSError(f"{host!r} has no address")


def _source_towards(ip: str) -> str:
    with socket.socket(family_of(ip), socket.SOCK_DGRAM) as route:
        route.connect((ip, _DISCARD))
        return str(route.getsockname()[0])


def own_ip(settings: Settings, rank: int) -> str | None:
    """The address at which others reach this rank, where a wiring, ``MYCEL_ADDRESS`` or ``MYCEL_INTERFACE`` says it.

    Args:
        settings: what the environment asks for.
        rank: of this process in the job.

    Raises:
        UsageError: the wiring has no address for the rank; the name or the interface is not known here.
        TopologyError: the wiring is malformed.
    """
    if settings.wiring is not None:
        addresses = read_wiring(settings.wiring).addresses
        place = rank if settings.ranks is None or rank >= len(settings.ranks) else settings.ranks[rank]
        if place >= len(addresses):
            raise UsageError(f"{settings.wiring}: has addresses for {len(addresses)} ranks; this is rank {place}")
        return addresses[place]
    if settings.address is not None:
        try:
            return resolve(settings.address)[0]
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"MYCEL_ADDRESS={settings.address!r}: no such address or name: {reason}") from None
    return None if settings.interfaces is None else _of_interface(settings.interfaces)


def _of_interface(names: Sequence[str]) -> str:
    """The first address of the first interface that has any, IPv4 before IPv6."""
    found = interface_addresses(loopback=True)
    for name in names:
        addresses = sorted((each.ip for each in found if each.name == name), key=lambda ip: ":" in ip)
        if addresses:
            return addresses[0]
    known = ", ".join(dict.fromkeys(f"{each.name} ({each.ip})" for each in found))
    raise UsageError(f"MYCEL_INTERFACE={','.join(names)}: no such interface with an address here; there are {known}")


def address_towards(others: Iterable[Sequence[str]]) -> str | None:
    """Own address in the first network that another rank is in too; else the local one of a route to a rank.

    Args:
        others: of each rank on another machine, the addresses at which it may be reached, with their networks
            (``10.0.0.2/24``) or without.

    Returns:
        ``None`` where no rank elsewhere has given an address to which there is a route.
    """
    wanted = [ipaddress.ip_interface(text) for candidates in others for text in candidates]
    wanted = [other for other in wanted if not other.ip.is_loopback]
    own = interface_addresses()
    for other in wanted:
        for mine in own:
            network = ipaddress.ip_interface(mine.text).network
            if other.version == network.version and other.ip in network:
                return mine.ip
    for other in wanted:
        try:
            source = _source_towards(str(other.ip))
        except OSError:
            continue
        if not is_loopback(source):
            return source
    return None


# -- what the kernel says ---------------------------------------------------------------------------------------


class _Ifaddrs(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3); what follows is not read."""


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
]
#: Where the address begins in a ``sockaddr_in`` and a ``sockaddr_in6``, and how long it is.
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def interface_addresses(*, loopback: bool = False) -> tuple[InterfaceAddress, ...]:
    """Addresses of the interfaces that are up, without those that are good for one link only (``fe80::``).

    Args:
        loopback: also those that lead nowhere else.

    Raises:
        OSError: the kernel does not say.
    """
    first = ctypes.POINTER(_Ifaddrs)()
    if _libc().getifaddrs(ctypes.byref(first)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    found: list[InterfaceAddress] = []
    try:
        entry = first
        while entry:
            given = entry.contents
            ip = _ip_at(given.address) if given.flags & _UP else None
            mask = _ip_at(given.netmask)
            if ip is not None and mask is not None and (loopback or not ip.is_loopback) and not ip.is_link_local:
                name = (given.name or b"").decode(errors="replace")
                found.append(InterfaceAddress(name=name, ip=str(ip), prefix_bits=int(mask).bit_count()))
            entry = given.next
    finally:
        _libc().freeifaddrs(first)
    return tuple(found)


def _ip_at(address: int | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in a ``sockaddr``; ``None`` where it is of another kind."""
    if not address:
        return None
    place = _PLACES.get(ctypes.c_ushort.from_address(address).value)  # type: ignore[call-overload]
    return None if place is None else ipaddress.ip_address(ctypes.string_at(address + place[0], place[1]))
