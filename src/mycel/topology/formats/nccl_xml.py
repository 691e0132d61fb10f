"""Topology XML of NCCL and RCCL: what ``NCCL_TOPO_DUMP_FILE`` writes and clouds ship for ``NCCL_TOPO_FILE``.

A ``<system>`` of ``<cpu>`` elements (NUMA nodes), in them ``<pci>`` bridges and devices, in those ``<gpu>`` with
``<nvlink>`` or ``<xgmi>``, and ``<nic>`` with ``<net>``. GPUs become ranks, NUMA nodes and bridges switches, all
NVSwitches of a machine one switch. Where ``<gpu>`` or ``<nic>`` is missing, the PCI class tells what a device is.

References:
    NCCL 2.19 sources, ``src/graph/topo.h`` (bandwidths a link) and ``src/graph/xml.cc``; RCCL likewise for xGMI.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from mycel.errors import TopologyError
from mycel.topology.formats.description import Description, gigabytes
from mycel.topology.formats.xml_nodes import Element, parse_elements
from mycel.topology.suggest import nearest

__all__ = ["parse_nccl_xml"]

#: GB/s a direction of one NVLink from this compute capability on.
_NVLINK = ((100, "40.1"), (90, "20.6"), (86, "12"), (70, "20"), (0, "18"))
#: Compute capability from which GPUs can ask NVSwitches to copy and add.
_NVLS_SM = 90
#: GB/s a direction of one xGMI link by the beginning of the GPU's name.
_XGMI = (("gfx95", 48), ("gfx94", 48), ("gfx90a", 36))
_XGMI_BEFORE = 24
#: Usable rate of one PCIe lane in units of 0.0125 GB/s, by gigatransfers a second.
_LANE = {"2.5": 15, "5": 30, "8": 60, "16": 120, "32": 240, "64": 480}
#: GB/s a direction between two sockets.
_BETWEEN_SOCKETS = {"AuthenticAMD": 16, "GenuineIntel": 10, "arm64": 6, "ppc64": 32}
_BETWEEN_OTHERS = 10

_MOST_CPUS = 256

_CHILDREN = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "nvlink", "xgmi", "pcilink"),
    "gpu": ("nvlink", "xgmi", "c2c", "pcilink"),
    "nic": ("net", "coll", "gin"),
}


@dataclass(slots=True, kw_only=True)
class _Gpu:
    element: Element | None
    pci: Element
    above: str
    rate: Fraction
    cpu: str
    label: str = ""


@dataclass(slots=True, kw_only=True)
class _Found:
    gpus: list[_Gpu] = field(default_factory=list)
    inferred_gpus: int = 0
    inferred_nics: int = 0
    default_speeds: int = 0
    num_nics: int = 0


def parse_nccl_xml(text: str, *, source: str) -> Description:
    """The machine that an NCCL or RCCL topology file describes.

    Raises:
        TopologyError: not XML, or not such a file; with the line.
    """
    root = parse_elements(text, source=source)
    return _Reader(root, source).description()


class _Reader:
    def __init__(self, root: Element, source: str) -> None:
        self._source = source
        self._root = root
        name = re.sub(r"\.xml$", "", source.rpartition("/")[2])
        self._machine = Description(name, source)
        self._found = _Found()
        self._switch = ""

    def description(self) -> Description:
        if self._root.tag != "system":
            raise self._error(self._root, f"expected <system>, got <{self._root.tag}>")
        cpus = self._children(self._root)
        if not cpus:
            raise self._error(self._root, "<system> holds no <cpu>")
        if len(cpus) > _MOST_CPUS:
            raise self._error(self._root, f"<system> holds {len(cpus)} <cpu>; at most {_MOST_CPUS} make a machine")
        labels: list[str] = []
        for cpu in cpus:
            label = f"cpu{cpu.attributes.get('numaid', len(labels))}"
            if label in labels:
                raise self._error(cpu, f"a second <cpu> with numaid {cpu.attributes['numaid']!r}")
            labels.append(self._machine.switch(label))
            for child in self._children(cpu):
                if child.tag == "nic":
                    self._nic(child, label, gigabytes(12), label)
                else:
                    self._pci(child, label, label)
        self._name_gpus()
        self._gpu_links()
        self._join_sockets(cpus, labels)
        self._tell()
        return self._machine

    def _error(self, element: Element, message: str) -> TopologyError:
        return TopologyError(f"{self._source}:{element.line}: {message}")

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

    # -- devices ----------------------------------------------------------------------------------------------

    def _pci(self, pci: Element, above: str, cpu: str) -> None:
        busid = pci.attributes.get("busid", "")
        if not busid:
            raise self._error(pci, "<pci> busid is missing")
        kind = pci.attributes.get("class", "")
        children = self._children(pci)
        rate = self._pcie_rate(pci)
        inner = [child for child in children if child.tag == "pci"]
        gpus = [child for child in children if child.tag == "gpu"]
        nics = [child for child in children if child.tag == "nic"]
        if len(gpus) > 1:
            raise self._error(gpus[1], f"a second <gpu> in <pci> {busid}")
        if gpus or (not inner and not nics and kind[:4] in ("0x03", "0x12")):
            self._found.inferred_gpus += not gpus
            gpu = _Gpu(element=gpus[0] if gpus else None, pci=pci, above=above, rate=rate, cpu=cpu)
            self._found.gpus.append(gpu)
        for nic in nics:
            self._nic(nic, above, rate, busid)
        if not inner and not nics and not gpus and kind.startswith("0x02"):
            self._found.inferred_nics += 1
            self._found.num_nics += 1
            self._machine.exit(f"nic{self._found.num_nics - 1}", [above], rate)
        if inner:
            try:
                label = self._machine.switch(f"pci {busid}")
            except TopologyError:
                raise self._error(pci, f"a second <pci> with busid {busid!r}") from None
            self._machine.cable(label, above, rate, fallback=True)
            for child in inner:
                self._pci(child, label, cpu)

    def _pcie_rate(self, pci: Element) -> Fraction:
        speed, width = pci.attributes.get("link_speed", ""), pci.attributes.get("link_width", "")
        match = re.match(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*GT/s", speed)
        lane = _LANE.get(match.group(1).removesuffix(".0")) if match else None
        if match and lane is None:
            raise self._error(pci, f"<pci> link_speed {speed!r} is no PCIe speed; known: {', '.join(_LANE)} GT/s")
        lanes = self._whole(pci, "link_width", most=64) if width.strip() else 0
        if lane is None or not lanes:
            self._found.default_speeds += 1
        return gigabytes(Fraction((lanes or 16) * (lane or _LANE["8"]), 80))

    def _nic(self, nic: Element, above: str, rate: Fraction, where: str) -> None:
        nets = [child for child in self._children(nic) if child.tag == "net"]
        for net in nets:
            speed = self._whole(net, "speed") if "speed" in net.attributes else 0
            name = net.attributes.get("name") or f"nic{self._found.num_nics}"
            port = net.attributes.get("port", "1")
            label = f"{name}:{port}" if port not in ("0", "1") else name
            self._found.num_nics += 1
            if not speed:
                self._machine.notes.append(f"{label} at {where} has no speed: taken at its PCIe bandwidth")
            rates = [rate, Fraction(speed * 10**6, 8)] if speed else [rate]
            self._machine.exit(label, [above], min(rates))

    # -- GPUs -------------------------------------------------------------------------------------------------

    def _name_gpus(self) -> None:
        """Label and number GPUs: by rank where the file gives every one its own, else by device, else in order."""
        gpus = self._found.gpus
        for key in ("rank", "dev"):
            numbers = [g.element.attributes.get(key, "") if g.element else "" for g in gpus]
            if len(set(numbers)) == len(numbers) and all(re.fullmatch(r"\d{1,9}", n) for n in numbers):
                order = sorted(range(len(gpus)), key=lambda i, numbers=numbers: int(numbers[i]))  # type: ignore[misc]
                self._found.gpus = [gpus[i] for i in order]
                break
        for number, gpu in enumerate(self._found.gpus):
            gpu.label = self._machine.rank(f"gpu{number}")
            self._machine.cable(gpu.label, gpu.above, gpu.rate, fallback=True)

    def _gpu_links(self) -> None:
        by_bus: dict[str, str] = {}
        for gpu in self._found.gpus:
            busid = gpu.pci.attributes["busid"].lower()
            if busid in by_bus:
                raise self._error(gpu.pci, f"a second GPU with busid {busid!r}")
            by_bus[busid] = gpu.label
        linked = unknown_sm = gone = 0
        for gpu in self._found.gpus:
            for link in gpu.element.children if gpu.element else ():
                if link.tag not in _CHILDREN["gpu"]:
                    raise self._error(link, f"<{link.tag}> in <gpu>{nearest(link.tag, _CHILDREN['gpu'])}")
                if link.tag not in ("nvlink", "xgmi") or gpu.element is None:
                    continue
                rate = self._link_rate(gpu.element, link.tag)
                unknown_sm += rate is None
                total = self._whole(link, "count", most=64) * (rate or gigabytes(20))
                if not total:
                    raise self._error(link, f"<{link.tag}> count must be positive")
                target, kind = link.attributes.get("target", "").lower(), link.attributes.get("tclass", "")
                linked += 1
                if target in by_bus:
                    if by_bus[target] == gpu.label:
                        raise self._error(link, f"<{link.tag}> of {gpu.label} leads to itself")
                    self._machine.cable(gpu.label, by_bus[target], total, one_way=True)
                elif kind.startswith("0x068000"):
                    self._switch = self._switch or self._machine.switch("nvswitch")
                    self._machine.cable(gpu.label, self._switch, total)
                elif kind.startswith("0x068001"):
                    self._machine.cable(gpu.label, gpu.cpu, total)
                elif kind.startswith("0x03"):
                    gone += 1
                else:
                    what = f"<{link.tag}> target {target!r} with tclass {kind!r}"
                    raise self._error(link, f"{what} is neither a GPU of this file nor an NVSwitch (0x068000)")
        notes = self._machine.notes
        if gone:
            notes.append(f"{gone} NVLink or xGMI entries lead to GPUs that the file does not hold: left out")
        if unknown_sm:
            notes.append(f"{unknown_sm} NVLink entries of GPUs without 'sm': taken at 20 GB/s a link")
        if not linked and self._found.gpus:
            notes.append("no NVLink or xGMI is described: only PCIe joins the GPUs here")

    def _link_rate(self, gpu: Element, tag: str) -> Fraction | None:
        if tag == "xgmi":
            name = gpu.attributes.get("gcn", "")
            return gigabytes(next((rate for start, rate in _XGMI if name.startswith(start)), _XGMI_BEFORE))
        if "sm" not in gpu.attributes:
            return None
        sm = self._whole(gpu, "sm", most=999)
        return gigabytes(next(rate for least, rate in _NVLINK if sm >= least))

    # -- the rest ---------------------------------------------------------------------------------------------

    def _join_sockets(self, cpus: list[Element], labels: list[str]) -> None:
        if len(cpus) < 2:
            return
        first = cpus[0].attributes
        known = [first.get(key, "") for key in ("vendor", "arch")]
        rate = next((_BETWEEN_SOCKETS[name] for name in known if name in _BETWEEN_SOCKETS), _BETWEEN_OTHERS)
        for number, a in enumerate(labels):
            for b in labels[number + 1 :]:
                self._machine.cable(a, b, gigabytes(rate), fallback=True)
        self._machine.notes.append(f"NUMA nodes are taken to be joined in pairs at {rate} GB/s")

    def _tell(self) -> None:
        found, notes = self._found, self._machine.notes
        generations = [
            self._whole(gpu.element, "sm", most=999)
            for gpu in found.gpus
            if gpu.element is not None and "sm" in gpu.element.attributes
        ]
        if self._switch and max(generations, default=0) >= _NVLS_SM:
            notes.append(
                "the NVSwitches may be able to copy and add (NVLS), which is not assumed; "
                "'mycel whatif FILE --compute \"*nvswitch\"' tells what it would gain"
            )
        if found.inferred_gpus:
            notes.append(f"{found.inferred_gpus} GPUs inferred from PCI classes 0x03 and 0x12")
        if found.inferred_nics:
            notes.append(
                f"{found.inferred_nics} network interfaces inferred from PCI class 0x02, at their PCIe bandwidth"
            )
        if found.default_speeds:
            notes.append(f"{found.default_speeds} PCI devices without speed or width: taken as PCIe 3 x16 where so")
