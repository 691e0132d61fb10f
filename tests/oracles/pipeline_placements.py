"""Small random placements, as data that both mycel and the exhaustive search read."""

from __future__ import annotations

from random import Random
from typing import Any

from mycel.pipeline.placement import Placement

__all__ = ["random_placement"]


def random_placement(seed: int, *, most_blocks: int = 6) -> Placement:
    """Up to three devices; forwards take memory and backwards give it back; branches, shared blocks, delays."""
    chance = Random(seed)
    devices = chance.randint(2, 3)
    stages = chance.randint(1, most_blocks // 2)
    blocks: list[dict[str, Any]] = []
    for stage in range(stages):
        on = [stage % devices] if chance.random() < 0.8 else sorted(chance.sample(range(devices), 2))
        blocks.append(
            {"name": f"F{stage}", "devices": on, "time": chance.randint(1, 3), "memory": chance.randint(0, 2)}
        )
    for stage in reversed(range(stages)):
        forward = blocks[stage]
        blocks.append(
            {
                "name": f"B{stage}",
                "devices": forward["devices"],
                "time": chance.randint(1, 4),
                "memory": -forward["memory"],
            }
        )
    count = len(blocks)
    deps = [[i, i + 1, chance.choice((0, 0, 0, 1, 3))] for i in range(count - 1)]
    if stages > 1 and chance.random() < 0.3:  # a branch: the second forward does not wait for the first
        deps[0] = [0, count - 1 - stages + 1, 0] if stages > 2 else deps[0]
    if len(blocks) < most_blocks and chance.random() < 0.4:
        blocks.append({"name": "S", "devices": list(range(devices)), "time": 1})
        deps.append([count - 1, count, 0])
    used = {device for block in blocks for device in block["devices"]}
    for device in set(range(devices)) - used:
        blocks.append({"name": f"x{device}", "devices": [device], "time": chance.randint(1, 3)})
        deps.append([0, len(blocks) - 1, 0])
    free = Placement.from_json({"devices": devices, "blocks": blocks, "deps": deps})
    cap = [chance.choice((None, need, need + 1, need + 2)) for need in free.need]
    return Placement.from_json(
        {"name": f"random {seed}", "devices": devices, "blocks": blocks, "deps": deps, "cap": cap}
    )
