"""What Megatron-LM claims of interleaved pipelines: the bubble by its formula, and measured over paced ranks.

    python benchmarks/claims/megatron.py    # three minutes; 4 ranks; replaces its lines and the table in the page

1F1B with one stage a rank, and interleaved with the same model in two and four chunks a rank; each carried out by
torch's class and by mycel's executor, steps in turns. The bubble is what a step takes beyond its work, over the work.

References:
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    section 2.2.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.pipeline.known import interleaved, one_f_one_b
from mycel.topology.builders import star
from paced import Case, measure, ratio
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "megatron.jsonl"
PAGE = ROOT / "docs" / "concepts" / "pipeline_claims.md"
RANKS, FORWARD_S, BACKWARD_S, ROUNDS = 4, 0.08, 0.16, 5
#: Micro-batches and chunks a rank. An activation is small here: the formula has no messages.
SHAPES = ((4, 1), (4, 2), (4, 4), (16, 1), (16, 2))
NUM_BYTES = 16 << 10


def cases() -> list[Case]:
    """Every shape, by torch's class and by mycel's executor."""
    made = []
    for count, chunks in SHAPES:
        order = one_f_one_b(RANKS, count) if chunks == 1 else interleaved(RANKS, count, chunks)
        times = {"F": FORWARD_S / chunks, "B": BACKWARD_S / chunks}
        more = {"micro_batches": count, "chunks": chunks}
        made += [
            Case(
                name=f"{chunks} x {count}",
                order=order.to_json(),
                times=times,
                num_bytes=NUM_BYTES,
                runner=runner,
                more=more,
            )
            for runner in ("1F1B" if chunks == 1 else "Interleaved1F1B", "mycel")
        ]
    return made


def table(lines: list[dict[str, Any]]) -> str:
    plain = {(s["more"]["micro_batches"], s["runner"] == "mycel"): s for s in lines if s["more"]["chunks"] == 1}
    rows = []
    for line in lines:
        count, chunks = line["more"]["micro_batches"], line["more"]["chunks"]
        work = count * (FORWARD_S + BACKWARD_S)
        formula = Fraction(RANKS - 1, count * chunks)
        rows.append(
            (
                count,
                chunks,
                "mycel" if line["runner"] == "mycel" else f"torch's {line['runner']}",
                f"{float(formula):.3f}",
                f"{median(line['seconds']) / work - 1:.3f}",
                f"{ratio(plain[count, line['runner'] == 'mycel']['seconds'], line['seconds']):.2f}",
                f"{float((1 + Fraction(RANKS - 1, count)) / (1 + formula)):.2f}",
            )
        )
    return markdown(
        ("micro-batches", "chunks a rank", "by", "bubble by formula", "measured", "1F1B / it", "by formula"), rows
    )


def main() -> None:
    heard = measure(star(num_ranks=RANKS, bandwidth="400 Mbit/s"), cases(), rounds=ROUNDS)
    for shape in {line["case"] for line in heard}:
        losses = [line["losses"] for line in heard if line["case"] == shape]
        if any(each != losses[0] for each in losses):
            raise SystemExit(f"{shape}: losses differ")
    conclude(OUTPUT, PAGE, "megatron", heard, table)


if __name__ == "__main__":
    main()
