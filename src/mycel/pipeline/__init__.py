"""In what order the stages of a pipeline work."""

from __future__ import annotations

from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Action", "Kind", "Order"]
