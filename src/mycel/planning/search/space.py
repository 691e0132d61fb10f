"""The space of jobs that a search looks at, as columns: every way to multiply degrees to the cluster's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.cluster import Cluster
from mycel.planning.job import Job, Mesh, Recompute
from mycel.planning.models.shape import ModelShape
from mycel.planning.search.limits import Limit, Limits
from mycel.planning.step.points import Points

__all__ = ["Space", "space_of"]

Column = NDArray[np.int64]
#: Recomputation that is worth trying where attention never writes its scores.
_RECOMPUTE: tuple[Recompute, ...] = ("none", "alternate", "full")
_COLUMNS = (
    "pp",
    "dp",
    "tp",
    "cp",
    "ep",
    "micro_batch",
    "chunks",
    "recompute",
    "zero",
    "offload",
    "shares",
    "coshard",
)
#: Sequences that a replica works on at once, at most: beyond, products are long enough and memory is short.
_MOST_MICRO = 32
#: Chunks a rank.
_CHUNKS = (1, 2, 3, 4, 6, 8)
#: Of these, what goes with layers in pieces: each of them is done again whole.
_WHOLE = (_RECOMPUTE.index("none"), _RECOMPUTE.index("full"))
#: Pieces that layers are cut into, by request only: each is done twice.
_PIECES = (2, 4, 8, 16)
#: Fewer tokens of a sequence than this on a rank are not worth an exchange of keys and values; only by request.
_LEAST_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Space:
    """Jobs as rows.

    Attributes:
        base: whose other fields all jobs have.
        columns: degrees and the rest by name; ``recompute`` is a place in ``recomputes``; ``shares`` is 1 where
            replicas have unlike many micro-batches, which of them how many is found when it is looked at.
        recomputes: policies that are looked at.
    """

    base: Job
    columns: dict[str, Column]
    recomputes: tuple[Recompute, ...] = _RECOMPUTE

    __repr__ = brief

    def __len__(self) -> int:
        return len(self.columns["pp"])

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int_]) -> Space:
        """Some of the rows."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def job(self, row: int) -> Job:
        """One row."""
        at = {name: int(column[row]) for name, column in self.columns.items()}
        mesh = Mesh(**{name: at[name] for name in ("pp", "dp", "tp", "cp", "ep")})
        is_shared = mesh.tp > 1
        each, more = divmod(self.base.global_batch // at["micro_batch"], mesh.dp)
        shares = tuple(each + (replica < more) for replica in range(mesh.dp)) if at["shares"] else ()
        return replace(
            self.base,
            mesh=mesh,
            micro_batch=at["micro_batch"],
            chunks=at["chunks"],
            recompute=self.recomputes[at["recompute"]],
            zero=at["zero"],
            is_offloaded=bool(at["offload"]),
            is_sequence_parallel=is_shared,
            is_scattered=is_shared and mesh.pp > 1,
            shares=shares,
            coshard=at["coshard"],
        )

    @property
    def words(self) -> dict[str, tuple[str, ...]]:
        """Of the columns whose numbers stand for words, these."""
        return {"recompute": self.recomputes, "offload": ("no", "yes"), "shares": ("equal", "unequal")}

    def points(self, shape: ModelShape) -> Points:
        """As the cost model takes them.

        Args:
            shape: the model.
        """
        one = Points.of([(shape, replace(self.base, mesh=Mesh(), chunks=1))])
        points = one.take(np.zeros(len(self), dtype=int))
        of = {name: column.astype(float) for name, column in self.columns.items()}
        kinds = self.columns["recompute"]
        is_kind = {name: (kinds == i).astype(float) for i, name in enumerate(self.recomputes)}
        none = np.zeros(len(self))
        is_shared = (of["tp"] > 1).astype(float)
        return replace(
            points,
            **{name: of[name] for name in ("pp", "dp", "tp", "cp", "ep", "micro_batch", "chunks", "zero", "coshard")},
            micro_batches=self.base.global_batch / (of["dp"] * of["micro_batch"]),
            full=is_kind.get("full", none),
            attention=is_kind.get("attention", none),
            alternate=is_kind.get("alternate", none),
            offloaded=of["offload"],
            unequal=of["shares"],
            sequence_parallel=is_shared,
            scattered=is_shared * (of["pp"] > 1),
        )

    def keeps(self, limit: Limit) -> NDArray[np.bool_]:
        """Rows whose numbers keep a limit; all of them where it is about places."""
        if limit.key in self.columns:
            column = self.columns[limit.key]
            names = self.words.get(limit.key)
            kept = [v for v in np.unique(column) if limit.allows(names[v] if names else int(v))]
            return np.isin(column, kept)
        if limit.key == "num_micro_batches":
            count = self.base.global_batch // (self.columns["dp"] * self.columns["micro_batch"])
            is_kept = np.isin(count, [v for v in np.unique(count) if limit.allows(int(v))])
            kept_rows: NDArray[np.bool_] = is_kept | (self.columns["shares"] == 1)  # who has how many is open yet
            return kept_rows
        return np.ones(len(self), dtype=bool)


def space_of(
    cluster: Cluster, shape: ModelShape, base: Job, limits: Limits, *, is_offload_tried: bool = False
) -> Space:
    """Every job that divides, whatever its memory.

    Args:
        cluster: whose ranks are all used.
        shape: the model.
        base: with batch, sequence and what is not searched.
        limits: those about numbers are kept.
        is_offload_tried: also with the optimizer's state in the host's memory.

    Raises:
        UsageError: nothing divides, or limits leave nothing; the message says which two contradict.
    """
    least = _LEAST_TOKENS if all(limit.allows(1) for limit in limits.of("cp")) else 1
    meshes = [mesh for mesh in _meshes(cluster.num_ranks) if _divides(mesh, shape, base, least)]
    rows = [row for mesh in meshes for row in _rows(mesh, shape, base, is_offload_tried=is_offload_tried)]
    if base.executor == "mycel" and len(set(cluster.devices)) > 1:  # ranks that are alike are best loaded alike
        meshes = [mesh for mesh in _meshes(cluster.num_ranks) if _divides(mesh, shape, base, least, is_equal=False)]
        rows += [
            row
            for mesh in meshes
            for row in _rows(mesh, shape, base, is_offload_tried=is_offload_tried, is_equal=False)
        ]
    rows += [(*row[:-1], pieces) for row in rows for pieces in _pieces(row, shape, limits)]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(_COLUMNS))
    recomputes = _RECOMPUTE if base.is_flash else (*_RECOMPUTE, "attention")
    space = Space(base=base, columns={name: table[:, i] for i, name in enumerate(_COLUMNS)}, recomputes=recomputes)
    masks = [space.keeps(limit) for limit in limits.limits]
    kept = np.all(masks, axis=0) if masks else np.ones(len(space), dtype=bool)
    if not kept.any():
        raise UsageError(_why_empty(cluster, shape, base, limits, masks))
    return space.take(kept)


def _meshes(count: int) -> Iterator[tuple[int, int, int, int]]:
    """``pp, dp, tp, cp`` that multiply to the ranks."""
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    for pp in divisors:
        for tp in divisors:
            if count % (pp * tp):
                continue
            for cp in divisors:
                if count % (pp * tp * cp) == 0:
                    yield pp, count // (pp * tp * cp), tp, cp


def _divides(
    mesh: tuple[int, int, int, int],
    shape: ModelShape,
    base: Job,
    least_tokens: int = _LEAST_TOKENS,
    *,
    is_equal: bool = True,
) -> bool:
    pp, dp, tp, cp = mesh
    heads = shape.num_heads % tp == 0 and (shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0)
    width = base.seq % cp == 0 and (cp == 1 or base.seq // cp >= least_tokens)
    batch = base.global_batch % dp == 0 if is_equal else 1 < dp < base.global_batch
    return heads and width and pp <= shape.num_layers and batch


def _rows(
    mesh: tuple[int, int, int, int], shape: ModelShape, base: Job, *, is_offload_tried: bool, is_equal: bool = True
) -> Iterator[tuple[int, ...]]:
    """Jobs of a mesh; with unequal shares those without what replicas would exchange for every micro-batch."""
    pp, dp, _, cp = mesh
    share = base.global_batch // dp
    divided = share if is_equal else base.global_batch
    levels = ((0, 1, 2, 3) if is_equal else (0, 1, 2)) if dp * cp > 1 else (0,)
    experts = [e for e in range(1, dp * cp + 1) if (dp * cp) % e == 0 and shape.num_experts % e == 0]
    recomputes = len(_RECOMPUTE) + (not base.is_flash)
    for micro in (d for d in range(1, min(share, _MOST_MICRO) + 1) if divided % d == 0):
        batches = share // micro
        if not is_equal and base.global_batch == dp * micro:
            continue
        for chunks in _CHUNKS if is_equal else (1,):
            if chunks > 1 and (pp == 1 or pp * chunks > shape.num_layers or batches % pp):
                continue
            for ep in experts if shape.num_experts and is_equal else [1]:
                for recompute in range(recomputes):
                    for zero in levels:
                        for offload in (0, 1) if is_offload_tried else (0,):
                            yield (*mesh[:3], cp, ep, micro, chunks, recompute, zero, offload, not is_equal, 1)


def _pieces(row: tuple[int, ...], shape: ModelShape, limits: Limits) -> list[int]:
    """Pieces that layers of a job may be cut into, beside none."""
    tried = [limit for limit in limits.of("coshard") if any(map(limit.allows, _PIECES))]
    of = dict(zip(_COLUMNS, row, strict=True))
    is_alone = of["tp"] == of["cp"] == of["ep"] == 1
    if not tried or not is_alone or of["recompute"] not in _WHOLE:
        return []
    return [k for k in _PIECES if _divide(k, shape)]


def _divide(pieces: int, shape: ModelShape) -> bool:
    """Whether a model's layers can be cut into so many."""
    return not shape.num_experts and not any(n % pieces for n in (shape.num_heads, shape.num_kv_heads, shape.ffn))


def _listed(numbers: list[int]) -> str:
    first, last = ", ".join(map(str, numbers[:-1])), str(numbers[-1])
    return f"{first} or {last}" if first else last


def _why_empty(cluster: Cluster, shape: ModelShape, base: Job, limits: Limits, masks: list[NDArray[np.bool_]]) -> str:
    alone = [limit for limit, mask in zip(limits.limits, masks, strict=True) if not mask.any()]
    if alone:
        hint = _what_divides(cluster, shape, base, alone[0])
        return f"nothing keeps the limit '{alone[0].text}' on {cluster.num_ranks} ranks{hint}"
    for i, first in enumerate(masks):
        for j in range(i + 1, len(masks)):
            if not (first & masks[j]).any():
                pair = f"'{limits.limits[i].text}' and '{limits.limits[j].text}'"
                return f"the limits {pair} contradict each other on {cluster.num_ranks} ranks: leave one of them out"
    if masks:
        names = ", ".join(f"'{text}'" for text in limits.texts)
        return f"nothing keeps all of the limits {names} on {cluster.num_ranks} ranks, though any two go together"
    return _what_is_odd(cluster, shape, base)


def _what_divides(cluster: Cluster, shape: ModelShape, base: Job, limit: Limit) -> str:
    """Values of the limit's key that would do."""
    free = space_of(cluster, shape, base, Limits())
    if limit.key not in free.columns:
        return ""
    if limit.key == "coshard":
        can = [k for k in _PIECES if _divide(k, shape)]
        into = f"{shape.name} is cut into {_listed(can)} pieces" if can else f"{shape.name} is not cut into pieces"
        return f": {into}, with tp=1, cp=1 and ep=1, and recompute=none or recompute=full"
    if limit.key == "shares":
        return ": only replicas of unlike speed have unequal ones, more micro-batches than there are replicas"
    if limit.key in ("recompute", "offload"):
        return ": it is not tried; 'attention' is only worth it without flash attention, offloading only by request"
    values = [int(v) for v in np.unique(free.columns[limit.key])]
    shown = ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")
    return (
        f": of {shape.name} with {shape.num_heads} heads, {shape.num_layers} layers and a batch of "
        f"{base.global_batch}, {limit.key} can be {shown}"
    )


def _what_is_odd(cluster: Cluster, shape: ModelShape, base: Job) -> str:
    """Why no mesh divides, without any limit."""
    count = cluster.num_ranks
    usable = [ranks for ranks in range(count, 0, -1) if any(_divides(mesh, shape, base) for mesh in _meshes(ranks))]
    batches: list[int] = []
    for step in range(1, count + 1):
        near = [batch for batch in (base.global_batch - step, base.global_batch + step) if batch > 0]
        batches = [b for b in near if any(_divides(m, shape, replace(base, global_batch=b)) for m in _meshes(count))]
        if batches:
            break
    ways = [f"a batch of {' or '.join(map(str, batches))}"] if batches else []
    ways += [f"{usable[0]} ranks"] if usable else []
    return (
        f"{count} ranks do not divide: {shape.name} has {shape.num_heads} heads and {shape.num_layers} layers, the "
        f"batch {base.global_batch} sequences of {base.seq} tokens; {' or '.join(ways) or 'nothing near'} would do"
    )
