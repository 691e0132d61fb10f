"""Is ``mycel advise`` right? What it predicts for a byte-level transformer, beside what every method then takes.

    python benchmarks/advise.py            # three to five minutes; root, for network namespaces
    python benchmarks/advise.py --quick    # fewer steps, recorded nowhere

Four ranks behind a switch, links of 50 Mbit/s and of 1 Gbit/s. The advice counts as right where the advised method's
measured step is within 15 % of the fastest one measured. Lines replace those of the last run in
``benchmarks/recorded/advise.jsonl``, and a table in the docs is made from them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "advise.jsonl"
PAGE = ROOT / "docs" / "guides" / "compression.md"
LINKS = ("50 Mbit/s", "1 Gbit/s")
RIGHT = 1.15


def ask(link: str, steps: int) -> dict[str, Any]:
    """Rank 0's answer over links of this rate."""
    records: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "mycel", "advise", "examples.compression.byte_model:make"]
    run_ranks(
        load_topology(f"star:ranks=4,bandwidth={link}"),
        [*command, "--steps", str(steps), "--check", "--json"],
        sink=lambda rank, record: records.append(record),
        timeout_s=600,
        warm=warm_up,
    )
    answer = records[0]
    measured = {m["method"]: m["measured_s"] for m in answer["methods"]}
    return {"link": link, **answer, "is_right": measured[answer["advice"]] <= RIGHT * min(measured.values())}


def table(answers: list[dict[str, Any]]) -> str:
    """Predicted and measured, a line a link and method."""
    rows = []
    for answer in answers:
        for m in answer["methods"]:
            advised = m["method"] == answer["advice"]
            rows.append(
                (
                    answer["link"],
                    f"**{m['method']}**" if advised else m["method"],
                    f"{1e3 * m['predicted_s']:.0f}" if "predicted_s" in m else "",
                    f"{1e3 * m['measured_s']:.0f}",
                    f"{m['sent_bytes'] / 1e3:.0f}",
                    f"{m['error']:.2f}",
                )
            )
    return markdown(("links", "method", "predicted, ms", "measured, ms", "KB a step", "loses"), rows)


def main() -> None:
    """Asks at every rate and shows what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, recorded nowhere")
    options = parser.parse_args()
    answers = [ask(link, 3 if options.quick else 7) for link in LINKS]
    text = table(answers)
    print(text)
    for answer in answers:
        print(f"{answer['link']}: {answer['advice']}, {'right' if answer['is_right'] else 'wrong'}")
    if not options.quick:
        shared = {"ranks": 4, "hardware": describe_hardware(), "versions": describe_versions()}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{**answer, **shared, **stamp()} for answer in answers])
        write_section(PAGE, "advise", text)


if __name__ == "__main__":
    main()
