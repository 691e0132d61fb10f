"""Anomalies found by an autoencoder that is solved for in a few exchanges, beside trained ones.

    python examples/federated/find_anomalies.py                             # one process
    torchrun --nproc-per-node 4 examples/federated/find_anomalies.py        # the same model from four parts
    torchrun --nproc-per-node 4 examples/federated/find_anomalies.py --write

``--write`` puts the table into table.md. AUC is the area under the curve of true over false alarms: the chance that
an anomaly has a larger reconstruction error than a normal example.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import backprop
import solved
import torch
import torch.distributed as dist
from sklearn import datasets
from sklearn.metrics import roc_auc_score
from torch import Tensor

from mycel.comm import ByteMeter
from mycel.data_parallel import closed_form
from mycel.data_parallel.closed_form import RidgeParts

HERE = Path(__file__).resolve().parent
#: Data by name: what loads it, the labels that are normal, and the hidden widths.
DATA: dict[str, tuple[Any, tuple[int, ...], list[int]]] = {
    "breast_cancer": (datasets.load_breast_cancer, (1,), [15, 7, 15]),
    "digits": (datasets.load_digits, tuple(range(9)), [32, 16, 32]),
}
EPOCHS, ROUNDS, LOCAL_EPOCHS = 100, 100, 2


class Task:
    """Normal examples to learn from, and others of both kinds to judge by.

    Args:
        name: of the data.
        seed: of the division.
    """

    def __init__(self, name: str, seed: int) -> None:
        load, normal, self.widths = DATA[name]
        found = load()
        x, labels = torch.tensor(found.data, dtype=torch.float64), torch.tensor(found.target)
        is_normal = torch.isin(labels, torch.tensor(normal))
        own = x[is_normal]
        own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))]
        held = len(own) * 3 // 10
        self.train = own[held:]
        self.test = torch.cat([own[:held], x[~is_normal]])
        self.is_anomaly = [0] * held + [1] * int((~is_normal).sum())

    def auc(self, errors: Tensor) -> float:
        """Of errors of ``test``."""
        return float(roc_auc_score(self.is_anomaly, errors.numpy()))


def merged(meter: ByteMeter, parts: Callable[[], list[RidgeParts]]) -> RidgeParts:
    """One of all parts of all ranks."""
    return closed_form.merge_over_ranks(lambda: closed_form.merge_parts(parts()), meter=meter)


def scaled(task: Task, model: solved.DAEF) -> tuple[Tensor, Tensor]:
    """Examples to learn from and to judge by, as DAEF sees them."""
    return (task.train - model.center) / model.scale, (task.test - model.center) / model.scale


def at_one_place(task: Task, epochs: int, seed: int) -> tuple[float, float, float]:
    """Where one process has all data: seconds in which DAEF is solved for, seconds of training, its AUC."""
    begin = time.perf_counter()
    model = solved.fit([task.train], task.widths, solved.merged_here, seed=seed)
    solved_s = time.perf_counter() - begin
    train, test = scaled(task, model)
    trained = backprop.network(train.shape[1], task.widths, seed)
    begin = time.perf_counter()
    backprop.train(trained, train, epochs, seed)
    trained_s = time.perf_counter() - begin
    return solved_s, trained_s, task.auc(backprop.errors(trained, test))


def compare(name: str, seed: int, *, rounds: int = ROUNDS, epochs: int = EPOCHS) -> dict[str, Any]:
    """DAEF from this rank's part, an autoencoder trained on all data, and federated averaging, on one task."""
    rank, size = dist.get_rank(), dist.get_world_size()
    task, meter = Task(name, seed), ByteMeter()
    own = task.train[rank::size]
    dist.all_reduce(torch.zeros(1))  # all are here
    begin = time.perf_counter()
    model = solved.fit([own], task.widths, partial(merged, meter), seed=seed)
    solved_s = time.perf_counter() - begin
    one_place = torch.zeros(3, dtype=torch.float64)
    if rank == 0:  # alone: on machines that ranks share, time counts
        one_place[:] = torch.tensor(at_one_place(task, epochs, seed))
    dist.broadcast(one_place, 0)
    alone_s, trained_s, trained_auc = one_place.tolist()
    alone = solved.fit([task.train], task.widths, solved.merged_here, seed=seed)
    found = {
        "data": name,
        "seed": seed,
        "ranks": size,
        "backend": dist.get_backend(),
        "auc": task.auc(model.errors(task.test)),
        "away": float((model.errors(task.test) - alone.errors(task.test)).abs().max()),
        "solved_s": solved_s,
        "alone_s": alone_s,
        "bytes": meter.total(),
        "trained_s": trained_s,
        "trained_auc": trained_auc,
    }
    train, test = scaled(task, alone)
    averaged = backprop.network(train.shape[1], task.widths, seed)
    best, sent = 0.0, 0
    for number, sent in enumerate(
        backprop.fed_avg(averaged, train[rank::size], rounds, LOCAL_EPOCHS, seed * size + rank), start=1
    ):
        best = max(best, task.auc(backprop.errors(averaged, test)))
        is_there = torch.tensor([best >= found["auc"]])
        dist.broadcast(is_there, 0)  # all ranks end in the same round, whatever the last digit of an area is
        found |= {"fedavg_rounds": number, "fedavg_bytes": sent, "fedavg_there": bool(is_there)}
        if is_there:
            break
    return {**found, "fedavg_auc": best}


HEADINGS = (
    "| data | DAEF: AUC | ms at one place | ms over ranks | KB a rank | trained at one place: AUC | ms "
    "| FedAvg: best AUC | rounds | KB a rank |"
)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: means over seeds, of times medians."""
    rows = [HEADINGS, "|" + "---|" * 10]
    for name in dict.fromkeys(line["data"] for line in lines):
        own = [line for line in lines if line["data"] == name]

        def mean(key: str, own: list[dict[str, Any]] = own) -> float:
            return statistics.mean(line[key] for line in own)

        def ms(key: str, own: list[dict[str, Any]] = own) -> float:
            return 1e3 * statistics.median(line[key] for line in own)

        there = sum(line["fedavg_there"] for line in own)
        rows.append(
            f"| {name} | {mean('auc'):.3f} | {ms('alone_s'):.1f} | {ms('solved_s'):.1f} | {mean('bytes') / 1e3:.1f} "
            f"| {mean('trained_auc'):.3f} | {ms('trained_s'):.0f} | {mean('fedavg_auc'):.3f} "
            f"({there} of {len(own)} reach DAEF's) | {mean('fedavg_rounds'):.0f} | {mean('fedavg_bytes') / 1e3:.1f} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    """Run on however many ranks there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="*", choices=sorted(DATA), default=sorted(DATA))
    parser.add_argument("--write", action="store_true", help="put the table into table.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("mycel")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lines = [compare(name, seed) for name in options.data for seed in range(options.seeds)]
    if dist.get_rank() == 0:
        print(table(lines))
        if options.write:
            head = f"{dist.get_world_size()} ranks on one machine, {options.seeds} seeds; times are medians.\n\n"
            (HERE / "table.md").write_text(head + table(lines), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
