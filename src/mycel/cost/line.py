"""A latency and a rate, fitted to two measured sizes.

References:
    R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20(3),
    1994 (a fixed time and a time for each byte).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds as a straight line: ``fixed_s + units * unit_s``.

    Attributes:
        fixed_s: of an operation, whatever its size.
        unit_s: of a byte that a rank sends, or of a row.
    """

    fixed_s: float
    unit_s: float

    def at(self, units: float) -> float:
        """Seconds."""
        return self.fixed_s + units * self.unit_s

    @staticmethod
    def through(small: tuple[float, float], large: tuple[float, float]) -> Line:
        """Through two measured points of units and seconds; no negative slope or beginning."""
        slope = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return Line(fixed_s=max(0.0, small[1] - slope * small[0]), unit_s=slope)
