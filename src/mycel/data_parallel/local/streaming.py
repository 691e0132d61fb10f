"""Streaming: a model in fragments that meet in turn, each behind the steps that follow.

Between two meetings of a fragment lie as many steps as between two of a whole model, so no byte is saved: but they
leave little by little, and a step that waits for them comes later.

References:
    A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025,
    arXiv 2501.18512: section 2.2 and algorithm 2 (fragments, overlap, mixing), figure 2 (strided and sequential).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mycel.arguments import whole_number
from mycel.errors import UsageError

__all__ = ["Streaming", "divide"]

#: Which blocks of layers make up a fragment: every so manieth, or neighbours.
Pattern = Literal["strided", "sequential"]
#: What a rank keeps of its own parameters when a meeting is used late.
Own = Literal["mixed", "since"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Fragments that meet in turn, every ``steps`` steps each, and at the end of the training all together.

    What the ranks make of a fragment's changes is used ``overlap`` steps after they have been measured. A rank goes
    on from ``mixing`` times its own parameters and the rest of the shared ones; or, with ``own="since"``, from the
    shared ones and what it has learned since it was measured, which is then lost nowhere. A meeting after which fewer
    than ``steps`` steps are left is put off to the end of the training: a fragment meets as often as the whole would.

    Attributes:
        steps: between two meetings of one fragment, at least as many as there are fragments.
        fragments: into which the model is divided.
        overlap: steps during which changes travel, less than ``steps``; 0 waits for them.
        mixing: share of a rank's own parameters that is kept, in [0, 1); without overlap nothing is to be kept.
        own: what a rank keeps of its own: such a share (``mixed``, as published), or its steps since it was measured
            (``since``), for which a copy of each fragment under way is kept.
        pattern: fragments of every so manieth block of layers (``strided``) or of neighbours (``sequential``).

    Raises:
        UsageError: numbers out of range.

    Examples:
        >>> rule = Streaming(steps=8, fragments=2, overlap=1)
        >>> [[step for step in range(1, 25) if rule.meets(part, step, total_steps=24)] for part in (0, 1)]
        [[4, 12, 24], [8, 16, 24]]
    """

    steps: int
    fragments: int = 4
    overlap: int = 0
    mixing: float = 0.5
    pattern: Pattern = "strided"
    own: Own = "mixed"
    delayed = True

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("fragments", 1), ("overlap", 0)):
            whole_number(getattr(self, name), f"Streaming: {name}", least=least)
        if not 1 <= self.fragments <= self.steps:
            raise UsageError(f"{self.fragments} fragments in {self.steps} steps: at least 1, at most one a step")
        if not 0 <= self.overlap < self.steps:
            raise UsageError(f"an overlap of {self.overlap} steps: at least 0 and less than the {self.steps} between")
        if not 0 <= self.mixing < 1:
            raise UsageError(f"mixing {self.mixing} of a rank's own parameters: must be in [0, 1)")
        if self.pattern not in ("strided", "sequential"):
            raise UsageError(f"pattern {self.pattern!r} is none of: strided, sequential")
        if self.own not in ("mixed", "since"):
            raise UsageError(f"own {self.own!r} is none of: mixed, since")

    def period(self, step: int, learning_rate: float) -> int:
        """See ``Synchronizer``: between two meetings of one fragment."""
        return self.steps

    def meets(self, fragment: int, step: int, total_steps: int | None = None) -> bool:
        """Whether a fragment meets after so many steps.

        Args:
            fragment: from 0.
            step: steps done, at least 1.
            total_steps: of the training, if it has an end.
        """
        if total_steps is not None and step >= total_steps:
            return True
        if total_steps is not None and step + self.steps > total_steps:
            return False
        return (step - (fragment + 1) * self.steps // self.fragments) % self.steps == 0


def divide(names: Sequence[str], sizes: Sequence[int], fragments: int, pattern: Pattern) -> list[list[int]]:
    """Which parameters are in which fragment: whole blocks, such as a layer of a transformer, where these are enough.

    Args:
        names: of parameters, in the model's order; what comes before the first number is a block's name, with it.
        sizes: elements of each.
        fragments: how many there shall be.
        pattern: of blocks that are numbered; others, such as embeddings, go to the smallest fragments.

    Returns:
        Places in ``names``, ascending, by fragment; the same on every rank.

    Raises:
        UsageError: there are fewer parameters than fragments.

    Examples:
        >>> names = ["embedding.weight", "layers.0.w", "layers.0.b", "layers.1.w", "layers.2.w", "layers.3.w"]
        >>> divide(names, [5, 4, 1, 5, 5, 5], 2, "strided")
        [[0, 1, 2, 4], [3, 5]]
        >>> divide(names, [5, 4, 1, 5, 5, 5], 2, "sequential")
        [[0, 1, 2, 3], [4, 5]]
    """
    if len(names) < fragments:
        raise UsageError(f"{len(names)} parameters cannot be divided into {fragments} fragments")
    blocks: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        blocks.setdefault(_block(name), []).append(place)
    units = list(blocks.items())
    if len(units) < fragments:
        units = [(name, [place]) for place, name in enumerate(names)]
    weights = [sum(sizes[place] for place in places) for _, places in units]
    if pattern == "sequential":
        chosen = _in_a_row(weights, fragments)
    else:
        chosen = _in_turn([name for name, _ in units], weights, fragments)
    return [sorted(p for unit in mine for p in units[unit][1]) for mine in chosen]


def _block(name: str) -> str:
    words = name.split(".")
    numbered = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[: numbered + 1]) if numbered is not None else words[0]


def _in_turn(names: Sequence[str], weights: Sequence[int], fragments: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(fragments)]
    numbered = [i for i, name in enumerate(names) if name.rsplit(".", 1)[-1].isdigit()]
    for turn, unit in enumerate(numbered):
        found[turn % fragments].append(unit)
    for unit in sorted(set(range(len(names))) - set(numbered), key=lambda i: (-weights[i], i)):
        # Those with nothing first: every fragment has some block.
        smallest = min(range(fragments), key=lambda f: (bool(found[f]), sum(weights[i] for i in found[f]), f))
        found[smallest].append(unit)
    return found


def _in_a_row(weights: Sequence[int], fragments: int) -> list[list[int]]:
    total, found, done, at = sum(weights), list[list[int]](), 0, 0
    for fragment in range(fragments):
        mine = [at]
        done += weights[at]
        at += 1
        left = fragments - fragment - 1
        while len(weights) - at > left and (
            left == 0 or done + weights[at] / 2 <= total * (fragment + 1) / fragments
        ):
            mine.append(at)
            done += weights[at]
            at += 1
        found.append(mine)
    return found
