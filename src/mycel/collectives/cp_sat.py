"""CP-SAT, which the extra ``solver`` brings: how it is imported, and how its models are solved here."""

from __future__ import annotations

from typing import Any

from mycel.extras import needs

__all__ = ["cp_sat", "solve"]


def cp_sat(what: str) -> Any:
    """The module ``ortools.sat.python.cp_model``.

    Args:
        what: that needs it, for people.

    Raises:
        UsageError: OR-tools is not installed.
    """
    needs(what, "ortools")
    from ortools.sat.python import cp_model

    return cp_model


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
