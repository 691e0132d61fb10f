"""What is installed here, what this machine can do, and whether two ranks come together: ``mycel doctor``."""

from __future__ import annotations

from mycel.doctor.examination import Finding, State, examine

__all__ = ["Finding", "State", "examine"]
