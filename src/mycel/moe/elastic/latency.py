"""How long a layer's experts take at each width: a table, looked up by whoever chooses widths."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycel.arguments import real_number, whole_number
from mycel.brief import brief
from mycel.errors import UsageError
from mycel.moe.elastic.elastic import ElasticExperts

__all__ = ["LatencyTable", "measure_latencies"]

_FORMAT = {"format": "mycel.elastic_latencies", "version": 1}
#: Parts that a wanted latency is counted in where widths are chosen.
_GRAIN = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Seconds that each layer's experts take at each width.

    Attributes:
        widths: of each layer, in neurons, ascending.
        seconds: of each layer, beside its widths.
        source: ``measured`` or ``modelled``, for those who read it.

    Raises:
        UsageError: tables that do not belong together.

    Examples:
        >>> table = LatencyTable(widths=((4, 8), (4, 8)), seconds=((1.0, 2.0), (1.5, 3.0)), source="modelled")
        >>> table.latency([8, 4]), table.range
        (3.5, (2.5, 5.0))
        >>> table.choose([[0.1, 0.9], [0.1, 0.9]], target_s=3.5, tolerance=0.05)
        (8, 4)
    """

    widths: tuple[tuple[int, ...], ...]
    seconds: tuple[tuple[float, ...], ...]
    source: str

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.source not in ("measured", "modelled"):
            raise UsageError(f"latencies are measured or modelled, got {self.source!r}")
        if not self.widths or [len(w) for w in self.widths] != [len(s) for s in self.seconds]:
            raise UsageError("a latency for each width of each layer is wanted")
        for layer, (widths, seconds) in enumerate(zip(self.widths, self.seconds, strict=True)):
            if not widths or list(widths) != sorted(set(widths)) or not all(s > 0 for s in seconds):
                raise UsageError(f"layer {layer}: widths {widths} ascend, and take seconds above 0, got {seconds}")

    @property
    def range(self) -> tuple[float, float]:
        """Least and greatest seconds of all layers together."""
        return sum(min(s) for s in self.seconds), sum(max(s) for s in self.seconds)

    def latency(self, widths: Sequence[int]) -> float:
        """Seconds of all layers together.

        Args:
            widths: of each layer.

        Raises:
            UsageError: a width that is not in the table.
        """
        if len(widths) != len(self.widths):
            raise UsageError(f"{len(widths)} widths for a table of {len(self.widths)} layers")
        total = 0.0
        for layer, width in enumerate(widths):
            if width not in self.widths[layer]:
                raise UsageError(f"layer {layer} has no width {width}; the table has {self.widths[layer]}")
            total += self.seconds[layer][self.widths[layer].index(width)]
        return total

    def choose(
        self, preferences: Sequence[Sequence[float]], *, target_s: float, tolerance: float = 0.05
    ) -> tuple[int, ...]:
        """Widths that take about as long as is asked, and of these the preferred ones.

        Layers are added one after the other; of all choices that come to the same latency, to a two thousandth of
        the target, only the one with the greatest product of preferences goes on.

        Args:
            preferences: for each layer and width, positive.
            target_s: seconds of all layers together.
            tolerance: the share of it by which the result may differ.

        Returns:
            A width for each layer.

        Raises:
            UsageError: no widths come as near; the message says what can be asked.
        """
        target_s = real_number(target_s, "target_s", above=0)
        tolerance = real_number(tolerance, "tolerance", least=0)
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
        for widths, seconds, liked in zip(self.widths, self.seconds, preferences, strict=True):
            following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            for score, spent, chosen in best.values():
                for width, takes, like in zip(widths, seconds, liked, strict=True):
                    total = spent + takes
                    if total > target_s * (1 + tolerance):
                        continue
                    new = (score + math.log(max(like, 1e-30)), total, (*chosen, width))
                    place = round(total / target_s * _GRAIN)
                    following[place] = max(following.get(place, (-math.inf, 0.0, ())), new)
            best = following
        near = [one for one in best.values() if abs(one[1] - target_s) <= tolerance * target_s]
        if not near:
            least, greatest = self.range
            raise UsageError(
                f"no widths take {target_s:.6g} s within {tolerance:.0%}; all layers together take {least:.6g} to "
                f"{greatest:.6g} s: ask for another latency, or allow more tolerance"
            )
        return max(near)[2]

    def save(self, file: str | Path) -> None:
        """As JSON: ranks that read the same table choose the same widths.

        Args:
            file: to write.
        """
        content = {**_FORMAT, "source": self.source, "widths": self.widths, "seconds": self.seconds}
        Path(file).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @staticmethod
    def load(file: str | Path) -> LatencyTable:
        """What ``save`` wrote.

        Args:
            file: to read.

        Raises:
            UsageError: there is no such file, or it is another one.
        """
        try:
            content: Mapping[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
            if {key: content[key] for key in _FORMAT} != _FORMAT:
                raise ValueError(f"{_FORMAT['format']} of version {_FORMAT['version']} was expected")
            return LatencyTable(
                widths=tuple(tuple(int(w) for w in layer) for layer in content["widths"]),
                seconds=tuple(tuple(float(s) for s in layer) for layer in content["seconds"]),
                source=content["source"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{file}: no table of latencies that can be read: {error}") from error


def measure_latencies(
    elastic: ElasticExperts, run: Callable[[], object], widths: Sequence[int], *, repeats: int = 5
) -> LatencyTable:
    """Time each layer's experts at each width, in turns, and keep the medians.

    Args:
        elastic: whose experts.
        run: calls the model on what it will be called with.
        widths: in neurons; each must exist in every layer.
        repeats: of every width.

    Raises:
        UsageError: widths that do not exist, or a model whose layers did not all run.

    Examples:
        >>> import torch
        >>> from mycel.moe import MoE
        >>> from mycel.moe.elastic import elastic_experts
        >>> model, x = MoE(dim=4, hidden=8, num_experts=2), torch.randn(16, 4)
        >>> with elastic_experts(model) as elastic:
        ...     table = measure_latencies(elastic, lambda: model(x), [2, 8], repeats=2)
        >>> table.widths, table.source
        (((2, 8),), 'measured')
    """
    repeats = whole_number(repeats, "repeats", least=1)
    ordered = sorted(set(widths))
    times: list[list[list[float]]] = [[[] for _ in ordered] for _ in elastic.num_neurons]
    begun = [0.0] * len(times)
    now = [0]

    def begin(layer: int) -> None:
        begun[layer] = time.perf_counter()

    def end(layer: int) -> None:
        times[layer][now[0]].append(time.perf_counter() - begun[layer])

    with elastic.timed(begin, end):
        for repeat in range(repeats + 1):
            for now[0], width in enumerate(ordered):
                elastic.use(width)
                run()
            if repeat == 0:  # to warm up
                for layer in times:
                    for found in layer:
                        found.clear()
    elastic.use(None)
    if any(not found for layer in times for found in layer):
        raise UsageError("some layer of experts did not run; measure with a call that passes all of them")
    return LatencyTable(
        widths=(tuple(ordered),) * len(times),
        seconds=tuple(tuple(statistics.median(found) for found in layer) for layer in times),
        source="measured",
    )
