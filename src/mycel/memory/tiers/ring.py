"""SE-MoE's ring of memory sections: what computes is near, with what is used next."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.errors import UsageError

__all__ = ["SectionRing"]


class SectionRing:
    """A schedule of sections of near memory that units go round: layers of experts, blocks of parameters.

    What has computed gives its section to what is used next and not there yet.

    Args:
        slots: sections, each for one unit of whatever size.

    Raises:
        UsageError: fewer than two slots.

    References:
        Shen et al., "SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and Inference System",
        2022 (arXiv 2205.10034; ring memory offload for inference).

    Examples:
        >>> ring = SectionRing(2)
        >>> [ring.near([(0,), (1,), (2,)], moment, again=True) for moment in range(3)]
        [(0, 1), (1, 2), (2, 0)]
        >>> ring.turned([(0,), (1,), (2,)], 2)
        ((2,), (1,))
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:
            raise UsageError(f"a ring of {slots} slots; with fewer than 2 nothing comes while a block computes")
        self.slots = slots

    def near(self, uses: Sequence[Sequence[int]], moment: int, *, again: bool) -> tuple[int, ...]:
        """Units that are near at a moment, in the order in which they are used; more than slots if it uses more.

        Args:
            uses: of each moment, units that compute then.
            moment: its place.
            again: whether the first moment follows the last one, with what is near then.
        """
        held = list(dict.fromkeys(uses[moment]))
        count = len(uses)
        for step in range(1, count if again else count - moment):
            if len(held) >= self.slots:
                break
            for unit in uses[(moment + step) % count]:
                if unit not in held and len(held) < self.slots:
                    held.append(unit)
        return tuple(held)

    def turned(self, uses: Sequence[Sequence[int]], moment: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Units that go when a moment is over, and those that come in their place, where the first follows the last.

        Args:
            uses: of each moment, units that compute then.
            moment: its place.
        """
        before = self.near(uses, moment, again=True)
        after = self.near(uses, (moment + 1) % len(uses), again=True)
        return tuple(unit for unit in before if unit not in after), tuple(u for u in after if u not in before)
