"""What a rank of ``test_long_context.py`` runs: the example's own steps."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "long_context")


Results = list[tuple[list[float], list[dict[str, float]]]]


def losses(rank: int, world_size: int, cases: list[list[str]], steps: int) -> Results:
    """For each command line losses of some steps, and what held-out bytes cost after them."""
    if EXAMPLE not in sys.path:
        sys.path.insert(0, EXAMPLE)
    import one_rank
    from packs import load, packs, whole

    results: Results = []
    for arguments in cases:
        options = one_rank.parse_arguments(arguments)
        model, optimizer = one_rank.make(options)
        for group in optimizer.param_groups:
            group["lr"] = 5e-4  # Adam's first steps are signs, which rounding turns: larger ones are compared later
        trained = one_rank.averaged(model)
        drawn = packs(load(options.context, held_out=False, max_bytes=1 << 20), options.context, seed=options.seed)
        found = [one_rank.step(trained, optimizer, whole(files, options.seen)) for files in islice(drawn, steps)]
        results.append((found, one_rank.held_out(model, options)))
    return results
