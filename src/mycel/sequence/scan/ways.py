"""The ways of scanning by name: one file and one line here each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mycel.sequence.scan.chain import chain, chain_messages
from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.doubling import doubling, doubling_messages
from mycel.sequence.scan.gathered import gathered, gathered_messages
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape
from mycel.sequence.scan.messages import Round
from mycel.sequence.scan.two_exchanges import two_exchanges, two_exchanges_messages
from mycel.sequence.scan.two_levels import two_levels, two_levels_messages

__all__ = ["WAYS", "Nodes", "Way"]

#: Ranks of each node.
Nodes = tuple[tuple[int, ...], ...]


class Run(Protocol):
    """Scans: states that come into the runs here, of shape (runs here, heads, values, keys)."""

    def __call__(self, courier: Courier, line: Line, maps: Maps, nodes: Nodes) -> Tensor: ...


class Messages(Protocol):
    """What a scan sends."""

    def __call__(self, line: Line, shape: Shape, num_ranks: int, nodes: Nodes) -> list[Round]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of scanning.

    Attributes:
        run: does it.
        messages: says what it sends.
    """

    run: Run
    messages: Messages


#: By name.
WAYS: dict[str, Way] = {
    "chain": Way(run=chain, messages=chain_messages),
    "all_gather": Way(run=gathered, messages=gathered_messages),
    "doubling": Way(run=doubling, messages=doubling_messages),
    "two_exchanges": Way(run=two_exchanges, messages=two_exchanges_messages),
    "two_levels": Way(run=two_levels, messages=two_levels_messages),
}
