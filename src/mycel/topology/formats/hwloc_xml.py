"""Topology XML of hwloc: what ``lstopo --of xml`` writes.

A tree of ``<object>``: machine, packages and NUMA nodes, under them PCI bridges and devices, under those what the
system calls them. GPUs become ranks, NUMA nodes and bridges switches, RDMA devices network interfaces (where there
are none, Ethernet ones). The tree holds PCI ids and no NVLink or xGMI: the ids tell what GPUs of their kind have.

References:
    hwloc 2.x manual, "Importing and exporting topologies from/to XML files" and the object attributes ``pci_type``,
    ``pci_link_speed`` (GB/s, 0 where unknown) and ``osdev_type``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from mycel.errors import TopologyError
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.formats.machine import Machine
from mycel.topology.formats.xml_nodes import Element, parse_elements
from mycel.topology.given import NOTHING, Given
from mycel.topology.hardware import Gpu, gigabytes, gpu_by_pci, gpu_called, nic_rate, pcie_rate

__all__ = ["HWLOC_XML", "parse_hwloc_xml"]

_PCI_TYPE = re.compile(r"([0-9a-fA-F]{4}) \[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\].*")
_GPU_CLASSES = ("0300", "0302", "0380", "1200")
_GPU_VENDORS = (0x10DE, 0x1002)
#: GB/s of one lane of generation 1, as hwloc counts; lanes of generation 3 are four of them less their coding.
_SLOW_LANE = 0.24615
#: GB/s that hwloc gives for 16 lanes of generation 1: an idle GPU, whose link wakes up when it is used.
_ASLEEP = 4.0
#: State of an active port, as verbs number them.
_ACTIVE = "4"
#: Vendor, and the beginning of the device ids, of Amazon's Elastic Fabric Adapter.
_EFA = (0x1D0F, 0xEFA)
_NETWORK, _OPENFABRICS = "2", "3"
_MOST_DEVICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A PCI device: where it is plugged in, what it is, and the names that the system has for it."""

    element: Element
    above: str
    kind: str
    vendor: int
    device: int
    rate: Fraction | None
    systems: dict[str, list[str]]


def parse_hwloc_xml(text: str, *, source: str, given: Given = NOTHING) -> Description:
    """The machine that ``lstopo --of xml`` describes.

    Args:
        text: contents of the file.
        source: its name, for messages.
        given: what a person says beside it.

    Raises:
        TopologyError: not XML, not hwloc's, or without GPUs; with the line.
    """
    root = parse_elements(text, source=source)
    return _Reader(root, source, given).description()


class _Reader:
    def __init__(self, root: Element, source: str, given: Given) -> None:
        self._source = source
        self._root = root
        self._machine = Machine(re.sub(r"\.xml$", "", source.rpartition("/")[2]), source, given)
        self._nodes: dict[int, str] = {}
        self._devices: list[_Device] = []
        self._asleep = 0

    def description(self) -> Description:
        if self._root.tag != "topology":
            raise self._error(self._root, f"expected <topology>, got <{self._root.tag}>")
        for child in self._objects(self._root):
            self._walk(child, child)
        gpus = [d for d in self._devices if d.kind in _GPU_CLASSES and d.vendor in _GPU_VENDORS]
        if not gpus:
            raise self._error(
                self._root,
                f"no GPU of NVIDIA or AMD among {len(self._devices)} PCI devices; lstopo leaves devices out unless "
                "it is asked for them: lstopo --whole-io --of xml topo.xml",
            )
        for number, gpu in enumerate(gpus):
            self._gpu(f"gpu{number}", gpu)
        self._interfaces()
        about: dict[str, str] = {}
        for name, value in self._infos(self._root):
            about.setdefault(name, value)
        cpu = (about.get("CPUVendor", ""), "arm64" if about.get("Architecture") == "aarch64" else "")
        self._machine.join_numa(self._nodes.values(), *cpu, model=about.get("CPUModelNumber", ""))
        if self._asleep:
            self._machine.notes.append(
                f"{self._asleep} GPUs were idle, with their PCIe links at 2.5 GT/s: taken at what their kind has"
            )
        return self._machine.finish()

    def _error(self, element: Element, message: str) -> TopologyError:
        return TopologyError(f"{self._source}:{element.line}: {message}")

    def _objects(self, element: Element) -> list[Element]:
        return [child for child in element.children if child.tag == "object"]

    def _infos(self, element: Element) -> Iterator[tuple[str, str]]:
        """Names and values of ``<info>`` in an element and below."""
        for child in element.children:
            if child.tag == "info":
                yield child.attributes.get("name", ""), child.attributes.get("value", "")
            else:
                yield from self._infos(child)

    # -- the tree ---------------------------------------------------------------------------------------------

    def _walk(self, element: Element, place: Element) -> None:
        """Find PCI devices; ``place`` is the nearest object above them that has memory of its own."""
        inner = self._objects(element)
        kind = element.attributes.get("type", "")
        if not kind:
            raise self._error(element, "<object> type is missing")
        if kind == "NUMANode" or any(child.attributes.get("type") == "NUMANode" for child in inner):
            place = element
        for child in inner:
            if child.attributes.get("type") in ("Bridge", "PCIDev"):
                self._pci(child, self._node(place))
            else:
                self._walk(child, place)

    def _node(self, place: Element) -> str:
        if id(place) not in self._nodes:
            self._nodes[id(place)] = self._machine.description.switch(f"numa{len(self._nodes)}")
        return self._nodes[id(place)]

    def _pci(self, element: Element, above: str) -> None:
        inner = [c for c in self._objects(element) if c.attributes.get("type") in ("Bridge", "PCIDev")]
        if element.attributes.get("type") == "Bridge":
            if len(inner) > 1 and element.attributes.get("bridge_type") == "1-1":
                above = self._bridge(element, above)
            for child in inner:
                self._pci(child, above)
            return
        match = _PCI_TYPE.fullmatch(element.attributes.get("pci_type", ""))
        if match is None:
            got = element.attributes.get("pci_type")
            raise self._error(element, f"pci_type {got!r} is no '0302 [10de:2330] ...'")
        if len(self._devices) >= _MOST_DEVICES:
            raise self._error(element, f"more than {_MOST_DEVICES} PCI devices")
        systems: dict[str, list[str]] = {}
        for child in self._objects(element):
            systems.setdefault(child.attributes.get("osdev_type", ""), []).append(child.attributes.get("name", ""))
        self._devices.append(
            _Device(
                element=element,
                above=above,
                kind=match[1],
                vendor=int(match[2], 16),
                device=int(match[3], 16),
                rate=self._rate(element),
                systems=systems,
            )
        )

    def _bridge(self, element: Element, above: str) -> str:
        label = f"pci {element.attributes.get('pci_busid', element.line)}"
        try:
            self._machine.description.switch(label)
        except TopologyError:
            raise self._error(element, f"a second bridge with pci_busid {label[4:]!r}") from None
        below = [rate for device in self._below(element) if (rate := self._rate(device))]
        self._machine.pcie(label, above, self._rate(element) or max(below, default=pcie_rate(3)))
        return label

    def _below(self, element: Element) -> Iterator[Element]:
        for child in self._objects(element):
            yield child
            yield from self._below(child)

    def _rate(self, element: Element) -> Fraction | None:
        """Usable bytes a second of one direction, ``None`` where hwloc did not know."""
        text = element.attributes.get("pci_link_speed", "0")
        if not re.fullmatch(r"\d{1,4}(\.\d{1,9})?", text):
            raise self._error(element, f"pci_link_speed {text!r} is no number of GB/s")
        lanes = round(float(text) / _SLOW_LANE)
        return gigabytes(Fraction(3, 16)) * lanes if lanes else None

    # -- devices ----------------------------------------------------------------------------------------------

    def _gpu(self, label: str, found: _Device) -> None:
        model, rate = self._model(found), found.rate
        if model is not None and float(found.element.attributes.get("pci_link_speed", "0")) == _ASLEEP:
            self._asleep += 1
            rate = None
        self._machine.gpu(label, model, bare=True)
        self._machine.pcie(label, found.above, self._machine.pcie_of(label, rate))

    def _model(self, found: _Device) -> Gpu | None:
        known = gpu_by_pci(found.vendor, found.device)
        names = [value for name, value in self._infos(found.element) if name in ("GPUModel", "PCIDevice")]
        return known or next((gpu for name in names if (gpu := gpu_called(name))), None)

    def _interfaces(self) -> None:
        """RDMA devices; without any, what the system calls network interfaces."""
        network = [d for d in self._devices if d.kind.startswith("02") or _OPENFABRICS in d.systems]
        # Amazon's EFA has no name of Ethernet, and without its library in lstopo none of RDMA either.
        rdma = [d for d in network if _OPENFABRICS in d.systems or (not d.systems and _is_efa(d))]
        down = [d for d in rdma if self._is_down(d.element)]
        if down:
            names = ", ".join(d.systems[_OPENFABRICS][0] for d in down)
            self._machine.notes.append(f"{names}: no port is up, left out")
        unknown, used = 0, [d for d in rdma if d not in down]
        for number, found in enumerate(used or [d for d in network if _NETWORK in d.systems]):
            names_of = found.systems.get(_OPENFABRICS) or found.systems.get(_NETWORK) or [f"nic{number}"]
            port = nic_rate(found.vendor, found.device)
            unknown += port is None
            rate = self._machine.nic_of(names_of[0], found.rate, port)
            self._machine.description.exit(names_of[0], [found.above], rate)
        if unknown and not self._machine.given.nic:
            self._machine.notes.append(f"{unknown} network interfaces are of no known kind: as fast as their PCIe")

    def _is_down(self, device: Element) -> bool:
        """Whether a device says of ports that they are, and of none that it is active."""
        states = [value for name, value in self._infos(device) if re.fullmatch(r"Port\d+State", name)]
        return bool(states) and _ACTIVE not in states


def _is_efa(found: _Device) -> bool:
    return (found.vendor, found.device >> 4) == _EFA


HWLOC_XML = FileFormat(
    name="hwloc XML",
    suffixes=(".xml",),
    signature=r"<object\s+type=",
    parse=parse_hwloc_xml,
    becomes="the same tree of PCIe as in NCCL's files; NVLink and xGMI from PCI ids",
    written_by="hwloc (`lstopo --whole-io --of xml`), `.xml`",
    machine=parse_hwloc_xml,
)
