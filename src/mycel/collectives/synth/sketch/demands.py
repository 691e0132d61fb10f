"""Who has which chunk, and who wants it: what a collective asks of the links.

Collectives that reduce are asked for backwards: the reverse of a schedule that copies chunks out along trees is one
that sums them up along the same trees, on the fabric with every link turned round.
"""

from __future__ import annotations

from dataclasses import dataclass

from mycel.collectives.spec import Collective

__all__ = ["Demand", "demands_of", "num_units_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One chunk.

    Attributes:
        chunk: its number, which is that of its unit.
        src: the rank that has it.
        dsts: the ranks that want it.
        twin: what stays the same when the ranks are turned: the piece of its block.
    """

    chunk: int
    src: int
    dsts: tuple[int, ...]
    twin: int


def num_units_of(collective: Collective, pieces: int) -> int:
    """Units of the array, one a chunk."""
    n = collective.num_ranks
    return (n if collective.name == "all_reduce" else collective.num_blocks) * pieces


def demands_of(collective: Collective, pieces: int) -> tuple[Demand, ...]:
    """The chunks of a collective, as something to copy (see above for those that reduce).

    Args:
        collective: what to move.
        pieces: chunks a block; of all_reduce, chunks a rank.
    """
    n, root, name = collective.num_ranks, collective.root, collective.name
    everyone = range(n)
    found = []
    for unit in range(num_units_of(collective, pieces)):
        block, twin = divmod(unit, pieces)
        if root is None:
            src, dsts = (block // n, [block % n]) if name == "all_to_all" else (block, list(everyone))
        elif name in ("broadcast", "reduce"):
            src, dsts = root, list(everyone)
        else:
            src, dsts = (block, [root]) if name == "gather" else (root, [block])
        wanted = tuple(dst for dst in dsts if dst != src)
        if wanted:
            found.append(Demand(chunk=unit, src=src, dsts=wanted, twin=twin))
    return tuple(found)
