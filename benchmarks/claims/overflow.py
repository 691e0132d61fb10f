"""Does a scaler that overflows every few steps cost anything under error feedback? Every compressor, DDP and FSDP2.

    python benchmarks/claims/overflow.py            # two ranks on loopback; a few minutes
    python benchmarks/claims/overflow.py --quick    # one seed, three compressors; recorded nowhere

A small byte-level transformer whose loss is scaled by ``GradScaler``; gradients of the logits pass through float16,
so that they overflow where the scale has grown too large, which it does every fourth step. A step that is skipped is
made again with the same batch: with nothing lost and nothing counted twice, the run ends where one at a fixed scale
ends. Held-out losses of both, over seeds, with residuals in float32 and, of two compressors, in eight bits; lines
replace those in ``benchmarks/recorded/claims/overflow.jsonl``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training import launch, say

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.data_parallel import COMPRESSORS, compress, make_compressor
from mycel.demo.corpus import Corpus, load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "overflow.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression.md"
MEMORY_PAGE = ROOT / "docs" / "concepts" / "compression_fsdp.md"
LENGTH, BATCH, RATE = 32, 4, 2e-3
#: Gradients of logits, at most 1 / 128, are made so much larger before they pass through float16, so that scales at
#: which they overflow leave the parameters' gradients, which the fp16 compressor sends, inside float16.
LARGER = 2.0**9
#: At this scale they are below float16's largest number, at twice that some are not.
FITS, GROWS_AFTER = 2.0**14, 3
FIXED = 2.0**12
KINDS = ("DDP", "FSDP2")
#: Compressors whose residuals are kept in eight bits, too.
ROUNDED = ("sign", "top_k")


def wrapped(kind: str, seed: int) -> nn.Module:
    """A model of that seed."""
    torch.manual_seed(seed)
    model = ByteGPT(ModelConfig(width=32, num_layers=1, num_heads=2, max_length=LENGTH))
    return DistributedDataParallel(model) if kind == "DDP" else fully_shard(model)


def run(
    kind: str, name: str, residuals: str, seed: int, steps: int, corpus: Corpus, *, overflows: bool
) -> tuple[float, int, int]:
    """Held-out loss after so many steps that were taken, how many were not, and bytes of this rank's residuals."""
    model = wrapped(kind, seed)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=FITS if overflows else FIXED, growth_interval=GROWS_AFTER if overflows else 10**9
    )
    handle = compress(model, make_compressor(name), feedback=True, scaler=scaler, residuals=residuals)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed * 1009 + dist.get_rank())
    skipped = 0
    for _ in range(steps):
        inputs, targets = sample_batch(corpus.train, BATCH, LENGTH, generator)
        while True:
            logits = model(inputs)
            logits.register_hook(lambda gradient: (gradient * LARGER).half().float() / LARGER)
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:
                break
            skipped += 1
    loss = held_out(model, corpus)
    num_bytes = handle.feedback.num_bytes
    handle.close()
    return loss, skipped, num_bytes


@torch.no_grad()
def held_out(model: nn.Module, corpus: Corpus) -> float:
    """Nats a byte; the same on all ranks."""
    inputs, targets = sample_batch(corpus.held_out, 64, LENGTH, torch.Generator().manual_seed(1))
    found: Tensor = functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))
    return float(found)


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    corpus = load_corpus()
    names = ("int8", "sign", "top_k") if options.quick else tuple(sorted(COMPRESSORS))
    kept = [(name, "float32") for name in names] + [(name, "int8") for name in ROUNDED if name in names]
    for kind in KINDS:
        for name, residuals in kept:
            made = make_compressor(name)
            if kind == "FSDP2" and made.aggregation.adds_payloads and not made.is_elementwise:
                continue  # several rounds, which a reduce-scatter has not
            for seed in range(options.seeds):
                same = (kind, name, residuals, seed, options.steps, corpus)
                still, none, _ = run(*same, overflows=False)
                moved, skipped, num_bytes = run(*same, overflows=True)
                if none or not skipped:
                    raise RuntimeError(f"{name}: {none} and {skipped} steps were skipped; nothing is compared")
                record = {"kind": kind, "compressor": name, "residuals": residuals, "residual_bytes": num_bytes}
                record |= {"seed": seed, "steps": options.steps, "skipped": skipped}
                say([{**record, "loss": moved, "loss_without": still}])
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    """A row a compressor: by how much losses differ, for both kinds."""
    rows = []
    for way in dict.fromkeys((line["compressor"], line["residuals"]) for line in lines):
        row = [way[0] if way[1] == "float32" else f"{way[0]}, residuals in {way[1]}"]
        for kind in KINDS:
            mine = [x for x in lines if (x["kind"], x["compressor"], x["residuals"]) == (kind, *way)]
            beside = [x["loss"] - x["loss_without"] for x in mine]
            row.append(f"{statistics.mean(beside):+.4f} ({', '.join(f'{b:+.4f}' for b in beside)})" if mine else "")
        skipped = [x["skipped"] / (x["steps"] + x["skipped"]) for x in lines if x["compressor"] == way[0]]
        rows.append((*row, f"{100 * statistics.mean(skipped):.0f} %"))
    return markdown(("", *(f"{kind}, nats (by seed)" for kind in KINDS), "steps that overflowed"), rows)


def memories(lines: list[dict[str, Any]]) -> str:
    """Residuals of FSDP2 in float32 and in eight bits: their size, and losses beside each other."""
    rows = []
    for name in ROUNDED:
        found = {(x["residuals"], x["seed"]): x for x in lines if (x["kind"], x["compressor"]) == ("FSDP2", name)}
        wide, rounded = ([x for (kept, _), x in found.items() if kept == k] for k in ("float32", "int8"))
        beside = [x["loss"] - found["float32", x["seed"]]["loss"] for x in rounded]
        sizes = [f"{x[0]['residual_bytes'] / 1e3:.1f}" for x in (wide, rounded)]
        rows.append((name, *sizes, f"{statistics.mean(beside):+.4f} ({', '.join(f'{b:+.4f}' for b in beside)})"))
    return markdown(("", "float32, KB a rank", "int8, KB a rank", "loss beside float32, nats (by seed)"), rows)


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, three compressors; recorded nowhere")
    parser.add_argument("--steps", type=int, default=40, help="that are taken")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.quick else 3)
    if options.worker:
        work(options)
        return
    found = launch({"judged": 2}, timeout_s=3000)["judged"]
    texts = (table(found), memories(found))
    print(*texts, sep="\n")
    if not options.quick:
        shared = {"ranks": 2, "hardware": describe_hardware(), "versions": describe_versions(), **stamp()}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{**line, **shared} for line in found])
        write_section(PAGE, "overflow", texts[0])
        write_section(MEMORY_PAGE, "residuals", texts[1])


if __name__ == "__main__":
    main()
