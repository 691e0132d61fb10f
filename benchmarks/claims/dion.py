"""Dion, DeMo and 1-bit Adam beside Muon, AdamW and AdamW with PowerSGD: losses over seeds, bytes, slow steps.

    python benchmarks/claims/dion.py            # root, for network namespaces
    python benchmarks/claims/dion.py --quick    # small; nothing is recorded
    python benchmarks/claims/dion.py --part judged --seeds 3 --steps 300
    python benchmarks/claims/dion.py --part judged --only "DeMo;1-bit Adam"   # beside what is recorded of the others

A byte-level transformer on the standard library's source. *judged*: ranks on loopback, where nothing is timed;
losses of Dion at a quarter of the rank beside Muon's with the same seed, everybody at the best of a few rates, which
are tried on another seed. *timed*: four ranks behind a switch, links of 50 Mbit/s, ways in turns. Embeddings and
norms are AdamW's in all of them. Lines replace those of the part in ``benchmarks/recorded/claims/dion.jsonl``, and
the tables in docs/guides/optimizers.md.

References:
    Ahn, Xu et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv 2504.05295;
    Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv 2411.19870;
    Tang et al., "1-bit Adam", ICML 2021, arXiv 2102.02888.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import WARM_UP, Sizes, Way, launch, loss_table, say, train

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.data_parallel import CompressionPolicy, DeMo, Dion, Muon, OneBitAdam, PowerSGD, compress, matrix_groups
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "dion.jsonl"
PAGE = ROOT / "docs" / "guides" / "optimizers.md"
TIMEOUT = timedelta(seconds=240)
#: Rates that are tried, of AdamW and of matrices' orthonormal updates.
ADAMW_RATES = (2e-3, 4e-3, 8e-3)
MATRIX_RATES = (1e-2, 2e-2, 4e-2)
#: Of AdamW for embeddings and norms, beside orthonormal updates; the middle of AdamW's own.
REST_RATE = 4e-3
#: Of Dion with less momentum, which takes more.
TWICE_RATES = (4e-2, 8e-2)
#: Of DeMo, whose updates are signs.
SIGN_RATES = (5e-4, 1e-3, 2e-3)
#: Share of the steps that 1-bit Adam is Adam.
ONE_BIT_WARM_UP = 0.2
#: On which rates are chosen; losses are compared on others.
CHOICE_SEED = 77
POWERSGD_RANK = 4
#: Which travel exact wherever matrices have an algorithm of their own.
EMBEDDINGS = ("embedding*",)
HALF_MUON = "Muon, bfloat16 updates"
#: Muon of what factors of Dion's rank bring of the gradients, by their own feedback.
MUON_OF_FACTORS = "Muon, PowerSGD 1/4"


@dataclass
class OptimizerWay(Way):
    """A way with an optimizer of its own.

    Attributes:
        optimize: makes it of the wrapped model; returns what has ``stats`` too, unless the wrapping has.
    """

    optimize: Callable[[DistributedDataParallel], tuple[torch.optim.Optimizer, Any]] | None = None

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """See ``Way``."""
        if self.optimize is None:
            return super().make_optimizer(model)
        made, handle = self.optimize(self.ddp)
        self.handle = handle if handle is not None else self.handle
        return made


def wrapped(backend: str, compressor: Any = None, exact: Sequence[str] = ()) -> Any:
    """DDP in a group of its own, compressed or not, but for parameters whose names fit patterns."""

    def make(model: nn.Module) -> Any:
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
        if compressor is None:
            return ddp, None
        own = dist.new_group(backend=backend, timeout=TIMEOUT)
        policy = CompressionPolicy(compressor, rules=dict.fromkeys(exact), start_step=2)
        return ddp, compress(ddp, policy, group=own)

    return make


def adamw(rate: float) -> Any:
    """AdamW for everything."""

    def make(ddp: DistributedDataParallel) -> Any:
        return torch.optim.AdamW(ddp.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True), None

    return make


def of_matrices(kind: Any, rate: float, **options: Any) -> Any:
    """Dion, Muon, DeMo or 1-bit Adam for matrices, AdamW for the rest."""

    def make(ddp: DistributedDataParallel) -> Any:
        groups = matrix_groups(ddp, adamw_options={"lr": REST_RATE})
        made = kind(groups, lr=rate, weight_decay=0.1, **{"betas": (0.9, 0.95), **options})
        return made, made.attach(ddp)

    return make


def muon_of_means(rate: float) -> Any:
    """Muon of averaged gradients: each rank makes all matrices orthonormal, and nothing more travels."""

    def make(ddp: DistributedDataParallel) -> Any:
        groups = matrix_groups(ddp, adamw_options={"lr": REST_RATE})
        return Muon(groups, lr=rate, weight_decay=0.1, betas=(0.9, 0.95)), None

    return make


def quarter(width: int) -> PowerSGD:
    """Factors of as many columns as Dion's at a quarter of the rank."""
    return PowerSGD(width // 4, min_ratio=1.0)


def one_bit(rate: float, steps: int) -> Any:
    """1-bit Adam; second moments that stay are of more steps than AdamW's."""
    return of_matrices(OneBitAdam, rate, warm_up=max(1, int(ONE_BIT_WARM_UP * steps)), betas=(0.9, 0.99))


def ways(backend: str, rates: dict[str, float], steps: int, width: int) -> list[Way]:
    """All of them; Muon first, which the others' losses are compared with."""
    half = torch.bfloat16
    a, m, d = rates["AdamW"], rates["Muon"], rates["Dion"]

    def way(name: str, optimize: Any, compressor: Any = None, exact: Sequence[str] = ()) -> Way:
        return OptimizerWay(name, wrapped(backend, compressor, exact), optimize=optimize)

    return [
        way("Muon", of_matrices(Muon, m)),
        way(HALF_MUON, of_matrices(Muon, m, wire=half)),
        way("Dion 1/4", of_matrices(Dion, d, rank=0.25)),
        way("Dion 1/4, bfloat16 factors", of_matrices(Dion, d, rank=0.25, wire=half)),
        way("Dion 1/4, momentum 0.8", of_matrices(Dion, rates["Dion, momentum 0.8"], rank=0.25, momentum=0.8)),
        way(MUON_OF_FACTORS, muon_of_means(rates[MUON_OF_FACTORS]), quarter(width), EMBEDDINGS),
        way("DeMo", of_matrices(DeMo, rates["DeMo"])),
        way("1-bit Adam", one_bit(rates["1-bit Adam"], steps)),
        way("AdamW", adamw(a)),
        way(f"AdamW, PowerSGD {POWERSGD_RANK}", adamw(a), PowerSGD(POWERSGD_RANK)),
    ]


def choose(sizes: Sizes, only: Sequence[str]) -> dict[str, float]:
    """The best rate of each, on a seed of its own; the same on all ranks. 1-bit Adam has AdamW's.

    Args:
        only: names of ways that will be trained; the others' rates are those that are recorded.
    """
    training.SEED = CHOICE_SEED
    wraps = {MUON_OF_FACTORS: wrapped("gloo", quarter(sizes.width), EMBEDDINGS)}
    makers: dict[str, tuple[Any, tuple[float, ...]]] = {
        "AdamW": (adamw, ADAMW_RATES),
        "Muon": (lambda rate: of_matrices(Muon, rate), MATRIX_RATES),
        "Dion": (lambda rate: of_matrices(Dion, rate, rank=0.25), MATRIX_RATES),
        "Dion, momentum 0.8": (lambda rate: of_matrices(Dion, rate, rank=0.25, momentum=0.8), TWICE_RATES),
        "DeMo": (lambda rate: of_matrices(DeMo, rate), SIGN_RATES),
        MUON_OF_FACTORS: (muon_of_means, MATRIX_RATES),
    }
    found = {
        line["way"].removesuffix(", rate"): line["chosen"] for line in read(OUTPUT) if line["way"].endswith(", rate")
    }
    for name, (make, tried) in makers.items():
        if only and name.replace("Dion", "Dion 1/4") not in only:
            continue
        wrap = wraps.get(name, wrapped("gloo"))
        candidates: list[Way] = [OptimizerWay(str(r), wrap, optimize=make(r)) for r in tried]
        losses = {float(r["way"]): r["validation_loss"] for r in train(candidates, replace(sizes, turn=sizes.steps))}
        found[name] = min(losses, key=lambda rate: losses[rate])
        say([{"way": f"{name}, rate", "chosen": found[name], "losses": losses}])
    return {**dict.fromkeys(makers, MATRIX_RATES[0]), **found, "1-bit Adam": found["AdamW"]}


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    sizes = Sizes(steps=options.steps, width=options.width, layers=options.layers, batch_size=options.batch_size)
    only = options.only.split(";") if options.only else []
    if options.worker == "timed":
        rates = {"AdamW": ADAMW_RATES[1], "Muon": MATRIX_RATES[1], "Dion": MATRIX_RATES[1], "DeMo": SIGN_RATES[1]}
        rates |= {"1-bit Adam": ADAMW_RATES[1], "Dion, momentum 0.8": TWICE_RATES[0]}
        rates |= {MUON_OF_FACTORS: MATRIX_RATES[1]}
        # Timed after the warm-up of 1-bit Adam, which costs what AdamW does.
        say(train(ways("mycel", rates, WARM_UP, sizes.width), replace(sizes, steps=options.timed_steps)))
    else:
        rates = choose(sizes, only)
        for seed in range(options.seeds):
            training.SEED = 1234 + seed
            judged = [
                way
                for way in ways("gloo", rates, options.steps, sizes.width)
                if way.name != HALF_MUON and (not only or way.name in only)
            ]
            records = train(judged, replace(sizes, turn=options.steps))
            say([{**record, "seed": seed, "ranks": dist.get_world_size()} for record in records])
    dist.destroy_process_group()


def rate_table(records: list[dict[str, Any]]) -> str:
    """A row a way: step times, bytes at the interface, and both beside Muon."""
    base = records[0]
    rows = [
        (
            r["way"],
            f"{r['step_ms']:.0f}",
            f"{r['step_p10_ms']:.0f}–{r['step_p90_ms']:.0f}",
            f"{base['step_ms'] / r['step_ms']:.1f}",
            f"{r['interface_bytes'] / 1e3:.0f}",
            f"{r['interface_bytes'] / base['interface_bytes']:.3f}",
        )
        for r in records
    ]
    headings = (
        "",
        "step, ms",
        "p10–p90",
        "times faster than Muon",
        "KB a step and rank by the interface",
        "of Muon's",
    )
    return markdown(headings, rows)


def tables(lines: list[dict[str, Any]]) -> dict[str, str]:
    """By section of the page."""
    timed = [line for line in lines if line["phase"] == "timed"]
    judged = [line for line in lines if line["phase"] == "judged" and "seed" in line]
    found = {"dion-timed": rate_table(timed)} if timed else {}
    return found | ({"dion-judged": loss_table(judged)} if judged else {})


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, recorded nowhere")
    parser.add_argument("--part", choices=("timed", "judged"), default=None)
    parser.add_argument("--steps", type=int, default=None, help="of a judged way")
    parser.add_argument("--timed-steps", type=int, default=None)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--judged-ranks", type=int, default=2)
    parser.add_argument("--link", default="50 Mbit/s")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--only", default="", help="names of judged ways, with semicolons; the others' lines stay")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (10 if options.quick else 400)
    options.timed_steps = options.timed_steps or (10 if options.quick else 40)
    options.seeds = options.seeds or (1 if options.quick else 3)
    if options.worker:
        work(options)
        return
    places: dict[str, Any] = {
        "timed": load_topology(f"star:ranks=4,bandwidth={options.link}"),
        "judged": options.judged_ranks,
    }
    about = {"link": options.link, "hardware": describe_hardware(), "versions": describe_versions()}
    kept: list[dict[str, Any]] = []
    for part, place in places.items():
        if options.part not in (None, part):
            continue
        sizes = {"width": options.width, "layers": options.layers, "batch_size": options.batch_size}
        if options.only and not options.quick and part == "judged":
            asked = sizes | {"steps": options.steps, "ranks": options.judged_ranks}
            for line in read(OUTPUT):
                was = {name: line[name] for name in asked if name in line}
                if line["phase"] == part and asked != asked | was:
                    parser.error(f"{line['way']} is recorded with {was}, which {asked} cannot be compared with")
        found = launch({part: place}, timeout_s=3000)[part]
        lines = [{**line, **sizes, "phase": part, **about, **stamp()} for line in found]
        before = kept if options.quick else read(OUTPUT)
        done = {line["way"] for line in lines}
        stays = [line for line in before if line["phase"] != part or (options.only and line["way"] not in done)]
        kept = stays + lines
        if not options.quick:
            OUTPUT.unlink(missing_ok=True)
            append(OUTPUT, kept)
    for name, text in tables(kept).items():
        print(text)
        if not options.quick:
            write_section(PAGE, name, text)


if __name__ == "__main__":
    main()
