"""Loading a topology from whatever a person has at hand: a file in any known form, or the name of a builder.

A new file format is one module with a function ``(text, *, source)`` that returns a Topology, or a Description where
something has to be assumed or several machines could be joined, and one line in ``FORMATS``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mycel.errors import TopologyError
from mycel.names import nearest
from mycel.topology.builders import BUILDERS, build
from mycel.topology.formats.description import Description, Reading
from mycel.topology.formats.hwloc_xml import parse_hwloc_xml
from mycel.topology.formats.nccl_xml import parse_nccl_xml
from mycel.topology.formats.nvidia_smi import parse_nvidia_smi
from mycel.topology.formats.rocm_smi import parse_rocm_smi
from mycel.topology.formats.simulators import parse_astra_sim, parse_simai
from mycel.topology.formats.slurm import parse_slurm_conf, parse_slurm_yaml
from mycel.topology.formats.taccl import parse_taccl
from mycel.topology.given import NOTHING, Given, read_given, split_given
from mycel.topology.json_format import parse_json
from mycel.topology.model import Topology
from mycel.topology.yaml_format import parse_yaml

__all__ = ["FORMATS", "FileFormat", "TopologyParser", "load_topology", "parse_topology", "read_topology"]

_log = logging.getLogger(__name__)


class TopologyParser(Protocol):
    """What a format provides."""

    def __call__(self, text: str, *, source: str) -> Topology | Description:
        """What ``text`` describes; ``source`` names it in messages."""


class MachineParser(Protocol):
    """What a format provides that describes a machine, and can be told more about it."""

    def __call__(self, text: str, *, source: str, given: Given) -> Description:
        """What ``text`` describes; what is ``given`` goes before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One file format.

    Attributes:
        name: for messages.
        suffixes: endings of file names, lower case, with the dot.
        signature: regular expression (several lines, case-insensitive) that contents of this form match somewhere.
        parse: reads it.
        machine: reads it with what a person says about the machine; ``None`` where the format says all itself.
    """

    name: str
    suffixes: tuple[str, ...]
    signature: str
    parse: TopologyParser
    machine: MachineParser | None = None


#: In the order in which contents are tried: first among the formats with the file's ending, then among all.
FORMATS: tuple[FileFormat, ...] = (
    FileFormat(
        name="hwloc XML",
        suffixes=(".xml",),
        signature=r"<object\s+type=",
        parse=parse_hwloc_xml,
        machine=parse_hwloc_xml,
    ),
    FileFormat(
        name="NCCL/RCCL XML",
        suffixes=(".xml",),
        signature=r"\A\s*<",
        parse=parse_nccl_xml,
        machine=parse_nccl_xml,
    ),
    FileFormat(name="TACCL JSON", suffixes=(".json",), signature=r'"gpus_per_node"', parse=parse_taccl),
    FileFormat(name="JSON", suffixes=(".json",), signature=r"\A\s*[{\[]", parse=parse_json),
    FileFormat(
        name="ASTRA-sim", suffixes=(".yml", ".yaml"), signature=r"^[{ ]*npus_count\s*:", parse=parse_astra_sim
    ),
    FileFormat(
        name="Slurm topology.yaml",
        suffixes=(".yaml", ".yml"),
        signature=r"^[ \t]*-[ \t]+topology[ \t]*:",
        parse=parse_slurm_yaml,
    ),
    FileFormat(
        name="Slurm topology.conf",
        suffixes=(".conf",),
        signature=r"^[ \t]*(SwitchName|BlockName)[ \t]*=",
        parse=parse_slurm_conf,
    ),
    FileFormat(
        name="rocm-smi --showtopo",
        suffixes=(".txt",),
        signature=r"(Weight|Hops|Link Type) between two GPUs",
        parse=parse_rocm_smi,
        machine=parse_rocm_smi,
    ),
    FileFormat(
        name="nvidia-smi topo -m",
        suffixes=(".txt",),
        signature=r"^[ \t>|#]*GPU\d+\s.*\bX(\s|$)",
        parse=parse_nvidia_smi,
        machine=parse_nvidia_smi,
    ),
    FileFormat(name="SimAI", suffixes=(".txt",), signature=r"\A\s*(\d+[ \t]+){5}\S", parse=parse_simai),
    FileFormat(name="YAML", suffixes=(".yaml", ".yml"), signature="", parse=parse_yaml),
)

#: ``FILE*4``, ``FILE*4@25 GB/s``: so many such machines on one network.
_SEVERAL = re.compile(r"(.+)\*(\d{1,5})(?:@(.+))?")


def load_topology(file: str | Path) -> Topology:
    """The topology in a file, or, where there is no such file, that of a builder.

    A file's format follows from its ending and from what it contains. What had to be assumed is logged
    (``read_topology`` returns it).

    Args:
        file: a path, or a builder with its arguments such as ``star:ranks=4`` (see ``builders.build``). With ``*4``
            after it, four such machines on one network switch, through the network interfaces that the file names;
            with ``*4@25 GB/s``, through interfaces of that bandwidth. With ``:gpu=B200,nic=400 Gbit/s`` after the
            path of a file that a machine's tools wrote, what a person knows goes before what is assumed (keys:
            ``gpu``; ``link``, of one NVLink or xGMI link; ``pcie``; ``nic``).

    Returns:
        The fabric, checked: every ``Topology`` can carry a collective.

    Raises:
        TopologyError: no such file, or its contents are malformed or describe a fabric that cannot work. The
            message begins with the file's name and, where there is one, the line.

    Examples:
        >>> load_topology("two_boxes:ranks=8,inside=400 Mbit/s,between=50 Mbit/s").num_ranks
        8
        >>> load_topology("ring:ranks=4,bandwidth=50 GB/s*2@25 GB/s").num_ranks
        8
    """
    found = read_topology(file)
    for note in found.notes:
        _log.info("%s: %s", file, note)
    return found.topology


def read_topology(file: str | Path) -> Reading:
    """As ``load_topology``, with what the file does not say and had to be assumed.

    Raises:
        TopologyError: as for ``load_topology``.
    """
    spec = str(file)
    match = _SEVERAL.fullmatch(spec)
    if match is None or _is_file(Path(file)):
        described = _describe(spec)
        return Reading(topology=described) if isinstance(described, Topology) else described.reading()
    single, nodes, network = match.group(1), int(match.group(2)), match.group(3)
    if not nodes:
        raise TopologyError(f"{spec}: no nodes; write for example '{single}*2'")
    described = _describe(single)
    if isinstance(described, Topology):
        described = Description.of(described, single)
    return described.reading(nodes=nodes, network=network)


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _describe(spec: str) -> Topology | Description:
    name, (file, said) = spec.partition(":")[0], split_given(spec)
    if not said or _is_file(Path(spec)):
        file, said = spec, ""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if name in BUILDERS:
            return build(spec)
        if said and (several := _SEVERAL.fullmatch(file)) and _is_file(Path(several[1])):
            raise TopologyError(f"{file}: say it before the number: '{several[1]}:{said}*{several[2]}'") from None
        raise TopologyError(f"{path}: no such file, and no builder of that name{nearest(name, BUILDERS)}") from None
    except IsADirectoryError:
        raise TopologyError(f"{path}: is a directory; name the file in it") from None
    except UnicodeDecodeError as error:
        raise TopologyError(f"{path}: not a text file: byte {error.start} is not UTF-8") from None
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _parse(text, source=str(path), given=read_given(said, source=str(path)) if said else NOTHING)


def parse_topology(text: str, *, source: str) -> Topology:
    """The topology that a text describes.

    Args:
        text: contents of a file.
        source: name of the file; with the contents, its ending chooses the format.

    Raises:
        TopologyError: as for ``load_topology``.
    """
    described = _parse(text, source=source)
    return described if isinstance(described, Topology) else described.reading().topology


def _parse(text: str, *, source: str, given: Given = NOTHING) -> Topology | Description:
    if not text.strip():
        raise TopologyError(f"{source}: empty; expected a topology as {' or '.join(f.name for f in FORMATS)}")
    suffix = Path(source).suffix.lower()
    own = [known for known in FORMATS if suffix in known.suffixes]
    for known in (*own, *([] if suffix in (".json", ".yaml", ".yml", ".xml") else FORMATS)):
        if re.search(known.signature, text, re.MULTILINE | re.IGNORECASE):
            if given is NOTHING:
                return known.parse(text, source=source)
            if known.machine is None:
                raise TopologyError(
                    f"{source}: {known.name} says all rates itself: nothing can be said beside it; "
                    f"'mycel show {source} -o cluster.yaml' writes what can be edited"
                )
            return known.machine(text, source=source, given=given)
    return own[-1].parse(text, source=source)
