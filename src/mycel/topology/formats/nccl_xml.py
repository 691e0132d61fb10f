"""Topology XML of NCCL and RCCL: what ``NCCL_TOPO_DUMP_FILE`` writes and clouds ship for ``NCCL_TOPO_FILE``.

A ``<system>`` of ``<cpu>`` elements (NUMA nodes), in them ``<pci>`` bridges and devices, in those ``<gpu>`` with
``<nvlink>`` or ``<xgmi>``, and ``<nic>`` with ``<net>``. GPUs become ranks, NUMA nodes and bridges switches,
NVSwitches that share GPUs one switch. Where ``<gpu>`` or ``<nic>`` is missing, the PCI class tells what a device is,
and its PCI id which one. Hosts of one dump differ in ``host_hash``.

References:
    NCCL 2.27 sources, ``src/graph/xml.cc`` (elements) and ``src/graph/topo.cc`` (C2C, hosts); RCCL likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from mycel.errors import TopologyError
from mycel.names import nearest
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.formats.machine import Machine
from mycel.topology.formats.xml_nodes import Element, parse_elements
from mycel.topology.given import NOTHING, Given
from mycel.topology.hardware import Gpu, gpu_by_arch, gpu_by_pci, nic_rate, pcie_rate

__all__ = ["NCCL_XML", "parse_nccl_xml"]

#: PCIe generation by gigatransfers a second.
_GENERATION = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
#: What the kernel has for the width of a link that has none.
_NO_WIDTH = "255"
#: Gbit/s beyond which a port's speed is a slip of the pen.
_FASTEST_PORT = 3200
#: A bridge so many times slower than a device below it is one of a virtual machine, which never carries the data.
_VIRTUAL = 16
#: Bus id of a switch that has none: that of the one NVLink domain of a rack.
_RACK_SWITCH = re.compile(r"f+:f+:f+\.[0-9a-f]")

_MOST_CPUS = 256

_CHILDREN = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "nvlink", "xgmi", "pcilink"),
    "gpu": ("nvlink", "xgmi", "c2c", "pcilink"),
    "nic": ("net", "coll", "gin"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cpu:
    """A NUMA node: its vertex and its host."""

    label: str
    host: str
    prefix: str


@dataclass(slots=True, kw_only=True)
class _Gpu:
    element: Element | None
    pci: Element
    above: str
    rate: Fraction | None
    cpu: _Cpu
    model: Gpu | None
    device: str = ""
    label: str = ""


@dataclass(slots=True, kw_only=True)
class _Found:
    gpus: list[_Gpu] = field(default_factory=list)
    inferred_gpus: int = 0
    inferred_nics: int = 0
    rated_nics: int = 0
    default_speeds: int = 0
    virtual: int = 0
    num_nics: int = 0
    num_devices: int = 0
    repeated: dict[str, int] = field(default_factory=dict)
    too_fast: list[str] = field(default_factory=list)
    repeated_nics: dict[str, int] = field(default_factory=dict)
    to_itself: int = 0
    gone: int = 0


def parse_nccl_xml(text: str, *, source: str, given: Given = NOTHING) -> Description:
    """The machine that an NCCL or RCCL topology file describes.

    Args:
        text: contents of the file.
        source: its name, for messages.
        given: what a person says beside it.

    Raises:
        TopologyError: not XML, or not such a file; with the line.
    """
    root = parse_elements(text, source=source)
    return _Reader(root, source, given).description()


class _Reader:
    def __init__(self, root: Element, source: str, given: Given) -> None:
        self._source = source
        self._root = root
        name = re.sub(r"\.xml$", "", source.rpartition("/")[2])
        self._machine = Machine(name, source, given)
        self._found = _Found()

    def description(self) -> Description:
        if self._root.tag == "graphs":
            raise self._error(
                self._root,
                "expected <system>, got <graphs>: those are the rings and trees that NCCL chose; "
                "NCCL_TOPO_DUMP_FILE writes the topology",
            )
        if self._root.tag != "system":
            raise self._error(self._root, f"expected <system>, got <{self._root.tag}>")
        cpus = self._children(self._root)
        if not cpus:
            raise self._error(self._root, "<system> holds no <cpu>")
        if len(cpus) > _MOST_CPUS:
            raise self._error(self._root, f"<system> holds {len(cpus)} <cpu>; at most {_MOST_CPUS} make a machine")
        placed = self._places(cpus)
        for cpu, place in zip(cpus, placed, strict=True):
            for child in self._children(cpu):
                if child.tag == "nic":
                    self._nic(child, place.label, place, None, None)
                else:
                    self._pci(child, place.label, place)
        if not self._found.gpus:
            raise self._no_gpus()
        self._name_gpus()
        self._gpu_links()
        for host in dict.fromkeys(place.host for place in placed):
            first = next(cpu for cpu, place in zip(cpus, placed, strict=True) if place.host == host).attributes
            labels = [place.label for place in placed if place.host == host]
            kind = (first.get("vendor", ""), first.get("arch", ""))
            self._machine.join_numa(labels, *kind, model=first.get("modelid", ""))
        self._tell()
        return self._machine.finish()

    def _error(self, element: Element, message: str) -> TopologyError:
        return TopologyError(f"{self._source}:{element.line}: {message}")

    def _no_gpus(self) -> TopologyError:
        if self._found.num_devices:
            return self._error(
                self._root,
                f"no GPU among {self._found.num_devices} PCI devices: they have no <gpu> and no class that tells; "
                "NCCL fills in the rest when it runs, and with NCCL_TOPO_DUMP_FILE=whole.xml writes a complete file",
            )
        return self._error(self._root, "<system> holds no GPU")

    def _children(self, element: Element) -> list[Element]:
        known = _CHILDREN[element.tag]
        for child in element.children:
            if child.tag not in known:
                raise self._error(child, f"<{child.tag}> in <{element.tag}>{nearest(child.tag, known)}")
        return element.children

    def _whole(self, element: Element, key: str, *, most: int = 10**9) -> int:
        text = element.attributes.get(key, "")
        if not re.fullmatch(r"\d{1,10}", text) or int(text) > most:
            got = f"got {text!r}" if key in element.attributes else "it is missing"
            raise self._error(element, f"<{element.tag}> {key} must be a whole number up to {most}; {got}")
        return int(text)

    def _places(self, cpus: list[Element]) -> list[_Cpu]:
        """A vertex for every NUMA node; hosts are named where there are several."""
        hosts = list(dict.fromkeys(cpu.attributes.get("host_hash", "") for cpu in cpus))
        placed: list[_Cpu] = []
        for number, cpu in enumerate(cpus):
            host = f"host{hosts.index(cpu.attributes.get('host_hash', ''))}" if len(hosts) > 1 else ""
            prefix = f"{host}/" if host else ""
            label = f"{prefix}cpu{cpu.attributes.get('numaid', number)}"
            if label in [place.label for place in placed]:
                raise self._error(
                    cpu, f"a second <cpu> with numaid {cpu.attributes.get('numaid')!r} and the same host_hash"
                )
            self._machine.description.switch(label, host or None)
            placed.append(_Cpu(label=label, host=host, prefix=prefix))
        if len(hosts) > 1:
            self._machine.notes.append(f"{len(hosts)} hosts, told apart by host_hash")
        return placed

    # -- devices ----------------------------------------------------------------------------------------------

    def _pci(self, pci: Element, above: str, cpu: _Cpu) -> None:
        busid = pci.attributes.get("busid", "")
        if not busid:
            raise self._error(pci, "<pci> busid is missing")
        self._found.num_devices += 1
        kind = pci.attributes.get("class", "")
        children = self._children(pci)
        rate = self._pcie_rate(pci)
        inner = [child for child in children if child.tag == "pci"]
        gpus = [child for child in children if child.tag == "gpu"]
        nics = [child for child in children if child.tag == "nic"]
        device = self._device(busid, above, rate, cpu) if len(gpus) > 1 else ""
        for gpu in gpus:
            self._gpu(pci, gpu, device or above, rate, cpu, device)
        if not gpus and not inner and not nics and kind[:4] in ("0x03", "0x12"):
            self._found.inferred_gpus += 1
            self._gpu(pci, None, above, rate, cpu)
        if len(gpus) > 1:
            self._machine.notes.append(f"{len(gpus)} GPUs in PCI device {busid}: they share its links")
        ids = self._ids(pci)
        for nic in nics:
            self._nic(nic, above, cpu, rate, nic_rate(*ids))
        if not inner and not nics and not gpus and kind.startswith("0x02"):
            self._found.inferred_nics += 1
            self._exit(f"nic{self._found.num_nics}", above, cpu, rate or pcie_rate(3), nic_rate(*ids))
        if inner:
            label = self._bridge(f"{cpu.prefix}pci {busid}", cpu)
            self._machine.pcie(label, above, self._bridge_rate(pci, rate))
            for child in inner:
                self._pci(child, label, cpu)

    def _bridge(self, label: str, cpu: _Cpu) -> str:
        """A bridge's vertex. Virtual bridges of several roots may have one bus id; each is a bridge of its own."""
        times = self._found.repeated[label] = self._found.repeated.get(label, 0) + 1
        return self._machine.description.switch(f"{label} #{times}" if times > 1 else label, cpu.host or None)

    def _ids(self, pci: Element) -> tuple[int | None, int | None]:
        """Vendor and device."""
        numbers = [pci.attributes.get(key, "") for key in ("vendor", "device")]
        vendor, device = (int(n, 16) if re.fullmatch(r"0x[0-9a-fA-F]{4}", n) else None for n in numbers)
        return vendor, device

    def _pcie_rate(self, pci: Element) -> Fraction | None:
        """What speed and width say, or ``None`` where one is missing."""
        speed, width = pci.attributes.get("link_speed", ""), pci.attributes.get("link_width", "")
        match = re.match(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", speed)
        generation = _GENERATION.get(match.group(1).removesuffix(".0")) if match else None
        if match and generation is None:
            raise self._error(
                pci, f"<pci> link_speed {speed!r} is no PCIe speed; known: {', '.join(_GENERATION)} GT/s"
            )
        unknown = width.strip() in ("", _NO_WIDTH)
        lanes = 0 if unknown else self._whole(pci, "link_width", most=64)
        return pcie_rate(generation, lanes or 16) if generation else None

    def _bridge_rate(self, pci: Element, rate: Fraction | None) -> Fraction:
        """A bridge's own rate; where it has none, or that of a virtual bridge, that of the fastest device below."""
        below = [found for device in _below(pci) if (found := self._pcie_rate(device))]
        fastest = max(below, default=pcie_rate(3))
        if rate is None:
            self._found.default_speeds += 1
        elif rate * _VIRTUAL < fastest:
            self._found.virtual += 1
        else:
            return rate
        return fastest

    def _nic(self, nic: Element, above: str, cpu: _Cpu, rate: Fraction | None, port_rate: Fraction | None) -> None:
        nets = [child for child in self._children(nic) if child.tag == "net"]
        for net in nets:
            said = net.attributes.get("speed", "-1")
            speed = 0 if said == "-1" else self._whole(net, "speed")
            name = net.attributes.get("name") or f"nic{self._found.num_nics}"
            port = net.attributes.get("port", "1")
            label = f"{name}:{port}" if port not in ("0", "1") else name
            if speed > _FASTEST_PORT * 1000:
                self._found.too_fast.append(label)
                speed = 0
            elif not speed and not port_rate:
                self._machine.notes.append(f"{label} has no speed: taken at its PCIe bandwidth")
            self._exit(label, above, cpu, rate, Fraction(speed * 10**6, 8) if speed else port_rate)

    def _exit(self, name: str, above: str, cpu: _Cpu, pcie: Fraction | None, port: Fraction | None) -> None:
        self._found.num_nics += 1
        self._found.rated_nics += port is not None
        label = cpu.prefix + name
        if above != cpu.label:  # two devices of one name are two; what hangs at the processors is one, seen from each
            times = self._found.repeated_nics[label] = self._found.repeated_nics.get(label, 0) + 1
            label += f" #{times}" if times > 1 else ""
        self._machine.description.exit(label, [above], self._machine.nic_of(name, pcie, port))

    # -- GPUs -------------------------------------------------------------------------------------------------

    def _device(self, busid: str, above: str, rate: Fraction | None, cpu: _Cpu) -> str:
        """The vertex of a device of which several GPUs are parts, each of which lists all of its links."""
        label = self._machine.description.switch(f"{cpu.prefix}device {busid}", cpu.host or None)
        self._machine.pcie(label, above, rate or pcie_rate(3))
        return label

    def _gpu(
        self, pci: Element, gpu: Element | None, above: str, rate: Fraction | None, cpu: _Cpu, device: str = ""
    ) -> None:
        model = self._model(pci, gpu)
        self._found.gpus.append(
            _Gpu(element=gpu, pci=pci, above=above, rate=rate, cpu=cpu, model=model, device=device)
        )

    def _model(self, pci: Element, gpu: Element | None) -> Gpu | None:
        """By PCI id; where that is unknown or says otherwise than the driver did, by what the driver said."""
        model = gpu_by_pci(*self._ids(pci))
        attributes = gpu.attributes if gpu else {}
        if attributes.get("gcn"):
            said = gpu_by_arch(attributes["gcn"])
        elif gpu and "sm" in attributes and self._ids(pci)[0] != 0x1002 and not _has(gpu, "xgmi"):
            said = gpu_by_arch(self._whole(gpu, "sm", most=999))
        elif gpu and _has(gpu, "xgmi") and model is None:
            said = gpu_by_arch("gfx9")
        else:
            return model
        return model if model and model.link_rate == said.link_rate else said

    def _name_gpus(self) -> None:
        """Label and number GPUs: by rank where the file gives every one its own, else by device, else in order."""
        gpus = self._found.gpus
        for key in ("rank", "dev"):
            numbers = [g.element.attributes.get(key, "") if g.element else "" for g in gpus]
            if len(set(numbers)) == len(numbers) and all(re.fullmatch(r"\d{1,9}", n) for n in numbers):
                order = sorted(range(len(gpus)), key=lambda i, numbers=numbers: int(numbers[i]))  # type: ignore[misc]
                self._found.gpus = [gpus[i] for i in order]
                break
        devices: set[str] = set()
        for number, gpu in enumerate(self._found.gpus):
            gpu.label = self._machine.gpu(
                f"{gpu.cpu.prefix}gpu{number}", gpu.model, gpu.cpu.host or None, bare=gpu.element is None
            )
            coherent = self._coherent(gpu)
            if coherent:
                self._machine.coherent(gpu.label, gpu.device or gpu.cpu.label, coherent)
            if coherent and gpu.device and gpu.device not in devices:
                self._machine.pcie(gpu.device, gpu.cpu.label, coherent)
            devices.add(gpu.device)
            if not coherent or gpu.above != gpu.cpu.label:
                self._machine.pcie(gpu.label, gpu.above, self._machine.pcie_of(gpu.label, gpu.rate))

    def _coherent(self, gpu: _Gpu) -> Fraction | None:
        """Bytes a second of the chip-to-chip link to the CPU, which takes the place of PCIe to it."""
        total = Fraction(0)
        for link in gpu.element.children if gpu.element else ():
            if link.tag == "c2c":
                total += Fraction(self._whole(link, "bw") * self._whole(link, "count", most=64) * 10**6)
        return total or None

    def _gpu_links(self) -> None:
        by_bus: dict[tuple[str, str], list[_Gpu]] = {}
        for gpu in self._found.gpus:
            key = (gpu.cpu.host, gpu.pci.attributes["busid"].lower())
            others = by_bus.setdefault(key, [])
            if others and others[0].pci is not gpu.pci:
                raise self._error(gpu.pci, f"a second GPU with busid {key[1]!r}")
            others.append(gpu)
        for gpu in self._found.gpus:
            for link in gpu.element.children if gpu.element else ():
                if link.tag not in _CHILDREN["gpu"]:
                    raise self._error(link, f"<{link.tag}> in <gpu>{nearest(link.tag, _CHILDREN['gpu'])}")
                if link.tag in ("nvlink", "xgmi"):
                    self._link(gpu, link, by_bus)

    def _link(self, gpu: _Gpu, link: Element, by_bus: dict[tuple[str, str], list[_Gpu]]) -> None:
        machine, count = self._machine, self._whole(link, "count", most=64)
        if not count:
            raise self._error(link, f"<{link.tag}> count must be positive")
        target, kind = link.attributes.get("target", "").lower(), link.attributes.get("tclass", "")
        ends = by_bus.get((gpu.cpu.host, target), [])
        if gpu in ends:
            self._found.to_itself += 1
        elif ends:
            part = gpu.element.attributes.get("mlopart") if gpu.element else None
            same = [end for end in ends if end.element and end.element.attributes.get("mlopart") == part]
            machine.link(gpu.label, (same or ends)[0].label, count)
        elif kind.startswith("0x068000"):
            rack = _RACK_SWITCH.fullmatch(target)
            switch = "rack" if rack else f"{gpu.cpu.prefix}{target}"
            machine.switched(gpu.label, switch, count, device=gpu.device)
        elif kind.startswith("0x068001"):
            machine.description.cable(gpu.label, gpu.cpu.label, count * machine.link_rate(gpu.label))
        elif kind.startswith(("0x03", "0x12")):
            self._found.gone += 1
        else:
            what = f"<{link.tag}> target {target!r} with tclass {kind!r}"
            raise self._error(link, f"{what} is neither a GPU of this file nor an NVSwitch (0x068000)")

    # -- the rest ---------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        found, notes = self._found, self._machine.notes
        if found.gone:
            notes.append(f"{found.gone} NVLink or xGMI entries lead to GPUs that the file does not hold: left out")
        if found.to_itself:
            notes.append(f"{found.to_itself} NVLink or xGMI entries lead from a GPU to itself: left out")
        if found.too_fast:
            names = ", ".join(found.too_fast)
            notes.append(f"{names}: no port is as fast as the file says: taken at what PCI id and PCIe allow")
        repeated = {label: times for label, times in found.repeated.items() if times > 1}
        for label, times in repeated.items():
            notes.append(f"{times} bridges are called '{label}': each is a switch of its own")
        if found.inferred_gpus:
            notes.append(f"{found.inferred_gpus} GPUs inferred from PCI classes 0x03 and 0x12")
        if found.inferred_nics:
            at = "their PCIe bandwidth" if not found.rated_nics else "what their PCI ids and PCIe allow"
            notes.append(f"{found.inferred_nics} network interfaces inferred from PCI class 0x02, at {at}")
        if found.default_speeds:
            notes.append(
                f"{found.default_speeds} PCIe bridges without a speed: taken to be as fast as the devices below"
            )
        if found.virtual:
            notes.append(
                f"{found.virtual} PCIe bridges claim a tiny part of what devices below have, as virtual ones do: not "
                "believed, taken to be as fast as those"
            )


def _below(pci: Element) -> Iterator[Element]:
    for child in pci.children:
        if child.tag == "pci":
            yield child
            yield from _below(child)


def _has(gpu: Element, tag: str) -> bool:
    return any(child.tag == tag for child in gpu.children)


NCCL_XML = FileFormat(
    name="NCCL/RCCL XML",
    suffixes=(".xml",),
    signature=r"\A\s*<",
    parse=parse_nccl_xml,
    becomes=(
        "GPUs are ranks; NUMA nodes, PCIe bridges and the NVSwitches are switches; NVLink, xGMI and C2C by their "
        "count, PCIe by link speed and width, hosts by `host_hash`. In files with PCI devices only, as clouds ship "
        "them, GPUs and network cards are told by their class and PCI id"
    ),
    written_by="NCCL, RCCL (`NCCL_TOPO_DUMP_FILE`, `NCCL_TOPO_FILE`), `.xml`",
    machine=parse_nccl_xml,
)
