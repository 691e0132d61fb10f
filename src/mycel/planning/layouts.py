"""What a change of a tensor's layout sends: split, whole on every rank (broadcast), or as parts of a sum.

The layouts are those that OneFlow names: ``S0``, ``S1`` and so on, split along a dimension; ``B``, whole; ``P``,
parts of a sum. The bytes are the least that any exchange sends, over all ranks together.

References:
    Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021 (arXiv 2110.15032),
    section 3.2 and table 2.
"""

from __future__ import annotations

import re

from mycel.errors import UsageError

__all__ = ["change_bytes"]

_LAYOUT = re.compile(r"S\d|B|P", re.ASCII)


def change_bytes(before: str, after: str, num_bytes: int, ranks: int) -> int:
    """Bytes that all ranks together send to change a tensor's layout.

    Args:
        before: ``S0``, ``S1``, ..., ``B`` or ``P``.
        after: likewise, but no ``P``: nothing becomes parts of a sum by sending.
        num_bytes: of the whole tensor.
        ranks: that hold it.

    Raises:
        UsageError: a layout that is not known, a change into ``P``, or no ranks.

    Examples:
        A sum over four ranks of 1 MiB that all need, and the same for a rank's own quarter:

        >>> change_bytes("P", "B", 1 << 20, 4) >> 20, change_bytes("P", "S0", 1 << 20, 4) >> 20
        (6, 3)
    """
    for layout in (before, after):
        if _LAYOUT.fullmatch(layout) is None:
            raise UsageError(f"layout {layout!r}; there are B (whole), P (parts of a sum) and S0, S1, ... (split)")
    if ranks < 1 or num_bytes < 0:
        raise UsageError(f"a tensor of {num_bytes} bytes on {ranks} ranks; expected 0 or more on 1 or more")
    if before == after or before == "B":
        if after == "P" and before != "P":
            raise UsageError(f"{before} to P: nothing becomes parts of a sum by sending; begin with the sum")
        return 0
    if after == "P":
        raise UsageError(f"{before} to P: nothing becomes parts of a sum by sending; begin with the sum")
    if before == "P":
        return (2 if after == "B" else 1) * num_bytes * (ranks - 1)
    return num_bytes * (ranks - 1) if after == "B" else num_bytes * (ranks - 1) // ranks
