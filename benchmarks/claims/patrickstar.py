"""PatrickStar's residency by next use beside ZeRO-Offload's static split: how large a model trains, and what moves.

    python benchmarks/claims/patrickstar.py [--quick] [--write]     # five minutes; --write renews the guide's table

Nothing is timed here: what a step needs is traced on tensors without memory, plans are made for it, and bytes are
counted. Models are Llamas of one width and as many layers as fit, with blocks computed again, AdamW in float32.

*Scale.* Near memory of 64 MiB, far memory of 1 GiB. With the static split parameters and gradients are near and
optimizer state is far. With residency everything is far and near memory has to hold what one block needs at a time.

*What moves*, of parameters and gradients, in a step of one and of four micro-batches, at the static split's largest
model and at twice as many layers: the split moves gradients out and parameters in, once a step; a fixed resident set
and eviction of what was used longest ago are beside eviction by next use, under the same room at each moment.

*Waste* of chunks of one size, in percent: the best found, and 64 Mi elements as a fixed size.

References:
    Fang et al., "PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Dynamic Memory Management",
    TPDS 2023; Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021 (static split).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from mycel.errors import SynthesisError, UsageError
from mycel.memory.needs import Needs, blocks_of, needs_of
from mycel.memory.residency import (
    Demand,
    Parts,
    ResidencyPlan,
    by_next_use,
    fixed_set,
    layout_of,
    least_recently_used,
    parts_of,
    search_layout,
)
from mycel.memory.residency.schedule import demand_of, least_budget
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "patrickstar.jsonl"
PAGE = ROOT / "docs" / "guides" / "models_that_do_not_fit.md"
NEAR, FAR = 64 << 20, 1 << 30
WIDTH, TOKENS = 256, 256
#: Layers and widths of GPTs from 1.5 to 12 billion parameters.
GPTS = {
    "1.5B": (48, 1600),
    "4B": (50, 2560),
    "6B": (53, 3072),
    "8B": (72, 3072),
    "10B": (50, 4096),
    "12B": (60, 4096),
}
FIXED_CHUNK = 64 << 20


def model(layers: int) -> Callable[[], nn.Module]:
    """Makes a Llama."""

    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            "llama",
            vocab_size=1024,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        made: nn.Module = AutoModelForCausalLM.from_config(config)
        return made

    return make


_TRACED: dict[int, tuple[Needs, Parts]] = {}


def traced(layers: int) -> tuple[Needs, Parts]:
    """What a step needs, and the units."""
    if layers not in _TRACED:
        ids = torch.zeros(4, TOKENS, dtype=torch.int64)
        needs = needs_of(model(layers), {"input_ids": ids, "labels": ids}, recompute=True)
        with torch.device("meta"):
            made = model(layers)()
        _TRACED[layers] = needs, parts_of(made, blocks_of(made))
    return _TRACED[layers]


def fits_split(layers: int) -> bool:
    """Whether the static split trains it: optimizer state far, all else near."""
    needs, parts = traced(layers)
    near = max(m.total - m.optimizer for m in needs.moments if m.phase != "step")
    return near <= NEAR and needs.most("optimizer") + sum(parts.sizes) <= FAR


def fits_residency(layers: int) -> bool:
    """Whether residency does: everything far."""
    needs, parts = traced(layers)
    return least_budget(needs, parts) <= NEAR and needs.most("optimizer") + 2 * sum(parts.sizes) <= FAR


def largest(fits: Callable[[int], bool]) -> int:
    """Layers, by doubling and bisection."""
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scale() -> tuple[list[dict[str, Any]], int]:
    """A line a way, and the layers of the split's largest."""
    made = []
    for way, fits in (("static split", fits_split), ("residency", fits_residency)):
        layers = largest(fits)
        count = sum(traced(layers)[1].sizes) // 4
        bound = (NEAR + FAR) / 16
        made.append({"part": "scale", "way": way, "layers": layers, "parameters": count, "of_bound": count / bound})
        print(made[-1], file=sys.stderr)
    return made, made[0]["layers"]


def moved(layers: int) -> list[dict[str, Any]]:
    """A line a way, of bytes over those of the parameters."""
    needs, parts = traced(layers)
    whole = sum(parts.sizes)
    made = []
    for micro in (1, 4):
        _, stale = demand_of(needs, parts, NEAR)
        split = 2.0 if fits_split(layers) else None
        made.append({"part": "moved", "layers": layers, "micro": micro, "way": "static split", "times": split})
        ways: tuple[tuple[str, Callable[[Demand], ResidencyPlan]], ...] = (
            ("fixed resident set", fixed_set),
            ("longest ago", least_recently_used),
            ("by next use", by_next_use),
        )
        every = sum(stale.sizes[unit] for units in stale.uses for unit in units) * micro
        rows = [("all far", every)]
        for name, way in ways:
            rows.append((name, way(stale.repeated(micro)).loaded_bytes))
        for name, loaded in rows:
            times = (loaded + micro * sum(parts.trained)) / whole
            made.append(
                {
                    "part": "moved",
                    "layers": layers,
                    "micro": micro,
                    "way": name,
                    "times": times,
                    "loaded": loaded / whole,
                }
            )
    return made


def waste() -> list[dict[str, Any]]:
    """A line a GPT."""
    made = []
    for name, (layers, width) in GPTS.items():
        layer = [width, width, 3 * width * width, 3 * width, width * width, width]
        layer += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
        sizes = layer * layers + [width, width]
        best = search_layout(sizes)
        try:
            fixed: float | None = layout_of(sizes, chunk_elements=FIXED_CHUNK).waste
        except UsageError:
            fixed = None
        line = {"part": "waste", "model": name, "chunk_elements": best.chunk_elements, "waste": best.waste}
        made.append(line | {"chunks": len(best.chunks), "fixed": fixed})
    return made


def table(lines: Sequence[dict[str, Any]]) -> str:
    """For the guide."""
    parts = []
    found = [line for line in lines if line["part"] == "scale"]
    rows: list[tuple[object, ...]] = [
        (one["way"], one["layers"], f"{one['parameters'] / 1e6:.1f} M", f"{100 * one['of_bound']:.0f} %")
        for one in found
    ]
    parts.append(markdown(("way", "layers", "parameters", "of (near + far) / 16 bytes"), rows))
    rows = [
        (
            one["layers"],
            one["micro"],
            one["way"],
            "does not fit" if one["times"] is None else f"{one['times']:.2f}",
            f"{one['loaded']:.2f}" if "loaded" in one else "",
        )
        for one in lines
        if one["part"] == "moved"
    ]
    heads = ("layers", "micro-batches", "way", "bytes moved a step, over the parameters'", "of that, parameters in")
    parts.append(markdown(heads, rows))
    rows = [
        (
            one["model"],
            one["chunks"],
            f"{one['chunk_elements'] / (1 << 20):.1f} Mi",
            f"{100 * one['waste']:.2f} %",
            "impossible" if one["fixed"] is None else f"{100 * one['fixed']:.1f} %",
        )
        for one in lines
        if one["part"] == "waste"
    ]
    parts.append(markdown(("GPT", "chunks", "elements", "waste", "waste with 64 Mi"), rows))
    return "\n".join(parts)


def main() -> None:
    """Count, print, and with ``--write`` record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="chunks, and what moves at six layers")
    parser.add_argument("--write", action="store_true", help="replace its recorded lines and the guide's table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = waste()
    if options.quick:
        print(table(made + moved(6)))
        return
    found, layers = scale()
    made += found
    for count in (layers, 2 * layers):
        try:
            made += moved(count)
        except SynthesisError as error:
            raise SystemExit(f"{count} layers: {error}") from None
    print(table(made))
    if options.write:
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [line | stamp() for line in made])
        write_section(PAGE, "patrickstar", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
