"""How CP-SAT models are solved here."""

from __future__ import annotations

from typing import Any

__all__ = ["solve"]


def solve(solver: Any, model: Any) -> Any:
    """The status that ``solver.solve(model)`` returns.

    OR-tools 9.15 fails with ``IndexError: raw_hash_map<>::at`` on some models without a solution while it looks for
    symmetries; it solves them when told not to.

    Args:
        solver: a ``CpSolver``; keeps the solution.
        model: a ``CpModel``.
    """
    try:
        return solver.solve(model)
    except IndexError:
        solver.parameters.symmetry_level = 0
        return solver.solve(model)
