"""What no schedule of a placement can beat: bounds on the period and on the makespan of a batch.

- *Load*: the busiest device works so long for a micro-batch.
- *Lifetime*: what is taken is held at least until the longest way to where it is given back has gone by. Summed over
  a micro-batch and divided by the cap, this is the least time between micro-batches (Little's law).
- *Chain*: a micro-batch takes as long as its longest way; a batch no less.

For whole batches the first two grow by what comes before a device's first block and after its last.

References:
    J. D. C. Little, "A proof for the queuing formula L = lambda W", Operations Research 9(3), 1961.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mycel.pipeline.pairing import longest_pairing
from mycel.pipeline.placement import Placement

__all__ = ["Binding", "makespan_bound", "period_bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A bound, and what it comes from.

    Attributes:
        value: time units, a micro-batch or a batch.
        kind: which of the bounds is the largest; ``states`` where a search looked at all states of any schedule.
        device: where; ``None`` for a chain and for states.

    Examples:
        >>> print(Binding(value=Fraction(16, 3), kind="lifetime", device=0))
        16/3 (lifetime of device 0)
    """

    value: Fraction
    kind: Literal["load", "lifetime", "chain", "states"]
    device: int | None = None

    def __str__(self) -> str:
        where = "" if self.device is None else f" of device {self.device}"
        return f"{self.value} ({self.kind}{where})"


def period_bound(placement: Placement) -> Binding:
    """The least time a micro-batch in any steady state, however many micro-batches repeat together.

    Args:
        placement: blocks, devices and caps.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 3, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> print(period_bound(Placement(name="", num_devices=2, blocks=blocks, dependencies=waits, cap=(1, 1))))
        8 (lifetime of device 0)
    """
    bounds = [Binding(value=Fraction(work), kind="load", device=d) for d, work in enumerate(placement.work)]
    for device, cap in enumerate(placement.cap):
        if cap:
            held = Fraction(_held(placement, device), cap)
            bounds.append(Binding(value=held, kind="lifetime", device=device))
    return max(bounds, key=lambda bound: bound.value)


def makespan_bound(placement: Placement, num_micro_batches: int) -> Binding:
    """The least time of a whole batch.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 3, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits, cap=(2, 1))
        >>> print(makespan_bound(two, 4))
        20 (load of device 1)
    """
    longest = placement.longest
    blocks = range(len(placement.blocks))
    before = [
        max(far for i in blocks if (far := longest[i][j]) is not None) - placement.blocks[j].time for j in blocks
    ]
    behind = [
        max(far for j in blocks if (far := longest[i][j]) is not None) - placement.blocks[i].time for i in blocks
    ]
    chain = max(before[i] + placement.blocks[i].time + behind[i] for i in blocks)
    bounds = [Binding(value=Fraction(chain), kind="chain")]
    for device, mine in enumerate(placement.on):
        ends = min(before[i] for i in mine) + min(behind[i] for i in mine)
        load = ends + num_micro_batches * placement.work[device]
        bounds.append(Binding(value=Fraction(load), kind="load", device=device))
        if cap := placement.cap[device]:
            # Nothing is held before the first block that takes, nor after the last one that gives back.
            taking = [before[i] for i in mine if placement.blocks[i].memory_on(device) > 0]
            giving = [behind[i] for i in mine if placement.blocks[i].memory_on(device) < 0]
            ends = min(taking, default=0) + min(giving, default=0)
            held = Fraction(num_micro_batches * _held(placement, device), cap)
            bounds.append(Binding(value=ends + held, kind="lifetime", device=device))
    return max(bounds, key=lambda bound: bound.value)


def _held(placement: Placement, device: int) -> int:
    """Memory times time that a micro-batch holds on a device, at least; 0 where nothing can be said.

    What is taken and what is given back are told apart by nothing but their amounts, so every way to pair them is
    right; the one with the longest ways in all says most.
    """
    sizes = {i: placement.blocks[i].memory_on(device) for i in placement.on[device]}
    taking = {i: size for i, size in sizes.items() if size > 0}
    giving = {i: -size for i, size in sizes.items() if size < 0}
    length = {(i, j): far for i in taking for j in giving if (far := placement.longest[i][j]) is not None}
    return longest_pairing(taking, giving, length) or 0
