"""What ``nvidia-smi``, ``rocm-smi`` and ``ibstat`` print, and what the kernel's files say, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["GpuLine", "ib_rate", "parse_gpu_query", "parse_ibstat", "parse_product_names"]

#: What ``nvidia-smi --query-gpu`` is asked for, in the order in which ``parse_gpu_query`` reads it.
GPU_QUERY = "index,name,pcie.link.gen.max,pcie.link.width.max"

_RATE = re.compile(r"\s*(\d{1,4}(?:\.\d{1,3})?)")
_AMD_NAME = re.compile(r"\s*GPU\s?\[?(\d{1,4})\]?\s*:\s*Card (?:Series|series|Model|model)\s*:\s*(\S.*?)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLine:
    """One GPU.

    Attributes:
        index: by which the machine knows it.
        name: of the product.
        pcie: generation and lanes of its PCIe link, ``None`` where the tool does not know them.
    """

    index: int
    name: str
    pcie: tuple[int, int] | None = None


def parse_gpu_query(text: str) -> list[GpuLine]:
    """GPUs from ``nvidia-smi --query-gpu=... --format=csv,noheader``; lines of another form are left out.

    Examples:
        >>> parse_gpu_query("0, NVIDIA H100 80GB HBM3, 5, 16")
        [GpuLine(index=0, name='NVIDIA H100 80GB HBM3', pcie=(5, 16))]
    """
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0].isdecimal():
            continue
        known = fields[2].isdecimal() and fields[3].isdecimal() and 1 <= int(fields[2]) <= 7
        pcie = (int(fields[2]), int(fields[3])) if known and 1 <= int(fields[3]) <= 32 else None
        found.append(GpuLine(index=int(fields[0]), name=fields[1], pcie=pcie))
    return found


def parse_product_names(text: str) -> list[GpuLine]:
    """GPUs from ``rocm-smi --showproductname``: the first line about each that names a series or model.

    Examples:
        >>> parse_product_names("GPU[0] : Card Series: AMD Instinct MI300X")
        [GpuLine(index=0, name='AMD Instinct MI300X', pcie=None)]
    """
    found: dict[int, GpuLine] = {}
    for line in text.splitlines():
        if match := _AMD_NAME.match(line):
            found.setdefault(int(match[1]), GpuLine(index=int(match[1]), name=match[2]))
    return list(found.values())


def ib_rate(text: str) -> float | None:
    """Gbit/s of a port from the kernel's ``rate`` file; ``None`` where it has none.

    Examples:
        >>> ib_rate("400 Gb/sec (4X NDR)")
        400.0
    """
    match = _RATE.match(text)
    return float(match[1]) if match and float(match[1]) > 0 else None


def parse_ibstat(text: str) -> dict[str, float]:
    """Gbit/s of the fastest active port of every adapter that ``ibstat`` lists.

    Examples:
        >>> parse_ibstat("CA 'mlx5_0'\\n\\tPort 1:\\n\\t\\tState: Active\\n\\t\\tRate: 200\\n")
        {'mlx5_0': 200.0}
    """
    found: dict[str, float] = {}
    adapter, active = "", False
    for line in text.splitlines():
        if match := re.match(r"CA '([^']{1,64})'", line):
            adapter, active = match[1], False
        elif re.match(r"\s*Port \d+:", line):
            active = False
        elif match := re.match(r"\s*State:\s*(\w+)", line):
            active = match[1] == "Active"
        elif (match := re.match(r"\s*Rate:\s*(.*)", line)) and active and adapter:
            rate = ib_rate(match[1])
            if rate:
                found[adapter] = max(rate, found.get(adapter, 0.0))
    return found
