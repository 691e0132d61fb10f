"""What one accelerator can do: operations a second, memory, and how fast that is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["DEVICES", "Device", "device_called", "device_from_json", "device_to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator as its data sheet describes it.

    Attributes:
        name: what people call it.
        flops: dense operations a second in 16-bit floating point, the limit of any matrix product.
        memory_bytes: of the device.
        memory_gbps: 10^9 bytes a second that its memory is read or written at.
        float8_flops: dense operations a second in 8 bits; 0 where it has none.
        source: where the numbers come from.

    Raises:
        UsageError: a number that is not positive.

    Examples:
        >>> a100 = Device(name="A100 80GB", flops=312e12, memory_bytes=80 << 30, memory_gbps=2039)
        >>> round(a100.flops / (a100.memory_gbps * 1e9))  # operations that hide a byte
        153
    """

    name: str
    flops: float
    memory_bytes: int
    memory_gbps: float
    float8_flops: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for what in ("flops", "memory_bytes", "memory_gbps"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise UsageError(f"device {self.name!r}: {what} is {value!r}; it must be a number above 0")
        if not 0 <= self.float8_flops < float("inf"):
            raise UsageError(f"device {self.name!r}: float8_flops is {self.float8_flops!r}; it must be 0 or above")


def _sheet(name: str, tera: float, memory_gib: int, memory_gbps: float, eight: float, source: str) -> Device:
    return Device(
        name=name,
        flops=tera * 1e12,
        memory_bytes=memory_gib << 30,
        memory_gbps=memory_gbps,
        float8_flops=eight * 1e12,
        source=source,
    )


#: By short name, as topology files may say. Dense rates with sums in 32 bits, of the data sheets named.
DEVICES: dict[str, Device] = {
    "A10": _sheet("A10", 125, 24, 600, 0, "NVIDIA A10 data sheet, 2021"),
    "A100": _sheet("A100 SXM 80GB", 312, 80, 2039, 0, "NVIDIA A100 data sheet, 2021"),
    "A100-40GB": _sheet("A100 SXM 40GB", 312, 40, 1555, 0, "NVIDIA A100 data sheet, 2020"),
    "B200": _sheet("B200 SXM", 2250, 180, 7700, 4500, "NVIDIA DGX B200 data sheet, 2024, dense"),
    "H100": _sheet("H100 SXM 80GB", 989, 80, 3350, 1979, "NVIDIA H100 data sheet, 2023, dense"),
    "H200": Device(
        name="H200 SXM 141GB",
        flops=989e12,
        memory_bytes=141 * 10**9,
        memory_gbps=4800,
        float8_flops=1979e12,
        source="NVIDIA H200 data sheet, 2024, dense",
    ),
    "L4": _sheet("L4", 121, 24, 300, 242, "NVIDIA L4 data sheet, 2023, dense"),
    "L40S": _sheet("L40S", 362, 48, 864, 733, "NVIDIA L40S data sheet, 2023, dense"),
    "MI250X": _sheet("MI250X, one of its two dies", 191.5, 64, 1638, 0, "AMD MI250X data sheet, 2021, halved"),
    "MI300X": _sheet("MI300X", 1307, 192, 5300, 2614, "AMD Instinct MI300X data sheet, 2023, dense"),
    "RTX 3090": _sheet("RTX 3090", 71, 24, 936, 0, "NVIDIA GA102 white paper, 2020, dense, sums in 32 bits"),
    "RTX 4090": _sheet("RTX 4090", 165.2, 24, 1008, 330.3, "NVIDIA Ada white paper, 2022, dense, sums in 32 bits"),
    "T4": _sheet("T4", 65, 16, 320, 0, "NVIDIA T4 data sheet, 2019"),
    "V100": _sheet("V100 SXM2 32GB", 125, 32, 900, 0, "NVIDIA V100 data sheet, 2018"),
}

_KEYS = ("name", "flops", "memory_bytes", "memory_gbps", "float8_flops", "source")


def device_called(name: str) -> Device:
    """A device of the table by its short name, in any case.

    Args:
        name: such as ``H100``.

    Raises:
        UsageError: none of that name; the message has the nearest.

    Examples:
        >>> device_called("h100").memory_bytes >> 30
        80
    """
    for known, device in DEVICES.items():
        if known.lower() == name.strip().lower():
            return device
    raise UsageError(
        f"no device called {name!r} is known{nearest(name, DEVICES)}; known: {', '.join(DEVICES)}; or say "
        "{name: ..., flops: ..., memory: ..., memory_gbps: ...}"
    )


def device_to_json(device: Device) -> dict[str, object]:
    """As an object of JSON; what is 0 or empty is left out.

    Examples:
        >>> device_from_json(device_to_json(device_called("T4"))) == device_called("T4")
        True
    """
    every = {key: getattr(device, key) for key in _KEYS}
    return {key: value for key, value in every.items() if value or key not in ("float8_flops", "source")}


def device_from_json(data: object, *, where: str = "device") -> Device:
    """A device from its JSON: a short name, or an object with the fields of ``Device``.

    Raises:
        UsageError: neither, a key that is unknown or missing, or a number out of range.
    """
    if isinstance(data, str):
        try:
            return device_called(data)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: a device is a name or an object, got {type(data).__name__}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in _KEYS:
            raise UsageError(
                f"{where}: unknown key {key!r}{nearest(str(key), _KEYS)}; known keys: {', '.join(_KEYS)}"
            )
        is_text = key in ("name", "source")
        if isinstance(value, str) != is_text or isinstance(value, bool):
            raise UsageError(f"{where}: {key} must be a {'text' if is_text else 'number'}, got {value!r}")
        values[key] = value
    for key in ("name", "flops", "memory_bytes", "memory_gbps"):
        if key not in values:
            raise UsageError(f"{where}: {key!r} is missing")
    try:
        return Device(**values)
    except (UsageError, TypeError, OverflowError) as error:
        raise UsageError(f"{where}: {error}") from None
