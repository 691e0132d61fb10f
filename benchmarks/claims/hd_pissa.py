"""Which rank HD-PiSSA's changes have, and what a byte-level transformer learns by it beside LoRA and PiSSA.

    python benchmarks/claims/hd_pissa.py            # four ranks on loopback, five minutes on two quiet cores
    python benchmarks/claims/hd_pissa.py --quick    # fewer steps, one seed; records nothing

Four ranks train a small transformer on the standard library's source, then tune it to the same text with upper and
lower case swapped: with LoRA and with PiSSA of rank 4, whose gradients are averaged, and with HD-PiSSA of rank 4 a
rank. All see the same batches and use Adam without weight decay; norms and embedding are frozen. Losses are those of
other files. Lines replace those of the last run in ``benchmarks/recorded/claims/hd_pissa.jsonl``, and the table in
docs/concepts/beyond_averaging.md.

References:
    Y. Wang et al., "HD-PiSSA: High-Rank Distributed Orthogonal Adaptation", EMNLP 2025, arXiv 2505.18777.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from digits import run_ranks, spread
from torch import Tensor, nn
from torch.nn import functional

from mycel.comm.bundle import Packed
from mycel.data_parallel import Mean, hd_pissa
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from mycel.demo.train import learning_rate
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "hd_pissa.jsonl"
PAGE = ROOT / "docs" / "concepts" / "beyond_averaging.md"
RANKS, RANK, BATCH, LENGTH = 4, 4, 8, 64
MODEL = ModelConfig(width=96, num_layers=2, num_heads=4, max_length=LENGTH)
RATES = (1e-5, 1e-3, 3e-3, 1e-2, 3e-2)
#: Singular values of a change below this share of its largest are taken for rounding and second-order terms.
NEGLIGIBLE = 1e-2

#: Takes a gradient step with this rank's loss.
Step = Callable[[Tensor], None]


class Adapter(nn.Module):
    """A linear layer beside a product of two thin matrices, which alone are trained."""

    def __init__(self, linear: nn.Linear, *, principal: bool) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = weight.clone()
        if principal:
            u, s, vh = torch.linalg.svd(weight, full_matrices=False)
            self.b = nn.Parameter(u[:, :RANK] * s[:RANK].sqrt())
            self.a = nn.Parameter(s[:RANK, None].sqrt() * vh[:RANK])
            self.weight -= (self.b @ self.a).detach()
        else:
            self.b = nn.Parameter(weight.new_zeros(weight.shape[0], RANK))
            self.a = nn.Parameter(nn.init.kaiming_uniform_(weight.new_empty(RANK, weight.shape[1]), a=5**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.a), self.b)

    def merged(self) -> Tensor:
        return (self.weight + self.b @ self.a).detach()


def averaging(optimizer: torch.optim.Optimizer) -> Step:
    """Steps with the mean of all ranks' gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    packed = Packed(parameters)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in parameters]
        packed.copy_from(gradients)
        assert dist.group.WORLD is not None
        for bundle in packed.bundles:
            Mean().start(bundle, dist.group.WORLD).wait()
        packed.copy_to(gradients)
        optimizer.step()

    return step


def adapted(model: nn.Module, rate: float, seed: int, *, principal: bool) -> tuple[Step, float]:
    """LoRA or PiSSA: its step, and the bytes that a rank sends in it."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Adapter(module, principal=principal))
    trained = [p for p in model.parameters() if p.requires_grad]
    num_bytes = 2 * (RANKS - 1) / RANKS * sum(4 * p.numel() for p in trained)
    return averaging(torch.optim.Adam(trained, lr=rate)), num_bytes


def distributed(model: nn.Module, rate: float, seed: int) -> tuple[Step, float]:
    """HD-PiSSA: the same."""
    tuned = hd_pissa(model, partial(torch.optim.Adam, lr=rate), rank=RANK)

    def step(loss: Tensor) -> None:
        tuned.optimizer.zero_grad()
        loss.backward()
        tuned.optimizer.step()

    return step, sum((RANKS - 1) * 4 * p.numel() for p in tuned.parameters())


METHODS: dict[str, Callable[[nn.Module, float, int], tuple[Step, float]]] = {
    "LoRA": partial(adapted, principal=False),
    "PiSSA": partial(adapted, principal=True),
    "HD-PiSSA": distributed,
}


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Weights of linear layers, adapters multiplied out."""
    kinds = ((name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, Adapter)))
    return {n: m.merged() if isinstance(m, Adapter) else m.weight.detach().clone() for n, m in kinds}


def loss_of(model: nn.Module, text: Tensor, generator: torch.Generator, batch_size: int = BATCH) -> Tensor:
    """Nats a byte on random windows."""
    inputs, targets = sample_batch(text, batch_size, LENGTH, generator)
    return functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1))


def swapped(text: Tensor) -> Tensor:
    """Upper case for lower and the other way round."""
    return torch.frombuffer(bytearray(text.numpy().tobytes().swapcase()), dtype=torch.uint8)


def be_rank(pretraining: int, steps: int, seeds: int, rates: list[float]) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    corpus = load_corpus()
    train, held_out = swapped(corpus.train), swapped(corpus.held_out)
    torch.manual_seed(0)
    begin = ByteGPT(MODEL)
    optimizer = torch.optim.AdamW(begin.parameters(), betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(dist.get_rank())
    step = averaging(optimizer)
    for done in range(pretraining):
        optimizer.param_groups[0]["lr"] = learning_rate(done, peak=4e-3, warm_up=20, steps=pretraining)
        step(loss_of(begin, corpus.train, generator))

    @torch.no_grad()
    def judge(model: nn.Module, text: Tensor) -> float:
        return float(loss_of(model, text, torch.Generator().manual_seed(99), 256))

    before = {
        "seed": 0,
        "method": "before",
        "original": judge(begin, corpus.held_out),
        "loss": judge(begin, held_out),
    }
    lines: list[dict[str, Any]] = [before]
    for name, make in METHODS.items():
        for rate in rates:
            for seed in range(seeds if rate > rates[0] else 1):  # the smallest is there for the ranks alone
                model = copy.deepcopy(begin)
                step, num_bytes = make(model, rate, seed)
                generator = torch.Generator().manual_seed(1000 + 100 * seed + dist.get_rank())
                for _ in range(steps):
                    step(loss_of(model, train, generator))
                ranks = []
                for key, old in matrices(begin).items():
                    values = torch.linalg.svdvals(matrices(model)[key].double() - old.double())
                    ranks.append(int((values > NEGLIGIBLE * values[0]).sum()))
                found = {"method": name, "rate": rate, "seed": seed, "steps": steps, "loss": judge(model, held_out)}
                lines.append({**found, "matrix_ranks": ranks, "sent_bytes": num_bytes})
                if dist.get_rank() == 0:
                    print(json.dumps(lines[-1]), flush=True)
    if dist.get_rank() == 0:
        print(json.dumps(before), flush=True)
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    """A row a method: ranks at the smallest and the largest learning rate, losses at all but the smallest."""
    rates = sorted({line["rate"] for line in lines if "rate" in line})
    rows = []
    for name in METHODS:
        of = {rate: [line for line in lines if line.get("rate") == rate and line["method"] == name] for rate in rates}
        ends = [[rank for line in of[rate] for rank in line["matrix_ranks"]] for rate in (rates[0], rates[-1])]
        losses = [spread([line["loss"] for line in of[rate]]) for rate in rates[1:]]
        best = min(statistics.mean(line["loss"] for line in of[rate]) for rate in rates[1:])
        sent = of[rates[0]][0]["sent_bytes"]
        bounds = [f"{min(found)}" if min(found) == max(found) else f"{min(found)}-{max(found)}" for found in ends]
        rows.append((name, f"{sent / 1e3:.0f}", *bounds, *losses, f"{best:.3f}"))
    headings = ("method", "KB a step", *(f"rank, rate {rate:g}" for rate in (rates[0], rates[-1])))
    text = markdown((*headings, *(f"loss, rate {rate:g}" for rate in rates[1:]), "best loss"), rows)
    before = next(line for line in lines if line["method"] == "before")
    return text + f"\nBefore: {before['loss']:.2f}, and {before['original']:.2f} on text that is not swapped.\n"


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pretraining", type=int, default=600, help="steps")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.pretraining, options.steps, options.seeds, options.rates = 60, 20, 1, (1e-5, 1e-3)
    if options.rank:
        be_rank(options.pretraining, options.steps, options.seeds, options.rates)
        return
    arguments = [f"--{k}={getattr(options, k)}" for k in ("pretraining", "steps", "seeds")]
    arguments += ["--rates", *map(str, options.rates)]
    lines = run_ranks(RANKS, __file__, arguments, print)
    if options.quick:
        print(table(lines))
        return
    conclude(OUTPUT, PAGE, "hd_pissa", lines, table)


if __name__ == "__main__":
    main()
