"""What a person says about a machine beside its file: ``topo.txt:gpu=B200,nic=400 Gbit/s``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from mycel.errors import MycelError, TopologyError
from mycel.names import nearest
from mycel.topology.capacities import read_rate
from mycel.topology.hardware import GPUS, Gpu, gpu_called

__all__ = ["NOTHING", "Given", "read_given", "split_given"]

_KEYS = ("gpu", "link", "pcie", "nic")
_SPEC = re.compile(rf"(.+?):((?:{'|'.join(_KEYS)})\s*=.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Facts that go before what a file says, and before what would be assumed.

    Attributes:
        gpu: which GPUs the machine has.
        link: bytes a second of one direction of one NVLink or xGMI link.
        pcie: bytes a second of one direction of each GPU's and interface's PCIe port.
        nic: bytes a second of one direction of each network interface.
        nics: the same of interfaces by name.
    """

    gpu: Gpu | None = None
    link: Fraction | None = None
    pcie: Fraction | None = None
    nic: Fraction | None = None
    nics: Mapping[str, Fraction] = field(default_factory=dict)


#: Nobody says anything.
NOTHING = Given()


def split_given(spec: str) -> tuple[str, str]:
    """A file and what is said after it; empty where nothing is.

    Examples:
        >>> split_given("topo.txt:gpu=B200,nic=50 GB/s"), split_given("star:ranks=4")
        (('topo.txt', 'gpu=B200,nic=50 GB/s'), ('star:ranks=4', ''))
    """
    match = _SPEC.fullmatch(spec)
    return (match[1], match[2]) if match else (spec, "")


def read_given(text: str, *, source: str) -> Given:
    """What ``gpu=...,link=...,pcie=...,nic=...`` says.

    Raises:
        TopologyError: an unknown key or GPU, or no bandwidth.

    Examples:
        >>> read_given("gpu=B200,nic=400 Gbit/s", source="topo.txt").gpu.name
        'B200'
    """
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS or not equals:
            raise TopologyError(f"{source}: {key!r} cannot be said{nearest(key, _KEYS)}; known: {', '.join(_KEYS)}")
        if key in found:
            raise TopologyError(f"{source}: {key} is said twice")
        found[key] = value
    rates: dict[str, Fraction] = {}
    for key in ("link", "pcie", "nic"):
        if key in found:
            try:
                rates[key] = read_rate(found[key])
            except MycelError as error:
                raise TopologyError(f"{source}: {key}: {error}") from None
    gpu = gpu_called(found["gpu"]) if "gpu" in found else None
    if "gpu" in found and gpu is None:
        names = [known.name for known in GPUS]
        hint, known = nearest(found["gpu"], names), ", ".join(names)
        raise TopologyError(f"{source}: no GPU called {found['gpu']!r} is known{hint}; known: {known}")
    return Given(gpu=gpu, link=rates.get("link"), pcie=rates.get("pcie"), nic=rates.get("nic"))
