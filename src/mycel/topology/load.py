"""Loading a topology from whatever a person has at hand: a file in any known form, or the name of a builder.

A new file format is one module in ``formats``, with a ``FileFormat`` at its end, and one line in ``FORMATS``.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mycel.errors import TopologyError
from mycel.names import nearest
from mycel.topology.builders import BUILDERS, build
from mycel.topology.formats.description import Description, Reading
from mycel.topology.formats.file_format import FileFormat, TopologyParser
from mycel.topology.formats.hwloc_xml import HWLOC_XML
from mycel.topology.formats.nccl_xml import NCCL_XML
from mycel.topology.formats.nvidia_smi import NVIDIA_SMI
from mycel.topology.formats.rocm_smi import ROCM_SMI
from mycel.topology.formats.simulators import ASTRA_SIM, SIMAI
from mycel.topology.formats.slurm import SLURM_CONF, SLURM_YAML
from mycel.topology.formats.taccl import TACCL_JSON
from mycel.topology.given import NOTHING, Given, read_given, split_given
from mycel.topology.json_format import JSON
from mycel.topology.model import Topology
from mycel.topology.yaml_format import YAML

__all__ = ["FORMATS", "FileFormat", "TopologyParser", "load_topology", "parse_topology", "read_topology"]

_log = logging.getLogger(__name__)


#: In the order in which contents are tried: first among the formats with the file's ending, then among all.
FORMATS: tuple[FileFormat, ...] = (
    HWLOC_XML,
    NCCL_XML,
    TACCL_JSON,
    JSON,
    ASTRA_SIM,
    SLURM_YAML,
    SLURM_CONF,
    ROCM_SMI,
    NVIDIA_SMI,
    SIMAI,
    YAML,
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
