"""A training run that is killed twice and goes on with fewer ranks, beside one that is not; losses in one plot.

    python benchmarks/restart.py            # four ranks, then three, then two, on loopback; about two minutes
    python benchmarks/restart.py --quick    # fewer steps; records nothing

A byte-level transformer learns the standard library's source with DiLoCo: rounds of eight steps, an outer optimizer
with momentum. Rank 0 saves after every meeting. Twice, in the middle of a round, the last rank kills itself without
a word, and the others end as well; then as many as are left start again from the last checkpoint. Lines replace those
of the last run in ``benchmarks/recorded/restart.jsonl``, the plot is docs/images/restart.png.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mycel.bench.ranks import run_ranks
from mycel.data_parallel.local import Periodic, diloco, local_updates
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from mycel.errors import CommunicationError
from record import RECORDED, ROOT, append, stamp

OUTPUT = RECORDED / "restart.jsonl"
PLOT = ROOT / "docs" / "images" / "restart.png"
ROUND, LENGTH = 8, 64


def be_rank(file: Path, steps: int, dies_at: int) -> None:
    """Train from the checkpoint, if there is one, to the end or to this rank's death."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    text = load_corpus(max_bytes=2 << 20).train
    torch.manual_seed(0)
    net = ByteGPT(ModelConfig(width=64, num_layers=2, num_heads=2, max_length=LENGTH))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    saved = torch.load(file, weights_only=True) if file.exists() else None
    if saved is not None:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    updates = local_updates(optimizer, Periodic(ROUND), model=model, outer=diloco(), total_steps=steps)
    if saved is not None:
        updates.load_state_dict(saved["updates"])
    for step in range(updates.step, steps):
        if step == dies_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * 64 + rank)
        inputs, targets = sample_batch(text, 8, LENGTH, generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(json.dumps({"step": step, "loss": float(mean) / size, "ranks": size}), flush=True)
            if updates.in_step:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "updates": updates.state_dict()}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
    dist.destroy_process_group()


def run(file: Path, steps: int, deaths: dict[int, int]) -> list[dict[str, Any]]:
    """Start as many ranks as are left again and again.

    Args:
        file: of the checkpoint.
        steps: of the training.
        deaths: step at which the last of so many ranks dies.
    """
    lines: list[dict[str, Any]] = []
    ranks = 4

    def take(rank: int, record: dict[str, Any]) -> None:
        lines.append(record)

    while True:
        dies_at = deaths.get(ranks, -1)
        command = [sys.executable, __file__, "--rank", str(file), "--steps", str(steps), "--dies-at", str(dies_at)]
        try:
            run_ranks(ranks, command, sink=take, timeout_s=900.0)
        except CommunicationError as error:
            if dies_at < 0 or not lines or lines[-1]["step"] != dies_at - 1:
                raise
            print(f"after step {lines[-1]['step']} of {ranks} ranks: {error}"[:150], flush=True)
            ranks -= 1
            continue
        return lines


def draw(straight: list[dict[str, Any]], broken: list[dict[str, Any]]) -> None:
    """Both curves; what was trained in vain is dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    panel.plot(
        [x["step"] for x in straight], [x["loss"] for x in straight], color="#b3a58f", label="4 ranks throughout"
    )
    colours = {4: "#1d7f55", 3: "#c2682b", 2: "#3b5fa8"}
    for ranks in (4, 3, 2):
        part = [x for x in broken if x["ranks"] == ranks]
        later = [x["step"] for x in broken if x["ranks"] < ranks]
        end = min(later, default=part[-1]["step"] + 1)
        kept, lost = [x for x in part if x["step"] < end], [x for x in part if x["step"] >= end - 1]
        label = f"{ranks} ranks" + (", one killed" if later else "")
        panel.plot([x["step"] for x in kept], [x["loss"] for x in kept], color=colours[ranks], label=label)
        panel.plot([x["step"] for x in lost], [x["loss"] for x in lost], color=colours[ranks], linestyle=":")
        if ranks < 4:
            panel.axvline(part[0]["step"], color=colours[ranks], linewidth=0.6)
    panel.set(xlabel="step", ylabel="loss, nats a byte, mean of ranks")
    panel.legend(frameon=False)
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run and draw; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=168)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dies-at", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.rank, options.steps, options.dies_at)
        return
    if options.quick:
        options.steps = 48
    deaths = {4: options.steps // 3 + 3, 3: 2 * options.steps // 3 + 3}
    with tempfile.TemporaryDirectory() as folder:
        straight = run(Path(folder, "straight.pt"), options.steps, {})
        broken = run(Path(folder, "broken.pt"), options.steps, deaths)
    ends = [statistics.mean(x["loss"] for x in lines[-ROUND:]) for lines in (straight, broken)]
    joints = {ranks: next(x["step"] for x in broken if x["ranks"] == ranks) for ranks in (3, 2)}
    print(f"restarted at steps {joints}; loss of the last {ROUND} steps {ends[1]:.3f}, uninterrupted {ends[0]:.3f}")
    if not options.quick:
        OUTPUT.unlink(missing_ok=True)
        lines = [{"run": name, **x} for name, found in (("straight", straight), ("broken", broken)) for x in found]
        append(OUTPUT, [{**line, **stamp()} for line in lines])
        draw(straight, broken)


if __name__ == "__main__":
    main()
