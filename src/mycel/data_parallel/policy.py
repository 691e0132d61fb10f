"""Which gradients are compressed, by what, and from which step on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from mycel.arguments import the, whole_number
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.errors import UsageError

__all__ = ["CompressionPolicy", "compressor_of"]


class CompressionPolicy:
    """Rules by the names of parameters.

    Vectors (norms, biases) travel exact unless a rule says otherwise: they are few bytes and steer much. So do
    tensors that would not become smaller.

    Args:
        default: for every matrix or larger tensor that no rule names; a name stands for the compressor with its
            usual settings, ``None`` leaves them exact.
        rules: patterns as in file names, and the compressor for what they match, or ``None`` for exact; the first
            that matches decides.
        start_step: steps that are all exact, before.
        min_elements: smaller tensors travel exact.

    Raises:
        UsageError: a negative step or size, or what is no compressor.

    Examples:
        >>> from mycel.data_parallel.compress import Quantised
        >>> policy = CompressionPolicy(Quantised(4), rules={"head.*": None}, start_step=10)
        >>> [policy.choose(n, (64, 64), s) is None for n, s in [("mlp.up", 9), ("mlp.up", 10), ("head.weight", 10)]]
        [True, False, True]
    """

    def __init__(
        self,
        default: Compressor | str | None,
        *,
        rules: Mapping[str, Compressor | str | None] | None = None,
        start_step: int = 0,
        min_elements: int = 256,
    ) -> None:
        self.start_step = whole_number(start_step, "start_step, exact steps before", least=0)
        self.min_elements = whole_number(min_elements, "min_elements, of a tensor", least=0)
        self.rules = {
            the(str, pattern, "a pattern of names"): _checked(c) for pattern, c in dict(rules or {}).items()
        }
        self.default = _checked(default)
        if self.start_step and any(c is not None and c.covers_all for c in (self.default, *self.rules.values())):
            raise UsageError(f"start_step={start_step}: so many steps would travel exact, and in the clear; give 0")

    def choose(self, name: str, shape: Sequence[int], step: int) -> Compressor | None:
        """The compressor for a gradient, the same answer on all ranks; ``None`` for exact."""
        if step < self.start_step:
            return None
        for pattern, compressor in self.rules.items():
            if fnmatchcase(name, pattern):
                return compressor if compressor is not None and compressor.takes(shape) else None
        if self.default is not None and self.default.covers_all:
            return self.default if self.default.takes(shape) else None
        if self.default is None or len(shape) < 2 or numel(shape) < self.min_elements:
            return None
        return self.default if self.default.takes(shape) else None

    def compressors(self) -> list[Compressor]:
        """Every compressor that it may choose, each once."""
        found: list[Compressor] = []
        for compressor in (self.default, *self.rules.values()):
            if compressor is not None and all(compressor is not other for other in found):
                found.append(compressor)
        return found

    @property
    def learns(self) -> bool:
        """Whether what comes later depends on the means of a step: something is primed, or kept, or chosen."""
        keeps = any(type(compressor).settle is not Compressor.settle for compressor in self.compressors())
        return keeps or self.start_step > 0 or type(self).observe is not CompressionPolicy.observe

    def observe(self, means: Mapping[str, Tensor], step: int) -> None:
        """Sees what every step came to: mean gradients by name, the same on all ranks. Adaptive policies learn here.

        Called once a step, from the thread that communicates, where all means of the step are finite; must not change
        the tensors. The means of the last exact step prime the compressors that will take over.
        """
        if step + 1 != self.start_step:
            return
        for name, mean in means.items():
            compressor = self.choose(name, mean.shape, self.start_step)
            if compressor is not None:
                compressor.prime(name, mean)


def compressor_of(given: Compressor | str) -> Compressor:
    """A compressor, or the one with its usual settings that a name stands for.

    Raises:
        UsageError: it is neither; of a class, the message says to make one.
    """
    from mycel.data_parallel.compress import make_compressor  # a part of that package is in use here already

    made = make_compressor(given) if isinstance(given, str) else given
    return the(Compressor, made, "a compressor or the name of one", hint="such as Quantised(bits=4)")  # type: ignore[type-abstract]


def _checked(given: Compressor | str | None) -> Compressor | None:
    return None if given is None else compressor_of(given)
