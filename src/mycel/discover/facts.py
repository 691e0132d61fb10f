"""What one machine says of itself: the tools of its GPUs, and the kernel's files about network interfaces.

Nothing is measured, and nothing here fails a job: every command has a deadline, and what cannot be read is a sentence
among the notes.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mycel.discover.printed import GPU_QUERY, GpuLine, ib_rate, parse_gpu_query, parse_ibstat, parse_product_names
from mycel.errors import CommunicationError

__all__ = ["Interface", "Node", "Runner", "machine_id", "read_node", "run_tool"]

#: Seconds that one command may take: a driver that is loaded for it takes some.
_TOOL_S = 30.0
#: Characters of output that are looked at.
_LONGEST = 1 << 20

#: What a command printed, or a sentence that says why there is nothing.
Runner = Callable[[Sequence[str]], tuple[str | None, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: of the system.
        gbits: Gbit/s of its port, ``None`` where the system does not know.
        rdma: whether it is an RDMA device rather than an Ethernet interface alone.
        numa: NUMA node that it is plugged into, -1 where the system does not say.
    """

    name: str
    gbits: float | None
    rdma: bool
    numa: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine.

    Attributes:
        host: its name.
        machine: what tells it from other machines and network namespaces of that name.
        matrix: what the GPUs' tool prints of how they are joined; empty without GPUs.
        gpus: its GPUs, by index.
        interfaces: those that are up.
        silent: names of RDMA devices whose ports are down.
        notes: what could not be read.
    """

    host: str
    machine: str
    matrix: str = ""
    gpus: tuple[GpuLine, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    silent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A record that ``from_json`` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Node:
        """What another rank sent.

        Raises:
            CommunicationError: the record is not one of ``to_json``.
        """
        try:
            gpus = [
                GpuLine(
                    index=int(gpu["index"]),
                    name=str(gpu["name"]),
                    pcie=None if gpu["pcie"] is None else (int(gpu["pcie"][0]), int(gpu["pcie"][1])),
                )
                for gpu in record["gpus"]
            ]
            return cls(
                host=str(record["host"]),
                machine=str(record["machine"]),
                matrix=str(record["matrix"]),
                gpus=tuple(gpus),
                interfaces=tuple(Interface(**interface) for interface in record["interfaces"]),
                silent=tuple(map(str, record["silent"])),
                notes=tuple(map(str, record["notes"])),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CommunicationError(
                f"discover: another rank sent no description of its machine: {error!r}"
            ) from None


def run_tool(command: Sequence[str]) -> tuple[str | None, str]:
    """Run a command; its output, or why there is none. Never waits longer than a deadline, never raises."""
    name = command[0]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            timeout=_TOOL_S,
            check=False,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return None, f"{name} is not installed"
    except subprocess.TimeoutExpired:
        return None, f"{name} did not answer within {_TOOL_S:g} s"
    except OSError as error:
        return None, f"{name} cannot be run: {error.strerror or error}"
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        return None, f"{name} failed with exit code {ended.returncode}" + (f": {said[0][:200]}" if said else "")
    return ended.stdout[:_LONGEST], ""


def read_node(*, run: Runner = run_tool, system: Path = Path("/sys")) -> Node:
    """Ask this machine.

    Args:
        run: runs a command.
        system: where the kernel's files are.

    Examples:
        >>> read_node().host == __import__("socket").gethostname()
        True
    """
    notes: list[str] = []
    matrix, gpus = _nvidia(run, notes)
    if not matrix:
        matrix, gpus = _amd(run, notes)
    up, silent = _rdma(system, run, notes)
    return Node(
        host=socket.gethostname(),
        machine=machine_id(),
        matrix=matrix,
        gpus=tuple(gpus),
        interfaces=(*up, *_ethernet(system)),
        silent=tuple(silent),
        notes=tuple(notes),
    )


def machine_id() -> str:
    """This boot of this machine and this network namespace: ranks in different ones share no network.

    Examples:
        >>> machine_id() == machine_id() != ""
        True
    """
    parts = [_text(Path("/proc/sys/kernel/random/boot_id"))]
    try:
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    except OSError:  # no such file outside of Linux: then host names have to do
        parts.append("")
    return " ".join(parts)


def _matrix(run: Runner, *command: str) -> tuple[str, str]:
    """What a tool prints of how GPUs are joined; empty, with the reason, where it shows none."""
    printed, why = run(command)
    if printed is not None and not re.search(r"\bGPU\d", printed):
        said = " ".join(printed.split())[:200]
        return "", f"{command[0]} shows none" + (f": {said}" if said else "")
    return printed or "", why


def _nvidia(run: Runner, notes: list[str]) -> tuple[str, list[GpuLine]]:
    matrix, why = _matrix(run, "nvidia-smi", "topo", "-m")
    if not matrix:
        notes.append(f"no NVIDIA GPUs were read: {why}")
        return "", []
    listed, why = run(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"])
    if listed is None:
        notes.append(f"the GPUs' names were not read: {why}")
    return matrix, parse_gpu_query(listed or "")


def _amd(run: Runner, notes: list[str]) -> tuple[str, list[GpuLine]]:
    matrix, why = _matrix(run, "rocm-smi", "--showtopo")
    if not matrix:
        notes.append(f"no AMD GPUs were read: {why}")
        return "", []
    listed, why = run(["rocm-smi", "--showproductname"])
    if listed is None:
        notes.append(f"the GPUs' names were not read: {why}")
    return matrix, parse_product_names(listed or "")


def _text(file: Path) -> str:
    """Contents of one of the kernel's files, empty where it has none to give."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> int:
    return int(text) if text.removeprefix("-").isdecimal() else -1


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _rdma(system: Path, run: Runner, notes: list[str]) -> tuple[list[Interface], list[str]]:
    """RDMA devices with an active port; by ``ibstat`` where the kernel's files do not say how fast they are."""
    up: list[Interface] = []
    silent: list[str] = []
    asked: dict[str, float] | None = None
    for device in _folders(system / "class" / "infiniband"):
        ports = _folders(device / "ports")
        active = [port for port in ports if _text(port / "state").partition(":")[0] == "4"]
        if ports and not active:
            silent.append(device.name)
            continue
        rate = max((ib_rate(_text(port / "rate")) or 0.0 for port in active), default=0.0)
        if not rate and asked is None:
            printed, why = run(["ibstat"])
            asked = parse_ibstat(printed or "")
            notes += [f"how fast RDMA devices are was not read: {why}"] if printed is None else []
        numa = _number(_text(device / "device" / "numa_node"))
        gbits = rate or (asked or {}).get(device.name)
        up.append(Interface(name=device.name, gbits=gbits, rdma=True, numa=numa))
    return up, silent


def _ethernet(system: Path) -> list[Interface]:
    """Network interfaces of real or virtual hardware that are up."""
    found = []
    for interface in _folders(system / "class" / "net"):
        if not (interface / "device").exists() or _text(interface / "operstate") not in ("up", "unknown"):
            continue
        mbits = _number(_text(interface / "speed"))  # -1, or nothing, where the driver does not know
        numa = _number(_text(interface / "device" / "numa_node"))
        gbits = mbits / 1000 if mbits > 0 else None
        found.append(Interface(name=interface.name, gbits=gbits, rdma=False, numa=numa))
    return found
