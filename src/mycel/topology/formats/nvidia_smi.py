"""What ``nvidia-smi topo -m`` prints: how pairs of GPUs, and GPUs and network interfaces, are joined.

It says what kind of way there is and how many NVLinks, not how fast they are and not which GPUs they join; where the
text around the matrix names the GPUs (``nvidia-smi -L``, ``collect_env``), they are those, and else the NVLinks hint
at them. PCIe is drawn as a tree: PCIe switches, NUMA nodes, and between those the sockets' links.

References:
    NVIDIA System Management Interface, legend of ``topo -m``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mycel.errors import TopologyError
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.formats.machine import Groups, Machine
from mycel.topology.given import NOTHING, Given
from mycel.topology.hardware import Gpu, gpu_by_links, gpu_called, gpus_in

__all__ = ["NVIDIA_SMI", "parse_nvidia_smi", "plain_lines"]

_MOST_DEVICES = 256
#: NVLinks of a GPU, where each of three or more GPUs shows as many to every other: they lead to a switch.
_ALL_LINKS = (8, 12, 18, 36)
#: NVLinks of the GPUs before generation 6 that have most of them.
_MOST_NVLINKS = 18

#: Colours, also where the escape character was lost on the way, or written out.
_COLOURS = re.compile(r"(?:\x1b|\^\[|\\u001b|\\x1b|\\033|\\e|\u241b|\u2190|\ufffd)?\[(?:\d{1,3}(?:;\d{1,3})*)?m")
_NVLINKS = re.compile(r"NV[1-9]\d?")
_NEAR = ("PIX", "PXB", "PSB")
_SAME_NODE = ("PHB", "NODE")
_FAR = ("SYS", "SOC")
_AFTER_DEVICES = ("CPU", "NUMA", "GPU", "Affinity")
_DEVICE = re.compile(r"[A-Za-z][\w.:-]{1,63}")


@dataclass(slots=True, kw_only=True)
class _Matrix:
    """The matrix as read: cells of each row, and what stands after them."""

    devices: list[str]
    rows: dict[str, list[str]] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    coherent: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        return [device for device in self.devices if re.fullmatch(r"GPU\d+", device)]

    def cell(self, a: str, b: str) -> str:
        return self.rows[a][self.devices.index(b)]


def plain_lines(text: str) -> list[str]:
    """Lines of something that was printed in a terminal and pasted: without colours, marks of quotations, frames."""
    lines = (_COLOURS.sub("", line) for line in text.splitlines())
    return [re.sub(r"^\s*(?:[>#]\s?)+", "", line).replace("|", " ").rstrip() for line in lines]


def parse_nvidia_smi(text: str, *, source: str, given: Given = NOTHING) -> Description:
    """The machine that the matrix of ``nvidia-smi topo -m`` describes.

    Args:
        text: contents of the file.
        source: its name, for messages.
        given: what a person says beside it.

    Raises:
        TopologyError: no such matrix, or a cell that means nothing; with the line.
    """
    lines = plain_lines(text)
    matrix = _read(lines, source)
    name = re.sub(r"\.\w{1,5}$", "", source.rpartition("/")[2])
    machine = Machine(name, source, given)
    _add_gpus(machine, matrix, lines)
    _add_pcie(machine, matrix)
    return machine.finish()


# -- the matrix -------------------------------------------------------------------------------------------------


def _read(lines: list[str], source: str) -> _Matrix:
    at = next((n for n, line in enumerate(lines) if re.match(r"\s*(?:\d{1,2}m)?GPU\d+(\s|$)", line)), None)
    if at is None:
        raise TopologyError(f"{source}:1: no row of GPUs")
    header = re.sub(r"^\s*\d{1,2}m", "", lines[at])
    devices: list[str] = []
    for token in header.split():
        if token in _AFTER_DEVICES or not _DEVICE.fullmatch(token):
            break
        devices.append(token)
    if len(devices) > _MOST_DEVICES:
        raise TopologyError(f"{source}:{at + 1}: {len(devices)} devices; at most {_MOST_DEVICES} make a machine")
    if len(set(devices)) != len(devices):
        raise TopologyError(f"{source}:{at + 1}: a device has two columns")
    matrix = _Matrix(devices=devices)
    for number, line in enumerate(lines[at + 1 :], start=at + 2):
        _read_row(matrix, header, line, f"{source}:{number}")
    missing = [gpu for gpu in matrix.gpus if gpu not in matrix.rows]
    if missing:
        raise TopologyError(f"{source}:{at + 1}: {missing[0]} has a column and no row")
    return matrix


def _read_row(matrix: _Matrix, header: str, line: str, where: str) -> None:
    label, *cells = line.split() or [""]
    devices = matrix.devices
    if named := re.fullmatch(r"\s*(NIC\d{1,4}):\s+(\S{1,64})", line):
        matrix.names[named[1]] = named[2]
        return
    if label not in devices:
        if re.fullmatch(r"GPU\d+", label):
            raise TopologyError(f"{where}: {label} has a row and no column")
        return
    if label in matrix.rows:
        raise TopologyError(f"{where}: a second row of {label}; one file describes one machine")
    if len(cells) < len(devices):
        raise TopologyError(f"{where}: {label} has {len(cells)} cells; expected {len(devices)}")
    for device, cell in zip(devices, cells, strict=False):
        good = _NVLINKS.fullmatch(cell) or cell in (*_NEAR, *_SAME_NODE, *_FAR)
        if (cell == "X") != (device == label) or not (good or cell == "X"):
            raise TopologyError(f"{where}: {label} to {device}: {cell!r}; expected NV#, PIX, PXB, PHB, NODE, SYS")
    matrix.rows[label] = cells[: len(devices)]
    after = cells[len(devices) :]
    if "\t" in line:  # columns keep their places where one is empty
        after = [field.strip() for field in line.split("\t")[len(devices) + 1 :]]
    own_memory = "GPU NUMA ID" in header
    node = after[1] if len(after) > 1 else ""
    if own_memory and "\t" not in line and len(after) == 2:  # a column is empty, and it is not the last
        node = after[0]
    if re.fullmatch(r"\d[\d,-]{0,30}", node):
        matrix.nodes[label] = f"node {node}"
    elif after and re.fullmatch(r"\d[\d,-]*", after[0]):
        matrix.nodes[label] = f"processors {after[0]}"
    if own_memory and len(after) > 2 and re.fullmatch(r"\d{1,4}", after[-1]):
        matrix.coherent.add(label)


# -- the machine ------------------------------------------------------------------------------------------------


def _add_gpus(machine: Machine, matrix: _Matrix, lines: list[str]) -> None:
    named = gpus_in("\n".join(line for line in lines if re.search(r"\bGPU\b|NVIDIA|Tesla", line)))
    by_index = {
        f"GPU{match[1]}": model
        for line in lines
        if (match := re.match(r"\s*GPU (\d{1,4}):", line)) and (model := gpu_called(line))
    }
    linked = any(_NVLINKS.fullmatch(cell) for row in matrix.rows.values() for cell in row)
    for gpu in matrix.gpus:
        model = by_index.get(gpu) or (named[0] if len(named) == 1 else None)
        # A name of a GPU without NVLinks, beside a matrix with some, is of something else.
        machine.gpu(gpu, model if model and (model.num_links or not linked or gpu in by_index) else None)
    groups = Groups()
    for a in matrix.gpus:
        for b in matrix.gpus:
            if _NVLINKS.fullmatch(matrix.cell(a, b)):
                groups.join(a, b)
    joined: dict[str, list[str]] = {}
    for gpu in matrix.gpus:
        joined.setdefault(groups.find(gpu), []).append(gpu)
    for members in joined.values():
        if len(members) > 1:
            _link(machine, matrix, members)


def _link(machine: Machine, matrix: _Matrix, members: list[str]) -> None:
    """NVLinks of GPUs that they join, straight or through a switch."""
    counts = {(a, b): int(cell[2:]) for a in members for b in members if (cell := matrix.cell(a, b)).startswith("NV")}
    total = {a: sum(count for ends, count in counts.items() if ends[0] == a) for a in members}
    most = {a: max((count for ends, count in counts.items() if ends[0] == a), default=0) for a in members}
    for gpu in members:
        model = gpu_by_links(max(total.values()), max(most.values()), len(members))
        coherent = gpu in matrix.coherent and most[gpu] == 18
        machine.guess(gpu, gpu_called("GB200") if coherent else model, "its NVLinks")
    known = machine.model(members[0])
    if len(members) > 2 and _through_switch(max(total.values()), set(counts.values()), known):
        for gpu in members:
            if most[gpu]:
                machine.switched(gpu, f"of {members[0]}", most[gpu])
        return
    for (a, b), count in counts.items():
        machine.link(a, b, count)


def _through_switch(total: int, counts: set[int], known: Gpu | None) -> bool:
    """Whether one GPU's row shows more NVLinks than it has: then each cell counts the same ones again."""
    if known and known.num_links:
        return total > known.num_links
    return total > _MOST_NVLINKS or (len(counts) == 1 and min(counts) in _ALL_LINKS)


def _add_pcie(machine: Machine, matrix: _Matrix) -> None:
    """PCIe switches under NUMA nodes, those joined in pairs; interfaces leave where they are plugged in."""
    near, node = _pcie_groups(matrix)
    numa: dict[str, str] = {}
    switches: dict[str, str] = {}
    devices, describe = matrix.devices, machine.description
    rate = max(machine.pcie_of(gpu) for gpu in matrix.gpus)
    for device in devices:
        if node.find(device) not in numa:
            numa[node.find(device)] = describe.switch(f"numa{len(numa)}")
    num_nics = 0
    for device in devices:
        group = near.find(device)
        if group not in switches and sum(near.find(other) == group for other in devices) > 1:
            switches[group] = describe.switch(f"pcie{len(switches)}")
            machine.pcie(switches[group], numa[node.find(device)], rate)
        above = switches.get(group, numa[node.find(device)])
        if device in matrix.gpus:
            machine.pcie(device, above, machine.pcie_of(device))
        else:
            name = matrix.names.get(device, device)
            num_nics += name not in machine.given.nics
            describe.exit(name, [above], machine.nic_of(name, rate))
    machine.join_numa(numa.values())
    if num_nics and not machine.given.nic:
        machine.notes.append(f"{num_nics} network interfaces are taken to be as fast as their PCIe")


def _pcie_groups(matrix: _Matrix) -> tuple[Groups, Groups]:
    """Devices behind one PCIe switch, and those of one NUMA node."""
    near, node = Groups(), Groups()
    for a, cells in matrix.rows.items():
        for b, cell in zip(matrix.devices, cells, strict=True):
            if cell in _NEAR:
                near.join(a, b)
            if cell in _NEAR or cell in _SAME_NODE:
                node.join(a, b)
    first: dict[str, str] = {}
    for device, name in matrix.nodes.items():
        node.join(first.setdefault(name, device), device)
    return near, node


NVIDIA_SMI = FileFormat(
    name="nvidia-smi topo -m",
    suffixes=(".txt",),
    signature=r"^[ \t>|#]*GPU\d+\s.*\bX(\s|$)",
    parse=parse_nvidia_smi,
    becomes=(
        "NVLinks by their number, an NVSwitch for each set of GPUs that show all their links to every other, PCIe as "
        "a tree"
    ),
    written_by="`nvidia-smi topo -m`",
    machine=parse_nvidia_smi,
)
