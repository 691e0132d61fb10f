"""What one accelerator can do: operations a second, memory, and how fast that is read."""

from __future__ import annotations

from dataclasses import dataclass

from mycel.errors import UsageError

__all__ = ["Device"]


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
