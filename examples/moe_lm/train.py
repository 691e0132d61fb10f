"""A byte-level language model with experts on two machines: dense or experts, flat or hierarchical, coded or not.

    python examples/moe_lm/train.py            # about ten minutes on two quiet cores
    python examples/moe_lm/train.py --quick    # a minute: shows that it works, learns little

Four ranks on an emulated cluster, two nodes of two with a slow way between them (needs root on Linux; on loopback
otherwise, where only losses and counted bytes mean something). Eight models see the same text: a dense one, and
mixtures of experts with as many multiplications a byte, whose rows travel in different ways. Writes a table, and with
it ``moe_lm.png`` and ``moe_lm.json``, into the folder of ``--output``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.emulate import check_support
from mycel.errors import EmulationError
from mycel.topology.builders import two_boxes
from mycel.topology.model import Topology

#: Steps of a run, and of one that only shows that everything works.
STEPS, QUICK_STEPS = 500, 8


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--steps", type=int, default=None, help=f"default: {STEPS}")
    parser.add_argument("--batch-size", type=int, default=4, help="windows of text a rank and step")
    parser.add_argument("--length", type=int, default=64, help="bytes a window")
    parser.add_argument("--inside", default="1 Gbit/s", help="cable of a rank to its node's switch")
    parser.add_argument("--between", default="100 Mbit/s", help="cable of a rank to the switch between the nodes")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--output", type=Path, default=Path("moe-lm"), help="folder for the table, plot and figures")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for everything")
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = QUICK_STEPS if options.quick else STEPS
    return options


def place(options: argparse.Namespace) -> Topology | int:
    """The cluster, or the number of ranks on loopback where this machine cannot emulate one."""
    try:
        check_support()
    except EmulationError as error:
        print(f"No cluster is emulated: {error}. On loopback, step times say nothing about links.")
        return 4
    return two_boxes(num_ranks=4, inside=options.inside, between=options.between)


def measure(where: Topology | int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks; what each model came to, in their order, with its losses on held-out text as it learned."""
    found: dict[str, dict[str, Any]] = {}

    def take(rank: int, record: dict[str, Any]) -> None:
        name, event = record["name"], record["event"]
        if event == "start":
            found[name] = {"name": name, "parameters": record["parameters"], "evaluations": []}
        elif event == "eval":
            found[name]["evaluations"].append({key: record[key] for key in ("step", "loss", "elapsed_s")})
            print(f"step {record['step']:4}  {name:20}  {record['loss']:.4f} nats", flush=True)
        else:
            found[name] |= {key: record[key] for key in ("step_s", "bytes_between", "bytes_of_rows")}

    command = [sys.executable, str(Path(__file__).with_name("rank.py"))]
    for name in ("steps", "batch_size", "length", "seed"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--eval-every", str(max(4, options.steps // 10))]
    command += ["--emulated"] if isinstance(where, Topology) else []
    run_ranks(where, command, sink=take, timeout_s=options.timeout, warm=warm_up)
    return list(found.values())


def table(models: Sequence[Mapping[str, Any]]) -> str:
    """One row a model."""
    lines = [
        "| model | parameters | held-out loss, nats | step, ms | between nodes, kB a step | of which rows, kB |",
        "|---|---|---|---|---|---|",
    ]
    for model in models:
        measured = model["bytes_between"]
        cells = (
            model["name"],
            f"{model['parameters']:,}",
            f"{model['evaluations'][-1]['loss']:.4f}",
            f"{1e3 * model['step_s']:.0f}",
            "not measured" if measured is None else f"{measured / 1e3:.0f}",
            f"{model['bytes_of_rows'] / 1e3:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(models: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Loss against the time of training, and what a step sends between the nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    learning, sending = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for number, model in enumerate(models):
        shown = model["evaluations"]
        colour = f"C{number}"
        times, losses = [e["elapsed_s"] for e in shown], [e["loss"] for e in shown]
        learning.plot(times, losses, color=colour, marker="o", markersize=3, label=model["name"])
        num_bytes = model["bytes_of_rows"] if model["bytes_between"] is None else model["bytes_between"]
        sending.barh(model["name"], num_bytes / 1e3, color=colour)
    learning.set_xlabel("seconds of training steps")
    learning.set_ylabel("held-out loss, nats a byte")
    learning.legend(frameon=False, fontsize=8)
    sending.invert_yaxis()
    sending.set_xlabel("kB between the nodes a step")
    for axes in (learning, sending):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Run, print, draw."""
    options = parse_arguments()
    where = place(options)
    models = measure(where, options)
    text = table(models)
    print(f"\n{text}\n\n{describe_hardware()}; {options.steps} steps; medians of the slowest rank's steps")
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(options).items()} | {"emulated": isinstance(where, Topology)}
    document = {
        "settings": settings,
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "models": models,
    }
    (options.output / "moe_lm.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(models, options.output / "moe_lm.png")
    print(f"Written to {options.output}: moe_lm.png, moe_lm.json")


if __name__ == "__main__":
    main()
