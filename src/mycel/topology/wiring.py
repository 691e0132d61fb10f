"""Wiring: at which network address each rank, and each physical path, is reached.

A topology says which links there are; a wiring says how a socket gets onto them. ``mycel emulate`` writes one
beside the emulated cluster. On a real cluster with one address a machine none is needed; where a rank has
several interfaces, a wiring with one address a path pins traffic to the links the schedule means. Addresses are
IPv4 or IPv6; a rank listens on its own and on those of the paths that end at it, and nowhere else.

JSON form::

    {"format": "mycel.wiring", "version": 1,
     "addresses": ["10.77.0.1", "10.77.0.2"],          one a rank, reached by ordinary routing
     "paths": {"0>2>1": "10.78.0.1"}}                  vertices of the path -> address that packets take it to
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mycel.brief import brief
from mycel.errors import TopologyError

__all__ = ["Wiring", "read_wiring", "write_wiring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Addresses of ranks and of physical paths.

    Attributes:
        addresses: of each rank, by rank number.
        paths: from the vertices of a path (first and last are ranks) to an address of its last rank.
    """

    addresses: tuple[str, ...]
    paths: Mapping[tuple[int, ...], str] = field(default_factory=dict)

    __repr__ = brief


def write_wiring(wiring: Wiring, file: Path) -> None:
    """Write the JSON form."""
    paths = {">".join(map(str, path)): address for path, address in wiring.paths.items()}
    data = {"format": "mycel.wiring", "version": 1, "addresses": list(wiring.addresses), "paths": paths}
    file.write_text(json.dumps(data, indent=1), encoding="utf-8")


def read_wiring(file: Path) -> Wiring:
    """Read the JSON form.

    Raises:
        TopologyError: the file cannot be read or is no wiring.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != "mycel.wiring" or data["version"] != 1:
            raise TopologyError(f"{file}: not a wiring of version 1")
        paths = {tuple(int(v) for v in key.split(">")): str(value) for key, value in data["paths"].items()}
        wiring = Wiring(addresses=tuple(map(str, data["addresses"])), paths=paths)
        for address in (*wiring.addresses, *paths.values()):
            ipaddress.ip_address(address)  # IPv4 or IPv6; names would be looked up by every rank for itself
        return wiring
    except OSError as error:
        raise TopologyError(f"{file}: cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"{file}: not a wiring: {error}") from None
