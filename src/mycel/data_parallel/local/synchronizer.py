"""When ranks that train alone synchronise: the number of steps of each round.

A synchronizer is asked once a round, with the step that begins it and the learning rate of that step, so that the
length of a round changes only right after a synchronisation. It has no state; whoever asks keeps count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from mycel.arguments import real_number, whole_number
from mycel.errors import UsageError

__all__ = [
    "QSR",
    "Delayed",
    "EveryStep",
    "Periodic",
    "PostLocal",
    "Synchronizer",
    "check_synchronizer",
    "check_total",
]


class Synchronizer(Protocol):
    """Decides how long a round is.

    Examples:
        >>> class Doubling:
        ...     delayed = False
        ...     def period(self, step, learning_rate):
        ...         return max(1, step)
        >>> rule, step = Doubling(), 0
        >>> for _ in range(3):
        ...     step += rule.period(step, learning_rate=0.1)
        ...     print(step)
        1
        2
        4
    """

    @property
    def delayed(self) -> bool:
        """Whether a round's result is used one round later, so that its exchange can go on meanwhile."""
        ...

    def period(self, step: int, learning_rate: float) -> int:
        """Steps of the round that begins with ``step`` (from 0), at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class EveryStep:
    """After every step.

    Examples:
        >>> [EveryStep().period(step, learning_rate=0.1) for step in (0, 100)]
        [1, 1]
    """

    delayed = False

    def period(self, step: int, learning_rate: float) -> int:
        """See ``Synchronizer``."""
        return 1


@dataclass(frozen=True, slots=True)
class Periodic:
    """Local SGD: every ``steps`` steps.

    Attributes:
        steps: of a round, at least 1.

    Raises:
        UsageError: rounds of no steps.

    References:
        S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767.

    Examples:
        >>> [Periodic(8).period(step, learning_rate=0.1) for step in (0, 8)]
        [8, 8]
    """

    steps: int
    delayed = False

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps of a round", least=1)

    def period(self, step: int, learning_rate: float) -> int:
        """See ``Synchronizer``."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PostLocal:
    """Post-local SGD: every step for the first ``begin`` steps, every ``steps`` afterwards.

    Attributes:
        begin: steps before rounds get longer.
        steps: of a round afterwards, at least 1.

    Raises:
        UsageError: rounds of no steps.

    References:
        T. Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, arXiv 1808.07217.

    Examples:
        >>> rule = PostLocal(begin=50, steps=8)
        >>> [rule.period(step, learning_rate=0.1) for step in (0, 49, 50)]
        [1, 1, 8]
    """

    begin: int
    steps: int
    delayed = False

    def __post_init__(self) -> None:
        whole_number(self.begin, "PostLocal: steps before rounds get longer", least=0)
        whole_number(self.steps, "steps of a round", least=1)

    def period(self, step: int, learning_rate: float) -> int:
        """See ``Synchronizer``."""
        return 1 if step < self.begin else self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class QSR:
    """The quadratic synchronization rule: ``max(base, floor((alpha / learning rate)^2))`` steps.

    As the learning rate decays, ranks may drift apart for longer; the square keeps what the drift does to the
    solution constant.

    Attributes:
        alpha: the learning rate below which rounds get longer than one step, if ``base`` is 1.
        base: the shortest round.
        warm_up: first steps, during which the learning rate rises and the rule would begin with long rounds.
        warm_up_period: steps of a round meanwhile; a round that begins in the warm-up ends with it at the latest.

    References:
        X. Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024, arXiv 2310.14423,
        section 2.

    Examples:
        >>> rule = QSR(alpha=0.2, base=2)
        >>> [rule.period(0, rate) for rate in (0.4, 0.1, 0.06, 0.02)]
        [2, 4, 11, 100]
    """

    alpha: float
    base: int = 1
    warm_up: int = 0
    warm_up_period: int = 1
    delayed = False

    def __post_init__(self) -> None:
        real_number(self.alpha, "QSR: alpha, a learning rate", above=0)
        whole_number(self.base, "QSR: base, steps of the shortest round", least=1)
        whole_number(self.warm_up, "QSR: warm_up, first steps", least=0)
        whole_number(self.warm_up_period, "QSR: warm_up_period, steps of a round", least=1)

    def period(self, step: int, learning_rate: float) -> int:
        """See ``Synchronizer``.

        Raises:
            UsageError: the learning rate is negative or no number.
        """
        if not learning_rate >= 0:
            raise UsageError(f"QSR at step {step}: the learning rate is {learning_rate}")
        if step < self.warm_up:
            return min(self.warm_up_period, self.warm_up - step)
        longest = (self.alpha / learning_rate) ** 2 if learning_rate else math.inf
        # A schedule that ends at zero would ask for an infinite round; 2^31 steps are longer than any training.
        return max(self.base, math.floor(min(longest, 2**31)))


@dataclass(frozen=True, slots=True)
class Delayed:
    """Rounds of another synchronizer, with results one round late: their exchange runs during the next round.

    Attributes:
        rounds: says how long each round is.

    References:
        W. Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", ICLR 2024,
        arXiv 2401.16265, section 3.1.

    Examples:
        >>> late = Delayed(Periodic(8))
        >>> late.period(0, learning_rate=0.1), late.delayed, Periodic(8).delayed
        (8, True, False)
    """

    rounds: Synchronizer
    delayed = True

    def __post_init__(self) -> None:
        check_synchronizer(self.rounds)
        if self.rounds.delayed:
            raise UsageError(f"Delayed: results of {type(self.rounds).__name__} come a round late already")

    def period(self, step: int, learning_rate: float) -> int:
        """See ``Synchronizer``."""
        return self.rounds.period(step, learning_rate)


def check_synchronizer(rule: object) -> None:
    """Refuse what does not say how long a round is.

    Raises:
        UsageError: a class in place of an object, a number of steps, a text.
    """
    if isinstance(rule, type):
        raise UsageError(
            f"{rule.__name__} is a class, and a rule of rounds is wanted: make one, {rule.__name__}(...)"
        )
    if not callable(getattr(rule, "period", None)) or not hasattr(rule, "delayed"):
        number = f"Periodic({rule})" if isinstance(rule, int) else "Periodic(100)"
        raise UsageError(
            f"expected a rule of rounds, got {type(rule).__name__}: such as {number}, QSR(alpha=...), or an object "
            "with period(step, learning_rate) and delayed"
        )


def check_total(rule: Synchronizer, total_steps: int | None, *, ends: bool) -> None:
    """Refuse a rule whose last round may be longer than what is left of the training, where nobody says how long.

    Args:
        rule: of rounds.
        total_steps: of the training, where they are known.
        ends: ranks say when they have had their last batch.

    Raises:
        UsageError: as said.
    """
    if total_steps is not None:
        whole_number(total_steps, "total_steps, of the training", least=1)
    elif not ends and isinstance(rule.rounds if isinstance(rule, Delayed) else rule, QSR):
        raise UsageError(
            "QSR's rounds get longer as the learning rate falls, and the last would not end with the training: pass "
            "total_steps=..., or uneven=True and call finish() after the last batch"
        )
