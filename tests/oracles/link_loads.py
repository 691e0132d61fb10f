"""A claimed rate, checked exactly and apart from what ``Schedule.algbw`` computes."""

from __future__ import annotations

from fractions import Fraction

from mycel.collectives.schedule import Schedule
from mycel.errors import UsageError, VerificationError


def verify_link_loads(schedule: Schedule, algbw: Fraction) -> None:
    """Return if no link carries more than its capacity while the array moves at the claimed rate.

    Args:
        schedule: whose transfers load the links.
        algbw: claimed size over time (see ``Schedule.algbw``), in the topology's unit, exact.

    Raises:
        UsageError: the claim is not positive.
        VerificationError: a link is overloaded; the message names the worst one.
    """
    if algbw <= 0:
        raise UsageError(f"algbw {algbw} must be positive")
    worst: tuple[Fraction, tuple[int, int]] | None = None
    parts = schedule.collective.num_parts
    for hop, units in schedule.link_load.items():
        needed = algbw * parts * units / schedule.num_units / schedule.topology.capacity[hop]
        if needed > 1 and (worst is None or needed > worst[0]):
            worst = (needed, hop)
    if worst:
        needed, (src, dst) = worst
        label = schedule.topology.label
        raise VerificationError(
            f"{schedule.method} does not reach algbw {algbw}: link {label(src)} -> {label(dst)} would carry "
            f"{needed} of its capacity ({schedule.link_load[src, dst]} of {schedule.num_units} units over capacity "
            f"{schedule.topology.capacity[src, dst]}); the schedule reaches {schedule.algbw}"
        )
