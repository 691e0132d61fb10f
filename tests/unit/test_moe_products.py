"""The product is chosen by the load: all of them compute the same, and the table says which."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mycel.errors import UsageError
from mycel.moe import MoE, ProductTable, measure_products, use_products
from mycel.moe.kernels import grouped_gemm
from mycel.moe.kernels.products import ProductShape

LOADS = [[3, 3, 3], [0, 7, 1], [5, 0, 0], [0, 0, 0], [2, 4, 6]]
FASTEST = 1e-9


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = use_products(None)
    yield
    use_products(before)


def preferring(weight: torch.Tensor, way: str) -> ProductTable:
    """A table in which one product is the fastest wherever it can be taken, and else the grouped one."""
    seconds = dict.fromkeys(("grouped", "each", "batched", "padded"), 1.0) | {"grouped": 0.5, way: FASTEST}
    curves = {name: ((1, seconds[name]), (1000, seconds[name])) for name in seconds}
    return ProductTable(curves={ProductShape.of(weight): curves})


@pytest.mark.parametrize("way", ["grouped", "each", "batched", "padded"])
def test_every_product_is_that_of_each_row(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noted(name: str, *given: Any) -> Any:
        taken.append(name)
        return products[name](*given)

    products = dict(grouped_gemm._PRODUCTS)
    ways = {name: partial(noted, name) for name in products}
    monkeypatch.setattr(grouped_gemm, "_PRODUCTS", ways)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 8, 4, generator=generator, requires_grad=True)
    use_products(preferring(weight, way))
    for load in LOADS:
        for tail in (0, 2):
            x = torch.randn(sum(load) + tail, 4, generator=generator, requires_grad=True)
            y = grouped_gemm.grouped_linear(x, weight, torch.tensor(load))
            expert = torch.repeat_interleave(torch.arange(3), torch.tensor(load))
            wanted = torch.einsum("ri,roi->ro", x[: sum(load)].double(), weight[expert].double())
            assert torch.allclose(y[: sum(load)].double(), wanted, atol=1e-6) and not y[sum(load) :].any()
            up = torch.randn(y.shape, generator=generator)
            mine = torch.autograd.grad(y, (x, weight), up)
            theirs = torch.autograd.grad(wanted, (x, weight), up[: sum(load)].double())
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))
    assert set(taken) == ({way} if way != "grouped" else set())


def test_the_table_chooses_by_the_load_and_survives_a_file(tmp_path: Path) -> None:
    shape = ProductShape(4, 8, 16, "float32", "cpu")
    curves = {
        "grouped": ((1, 4e-6), (16, 8e-6)),
        "each": ((1, 1e-6), (16, 16e-6)),
        "batched": ((1, 5e-6), (16, 6e-6)),
        "padded": ((1, 5e-6), (16, 7e-6)),
    }
    table = ProductTable(curves={shape: curves})
    assert table.choose(shape, [1, 1, 1, 1]) == "each"
    assert table.choose(shape, [16, 16, 16, 16]) == "batched"
    assert table.choose(shape, [16, 16, 16, 15]) == "padded"
    assert table.choose(shape, [64, 1, 1, 1]) == "grouped"  # padding to the largest load costs too much
    assert table.seconds(shape, [32, 0, 0, 1]) == pytest.approx(
        {"grouped": 16e-6 + 4e-6, "each": 32e-6 + 1e-6, "padded": 4 * 14e-6}
    )
    table.save(tmp_path / "products.json")
    assert ProductTable.load(tmp_path / "products.json") == table


def test_a_measured_layer_computes_the_same() -> None:
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, 2)
    x = torch.randn(32, 8)
    wanted = layer(x)
    table = measure_products(layer, rows=(1, 4), trials=1)
    assert {shape[:3] for shape in table.curves} == {(4, 32, 8), (4, 8, 16)}
    assert all(
        [n for n, _ in curve] == [1, 4] and min(s for _, s in curve) > 0
        for ways in table.curves.values()
        for curve in ways.values()
    )
    assert use_products(table) is None
    assert torch.allclose(layer(x), wanted, atol=1e-6)
    half = measure_products(layer, rows=(1,), trials=1, dtype=torch.bfloat16)
    assert {shape.dtype for shape in half.curves} == {"bfloat16"}


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    for content in ("no json", '{"format": "mycel.products", "version": 2}', '{"shapes": []}'):
        (tmp_path / "file").write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match="no table of products that can be read"):
            ProductTable.load(tmp_path / "file")
    with pytest.raises(UsageError, match="no experts with stacked matrices"):
        measure_products(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="ascending from 1"):
        measure_products(MoE(8, 8, 2), rows=(4, 4))
    with pytest.raises(UsageError, match="without points"):
        ProductTable(curves={ProductShape(1, 1, 1, "float32", "cpu"): {"each": ()}})
