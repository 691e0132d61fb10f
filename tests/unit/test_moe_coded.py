"""Products by tables: right within rounding, as many operations as the formula says, and whole models in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.checks.hugging_face_models import make
from torch import nn

import mycel.moe
from mycel.errors import UsageError
from mycel.moe import MoE
from mycel.moe.memory import (
    CodedMatrix,
    CodedOffload,
    CodedProducts,
    EmulatedLink,
    Offload,
    code_matrix,
    measure_coded_products,
    table_operations,
)
from mycel.moe.memory.lookup import METHODS


@pytest.mark.parametrize(("rows", "columns", "vectors"), [(1, 2, 1), (33, 64, 3), (40, 70, 2), (128, 200, 5)])
@pytest.mark.parametrize("method", METHODS)
def test_products_are_right_within_rounding(rows: int, columns: int, vectors: int, method: str) -> None:
    made = torch.Generator().manual_seed(rows)
    coded = code_matrix(torch.randn(rows, columns, generator=made))
    x = torch.randn(vectors, columns, generator=made)
    exact = coded.dequantised(torch.float64)
    found = coded.product(x, method)
    # Tables add the values -8 to 7 up from -8: each sum is of numbers up to 8 |x|.
    spread = coded.scales.double().repeat_interleave(64, 1)[:, :columns] * 8
    bound = columns * torch.finfo(torch.float32).eps * (x.double().abs() @ torch.maximum(exact.abs(), spread).T)
    assert bool(((found.double() - x.double() @ exact.T).abs() <= bound).all())


def test_codes_are_the_nearest() -> None:
    weight = torch.randn(9, 130, generator=torch.Generator().manual_seed(0))
    coded = code_matrix(weight)
    step = coded.scales.repeat_interleave(64, 1)[:, :130]
    assert bool(((coded.dequantised() - weight).abs() <= step / 2 * (1 + 1e-5)).all())
    assert coded.shape == (9, 130) and coded.num_bytes == 9 * (65 + 4 * 3)
    again = code_matrix(coded.dequantised())
    assert torch.equal(again.codes, coded.codes)
    assert not code_matrix(torch.zeros(2, 4)).dequantised().any()


@pytest.mark.parametrize("together", [1, 2, 3])
def test_operations_are_counted_right(together: int) -> None:
    """A product by the method itself, which counts as it goes."""
    rows, columns, bits = 5, 6, 2
    made = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=made).tolist()
    x = torch.randn(columns, generator=made, dtype=torch.float64).tolist()
    counted, y = 0, [0.0] * rows
    for first in range(0, columns, together):
        table: dict[tuple[int, ...], float] = {(): 0.0}
        for t in range(together):  # all tables of fewer columns on the way, each entry from another by one addition
            longer: dict[tuple[int, ...], float] = {}
            for known, value in table.items():
                for v in range(2**bits):
                    before = longer[(*known, v - 1)] if v else value - x[first + t]
                    longer[(*known, v)] = before + x[first + t]
                    counted += 1
            table = longer
        for i in range(rows):
            y[i] += table[tuple(codes[i][first : first + together])]
            counted += 1
    expected = [sum(c * value for c, value in zip(row, x, strict=True)) for row in codes]
    assert y == pytest.approx(expected)
    assert (counted, 2 * rows * columns) == table_operations(rows, columns, bits=bits, together=together)


def test_fewer_operations_on_the_shapes_of_experts() -> None:
    """2.5 times fewer and more, as published, for the maps of Mixtral's, OLMoE's and DeepSeek's experts."""
    for rows, columns in ((28_672, 4096), (4096, 14_336), (2048, 2048), (2048, 1024), (4096, 7168), (7168, 2048)):
        by_tables, plain = table_operations(rows, columns)
        assert plain / by_tables > 2.5
    by_tables, plain = table_operations(4096, 4080, together=3)
    assert plain / by_tables == pytest.approx(2.90, abs=0.01)


def test_the_faster_is_taken() -> None:
    measured = measure_coded_products([(16, 8)], [1, 8], repeats=1)
    for rows, ways in measured.seconds[16, 8].items():
        assert set(ways) == set(METHODS)
        assert ways[measured.choose((16, 8), rows)] == min(ways.values())
    assert measured.choose((5, 5), 1) == "expand"


#: Every way on some number of rows, so that one model computes with all of them.
MIXED = {1: {"tables": 1.0}, 3: {"dequantise": 1.0}, 9: {"expand": 1.0}}


def in_codes(parameter: torch.Tensor, *, transposed: bool) -> None:
    """What codes make of a stack, in place."""
    for matrix in parameter.detach():
        coded: CodedMatrix = code_matrix(matrix.T if transposed else matrix)
        matrix.copy_(coded.dequantised().T if transposed else coded.dequantised())


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_model_in_four_bits(bias: bool) -> None:
    """The same as with the numbers that the codes stand for; and as before when it is closed."""
    with torch.inference_mode(False):
        torch.manual_seed(0)
        model = nn.Sequential(*(MoE(16, 24, 4, 2, bias=bias) for _ in range(2)))
        for layer in model:
            if bias:
                nn.init.normal_(layer.experts.gate_up_bias)
                nn.init.normal_(layer.experts.down_bias)
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    before = model(x)
    products = CodedProducts(seconds={(48, 16): MIXED, (16, 24): MIXED})
    link = EmulatedLink(bandwidth_gbps=50.0)
    with CodedOffload(model, link, "on_demand", products=products) as offload:
        found = model(x)
        few = [model(x[i : i + 1]) for i in range(3)]
        coded_bytes = offload.store.expert_bytes
    torch.testing.assert_close(model(x), before, atol=0, rtol=0)
    with Offload(model, link, "on_demand") as plain:
        assert coded_bytes < plain.store.expert_bytes / (3.0 if bias else 3.5)  # few columns, and so many scales
    link.close()
    for layer in model:
        in_codes(layer.experts.gate_up_proj, transposed=False)
        in_codes(layer.experts.down_proj, transposed=False)
    torch.testing.assert_close(found, model(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(few), model(x[:3]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
@torch.inference_mode()
def test_hugging_face_models_in_four_bits(family: str) -> None:
    with torch.inference_mode(False):
        model = make(family).eval()
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    mycel.moe.apply(model)
    link = EmulatedLink(bandwidth_gbps=50.0)
    with CodedOffload(model, link, "resident", products=CodedProducts(seconds={})):
        found = model(ids).logits
    link.close()
    for module in model.modules():
        if hasattr(module, "mycel_experts"):
            for name in module.mycel_experts.names[:2]:
                in_codes(module.get_parameter(name), transposed=module.is_transposed)
    torch.testing.assert_close(found, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: code_matrix(torch.ones(2, 3)), "two codes share a byte: expected"),
        (lambda: code_matrix(torch.full((2, 2), torch.inf)), "not finite has no codes"),
        (lambda: code_matrix(torch.ones(2, 4)).product(torch.ones(1, 6), "tables"), r"float32 \[rows, 4\], got"),
        (
            lambda: code_matrix(torch.ones(2, 4)).product(torch.ones(1, 4), "table"),
            "unknown way of a product 'table'",
        ),
        (lambda: table_operations(4, 5), "5 columns are not a multiple of 2"),
        (lambda: CodedProducts(seconds={(2, 2): {}}), "without a time"),
    ],
)
def test_what_makes_no_sense_is_said(call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()
