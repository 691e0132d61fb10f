"""Published steps as jobs: rows of ``data/published_runs.json`` in the terms of ``mycel.planning``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mycel.cost import Device
from mycel.planning.job import Job, Mesh
from mycel.planning.models import ModelShape, named, padded_vocab
from mycel.planning.step.links import Rates
from mycel.planning.step.points import Points

DATA = Path(__file__).parent / "data" / "published_runs.json"
_GIB = 1 << 30

A100 = Device(
    name="A100 SXM 80GB",
    flops=312e12,
    memory_bytes=80 * _GIB,
    memory_gbps=2039,
    source="NVIDIA A100 data sheet, 2021",
)
A100_40 = replace(A100, name="A100 SXM 40GB", memory_bytes=40 * _GIB, memory_gbps=1555)
H100 = Device(
    name="H100 SXM 80GB",
    flops=989e12,
    memory_bytes=80 * _GIB,
    memory_gbps=3350,
    float8_flops=1979e12,
    source="NVIDIA H100 data sheet, 2023, dense",
)
#: Meta's, of 500 W, with slower memory and more of it.
H100_96 = replace(H100, name="H100 96GB HBM2e", memory_bytes=96 * _GIB, memory_gbps=2400)
SELENE = Rates(ranks_per_node=8, link_gbps=300, network_gbps=25)
#: 800 Gbit/s a box.
VTRAIN = Rates(ranks_per_node=8, link_gbps=300, network_gbps=12.5)
H100_NODES = Rates(ranks_per_node=8, link_gbps=450, network_gbps=50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Measured steps of one machine.

    Attributes:
        jobs: each a model and how it was trained.
        seconds: of a step.
        device, rates: what it ran on.
        family: which of several fitted machines it belongs to.
        published: the rows as the source has them.
    """

    jobs: tuple[tuple[ModelShape, Job], ...]
    seconds: NDArray[np.float64]
    device: Device
    rates: Rates
    family: str
    published: tuple[Mapping[str, Any], ...]

    @property
    def points(self) -> Points:
        """As columns."""
        return Points.of(self.jobs)


@cache
def _sets() -> dict[str, Any]:
    return {one["name"]: one for one in json.loads(DATA.read_text(encoding="utf-8"))["sets"]}


def source(name: str) -> str:
    """Where a set comes from."""
    return str(_sets()[name]["source"])


def published(name: str) -> list[dict[str, Any]]:
    """Rows of a set by the names of its columns."""
    one = _sets()[name]
    return [dict(zip(one["columns"], row, strict=True)) for row in one["rows"]]


def gpt(row: Mapping[str, Any], vocab: int) -> ModelShape:
    """A GPT of a row's sizes, as Megatron-LM makes it."""
    return ModelShape(
        name="gpt",
        num_layers=row["layers"],
        hidden=row["hidden"],
        num_heads=row["heads"],
        num_kv_heads=row["heads"],
        head_dim=row["hidden"] // row["heads"],
        ffn=4 * row["hidden"],
        vocab=vocab,
        max_seq=row["seq"],
        is_gated=False,
        is_tied=True,
        num_positions=row["seq"],
        norm_width=2,
        has_qkv_bias=True,
        has_out_bias=True,
        has_ffn_bias=True,
    )


def megatron_job(row: Mapping[str, Any], *, is_scattered: bool) -> Job:
    """A row of Megatron-LM's or Megatron-DeepSpeed's: attention that writes its scores, gradients in 16 bits."""
    return Job(
        mesh=Mesh(pp=row["pp"], dp=row["dp"], tp=row["tp"]),
        global_batch=row["global_batch"],
        micro_batch=row["micro_batch"],
        seq=row["seq"],
        chunks=row.get("chunks_per_rank", 1),
        recompute={"full": "full", "selective": "attention"}[row.get("recompute", "full")],
        is_sequence_parallel=bool(row.get("sequence_parallel")),
        is_scattered=is_scattered,
        is_flash=False,
        has_dropout=True,
        executor="megatron",
        gradient_bytes=2,
    )


def selene() -> Rows:
    """Megatron-LM on Selene: SC 2021 and MLSys 2023."""
    rows = published("megatron_sc21_a100") + published("korthikanti_a100")
    return Rows(
        jobs=tuple((gpt(row, row["vocab"]), megatron_job(row, is_scattered=True)) for row in rows),
        seconds=np.array([row["seconds"] for row in rows]),
        device=A100,
        rates=SELENE,
        family="",
        published=tuple(rows),
    )


def vtrain(name: str) -> Rows:
    """vTrain's runs: ``vtrain_multi_a100`` or ``vtrain_single_a100``."""
    rows = published(name)
    return Rows(
        jobs=tuple((gpt(row, padded_vocab(50257, 1)), megatron_job(row, is_scattered=False)) for row in rows),
        seconds=np.array([row["seconds"] for row in rows]),
        device=A100,
        rates=VTRAIN,
        family="",
        published=tuple(rows),
    )


def mosaic() -> list[Rows]:
    """MosaicML's FSDP rows, one machine each."""
    found = []
    for gpu, device, rates, family in (
        ("h100_80gb", H100, H100_NODES, "h100"),
        ("a100_80gb", A100, SELENE, "a100"),
        ("a100_40gb", A100_40, SELENE, "a100"),
    ):
        rows = [row for row in published("mosaic_fsdp") if row["gpu"] == gpu]
        found.append(
            Rows(
                jobs=tuple(_mosaic_job(row) for row in rows),
                seconds=np.array(
                    [
                        row["global_batch"] * row["seq"] / row["gpus"] / row["tokens_per_second_per_gpu"]
                        for row in rows
                    ]
                ),
                device=device,
                rates=rates,
                family=family,
                published=tuple(rows),
            )
        )
    return found


def _mosaic_job(row: Mapping[str, Any]) -> tuple[ModelShape, Job]:
    shape = replace(
        gpt(row, 50368),
        name=f"mpt-{row['model']}",
        num_positions=0,
        norm_width=1,
        has_qkv_bias=False,
        has_out_bias=False,
        has_ffn_bias=False,
    )
    job = Job(
        mesh=Mesh(dp=row["gpus"]),
        global_batch=row["global_batch"],
        micro_batch=row["micro_batch"],
        seq=row["seq"],
        recompute="full" if row["recompute_full"] else "none",
        zero=3 if row["sharding"] == "FULL_SHARD" else 2,
        is_loss_fused=True,
        gradient_bytes=2,
    )
    return shape, job


def torchtitan() -> Rows:
    """torchtitan's tables; in a pipeline a replica's batch is cut into as many micro-batches as there are stages."""
    rows = published("torchtitan_h100")
    return Rows(
        jobs=tuple((named(row["model"]), _titan_job(row)) for row in rows),
        seconds=np.array(
            [row["global_batch"] * row["seq"] / row["gpus"] / row["tokens_per_second_per_gpu"] for row in rows]
        ),
        device=H100_96,
        rates=H100_NODES,
        family="",
        published=tuple(rows),
    )


def _titan_job(row: Mapping[str, Any]) -> Job:
    replicas = row["gpus"] // (row["tp"] * row["pp"] * row["cp"])
    return Job(
        mesh=Mesh(dp=replicas, tp=row["tp"], pp=row["pp"], cp=row["cp"]),
        global_batch=row["global_batch"],
        micro_batch=row["local_batch"] // row["pp"],
        seq=row["seq"],
        recompute={"full": "full", "selective": "alternate"}[row["checkpointing"]],
        is_sequence_parallel=row["tp"] > 1,
        zero=3,
        is_compiled=bool(row["compile"]),
        is_float8=bool(row["float8"]),
        is_async_tp=bool(row["async_tp"]),
        executor="torch",
    )


def groups(rows: Sequence[Mapping[str, Any]]) -> list[NDArray[np.int_]]:
    """Rows of the same job in several configurations: same model, GPUs and batch."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        key = tuple(row[k] for k in ("layers", "hidden", "heads", "seq", "gpus", "global_batch"))
        found.setdefault(key, []).append(i)
    return [np.array(one) for one in found.values()]


def regrets(rows: Rows, predicted: NDArray[np.float64], *, least: int = 5) -> NDArray[np.float64]:
    """How much slower the configuration that is predicted the fastest is than the fastest, by group of ``least``."""
    return np.array(
        [
            rows.seconds[one[int(np.argmin(predicted[one]))]] / rows.seconds[one].min() - 1.0
            for one in groups(rows.published)
            if len(one) >= least
        ]
    )


def misordered(rows: Rows, predicted: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Pairs of published throughputs of one model that the prediction has the other way round."""
    work = np.array([row["global_batch"] * row["seq"] / row["gpus"] for row in rows.published])
    said, model = work / rows.seconds, work / predicted
    names = [row["model"] for row in rows.published]
    return [
        (float(said[i]), float(said[j]))
        for i in range(len(names))
        for j in range(len(names))
        if names[i] == names[j] and said[i] > said[j] and model[i] <= model[j]
    ]
