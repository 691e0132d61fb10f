"""The table of hardware: what a PCI id, a compute capability, a gcn name or a product's name says about rates.

Every reader of files that machines write takes its rates from here, so that the same GPU has the same links whichever
tool described it. Rates are what one direction of a link carries in practice, as NCCL and RCCL count them, not what
is printed on data sheets.

References:
    NCCL 2.27 sources, ``src/graph/topo.h`` (NVLink by compute capability, PCIe, links between sockets); RCCL,
    ``topo.h`` (xGMI) and ``convertGcnArchToGcnArchName`` (old gcn numbers). PCI ids: the PCI ID repository,
    pci-ids.ucw.cz, vendors 10de, 1002, 15b3, 1d0f, 14e4, 17db and 8086.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

__all__ = [
    "DGX1_NVLINKS",
    "GPUS",
    "Gpu",
    "gcn_name",
    "gigabytes",
    "gpu_by_arch",
    "gpu_by_links",
    "gpu_by_pci",
    "gpu_called",
    "gpus_in",
    "nic_rate",
    "nvlink_rate",
    "pcie_rate",
    "sockets_rate",
    "xgmi_rate",
]

#: How a machine full of such GPUs joins them: by NVSwitch, all to all, in DGX-1's hybrid cube mesh, or in no way that
#: the GPU's name tells (bridges between pairs, PCIe alone).
GpuFabric = Literal["nvswitch", "mesh", "cube", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as people call it.
        arch: NVIDIA's compute capability as an integer (``90``), or AMD's gcn name (``"gfx942"``).
        num_links: NVLinks or xGMI links that it has; 0: none.
        pcie_generation: of its PCIe x16 port.
        fabric: how machines full of them join them, where the part is made for one way.
        ids: PCI device ids.
        pattern: regular expression of its product names.
    """

    name: str
    arch: int | str
    num_links: int
    pcie_generation: int
    fabric: GpuFabric = ""
    ids: tuple[int, ...] = ()
    pattern: str = ""

    @property
    def kind(self) -> str:
        """``"NVLink"`` or ``"xGMI"``."""
        return "NVLink" if isinstance(self.arch, int) else "xGMI"

    @property
    def link_rate(self) -> Fraction:
        """Bytes a second of one direction of one of its links."""
        return nvlink_rate(self.arch) if isinstance(self.arch, int) else xgmi_rate(self.arch)

    @property
    def pcie(self) -> Fraction:
        """Bytes a second of one direction of its PCIe port."""
        return pcie_rate(self.pcie_generation)


def gigabytes(number: int | str | Fraction) -> Fraction:
    """Bytes a second of ``number`` GB/s.

    Examples:
        >>> gigabytes("20.6")
        Fraction(20600000000, 1)
    """
    return Fraction(number) * 10**9


def _nv(name: str, sm: int, links: int, pcie: int, ids: str = "", pattern: str = "", fabric: GpuFabric = "") -> Gpu:
    return Gpu(
        name=name, arch=sm, num_links=links, pcie_generation=pcie, fabric=fabric,
        ids=tuple(int(part, 16) for part in ids.split()), pattern=pattern,
    )  # fmt: skip


def _amd(name: str, gcn: str, links: int, pcie: int, ids: str, pattern: str, fabric: GpuFabric = "") -> Gpu:
    return Gpu(
        name=name, arch=gcn, num_links=links, pcie_generation=pcie, fabric=fabric,
        ids=tuple(int(part, 16) for part in ids.split()), pattern=pattern,
    )  # fmt: skip


#: Special names before general ones: the first whose pattern is found in a product's name is it.
GPUS: tuple[Gpu, ...] = (
    _nv("VR200", 107, 36, 6, "307f", r"\bVR200", "nvswitch"),
    _nv("GB300", 103, 18, 6, "31c2 31c3", r"\bGB300", "nvswitch"),
    _nv("GB200", 100, 18, 5, "2941", r"\bGB200", "nvswitch"),
    _nv("GB10", 121, 0, 5, "2e12", r"\bGB10\b"),
    _nv("B300", 103, 18, 6, "3182", r"\bB300", "nvswitch"),
    _nv("B200", 100, 18, 5, "2901", r"\bB200", "nvswitch"),
    _nv("B100", 100, 18, 5, "29bc", r"\bB100\b", "nvswitch"),
    _nv("GH200", 90, 18, 5, "2342 2345 2348", r"\bGH200"),
    _nv("H200 NVL", 90, 18, 5, "233b", r"\bH200[ -]NVL"),
    _nv("H200", 90, 18, 5, "2335", r"\bH200\b", "nvswitch"),
    _nv("H20", 90, 18, 5, "2329 232c", r"\bH20\b", "nvswitch"),
    _nv("H800 PCIe", 90, 8, 5, "2322", r"\bH800[ -]PCIe"),
    _nv("H800", 90, 8, 5, "2324", r"\bH800\b", "nvswitch"),
    _nv("H100 NVL", 90, 12, 5, "2321", r"\bH100[ -]NVL"),
    _nv("H100 PCIe", 90, 12, 5, "2331", r"\bH100[ -]PCIe"),
    _nv("H100", 90, 18, 5, "2330 2336 2337 2339", r"\bH100\b", "nvswitch"),
    _nv("A800 PCIe", 80, 8, 4, "20f5 20f6", r"\bA800[ -](?:\d+GB[ -])?PCIe|\bA800 40GB Active"),
    _nv("A800", 80, 8, 4, "20bd 20f3", r"\bA800\b", "nvswitch"),
    _nv("A100 PCIe", 80, 12, 4, "20b1 20b5 20f1", r"\bA100[ -](?:\d+GB[ -])?PCI"),
    _nv("A100 SXM-64GB", 80, 12, 4, "20b3", r"\bA100[ -]SXM-64GB"),
    _nv("A100", 80, 12, 4, "20b0 20b2", r"\bA100\b", "nvswitch"),
    _nv("A30", 80, 4, 4, "20b7", r"\bA30\b"),
    _nv("RTX A6000", 86, 4, 4, "2230", r"\bRTX A6000"),
    _nv("A40", 86, 4, 4, "2235", r"\bA40\b"),
    _nv("A10", 86, 0, 4, "2236 2237", r"\bA10G?\b"),
    _nv("RTX 3090", 86, 4, 4, "2203 2204", r"\bRTX 3090"),
    _nv("L40S", 89, 0, 4, "26b9", r"\bL40S"),
    _nv("L40", 89, 0, 4, "26b5", r"\bL40\b"),
    _nv("L4", 89, 0, 4, "27b8", r"\bL4\b"),
    _nv("RTX 4090", 89, 0, 4, "2684 2685", r"\bRTX 4090"),
    _nv("RTX 5090", 120, 0, 5, "2b85", r"\bRTX 5090"),
    _nv("RTX PRO 6000", 120, 0, 5, "2bb1 2bb5", r"\bRTX PRO 6000"),
    _nv("T4", 75, 0, 3, "1eb8", r"\bT4\b"),
    _nv("V100 PCIe", 70, 0, 3, "1db4 1db6", r"\bV100[ -](?:PCIE|FHHL)"),
    _nv("V100-SXM3", 70, 6, 3, "1db8", r"\bV100-SXM3", "nvswitch"),
    _nv("V100", 70, 6, 3, "1db1 1db5", r"\bV100\b", "cube"),
    _nv("P100 PCIe", 60, 0, 3, "15f7 15f8", r"\bP100[ -]PCIE"),
    _nv("P100", 60, 4, 3, "15f9", r"\bP100\b"),
    _amd("MI355X", "gfx950", 7, 5, "75a3 75b3", r"\bMI355X?", "mesh"),
    _amd("MI350X", "gfx950", 7, 5, "75a0 75b0", r"\bMI350X?", "mesh"),
    _amd("MI325X", "gfx942", 7, 5, "74a5 74b9", r"\bMI325X?", "mesh"),
    _amd("MI308X", "gfx942", 7, 5, "74a2 74a8 74b6", r"\bMI308X?", "mesh"),
    _amd("MI300A", "gfx942", 6, 5, "74a0", r"\bMI300A"),
    _amd("MI300X", "gfx942", 7, 5, "74a1 74a9 74b5 74bd", r"\bMI300X?", "mesh"),
    _amd("MI250", "gfx90a", 8, 4, "7408 740c", r"\bMI250X?"),
    _amd("MI210", "gfx90a", 3, 4, "740f", r"\bMI210"),
    _amd("MI100", "gfx908", 3, 4, "7388 738c 738e", r"\bMI100"),
    _amd("MI50", "gfx906", 2, 4, "66a0 66a1", r"\bMI[56]0\b"),
)

#: DGX-1: NVLinks between GPUs (the hybrid cube mesh of NVIDIA's DGX-1 system architecture white paper, 2017).
DGX1_NVLINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip

_NVIDIA, _AMD = 0x10DE, 0x1002

#: GB/s a direction of one NVLink from this compute capability on; workstation GPUs of 8.6 have slower ones.
_NVLINK = ((100, "40.1"), (90, "20.6"), (70, "20"), (0, "18"))
_NVLINK_SLOW = {86: "12"}
#: Generation of PCIe from this compute capability on.
_PCIE_OF = ((90, 5), (80, 4), (0, 3))
#: GB/s a direction of one xGMI link by the beginning of the gcn name.
_XGMI = (("gfx95", 48), ("gfx94", 48), ("gfx90a", 36))
_XGMI_BEFORE = 24
#: RCCL's old numbers for gcn names where the name is not "gfx" and the number.
_OLD_GCN = {"910": "gfx90a"}
#: What so many NVLinks of one GPU hint at, where nothing names it: those of the most usual machines.
_BY_LINKS = {36: "VR200", 18: "H100", 12: "A100", 8: "A800"}
#: Links of GPUs before generation 6: more in one row of a matrix are counted through a switch, once a peer.
_MOST_LINKS = 18
#: GB/s a direction between two sockets, by the vendor or the architecture of the CPUs.
_BETWEEN_SOCKETS = {"AuthenticAMD": 16, "GenuineIntel": 10, "arm64": 6, "ppc64": 32}
_BETWEEN_OTHERS = 10
#: The same by the model of an Intel CPU: Sapphire Rapids, Emerald Rapids, and Granite Rapids, which has no less.
_INTEL = {0x8F: 22, 0xCF: 40, 0xAD: 40, 0xAE: 40}
_SKYLAKE = 0x55

#: Gbit/s of a port of network interfaces by vendor and device.
_NICS: dict[tuple[int, int], int] = {
    (0x15B3, 0x1013): 100, (0x15B3, 0x1014): 100,  # ConnectX-4 and its virtual functions
    (0x15B3, 0x1015): 25, (0x15B3, 0x1016): 25,  # ConnectX-4 Lx
    (0x15B3, 0x1017): 100, (0x15B3, 0x1018): 100, (0x15B3, 0x1019): 100, (0x15B3, 0x101A): 100,  # ConnectX-5
    (0x15B3, 0x101B): 200, (0x15B3, 0x101C): 200,  # ConnectX-6
    (0x15B3, 0x101D): 100, (0x15B3, 0x101F): 25,  # ConnectX-6 Dx, Lx
    (0x15B3, 0x1021): 400, (0x15B3, 0x1023): 800,  # ConnectX-7, ConnectX-8
    (0x15B3, 0xA2D6): 200, (0x15B3, 0xA2DC): 400,  # BlueField-2, BlueField-3
    (0x1D0F, 0xEFA0): 100, (0x1D0F, 0xEFA1): 100, (0x1D0F, 0xEFA2): 100,  # EFA; 0xefa3 has ports of 200 and of 400
    (0x14E4, 0x1750): 100, (0x14E4, 0x1760): 400,  # Broadcom 57508, 57608
    (0x17DB, 0x0501): 200,  # Cassini (Slingshot 11)
    (0x8086, 0x1592): 100, (0x8086, 0x1593): 25, (0x8086, 0x24F0): 100,  # E810 C, E810 XXV, Omni-Path
}  # fmt: skip


def nvlink_rate(sm: int) -> Fraction:
    """Bytes a second of one direction of one NVLink of a GPU of compute capability ``sm``.

    Examples:
        >>> nvlink_rate(90) == gigabytes("20.6"), nvlink_rate(86) == gigabytes(12)
        (True, True)
    """
    return gigabytes(_NVLINK_SLOW.get(sm) or next(rate for least, rate in _NVLINK if sm >= least))


def gcn_name(gcn: str) -> str:
    """The gcn name of what older files write as a number.

    Examples:
        >>> gcn_name("910"), gcn_name("940"), gcn_name("gfx942:sramecc+:xnack-")
        ('gfx90a', 'gfx940', 'gfx942')
    """
    short = gcn.partition(":")[0]
    return _OLD_GCN.get(short) or (f"gfx{short}" if re.fullmatch(r"\d{3,4}", short) else short)


def xgmi_rate(gcn: str) -> Fraction:
    """Bytes a second of one direction of one xGMI link of a GPU, by its gcn name or old number.

    Examples:
        >>> xgmi_rate("910") == xgmi_rate("gfx90a") == gigabytes(36)
        True
    """
    name = gcn_name(gcn)
    return gigabytes(next((rate for start, rate in _XGMI if name.startswith(start)), _XGMI_BEFORE))


def pcie_rate(generation: int, lanes: int = 16) -> Fraction:
    """Bytes a second of one direction of PCIe: 12 GB/s for 16 lanes of generation 3, twice that for each later one.

    Args:
        generation: 1 to 7.
        lanes: 1 to 64.

    Examples:
        >>> pcie_rate(3) == gigabytes(12), pcie_rate(5, lanes=4) == gigabytes(12)
        (True, True)
    """
    return gigabytes(Fraction(12, 16)) * lanes * Fraction(2) ** (generation - 3)


def sockets_rate(*known: str, model: int | None = None) -> Fraction:
    """Bytes a second of one direction between two CPU sockets.

    Args:
        known: vendor and architecture; the first that is known decides.
        model: number of the CPU's model (of family 6), which tells Intel's generations apart.

    Examples:
        >>> sockets_rate("GenuineIntel", model=143) == gigabytes(22), sockets_rate("AuthenticAMD") == gigabytes(16)
        (True, True)
    """
    name = next((name for name in known if name in _BETWEEN_SOCKETS), "")
    if name == "GenuineIntel" and model is not None:
        return gigabytes(_INTEL.get(model) or (10 if model >= _SKYLAKE else 6))
    return gigabytes(_BETWEEN_SOCKETS.get(name, _BETWEEN_OTHERS))


def gpu_by_pci(vendor: int | None, device: int | None) -> Gpu | None:
    """The GPU of a PCI id; without a vendor, whichever has such a device.

    Examples:
        >>> gpu_by_pci(0x10DE, 0x2335).name
        'H200'
    """
    for gpu in GPUS:
        if device in gpu.ids and vendor in (None, _NVIDIA if gpu.kind == "NVLink" else _AMD):
            return gpu
    return None


def gpu_by_arch(arch: int | str) -> Gpu:
    """A GPU of which only the compute capability, or the gcn name or number, is known: that decides its link rate.

    Examples:
        >>> gpu_by_arch(90).name, gpu_by_arch("910").name, gpu_by_arch(90).link_rate == gpu_called("H100").link_rate
        ('sm_90', 'gfx90a', True)
    """
    if isinstance(arch, int):
        generation = next(pcie for least, pcie in _PCIE_OF if arch >= least)
        return Gpu(name=f"sm_{arch}", arch=arch, num_links=0, pcie_generation=generation)
    name = gcn_name(arch)
    return Gpu(name=name, arch=name, num_links=0, pcie_generation=5 if name.startswith(("gfx94", "gfx95")) else 4)


def gpu_by_links(total: int, most: int, size: int) -> Gpu | None:
    """The NVIDIA GPU that NVLinks alone hint at, ``None`` where they do not.

    Args:
        total: NVLinks that a matrix shows of one GPU, to all others.
        most: those to one other.
        size: GPUs that are joined.

    Examples:
        >>> gpu_by_links(7 * 12, 12, 8).name, gpu_by_links(6, 2, 8).name, gpu_by_links(4, 4, 2).name
        ('A100', 'V100', 'RTX A6000')
    """
    if size == 2 and most == 4:
        return _named("RTX A6000")
    if most in _BY_LINKS and (size == 2 or total > most):
        return _named(_BY_LINKS[most])
    if total > _MOST_LINKS:
        return _named("V100-SXM3") if most == 6 else None
    if total in _BY_LINKS:
        return _named(_BY_LINKS[total])
    return _named("V100") if total <= 6 else None


def _named(name: str) -> Gpu:
    return next(gpu for gpu in GPUS if gpu.name == name)


def gpu_called(text: str) -> Gpu | None:
    """The GPU that a product's name means.

    Examples:
        >>> gpu_called("NVIDIA H100 80GB HBM3").name, gpu_called("h200-nvl").name
        ('H100', 'H200 NVL')
    """
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, text, re.IGNORECASE)), None)


def gpus_in(text: str) -> tuple[Gpu, ...]:
    """All GPUs that lines of a text name, each once; for what stands around a pasted matrix.

    Examples:
        >>> [gpu.name for gpu in gpus_in("GPU 0: NVIDIA A100-SXM4-80GB (UUID: ...)")]
        ['A100']
    """
    found = {gpu.name: gpu for line in text.splitlines() if (gpu := gpu_called(line))}
    return tuple(found.values())


def nic_rate(vendor: int | None, device: int | None) -> Fraction | None:
    """Bytes a second of one direction of a network interface's port, ``None`` where the PCI id is not known.

    Examples:
        >>> nic_rate(0x15B3, 0x1021) == gigabytes(50)
        True
    """
    gbits = _NICS.get((vendor or 0, device or 0))
    return None if gbits is None else Fraction(gbits * 10**9, 8)
