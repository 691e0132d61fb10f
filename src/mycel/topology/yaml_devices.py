"""Devices in a topology's YAML: one for all, one a box, or by the names of boxes and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import yaml

from mycel.errors import MycelError
from mycel.topology.device import DEVICES, Device, device_called
from mycel.topology.model import Topology, Vertex
from mycel.topology.yaml_nodes import YamlReader
from mycel.units import parse_size

__all__ = ["DeviceReader", "device_lines"]

_KEYS = ("name", "flops", "memory", "memory_gbps", "float8_flops", "source")


class DeviceReader:
    """Takes devices from the nodes of a YAML text.

    Args:
        read: of the text.
    """

    def __init__(self, read: YamlReader) -> None:
        self._read = read
        self._boxes: dict[str, Device] = {}

    def of_box(self, box: str, node: yaml.Node) -> None:
        """Note what a box's ranks have."""
        self._boxes[box] = self._device(node, f"box {box}: device")

    def given(self, vertices: Sequence[Vertex], top: Mapping[str, yaml.Node]) -> tuple[Vertex, ...]:
        """The vertices with their devices.

        Args:
            vertices: of the fabric.
            top: nodes at the top of the text by key.

        Raises:
            TopologyError: a device that cannot be read, or the name of no rank or box.
        """
        usual = self._device(top["device"], "device") if "device" in top else None
        named: dict[str, Device] = {}
        if "devices" in top:
            ranks = [vertex for vertex in vertices if vertex.kind == "rank"]
            names = [*dict.fromkeys(vertex.node for vertex in ranks if vertex.node), *(v.label for v in ranks)]
            for name, node in self._read.mapping(top["devices"], names, what="devices").items():
                named[name] = self._device(node, f"device of {name}")
        found = []
        for vertex in vertices:
            device = None
            if vertex.kind == "rank":
                box = vertex.node or ""
                device = named.get(vertex.label) or named.get(box) or self._boxes.get(box) or usual
            found.append(replace(vertex, device=device) if device is not None else vertex)
        return tuple(found)

    def _device(self, node: yaml.Node, what: str) -> Device:
        read = self._read
        try:
            if isinstance(node, yaml.ScalarNode):
                return device_called(read.text(node, what=what))
            found = read.mapping(node, _KEYS, required=("name", "flops", "memory", "memory_gbps"), what=what)
            texts = {key: read.text(value, what=f"{what}: {key}") for key, value in found.items()}
            numbers = {
                key: self._number(found[key], texts[key], f"{what}: {key}")
                for key in ("flops", "memory_gbps", "float8_flops")
                if key in texts
            }
            words = {key: texts[key] for key in ("name", "source") if key in texts}
            return Device(memory_bytes=parse_size(texts["memory"]), **numbers, **words)  # type: ignore[arg-type]
        except MycelError as error:
            if str(error).startswith(f"{read.source}:"):
                raise
            raise read.error(node, f"{what}: {error}") from None

    def _number(self, node: yaml.Node, text: str, what: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise self._read.error(node, f"{what} must be a number, such as 60e12; got {text!r}") from None


def device_lines(topology: Topology, *, quoted: Callable[[str], str]) -> list[str]:
    """Lines of YAML that say a fabric's devices; none where it has none.

    Args:
        topology: the fabric.
        quoted: a scalar from a text.
    """
    devices = topology.devices
    if not any(devices):
        return []
    if devices[0] is not None and all(device == devices[0] for device in devices):
        return [f"device: {_text(devices[0], quoted)}"]
    pairs = zip(topology.ranks, devices, strict=True)
    return ["devices:"] + [
        f"  {quoted(topology.label(vertex))}: {_text(device, quoted)}"
        for vertex, device in pairs
        if device is not None
    ]


def _text(device: Device, quoted: Callable[[str], str]) -> str:
    for name, known in DEVICES.items():
        if known == device:
            return quoted(name)
    parts = [f"name: {quoted(device.name)}", f"flops: {device.flops!r}", f"memory: {device.memory_bytes}"]
    parts.append(f"memory_gbps: {device.memory_gbps!r}")
    parts += [f"float8_flops: {device.float8_flops!r}"] if device.float8_flops else []
    parts += [f"source: {quoted(device.source)}"] if device.source else []
    return f"{{{', '.join(parts)}}}"
