"""Tiles and their number, rates, and what operators refuse; in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from mycel.cost import makespan
from mycel.errors import UsageError
from mycel.overlap import (
    Lamb,
    Norm,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    plan_tiles,
    reduce_scatter_update_all_gather,
)
from mycel.overlap.rates import Network, Products
from mycel.overlap.rows import block_tiles, span_tiles
from mycel.overlap.tiling import Operator, Shape, choose_tiling


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


# -- rows -------------------------------------------------------------------------------------------------------


@given(rows=st.lists(st.integers(0, 30), min_size=1, max_size=5), tiles=st.integers(1, 9))
def test_tiles_of_blocks_are_all_rows_once(rows: list[int], tiles: int) -> None:
    found: list[int] = []
    for tile in block_tiles(rows, tiles):
        assert tile.most == max(tile.counts) > 0 and tile.is_even == (len(set(tile.counts)) == 1)
        for rank, (start, count) in enumerate(zip(tile.starts, tile.counts, strict=True)):
            first = sum(rows[:rank])
            assert first <= start and start + count <= first + rows[rank], "a rank's rows stay its own"
            found += range(start, start + count)
    assert sorted(found) == list(range(sum(rows)))


@given(num_rows=st.integers(0, 60), num_ranks=st.integers(1, 5), tiles=st.integers(1, 9))
def test_tiles_of_spans_are_all_rows_once(num_rows: int, num_ranks: int, tiles: int) -> None:
    cuts = span_tiles(num_rows, num_ranks, tiles)
    assert len(cuts) <= tiles
    found = [row for tile in cuts for rank in range(num_ranks) for row in range(*tile.own(rank))]
    assert found == list(range(num_rows)), "in order, tile by tile and rank by rank"
    assert all(tile.stop - tile.start <= tile.each * num_ranks for tile in cuts)
    assert all(tile.stop - tile.start == tile.each * num_ranks for tile in cuts[:-1]), "only the last is padded"


def test_rows_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="0 tiles"):
        block_tiles((1, 2), 0)
    with pytest.raises(UsageError, match="a rank has none or more"):
        span_tiles(-1, 2, 1)


# -- how many tiles ---------------------------------------------------------------------------------------------

PRODUCTS = Products(rows=(16, 256), flops=(2e10, 5e10), bytes_per_second=5e9)
OPERATORS: tuple[Operator, ...] = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def network(bytes_per_second: float, fixed_s: float = 0.0) -> Network:
    return Network(seconds=lambda exchange, n: fixed_s + n / bytes_per_second, source="made up")


def shape(operator: Operator, rows: int = 1024, inner: int = 1024, columns: int = 1024, ranks: int = 2) -> Shape:
    return Shape(operator=operator, rows=rows, inner=inner, columns=columns, item_bytes=4, num_ranks=ranks)


@pytest.mark.parametrize("operator", OPERATORS)
def test_tiles_where_both_take_long_and_one_where_there_is_nothing_to_hide(operator: Operator) -> None:
    even = choose_tiling(shape(operator), PRODUCTS, network(1e8))
    assert even.tiles > 1 and even.chosen_s < 0.8 * even.plain_s
    least = min(s for _, s in even.seconds)
    assert even.tiles == min(tiles for tiles, s in even.seconds if s <= 1.01 * least)
    assert f"{even.tiles} tiles; product" in even.explain() and "(made up)" in even.explain()
    assert choose_tiling(shape(operator), PRODUCTS, network(1e13)).tiles == 1
    assert choose_tiling(shape(operator, rows=8, inner=4, columns=4), PRODUCTS, network(1e8)).tiles == 1
    assert choose_tiling(shape(operator), PRODUCTS, network(1e8, fixed_s=0.5)).tiles == 1, "messages that cost much"
    assert choose_tiling(shape(operator, ranks=1), PRODUCTS, network(1e8)).tiles == 1


@pytest.mark.parametrize("operator", [*OPERATORS, "update"])
def test_what_moves_bytes_may_need_the_processors_that_multiply(operator: Operator) -> None:
    """The less is hidden, the nearer to the plain program; nothing hidden: one tile."""
    flat = {"rows": 1 << 22, "inner": 0, "columns": 1} if operator == "update" else {}
    sizes, free = shape(operator, **flat), network(1e9 if flat else 1e8)
    found = [choose_tiling(sizes, PRODUCTS, replace(free, hidden=share, host_s=1e-5)) for share in (1.0, 0.5, 0.0)]
    for all_hidden, half, none in zip(*(dict(tiling.seconds).values() for tiling in found), strict=True):
        assert half == pytest.approx((all_hidden + none) / 2)
    assert found[0].tiles > 1 and found[2].tiles == 1
    assert found[0].plain_s == pytest.approx(found[2].plain_s)


def test_slow_rates_of_few_rows_count_against_tiles() -> None:
    slow = Products(rows=(16, 512), flops=(1e9, 5e10), bytes_per_second=5e9)
    assert choose_tiling(shape("matmul_reduce_scatter"), slow, network(1e8)).tiles == 1


def test_the_model_is_a_makespan() -> None:
    assert makespan([(1.0, 2.0), (3.0, 0.0)], 1) == 6.0
    assert makespan([(1.0, 2.0), (3.0, 0.0)], 1, beside_s=1.5) == 6.0
    assert makespan([(1.0, 2.0), (3.0, 0.0)], 1, beside_s=2.5) == 6.5


def test_what_cannot_be_planned(alone: dist.ProcessGroup) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "group": alone}
    assert plan_tiles("matmul_all_reduce", 8, 8, 8, **options).explain().endswith("nothing to overlap")
    assert (
        plan_tiles("update", 8, 0, 1, **options, tiles=3).explain()
        == "update of 8 elements over 1 rank: 3 tiles, as given"
    )
    with pytest.raises(UsageError, match="unknown operator 'all_to_all'"):
        plan_tiles("all_to_all", 8, 8, 8, **options)  # type: ignore[arg-type]
    for tiles in (0, True, 1.5):
        with pytest.raises(UsageError, match="a whole number from 1"):
            plan_tiles("matmul_all_reduce", 8, 8, 8, **options, tiles=tiles)
    with pytest.raises(UsageError, match="rates are above 0"):
        Products(rows=(1,), flops=(0.0,), bytes_per_second=1.0)
    with pytest.raises(UsageError, match="rows ascending"):
        Products(rows=(2, 1), flops=(1.0, 1.0), bytes_per_second=1.0)
    with pytest.raises(UsageError, match="sizes are 0 or more"):
        shape("matmul_all_reduce", rows=-1)


# -- operators --------------------------------------------------------------------------------------------------


def test_what_operators_refuse(alone: dist.ProcessGroup) -> None:
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    with pytest.raises(UsageError, match=r"transposed: weight.t\(\)"):
        all_gather_matmul(x, w.t())
    with pytest.raises(UsageError, match=r"rows of torch.float32 times a weight of torch.float64"):
        matmul_all_reduce(x, w.double())
    with pytest.raises(UsageError, match="rank 0 has 4 rows, rows says 3"):
        all_gather_matmul(x, w, rows=[3])
    with pytest.raises(UsageError, match="rows of 2 ranks, the group has 1"):
        all_gather_matmul(x, w, rows=[2, 2])
    with pytest.raises(UsageError, match="3 together, the array has 4"):
        matmul_reduce_scatter(x, w, rows=[3])
    with pytest.raises(UsageError, match=r"a residual of shape \[3, 2\], expected \[4, 2\]"):
        matmul_reduce_scatter(x, w, residual=torch.ones(3, 2))
    with pytest.raises(UsageError, match=r"a residual of shape \[3, 2\], expected \[4, 2\]"):
        matmul_all_reduce(x, w, residual=torch.ones(3, 2))
    with pytest.raises(UsageError, match="a share from 0 to 1"):
        matmul_all_reduce(x, w, dropout=1.5)
    with pytest.raises(UsageError, match="unknown norm 'batch_norm'"):
        Norm(kind="batch_norm")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rms_norm has no bias"):
        Norm(kind="rms_norm", bias=torch.ones(2))
    with pytest.raises(UsageError, match="BatchNorm1d is no norm of rows"):
        Norm.of(nn.BatchNorm1d(2))
    with pytest.raises(UsageError, match="over 2 dimensions"):
        Norm.of(nn.LayerNorm((2, 3)))


def test_products_under_autocast_are_those_of_torch(alone: dist.ProcessGroup) -> None:
    x, w = torch.randn(2, 4, 3), torch.randn(3, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = x @ w, all_gather_matmul(x, w)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    found.float().sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32


@pytest.mark.parametrize("dropout", [0.3, 1.0])
def test_masks_are_those_of_torchs_dropout(alone: dist.ProcessGroup, dropout: float) -> None:
    x, w = torch.randn(40, 3), torch.randn(3, 20)
    torch.manual_seed(3)
    expected = nn.functional.dropout(x @ w, dropout)
    for operator in (matmul_all_reduce, matmul_reduce_scatter):
        torch.manual_seed(3)
        assert torch.equal(operator(x, w, dropout=dropout), expected)


# -- optimizers -------------------------------------------------------------------------------------------------


def test_what_cannot_be_sliced(alone: dist.ProcessGroup) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="RMSprop cannot be sliced; these can: SGD, Adam, AdamW, Lamb"):
        reduce_scatter_update_all_gather(RMSprop(model.parameters()), model.named_parameters())
    with pytest.raises(UsageError, match="has no name"):
        reduce_scatter_update_all_gather(SGD(model.parameters(), lr=0.1))
    used = AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    used.step()
    with pytest.raises(UsageError, match="has made steps"):
        reduce_scatter_update_all_gather(used, model.named_parameters())
    with pytest.raises(UsageError, match="no parameter of the optimizer is trained"):
        frozen = nn.Linear(3, 2).requires_grad_(False)
        reduce_scatter_update_all_gather(SGD(frozen.parameters(), lr=0.1), frozen.named_parameters())
    with pytest.raises(UsageError, match="expected numbers from 0"):
        Lamb(model.parameters(), lr=-1.0)


def test_names_of_the_optimizer_serve(alone: dist.ProcessGroup) -> None:
    model = nn.Linear(3, 2)
    optimizer = reduce_scatter_update_all_gather(Lamb(list(model.named_parameters()), lr=0.1), tiles=2)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == ["bias", "weight"]
    for old, new in zip(before, model.parameters(), strict=True):  # as far as the rate times its length
        moved = float((new.detach() - old).norm() / old.norm())
        assert moved == pytest.approx(0.1, rel=1e-4)
