"""What ``nvidia-smi topo -m`` and ``rocm-smi --showtopo`` print: how pairs of GPUs are joined.

Both say what kind of way there is, not how fast it is; the bandwidths are assumed, and the notes say which. PCIe is
drawn as a tree: PCIe switches, NUMA nodes, and between those the sockets' links.

References:
    NVIDIA System Management Interface, legend of ``topo -m``. ROCm SMI library, ``rsmi_topo_get_link_weight``: the
    weight counts 15 a hop over xGMI; ``hops`` says 1 even of GPUs that xGMI joins only through others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mycel.errors import TopologyError
from mycel.topology.formats.description import Description, gigabytes

__all__ = ["parse_nvidia_smi", "parse_rocm_smi"]

_NVLINK_GBPS = 20
_XGMI_GBPS = 36
_PCIE_GBPS = 12
_SOCKETS_GBPS = 10
#: NVLinks of the GPUs that have most of them.
_MOST_NVLINKS = 18
_MOST_DEVICES = 256

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(?:GPU|NIC)\d{1,4}|mlx\d_\w{1,40}|[a-z][\w.]{0,40}_\d{1,4}")
_NEAR = ("PIX", "PXB", "PSB")
_SAME_NODE = ("PHB", "NODE")
_FAR = ("SYS", "SOC")


class _Groups:
    """Sets that grow together: which of ``count`` things belong to one."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def find(self, item: int) -> int:
        while self._above[item] != item:
            self._above[item] = self._above[self._above[item]]
            item = self._above[item]
        return item

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.find(a), self.find(b)))
        self._above[b] = a


def _stem(source: str) -> str:
    return re.sub(r"\.\w{1,5}$", "", source.rpartition("/")[2])


# -- nvidia-smi -------------------------------------------------------------------------------------------------


def parse_nvidia_smi(text: str, *, source: str) -> Description:
    """The machine that the matrix of ``nvidia-smi topo -m`` describes.

    Raises:
        TopologyError: no such matrix, or a cell that means nothing; with the line.
    """
    lines = [_COLOURS.sub("", line).rstrip() for line in text.splitlines()]
    at = next((n for n, line in enumerate(lines) if re.match(r"\s*GPU\d+(\s|$)", line)), None)
    if at is None:
        raise TopologyError(f"{source}:1: no row of GPUs")
    devices: list[str] = []
    for token in lines[at].split():
        if not _DEVICE.fullmatch(token):
            break
        devices.append(token)
    if len(devices) > _MOST_DEVICES:
        raise TopologyError(f"{source}:{at + 1}: {len(devices)} devices; at most {_MOST_DEVICES} make a machine")
    if len(set(devices)) != len(devices):
        raise TopologyError(f"{source}:{at + 1}: a device has two columns")
    rows: dict[str, list[str]] = {}
    nodes: dict[str, str] = {}
    for number, line in enumerate(lines[at + 1 :], start=at + 2):
        label, *cells = line.split() or [""]
        if label not in devices or label in rows:
            if label in rows:
                raise TopologyError(f"{source}:{number}: a second row of {label}")
            if re.fullmatch(r"GPU\d+", label):
                raise TopologyError(f"{source}:{number}: {label} has a row and no column")
            continue
        if len(cells) < len(devices):
            raise TopologyError(f"{source}:{number}: {label} has {len(cells)} cells; expected {len(devices)}")
        for device, cell in zip(devices, cells, strict=False):
            good = re.fullmatch(r"NV[1-9]\d?", cell) or cell in (*_NEAR, *_SAME_NODE, *_FAR)
            if (cell == "X") != (device == label) or not (good or cell == "X"):
                known = "NV#, PIX, PXB, PHB, NODE, SYS"
                raise TopologyError(f"{source}:{number}: {label} to {device}: {cell!r}; expected {known}")
        rows[label] = cells[: len(devices)]
        after = cells[len(devices) :]
        if len(after) > 1 and re.fullmatch(r"\d{1,4}", after[1]):
            nodes[label] = after[1]
    gpus = [device for device in devices if device.startswith("GPU")]
    missing = [gpu for gpu in gpus if gpu not in rows]
    if missing:
        raise TopologyError(f"{source}:{at + 1}: {missing[0]} has a column and no row")
    return _nvidia_machine(source, devices, gpus, rows, nodes)


def _nvidia_machine(
    source: str, devices: list[str], gpus: list[str], rows: dict[str, list[str]], nodes: dict[str, str]
) -> Description:
    machine = Description(_stem(source), source)
    for gpu in gpus:
        machine.rank(gpu)
    index = {device: number for number, device in enumerate(devices)}
    links = {(a, b): int(rows[a][index[b]][2:]) for a in gpus for b in gpus if rows[a][index[b]].startswith("NV")}
    if links:
        machine.notes.append(f"an NVLink is taken at {_NVLINK_GBPS} GB/s a direction")
    total, most = dict.fromkeys(gpus, 0), dict.fromkeys(gpus, 0)
    for (a, _), count in links.items():
        total[a] += count
        most[a] = max(most[a], count)
    if max(total.values(), default=0) > _MOST_NVLINKS:
        machine.notes.append(f"more NVLinks than a GPU's {_MOST_NVLINKS}: they lead to an NVSwitch")
        machine.switch("nvswitch")
        for a in gpus:
            if most[a]:
                machine.cable(a, "nvswitch", gigabytes(most[a] * _NVLINK_GBPS))
    else:
        for (a, b), count in links.items():
            machine.cable(a, b, gigabytes(count * _NVLINK_GBPS), one_way=True)
    near, node = _Groups(len(devices)), _Groups(len(devices))
    for a, cells in rows.items():
        for column, cell in enumerate(cells):
            if cell in _NEAR:
                near.join(index[a], column)
            if cell in _NEAR or cell in _SAME_NODE:
                node.join(index[a], column)
    first: dict[str, int] = {}
    for device, name in nodes.items():
        node.join(index[device], first.setdefault(name, index[device]))
    _pcie_tree(machine, devices, near, node)
    return machine


def _pcie_tree(machine: Description, devices: list[str], near: _Groups, node: _Groups) -> None:
    """PCIe switches under NUMA nodes, those joined in pairs; interfaces leave where they are plugged in."""
    numa: dict[int, str] = {}
    switches: dict[int, str] = {}
    for number in range(len(devices)):
        if node.find(number) not in numa:
            numa[node.find(number)] = machine.switch(f"numa{len(numa)}")
    for number, device in enumerate(devices):
        group = near.find(number)
        if group not in switches and sum(near.find(other) == group for other in range(len(devices))) > 1:
            switches[group] = machine.switch(f"pcie{len(switches)}")
            machine.cable(switches[group], numa[node.find(number)], gigabytes(_PCIE_GBPS), fallback=True)
        above = switches.get(group, numa[node.find(number)])
        if device.startswith("GPU"):
            machine.cable(device, above, gigabytes(_PCIE_GBPS), fallback=True)
        else:
            machine.exit(device.lower(), [above], gigabytes(_PCIE_GBPS))
    _join_nodes(machine, numa.values())
    machine.notes.append(f"PCIe is taken at {_PCIE_GBPS} GB/s a direction, interfaces likewise")


def _join_nodes(machine: Description, nodes: Iterable[str]) -> None:
    labels = list(nodes)
    for number, a in enumerate(labels):
        for b in labels[number + 1 :]:
            machine.cable(a, b, gigabytes(_SOCKETS_GBPS), fallback=True)
    if len(labels) > 1:
        machine.notes.append(f"NUMA nodes are taken to be joined in pairs at {_SOCKETS_GBPS} GB/s")


# -- rocm-smi ---------------------------------------------------------------------------------------------------


def parse_rocm_smi(text: str, *, source: str) -> Description:
    """The machine that ``rocm-smi --showtopo`` describes, by link type and weight.

    Raises:
        TopologyError: a matrix is missing or cannot be read; with the line.
    """
    lines = text.splitlines()
    gpus, weights = _rocm_matrix(lines, "Weight between two GPUs", source)
    others, types = _rocm_matrix(lines, "Link Type between two GPUs", source)
    if others != gpus:
        raise TopologyError(f"{source}: the matrices of weights and of link types have different GPUs")
    machine = Description(_stem(source), source)
    for gpu in gpus:
        machine.rank(gpu)
    direct: dict[tuple[str, str], int] = {}
    for pair, (kind, line) in types.items():
        weight, where = weights[pair]
        if pair[0] == pair[1]:
            continue
        if kind not in ("XGMI", "PCIE"):
            raise TopologyError(f"{source}:{line}: {pair[0]} to {pair[1]}: {kind!r}; expected XGMI or PCIE")
        if not re.fullmatch(r"[1-9]\d{0,5}", weight):
            raise TopologyError(f"{source}:{where}: {pair[0]} to {pair[1]}: weight {weight!r} is no positive number")
        if kind == "XGMI":
            direct[pair] = int(weight)
    far = 0
    for (a, b), distance in direct.items():
        if distance < 2 * min(direct.values()):
            machine.cable(a, b, gigabytes(_XGMI_GBPS), one_way=True)
        else:
            far += 1
    if direct:
        machine.notes.append(f"an xGMI connection is taken at {_XGMI_GBPS} GB/s a direction, one link a pair")
    if far:
        machine.notes.append(f"{far} pairs are joined by xGMI through other GPUs only, as their weights say")
    numa: dict[str, str] = {}
    for number, text_line in enumerate(lines, start=1):
        if match := re.match(r"\s*GPU\[(\d{1,4})\]\s*:.*Numa Node:\s*(-?\d{1,4})\s*$", text_line):
            gpu, node = f"GPU{match.group(1)}", match.group(2)
            if gpu not in gpus:
                raise TopologyError(f"{source}:{number}: {gpu} is in no matrix")
            numa.setdefault(gpu, f"numa{node}")
    nodes = list(dict.fromkeys(numa.get(gpu, "numa") for gpu in gpus))
    for node in nodes:
        machine.switch(node)
    for gpu in gpus:
        machine.cable(gpu, numa.get(gpu, "numa"), gigabytes(_PCIE_GBPS), fallback=True)
    machine.notes.append(f"PCIe is taken at {_PCIE_GBPS} GB/s a direction")
    _join_nodes(machine, nodes)
    return machine


def _rocm_matrix(
    lines: list[str], title: str, source: str
) -> tuple[list[str], dict[tuple[str, str], tuple[str, int]]]:
    """The GPUs of a matrix, and its cells with their lines."""
    start = next((n for n, line in enumerate(lines) if re.search(rf"={{2,}}\s*{title}\s*=", line)), None)
    if start is None:
        raise TopologyError(f"{source}: the matrix '{title}' is missing")
    header = start + 1
    while header < len(lines) and not lines[header].strip():
        header += 1
    gpus = lines[header].split() if header < len(lines) else []
    if not gpus or len(gpus) > _MOST_DEVICES or not all(re.fullmatch(r"GPU\d{1,4}", gpu) for gpu in gpus):
        raise TopologyError(f"{source}:{min(header + 1, len(lines))}: expected a row GPU0 GPU1 ... under '{title}'")
    if len(set(gpus)) != len(gpus):
        raise TopologyError(f"{source}:{header + 1}: a GPU has two columns")
    cells: dict[tuple[str, str], tuple[str, int]] = {}
    for number, gpu in enumerate(gpus, start=header + 1):
        row = lines[number].split() if number < len(lines) else []
        if row[:1] != [gpu] or len(row) != len(gpus) + 1:
            raise TopologyError(f"{source}:{number + 1}: expected the row of {gpu} with {len(gpus)} cells")
        for other, cell in zip(gpus, row[1:], strict=True):
            cells[gpu, other] = (cell, number + 1)
    return gpus, cells
