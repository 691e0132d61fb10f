"""How much of a model's quality narrow experts keep after a little training at random widths, and what they save.

    python benchmarks/claims/flextron.py             # digits and a small Hugging Face model, three seeds
    python benchmarks/claims/flextron.py --quick

Digits: a residual network with experts, trained, then cut as it is, sorted by sizes of activations and by spread, and
trained a quarter more at random widths. Text: a Mixtral of four small layers, trained and made elastic likewise; at
five widths its loss, the bytes of experts that an offload brings for a batch, and how near the router's widths come
to the latency that it was asked for. Latencies of the table are modelled: what bytes take over a link of 1 GB/s. Rows
replace those of the last run in ``benchmarks/recorded/claims/flextron.jsonl``, and the tables in
docs/guides/elastic_experts.md.

References:
    R. Cai et al., "Flextron: Many-in-One Flexible Large Language Model", ICML 2024, arXiv 2406.10260.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from digits import Digits
from torch import Tensor, nn

import mycel.moe
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.moe import MoE
from mycel.moe.elastic import ElasticExperts, LatencyTable, WidthRouter, elastic_experts, train_width_router
from mycel.moe.memory import EmulatedLink, Offload
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "flextron.jsonl"
PAGE = ROOT / "docs" / "guides" / "elastic_experts.md"
WIDTHS = (8, 16, 32, 64, 128)
BATCH, LINK_GBPS, SHARES = 64, 1.0, (0.15, 0.3, 0.5, 0.7, 0.9)
#: A batch's inputs and targets at a step.
Batches = Callable[[int], tuple[Tensor, Tensor]]


class Network(nn.Module):
    """Two layers of experts beside a residual stream."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(MoE(width, WIDTHS[-1], 4, 1, activation="relu", bias=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        y: Tensor = self.head(x)
        return y


def train(
    model: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    batches: Batches,
    steps: range,
    rate: float,
    elastic: ElasticExperts | None = None,
    seed: int = 0,
) -> None:
    """Adam; at random widths with ``elastic``."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in steps:
        if elastic is not None:
            elastic.use(elastic.random_widths(WIDTHS, step, seed=seed))
        x, y = batches(step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    if elastic is not None:
        elastic.use(None)


def at_widths(elastic: ElasticExperts, judge: Callable[[], float]) -> list[float]:
    """What is judged at each width."""
    found = []
    for width in WIDTHS:
        elastic.use(width)
        found.append(judge())
    elastic.use(None)
    return found


def of_digits(seed: int, steps: int) -> list[dict[str, Any]]:
    """A line a way of getting narrow experts."""
    digits = Digits(seed)
    torch.manual_seed(seed)
    model = Network()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        return digits.batch(seed, 0, step, BATCH)

    train(model, nn.functional.cross_entropy, batches, range(steps), 2e-3)
    found = {}
    with elastic_experts(model) as elastic:

        def judge() -> float:
            return 100 * digits.judge(model)[0]

        found["cut as trained"] = at_widths(elastic, judge)
        for by in ("magnitude", "spread"):
            with elastic.observe():
                model(digits.train[0])
            elastic.sort(by)
            found[f"sorted by {by}"] = at_widths(elastic, judge)
        elastic.forget_means()
        found["sorted by spread, no constant"] = at_widths(elastic, judge)
        more = range(steps, steps + steps // 4)
        train(model, nn.functional.cross_entropy, batches, more, 2e-3, elastic, seed)
        found["and 25 % more steps at random widths"] = at_widths(elastic, judge)
    return [{"part": "digits", "way": way, "seed": seed, "accuracy": some} for way, some in found.items()]


def of_text(seed: int, steps: int, router_steps: int) -> list[dict[str, Any]]:
    """A line a width, and one a latency asked for."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=WIDTHS[-1],
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = MixtralForCausalLM(config)
    mycel.moe.apply(model)
    text = load_corpus(max_bytes=1 << 20).train
    made = torch.Generator().manual_seed(seed)
    held = sample_batch(text, 16, 48, torch.Generator().manual_seed(10_007))

    def per_byte(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.reshape(-1, 256), target.reshape(-1))

    def batches(_: int) -> tuple[Tensor, Tensor]:
        return sample_batch(text, 8, 48, made)

    @torch.no_grad()
    def loss() -> float:
        return float(per_byte(model(held[0]), held[1]))

    train(model, per_byte, batches, range(steps), 2e-3)
    lines: list[dict[str, Any]] = []
    with elastic_experts(model) as elastic:
        whole = loss()
        with elastic.observe(), torch.no_grad():
            model(held[0])
        elastic.sort()
        lines.append({"part": "sorted", "seed": seed, "away": abs(loss() - whole), "loss": whole})
        cut = at_widths(elastic, loss)
        elastic.forget_means()
        train(model, per_byte, batches, range(steps, steps + steps // 4), 1e-3, elastic, seed)
        losses = at_widths(elastic, loss)
        bytes_at = [sum(elastic.expert_bytes(width)) / len(elastic.num_neurons) for width in WIDTHS]
        per_layer = tuple(config.num_local_experts * num_bytes / (LINK_GBPS * 1e9) for num_bytes in bytes_at)
        table = LatencyTable(widths=(WIDTHS,) * 4, seconds=(per_layer,) * 4, source="modelled")
        torch.manual_seed(seed)
        router = WidthRouter(table)

        def loss_at(widths: Sequence[int]) -> float:
            elastic.use(widths)
            return loss()

        train_width_router(router, loss_at, steps=router_steps, seed=seed)
        least, greatest = table.range
        for share in SHARES:
            asked = least + share * (greatest - least)
            widths, alone = router.widths(asked), router.widths(asked, tolerance=None)
            away = [abs(table.latency(w) - asked) / asked for w in (widths, alone)]
            lines.append(
                {
                    "part": "router",
                    "seed": seed,
                    "share": share,
                    "widths": widths,
                    "away": away[0],
                    "away_alone": away[1],
                    "loss": loss_at(widths),
                }
            )
        elastic.use(None)
    for width, before, after in zip(WIDTHS, cut, losses, strict=True):
        with elastic_experts(model) as narrow:
            narrow.keep(width)
            link = EmulatedLink(bandwidth_gbps=50.0)
            with torch.inference_mode(), Offload(model, link, "on_demand") as offload:
                model(held[0])
                fetched = offload.store.fetched_bytes
            link.close()
        lines.append(
            {
                "part": "text",
                "seed": seed,
                "width": width,
                "loss_cut": before,
                "loss": after,
                "fetched_bytes": fetched,
            }
        )
    return lines


def digits_table(lines: list[dict[str, Any]]) -> str:
    """A row a way, a column a width."""
    own = [line for line in lines if line["part"] == "digits"]
    rows = []
    for way in dict.fromkeys(line["way"] for line in own):
        some = [line["accuracy"] for line in own if line["way"] == way]
        rows.append((way, *(f"{statistics.mean(column):.1f}" for column in zip(*some, strict=True))))
    seeds = len({line["seed"] for line in own})
    return markdown((f"digits right, % at width; {seeds} seeds", *map(str, WIDTHS)), rows)


def text_table(lines: list[dict[str, Any]]) -> str:
    """Rows of widths, and rows of latencies."""

    def mean(own: list[dict[str, Any]], key: str) -> float:
        return statistics.mean(line[key] for line in own)

    rows = []
    for width in WIDTHS:
        own = [line for line in lines if line["part"] == "text" and line["width"] == width]
        kept = f"{mean(own, 'fetched_bytes') / 1e3:.0f} KB"
        rows.append((f"width {width}", f"{mean(own, 'loss_cut'):.3f}", f"{mean(own, 'loss'):.3f}", kept, "", ""))
    for share in SHARES:
        own = [line for line in lines if line["part"] == "router" and line["share"] == share]
        away = [f"{100 * max(line[key] for line in own):.1f} %" for key in ("away", "away_alone")]
        rows.append((f"router, {share:.0%} of the way to full", "", f"{mean(own, 'loss'):.3f}", "", *away))
    heads = (
        "text",
        "loss, sorted and cut",
        "loss, trained a quarter more",
        "fetched for a batch",
        "latency off by at most",
        "without the table's help",
    )
    return markdown(heads, rows)


def table(lines: list[dict[str, Any]]) -> str:
    """Both parts."""
    return digits_table(lines) + "\n" + text_table(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; records nothing")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, sizes = (1, (120, 60, 40)) if options.quick else (options.seeds, (600, 400, 300))
    lines = []
    for seed in range(seeds):
        lines += of_digits(seed, sizes[0])
        lines += of_text(seed, *sizes[1:])
        if options.quick:
            print(table(lines))
        else:
            conclude(OUTPUT, PAGE, "flextron", lines, table)


if __name__ == "__main__":
    main()
