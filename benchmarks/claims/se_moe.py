"""SE-MoE's ring of layers beside fetching on demand, training with far experts, and what host memory keeps of a disk.

    python benchmarks/claims/se_moe.py [--quick]     # two minutes; replaces its lines and tables in the guide
    python benchmarks/claims/se_moe.py --only tiers  # training, dense blocks and disk alone, which are counted

The paper keeps K layers near in a ring and loads layer ``l + K`` while others compute, and reports inference without
stalls as long as a layer loads as fast as it computes. Here the link is emulated and all policies take turns in one
run (``moe_offload.py``), at two loads: one token at a time, where 2 of 16 experts of a layer are active, and 64,
where all are. The link's speed is set so that a block's active experts take 0.8 of its time.

Training: bytes of experts near at once, and brought in a step of six layers, counted; losses and parameters are
those of training with everything near, bit for bit (checked). Dense blocks in the same ring (``fit(..., slots=N)``),
beside what moves least under the same budget, counted and checked alike. Disk: tensors that are read from it, of
those asked for, by how much of them host memory holds, for experts that are asked for by Zipf's law in an order that
changes half way; beside the same memory with what was used last.

References:
    Shen et al., "SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and Inference System", 2022
    (arXiv 2205.10034).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from moe_offload import measure, stack
from mycel.bench.measurement import describe_hardware
from mycel.comm.pending import Pending
from mycel.memory import fit
from mycel.memory.needs import needs_of
from mycel.moe import MoE
from mycel.moe.memory import DiskLink, EmulatedLink, FetchPolicy, Ring, TrainingOffload, make_fetch_policy
from record import RECORDED, ROOT, append, conclude, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "se_moe.jsonl"
PAGE = ROOT / "docs" / "guides" / "moe_memory.md"
BLOCKS = 6
#: Steps of training; experts on the disk, and how often one is asked for.
TRAINED, EXPERTS, ASKED = 3, 64, 4000
#: Dense blocks, and the part of what a step needs with everything near that each way has as its budget.
DENSE, PART = 12, 0.2


def lines(*, quick: bool) -> list[dict[str, Any]]:
    """A line a load and policy."""

    def make() -> nn.Module:
        return stack(blocks=BLOCKS, dim=512, hidden=256, experts=16, top_k=2, context=512)

    made = []
    for tokens in (1, 64):
        policies: dict[str, FetchPolicy] = {name: make_fetch_policy(name) for name in ("resident", "on_demand")}
        policies |= {f"ring of {slots} layers": Ring(slots=slots) for slots in (2, 3, 4)}
        rows = measure(make, policies, ratio=0.8, steps=4 if quick else 15, tokens=tokens, width=512)
        made += [row for row in rows if row["policy"] != "layer as it is"]
    return made


def training() -> list[dict[str, Any]]:
    """A line a way to keep experts while they are trained."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(MoE(64, 128, 16, 2) for _ in range(BLOCKS)))

    whole = sum(p.nbytes for layer in make() for p in layer.experts.parameters())
    made, wanted = [], None
    for way in ("all near", "far, the next layer ahead", "far, on demand"):
        link = Counting(bandwidth_gbps=100)
        model = make()
        offload = None if way == "all near" else TrainingOffload(model, link, prefetch=way != "far, on demand")
        optimizer = torch.optim.AdamW((offload or model).parameters())
        for step in range(TRAINED):
            x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        near = whole if offload is None else offload.peak_bytes
        if offload is not None:
            offload.close()
            link.num_bytes -= whole  # brought by closing
        link.close()
        found = [p.detach() for p in model.parameters()]
        wanted = wanted or found
        if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            raise SystemExit(f"{way}: trains to something else")
        made.append({"trained": way, "near": near / whole, "brought": link.num_bytes / whole / TRAINED})
    return made


class Dense(nn.Module):
    """Feed-forward blocks with residuals."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(DENSE))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def dense() -> list[dict[str, Any]]:
    """A line a way to have dense blocks come and go, all within one budget."""
    whole = sum(p.nbytes for p in Dense().parameters())
    made, wanted = [], None
    for way in ("all near", "what moves least", 2, 3, 4):
        link = Counting(bandwidth_gbps=100)
        model = Dense()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        budget = round(PART * needs_of(model, (batch,), optimizer=optimizer).peak)
        slots = way if isinstance(way, int) else None
        fitted = None
        if way != "all near":
            fitted = fit(model, optimizer, (batch,), budget=budget, link=link, slots=slots)
        begun = link.num_bytes
        for step in range(TRAINED):
            model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        brought, near = link.num_bytes - begun, whole
        if fitted is not None:
            residency = fitted.handles[-1]
            near = residency.peak_bytes + sum(residency.schedule.parts.sizes[u] for u in residency.schedule.pinned)
            fitted.close()
        link.close()
        found = [p.detach() for p in model.parameters()]
        wanted = wanted or found
        if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            raise SystemExit(f"dense blocks, {way}: train to something else")
        named = f"ring of {way} blocks" if slots else str(way)
        made.append({"dense": named, "near": near / whole, "brought": brought / whole / TRAINED})
    return made


class Counting(EmulatedLink):
    """Bytes asked for."""

    num_bytes = 0

    def fetch(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Pending[None]:
        self.num_bytes += sum(near.nbytes for _, near in copies)
        return super().fetch(copies)


def disk() -> list[dict[str, Any]]:
    """A line a size of host memory."""
    generator = torch.Generator().manual_seed(0)
    shares = 1.0 / torch.arange(1, EXPERTS + 1, dtype=torch.float64)
    orders = [torch.randperm(EXPERTS, generator=generator) for _ in range(2)]
    asked = [
        int(order[n]) for order in orders for n in torch.multinomial(shares, ASKED // 2, True, generator=generator)
    ]
    made = []
    for part in (4, 2):
        with tempfile.TemporaryDirectory() as folder:
            inner = EmulatedLink(bandwidth_gbps=100)
            link = DiskLink(inner, folder, host_bytes=EXPERTS // part * 256)
            far, near = [link.far(torch.zeros(64)) for _ in range(EXPERTS)], torch.empty(64)
            for expert in asked:
                link.fetch([(far[expert], near)]).wait()
            link.close()
            inner.close()
        recent: OrderedDict[int, None] = OrderedDict()
        missed = 0
        for expert in asked:
            missed += expert not in recent
            recent[expert] = None
            recent.move_to_end(expert)
            if len(recent) > EXPERTS // part:
                recent.popitem(last=False)
        made.append({"held": 1 / part, "asked": len(asked), "read": link.reads, "read_recent": missed})
    return made


def table(made: Sequence[dict[str, Any]]) -> str:
    """For the guide."""
    trained = [(r["trained"], f"{100 * r['near']:.0f} %", f"{r['brought']:.2f}") for r in made if "trained" in r]
    blocks = [(r["dense"], f"{100 * r['near']:.0f} %", f"{r['brought']:.2f}") for r in made if "dense" in r]
    held = [
        (
            f"{100 * r['held']:.0f} %",
            f"{100 * r['read'] / r['asked']:.1f} %",
            f"{100 * r['read_recent'] / r['asked']:.1f} %",
        )
        for r in made
        if "held" in r
    ]
    rows = [
        (
            r["policy"],
            r["tokens"],
            f"{r['of_first']:.2f}x",
            f"{100 * r['peak'] / r['experts']:.0f} %",
            "" if r["policy"] == "resident" else f"{r['fetched_a_pass']:.0f}",
        )
        for r in made
        if "policy" in r
    ]
    heads = ("policy", "tokens a pass", "time of resident", "experts near", "experts brought a pass")
    parts = [
        markdown(heads, rows),
        markdown(("training", "experts near at most", "experts brought a step, times all of them"), trained),
        markdown(("dense blocks", "near at most", "brought a step, times all of them"), blocks),
        markdown(("in host memory", "read from the disk", "with what was used last"), held),
    ]
    return "\n".join(parts)


def main() -> None:
    """Measure, record, and renew the guide's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few passes; nothing is kept")
    parser.add_argument("--only", choices=("tiers",))
    options = parser.parse_args()
    torch.set_num_threads(1)
    tiers = [{"tier": True, **line} for line in training() + dense() + disk()]
    if options.only:
        conclude(OUTPUT, PAGE, "se_moe", tiers, table, kind="tier")
        return
    made = lines(quick=options.quick) + tiers
    print(table(made))
    if not options.quick:
        common = {**stamp(), "hardware": describe_hardware()}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [row | common for row in made])
        write_section(PAGE, "se_moe", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
