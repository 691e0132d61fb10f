"""A machine with GPUs, from what a reader found in a file to links with rates.

Readers of NCCL's XML, of hwloc's, and of the matrices that vendors' tools print say here which GPUs there are, how
many links join which, and where interfaces are plugged in. What a link carries is decided here, by one table
(``mycel.topology.hardware``), so that two files of one machine give the same fabric; what had to be assumed on the
way goes to the description's notes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from mycel.errors import TopologyError
from mycel.topology.formats.description import Description
from mycel.topology.given import NOTHING, Given
from mycel.topology.hardware import DGX1_NVLINKS, Gpu, gigabytes, pcie_rate, sockets_rate

__all__ = ["Groups", "Machine", "in_gigabytes"]

#: GB/s a direction of an NVLink of a GPU of which nothing is known.
_ANY_LINK = 20
#: PCIe of which nothing is known.
_ANY_PCIE = 3
#: GPUs on a board with NVSwitches; machines of 16 (DGX-2, HGX A100 16-GPU) join those of two boards by cables that no
#: file of theirs shows.
_BOARD = 8
_LINK = {"NVLink": "NVLink", "xGMI": "xGMI link"}
#: Compute capability from which GPUs can ask NVSwitches to copy and add.
_NVLS_SM = 90


class Groups:
    """Sets that grow together: which of some things belong to one."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def find(self, item: str) -> str:
        """The member that stands for the set of ``item``."""
        above = self._above.setdefault(item, item)
        while above != self._above[above]:
            self._above[above] = self._above[self._above[above]]
            above = self._above[above]
        return above

    def join(self, a: str, b: str) -> None:
        """Make one set of those of two things; the first stands for it."""
        self._above[self.find(b)] = self.find(a)


@dataclass(slots=True, kw_only=True)
class _Seat:
    """A GPU: what it is, where that is known, and whether it was told by its PCI class alone."""

    label: str
    model: Gpu | None
    bare: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uplink:
    """NVLinks of a GPU to a switch; of a device, where the GPU is a part of one."""

    gpu: str
    switch: str
    count: int
    device: str


def in_gigabytes(rate: Fraction) -> str:
    """A rate for people.

    Examples:
        >>> in_gigabytes(gigabytes("20.6"))
        '20.6 GB/s'
    """
    return f"{float(rate / 10**9):g} GB/s"


class Machine:
    """One machine in the making.

    Args:
        name: of the topology.
        source: name of the file, for messages.
        given: what a person says about it.
    """

    def __init__(self, name: str, source: str, given: Given = NOTHING) -> None:
        self.description = Description(name, source)
        self.notes = self.description.notes
        self.given = given
        self._source = source
        self._seats: dict[str, _Seat] = {}
        self._direct: dict[tuple[str, str], int] = {}
        self._switched: list[_Uplink] = []
        self._guessed: dict[tuple[str, str], list[str]] = {}
        self._assumed_pcie: dict[tuple[str, Fraction], list[str]] = {}
        self._coherent: dict[Fraction, list[str]] = {}

    # -- what a reader says -----------------------------------------------------------------------------------

    def gpu(self, label: str, model: Gpu | None, node: str | None = None, *, bare: bool = False) -> str:
        """Add a GPU, which is a rank.

        Args:
            label: its name.
            model: what it is, as far as the file says.
            node: the host it is in, of several.
            bare: the file holds no more of it than its PCI device, so that links of it may be missing.
        """
        self._seats[label] = _Seat(label=label, model=self.given.gpu or model, bare=bare)
        return self.description.rank(label, node)

    def guess(self, label: str, model: Gpu | None, why: str) -> None:
        """What a GPU is taken for where the file does not name it."""
        seat = self._seats[label]
        if seat.model is None and model is not None:
            seat.model = model
            self._guessed.setdefault((model.name, why), []).append(label)

    def model(self, label: str) -> Gpu | None:
        """What a GPU is known or taken to be."""
        return self._seats[label].model

    def link(self, src: str, dst: str, count: int) -> None:
        """``count`` NVLinks or xGMI links from one GPU to another, one way."""
        self._direct[src, dst] = self._direct.get((src, dst), 0) + count

    def switched(self, gpu: str, switch: str, count: int, *, device: str = "") -> None:
        """``count`` NVLinks of a GPU to a switch; switches that GPUs share are one vertex.

        Args:
            gpu: its label.
            switch: what tells the switch from others.
            count: of links.
            device: vertex of the device that the GPU is a part of, whose links its parts share.
        """
        self._switched.append(_Uplink(gpu=gpu, switch=switch, count=count, device=device))

    def link_rate(self, label: str) -> Fraction:
        """Bytes a second of one direction of one NVLink or xGMI link of a GPU."""
        model = self._seats[label].model
        return self.given.link or (model.link_rate if model else gigabytes(_ANY_LINK))

    def pcie_of(self, label: str, said: Fraction | None = None) -> Fraction:
        """Bytes a second of one direction of a GPU's PCIe port: as a person says, the file, or the kind of GPU."""
        model = self._seats[label].model
        if said := self.given.pcie or said:
            return said
        generation = model.pcie_generation if model else _ANY_PCIE
        why = (
            f"as {model.name} have it" if model else "for nothing is known of it; 'FILE:pcie=24 GB/s' says otherwise"
        )
        labels = self._assumed_pcie.setdefault((f"generation {generation}, {why}", pcie_rate(generation)), [])
        labels += [label] if label not in labels else []
        return pcie_rate(generation)

    def nic_of(self, name: str, *known: Fraction | None) -> Fraction:
        """Bytes a second of one direction of an interface: as a person says, or the least of what is known."""
        said = self.given.nics.get(name) or self.given.nic
        return said or min([rate for rate in known if rate] or [pcie_rate(_ANY_PCIE)])

    def _class_of(self, label: str) -> str:
        """What links of a GPU to others are."""
        model = self._seats[label].model
        return "xgmi" if model is not None and model.kind == "xGMI" else "nvlink"

    def coherent(self, gpu: str, cpu: str, rate: Fraction) -> None:
        """A chip-to-chip link (C2C) of a GPU to its CPU."""
        self._coherent.setdefault(rate, []).append(gpu)
        self.pcie(gpu, cpu, rate)

    def pcie(self, a: str, b: str, rate: Fraction) -> None:
        """A PCIe cable."""
        self.description.cable(a, b, rate, fallback=True, link_class="pcie")

    def join_numa(self, labels: Iterable[str], *cpus: str, model: str = "") -> None:
        """Join NUMA nodes in pairs, at what sockets of such CPUs (vendor, architecture, model's number) have."""
        nodes = list(labels)
        rate = sockets_rate(*cpus, model=int(model) if model.isdecimal() and len(model) < 6 else None)
        for number, a in enumerate(nodes):
            for b in nodes[number + 1 :]:
                self.description.cable(a, b, rate, fallback=True, link_class="pcie")
        if len(nodes) > 1:
            self.notes.append(f"NUMA nodes are taken to be joined in pairs at {in_gigabytes(rate)}")

    # -- what follows -----------------------------------------------------------------------------------------

    def finish(self) -> Description:
        """The description, with links at their rates.

        Raises:
            TopologyError: the GPUs that a person names cannot have the links that the file describes.
        """
        named = self.given.gpu
        if named is not None and not named.num_links and (self._direct or self._switched):
            raise TopologyError(f"{self._source}: describes links between GPUs, and {named.name} have none")
        if not (self._direct or self._switched):
            self._complete()
        for (a, b), count in self._direct.items():
            self.description.cable(a, b, count * self.link_rate(a), one_way=True, link_class=self._class_of(a))
        self._make_switches()
        self._tell()
        return self.description

    def _complete(self) -> None:
        """Links that the file does not describe, where the GPUs are made to be joined in one way."""
        seats = list(self._seats.values())
        models = {seat.model for seat in seats}
        model = next(iter(models), None)
        if len(seats) < 2:
            return
        if len(models) > 1 or model is None or not (self.given.gpu or any(seat.bare for seat in seats)):
            model = None
        labels, how = [seat.label for seat in seats], ""
        if model and model.fabric == "nvswitch":
            how = f"{model.num_links} NVLinks of each GPU to one NVSwitch"
            for label in labels:
                self.switched(label, "nvswitch", model.num_links)
        elif model and model.fabric == "mesh" and len(labels) <= model.num_links + 1:
            how = "one xGMI link between any two GPUs"
            for a in labels:
                for b in labels:
                    if a != b:
                        self.link(a, b, 1)
        elif model and model.fabric == "cube" and len(labels) in (4, 8):
            how = f"the NVLinks of the {'first four GPUs' if len(labels) == 4 else 'GPUs'} of a DGX-1, in this order"
            for (first, second), count in DGX1_NVLINKS.items():
                if second < len(labels):
                    self.link(labels[first], labels[second], count)
                    self.link(labels[second], labels[first], count)
        if model and how:
            self.notes.append(
                f"the file describes no {model.kind}: completed, as machines of {len(labels)} {model.name} have it, "
                f"by {how}"
            )
        else:
            self.notes.append(
                "no NVLink or xGMI is described: only PCIe joins the GPUs here; if the machine has some, name its "
                "GPUs, for example 'FILE:gpu=H100'"
            )

    def _make_switches(self) -> None:
        """One vertex for NVSwitches between which some GPU has links to both, as in one machine all have."""
        groups = Groups()
        for link in self._switched:
            groups.join(f"switch {link.switch}", f"gpu {link.gpu}")
        boards: dict[str, set[str]] = {}
        for link in self._switched:
            boards.setdefault(groups.find(f"gpu {link.gpu}"), set()).add(link.gpu)
        models = [self._seats[link.gpu].model for link in self._switched]
        if [len(gpus) for gpus in boards.values()] == [_BOARD, _BOARD] and all(
            m and m.arch in (70, 80) for m in models
        ):
            groups.join(*boards)
            self.notes.append(f"the NVSwitches of two boards of {_BOARD} GPUs are taken to be joined without loss")
        places = list(dict.fromkeys(groups.find(place) for place in boards))
        labels = {
            place: self.description.switch("nvswitch" if len(places) == 1 else f"nvswitch{number}")
            for number, place in enumerate(places)
        }
        shared: set[tuple[str, str]] = set()
        for link in self._switched:
            rate, end = link.count * self.link_rate(link.gpu), labels[groups.find(f"gpu {link.gpu}")]
            if link.device:
                self.description.cable(link.gpu, link.device, rate, link_class="nvlink")
            if (link.device, link.switch) not in shared:
                self.description.cable(link.device or link.gpu, end, rate, link_class="nvlink")
            if link.device:
                shared.add((link.device, link.switch))

    def _tell(self) -> None:
        first: list[str] = []
        for (name, why), labels in self._guessed.items():
            others = (
                "B200 and GB200 have as many, twice as fast: " if name == "H100" else "if they are others, say so: "
            )
            other = "B200" if name == "H100" else "NAME"
            first.append(f"{_some(labels)}: not named; taken for {name} by {why}; {others}'FILE:gpu={other}'")
        linked = {link.gpu for link in self._switched} | {gpu for ends in self._direct for gpu in ends}
        by_rate: dict[tuple[str, Fraction], list[str]] = {}
        for label in (label for label in self._seats if label in linked):
            model = self._seats[label].model
            what = f"one {_LINK[model.kind]} of {model.name}" if model else "one NVLink of a GPU that is not known"
            by_rate.setdefault((what, self.link_rate(label)), []).append(label)
        if linked and len(linked) < len(self._seats):
            without = [label for label in self._seats if label not in linked]
            first.append(f"{_some(without)}: no NVLink or xGMI of it is described, although others have some")
        first += [f"{what} is taken at {in_gigabytes(rate)} a direction" for what, rate in by_rate]
        for (why, rate), labels in self._assumed_pcie.items():
            first.append(f"PCIe of {_some(labels)} is not described: {in_gigabytes(rate)} a direction, {why}")
        for rate, labels in self._coherent.items():
            first.append(f"{_some(labels)}: joined to the CPU by C2C at {in_gigabytes(rate)}")
        self.notes[:0] = first
        models = [self._seats[link.gpu].model for link in self._switched]
        if any(model and isinstance(model.arch, int) and model.arch >= _NVLS_SM for model in models):
            self.notes.append(
                "the NVSwitches may be able to copy and add (NVLS), which is not assumed; "
                "'mycel whatif FILE --compute \"*nvswitch*\"' tells what it would gain"
            )


def _some(labels: list[str]) -> str:
    return ", ".join(labels) if len(labels) < 4 else f"{labels[0]} ... {labels[-1]} ({len(labels)})"
