"""Network files of simulators: ASTRA-sim's analytical ``network.yml`` and SimAI's topology text.

ASTRA-sim: a list of dimensions, each a Ring, Switch or FullyConnected of so many NPUs, with the bandwidth of a link
in GB/s, of 2^30 bytes, and its latency in ns; the first dimension varies fastest. SimAI: a line of counts, the
numbers of the switches, then ``source destination bandwidth delay error-rate`` a cable.

References:
    W. Won et al., "ASTRA-sim2.0: Modeling Hierarchical Networks and Disaggregated Systems for Large-model Training
    at Scale", ISPASS 2023. X. Wang et al., "SimAI: Unifying Architecture Design and Performance Tuning for
    Large-Scale LLM Training with Scalability and Precision", NSDI 2025.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import product

import yaml

from mycel.errors import MycelError, TopologyError
from mycel.names import nearest
from mycel.topology.capacities import read_rate, read_seconds
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.limits import MAX_LINKS, MAX_VERTICES
from mycel.topology.yaml_nodes import YamlReader, compose

__all__ = ["ASTRA_SIM", "SIMAI", "parse_astra_sim", "parse_simai"]

#: Bytes of what ASTRA-sim's files call a GB: its network layer multiplies by 2^30 (``NetworkFunction.cpp``).
_GB = 1 << 30
_KEYS = ("topology", "npus_count", "bandwidth", "latency")
_KINDS = ("Ring", "Switch", "FullyConnected")
_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,9})?|\.\d{1,9}")


def parse_astra_sim(text: str, *, source: str) -> Description:
    """The network that an ASTRA-sim network file describes.

    Raises:
        TopologyError: not YAML, or not such a file; with the line.
    """
    read = YamlReader(source)
    root = compose(text, source=source)
    top = read.mapping(root, _KEYS, required=_KEYS, what="an ASTRA-sim network")
    columns = {key: _entries(read, top[key], key) for key in _KEYS}
    for key in _KEYS[1:]:
        if len(columns[key]) != len(columns["topology"]):
            got, wanted = len(columns[key]), len(columns["topology"])
            raise read.error(top[key], f"{key} has {got} entries; topology has {wanted}")
    kinds = [read.text(node, what="topology") for node in columns["topology"]]
    for kind, node in zip(kinds, columns["topology"], strict=True):
        if kind not in _KINDS:
            raise read.error(node, f"unknown topology {kind!r}{nearest(kind, _KINDS)}; known: {', '.join(_KINDS)}")
    counts = [read.whole(n, what="npus_count", least=1, most=MAX_VERTICES) for n in columns["npus_count"]]
    # Whole bytes: 0.1 GB/s of these would be a fraction of one.
    rates = [Fraction(int(_decimal(read, node, "bandwidth") * _GB)) for node in columns["bandwidth"]]
    for rate, node in zip(rates, columns["bandwidth"], strict=True):
        if rate < 1:
            raise read.error(node, "bandwidth must be positive")
    delays = [float(_decimal(read, node, "latency") / 10**9) for node in columns["latency"]]
    total = math.prod(counts)
    each = sum(n - 1 if k == "FullyConnected" else 2 for n, k in zip(counts, kinds, strict=True))
    if total > MAX_VERTICES or total * each > MAX_LINKS:
        raise read.error(top["npus_count"], f"{total} NPUs and about {total * each} links are too many")
    network = Description(re.sub(r"\.ya?ml$", "", source.rpartition("/")[2]), source)
    for number in range(total):
        network.rank(str(number))
    stride = 1
    for dim, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        for high, low in product(range(total // (stride * count)), range(stride)):
            group = [str(high * stride * count + i * stride + low) for i in range(count)]
            _dimension(network, kind, group, rates[dim], delays[dim], f"dim{dim}/{high * stride + low}")
        stride *= count
    return network


def _dimension(
    network: Description, kind: str, group: list[str], rate: Fraction, latency_s: float, label: str
) -> None:
    if kind == "Switch":
        network.switch(label)
        pairs = [(member, label) for member in group]
    elif kind == "Ring":
        pairs = [(group[i], group[(i + 1) % len(group)]) for i in range(len(group) if len(group) > 2 else 1)]
    else:
        pairs = [(a, b) for i, a in enumerate(group) for b in group[i + 1 :]]
    for a, b in pairs:
        if a != b:
            network.cable(a, b, rate, latency_s)


def _entries(read: YamlReader, node: yaml.Node, key: str) -> list[yaml.Node]:
    found: list[yaml.Node] = [node] if isinstance(node, yaml.ScalarNode) else read.items(node, what=key)
    if not found or len(found) > 16:
        raise read.error(node, f"{key} must have from 1 to 16 entries; got {len(found)}")
    return found


def _decimal(read: YamlReader, node: yaml.Node, key: str) -> Fraction:
    text = read.text(node, what=key)
    if not _DECIMAL.fullmatch(text):
        raise read.error(node, f"{key} must be a decimal number; got {text[:40]!r}")
    return Fraction(text)


def parse_simai(text: str, *, source: str) -> Description:
    """The network that a SimAI topology text describes.

    Raises:
        TopologyError: not such a file; with the line.
    """
    rows = [(number, line.split()) for number, line in enumerate(text.splitlines(), start=1) if line.split()]
    line, counts = rows[0]
    names = ("nodes", "GPUs a server", "NVSwitches", "switches", "links")
    if len(counts) < 6 or not all(re.fullmatch(r"\d{1,7}", word) for word in counts[:5]):
        raise TopologyError(f"{source}:{line}: expected the numbers of {', '.join(names)}, and the GPU type")
    num_nodes, per_server, num_nvswitches, num_switches, num_links = map(int, counts[:5])
    num_gpus = num_nodes - num_nvswitches - num_switches
    if num_gpus < 2 or num_nodes > MAX_VERTICES or num_links > MAX_LINKS or per_server < 1:
        raise TopologyError(
            f"{source}:{line}: {num_nodes} nodes less {num_nvswitches} NVSwitches and {num_switches} switches leave "
            f"{num_gpus} GPUs ({per_server} a server, {num_links} links): out of range"
        )
    switches: list[int] = []
    at = 1
    while at < len(rows) and len(switches) < num_nvswitches + num_switches:
        line, words = rows[at]
        switches += [_node(word, num_nodes, f"{source}:{line}") for word in words]
        at += 1
    if len(switches) != num_nvswitches + num_switches or len(set(switches)) != len(switches):
        raise TopologyError(
            f"{source}:{line}: {len(set(switches))} different switches are numbered; "
            f"expected {num_nvswitches + num_switches}"
        )
    network = Description(_stem(source), source, unit="Gbit/s")
    labels: dict[int, str] = {}
    for order, number in enumerate(sorted(set(range(num_nodes)) - set(switches))):
        node = f"server{order // per_server}"
        labels[number] = network.rank(str(number), node)
    for order, number in enumerate(switches):
        nvswitch = order < num_nvswitches
        labels[number] = network.switch(f"{'nvswitch' if nvswitch else 'switch'}{number}")
    links = rows[at:]
    if len(links) != num_links:
        raise TopologyError(f"{source}:{rows[0][0]}: {num_links} links are announced, {len(links)} follow")
    for line, words in links:
        where = f"{source}:{line}"
        if len(words) < 4:
            raise TopologyError(f"{where}: expected source, destination, bandwidth, delay and error rate")
        src, dst = (_node(word, num_nodes, where) for word in words[:2])
        if src == dst:
            raise TopologyError(f"{where}: a cable from {src} to itself")
        try:
            rate, latency_s = read_rate(words[2]), read_seconds(words[3])
        except MycelError as error:
            raise TopologyError(f"{where}: {error}") from None
        network.cable(labels[src], labels[dst], rate, latency_s)
    return network


def _stem(source: str) -> str:
    return re.sub(r"\.txt$", "", source.rpartition("/")[2])


def _node(word: str, num_nodes: int, where: str) -> int:
    if not re.fullmatch(r"\d{1,7}", word) or int(word) >= num_nodes:
        raise TopologyError(f"{where}: no node {word[:40]!r}; nodes are 0..{num_nodes - 1}")
    return int(word)


ASTRA_SIM = FileFormat(
    name="ASTRA-sim",
    suffixes=(".yml", ".yaml"),
    signature=r"^[{ ]*npus_count\s*:",
    parse=parse_astra_sim,
    becomes="one rank an NPU, dimension by dimension; its GB are 2^30 bytes, as ASTRA-sim's network layer takes them",
    written_by="ASTRA-sim network `.yml`",
)


SIMAI = FileFormat(
    name="SimAI",
    suffixes=(".txt",),
    signature=r"\A\s*(\d+[ \t]+){5}\S",
    parse=parse_simai,
    becomes="as it stands",
    written_by="SimAI topology text",
)
