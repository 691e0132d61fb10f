"""What ``rocm-smi --showtopo`` prints: how pairs of AMD GPUs are joined.

It says what kind of way there is, not how fast it is. Where the text around the matrices names the GPUs
(``--showproductname``), they are those, and else the form of the mesh hints at them.

References:
    ROCm SMI library, ``rsmi_topo_get_link_weight``: the weight counts 15 a hop over xGMI; ``hops`` says 1 even
    of GPUs that xGMI joins only through others.
"""

from __future__ import annotations

import re

from mycel.errors import TopologyError
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.formats.machine import Machine
from mycel.topology.formats.nvidia_smi import plain_lines
from mycel.topology.given import NOTHING, Given
from mycel.topology.hardware import Gpu, gpu_by_arch, gpu_called, gpus_in

__all__ = ["ROCM_SMI", "parse_rocm_smi"]

_MOST_DEVICES = 256
#: GPUs from which a full mesh of xGMI means GPUs with seven links each.
_LARGE_MESH = 5

_Cells = dict[tuple[str, str], tuple[str, int]]


def parse_rocm_smi(text: str, *, source: str, given: Given = NOTHING) -> Description:
    """The machine that ``rocm-smi --showtopo`` describes, by link type and weight.

    Args:
        text: contents of the file.
        source: its name, for messages.
        given: what a person says beside it.

    Raises:
        TopologyError: a matrix is missing or cannot be read; with the line.
    """
    lines = plain_lines(text)
    gpus, types = _matrix(lines, "Link Type between two GPUs", source)
    machine = Machine(re.sub(r"\.\w{1,5}$", "", source.rpartition("/")[2]), source, given)
    if any(_title("Weight between two GPUs").search(line) for line in lines):
        others, weights = _matrix(lines, "Weight between two GPUs", source)
        if others != gpus:
            raise TopologyError(f"{source}: the matrices of weights and of link types have different GPUs")
    else:
        weights = {pair: ("1", line) for pair, (_, line) in types.items()}
        machine.notes.append("there are no weights: every pair with xGMI is taken to be joined directly")
    named = _named(lines)
    for gpu in gpus:
        machine.gpu(gpu, named)
    _link(machine, gpus, _joined(types, weights, source))
    _add_numa(machine, gpus, _numa_nodes(lines, gpus, source))
    return machine.finish()


def _named(lines: list[str]) -> Gpu | None:
    """The kind of GPU that lines about products name, if it is one."""
    about = [line for line in lines if re.search(r"GPU\s?\[?\d+\]?\s*:|Instinct|\bAMD\b", line)]
    found = gpus_in("\n".join(about))
    if len(found) == 1:
        return found[0]
    archs = {match[0] for line in about if (match := re.search(r"gfx9\w{2,3}", line))}
    return gpu_by_arch(archs.pop()) if len(archs) == 1 and not found else None


def _joined(types: _Cells, weights: _Cells, source: str) -> dict[tuple[str, str], int]:
    """Pairs that xGMI joins, with their weights."""
    found: dict[tuple[str, str], int] = {}
    for pair, (kind, line) in types.items():
        weight, where = weights[pair]
        if pair[0] == pair[1]:
            continue
        if kind not in ("XGMI", "PCIE"):
            raise TopologyError(f"{source}:{line}: {pair[0]} to {pair[1]}: {kind!r}; expected XGMI or PCIE")
        if not re.fullmatch(r"[1-9]\d{0,5}", weight):
            raise TopologyError(f"{source}:{where}: {pair[0]} to {pair[1]}: weight {weight!r} is no positive number")
        if kind == "XGMI":
            found[pair] = int(weight)
    return found


def _link(machine: Machine, gpus: list[str], joined: dict[tuple[str, str], int]) -> None:
    direct = [pair for pair, weight in joined.items() if weight < 2 * min(joined.values())]
    full = len(direct) == len(gpus) * (len(gpus) - 1)
    if direct:
        usual = gpu_called("MI300X") if full and len(gpus) >= _LARGE_MESH else gpu_called("MI210")
        for gpu in gpus:
            machine.guess(gpu, usual, "its xGMI mesh")
        machine.notes.append("an xGMI connection is taken for one link a pair, which the matrices do not say")
    for a, b in direct:
        machine.link(a, b, 1)
    if len(direct) < len(joined):
        far = len(joined) - len(direct)
        machine.notes.append(f"{far} pairs are joined by xGMI through other GPUs only, as their weights say")


def _numa_nodes(lines: list[str], gpus: list[str], source: str) -> dict[str, str]:
    numa: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if match := re.match(r"\s*GPU\s?\[?(\d{1,4})\]?\s*:.*Numa Node:\s*(-?\d{1,4})\s*$", line):
            gpu, node = f"GPU{match[1]}", match[2]
            if gpu not in gpus:
                raise TopologyError(f"{source}:{number}: {gpu} is in no matrix")
            numa.setdefault(gpu, f"numa{node}")
    return numa


def _add_numa(machine: Machine, gpus: list[str], numa: dict[str, str]) -> None:
    nodes = list(dict.fromkeys(numa.get(gpu, "numa") for gpu in gpus))
    for node in nodes:
        machine.description.switch(node)
    for gpu in gpus:
        machine.pcie(gpu, numa.get(gpu, "numa"), machine.pcie_of(gpu))
    machine.join_numa(nodes)


def _title(title: str) -> re.Pattern[str]:
    return re.compile(rf"={{2,}}\s*{title}\s*=")


def _matrix(lines: list[str], title: str, source: str) -> tuple[list[str], _Cells]:
    """The GPUs of a matrix, and its cells with their lines."""
    start = next((n for n, line in enumerate(lines) if _title(title).search(line)), None)
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
    cells: _Cells = {}
    for number, gpu in enumerate(gpus, start=header + 1):
        row = lines[number].split() if number < len(lines) else []
        if row[:1] != [gpu] or len(row) != len(gpus) + 1:
            raise TopologyError(f"{source}:{number + 1}: expected the row of {gpu} with {len(gpus)} cells")
        for other, cell in zip(gpus, row[1:], strict=True):
            cells[gpu, other] = (cell, number + 1)
    return gpus, cells


ROCM_SMI = FileFormat(
    name="rocm-smi --showtopo",
    suffixes=(".txt",),
    signature=r"(Weight|Hops|Link Type) between two GPUs",
    parse=parse_rocm_smi,
    becomes="xGMI where type and weight say that a pair is joined directly",
    written_by="`rocm-smi --showtopo`",
    machine=parse_rocm_smi,
)
