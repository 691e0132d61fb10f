"""How large a described fabric may be, so that a slip such as ``ranks: 1000000000`` does not eat the memory."""

from __future__ import annotations

__all__ = ["MAX_LINKS", "MAX_VERTICES"]

#: Ranks and switches together; beyond any fabric that a plan can be made for.
MAX_VERTICES = 1 << 16

#: Directed links.
MAX_LINKS = 1 << 20
