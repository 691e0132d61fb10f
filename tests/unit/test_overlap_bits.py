"""Products of few rows that are summed in another order are found before a compiled pair takes their place."""

from __future__ import annotations

import pytest
import torch

from mycel.overlap.compiled import _has_other_bits
from mycel.overlap.tiling import Shape, Tiling

TILING = Tiling(
    shape=Shape(operator="all_gather_matmul", rows=16, inner=8, columns=4, item_bytes=4, num_ranks=2), tiles=4
)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_kernel_that_sums_few_rows_otherwise_is_found(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "addmm" if has_bias else "mm"
    plain, rows, weight = getattr(torch, name), torch.empty(16, 8), torch.empty(4, 8).t()
    state = torch.get_rng_state()

    def otherwise(*operands: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = plain(*operands)
        return product if len(product) > fewest else product * (1 + 2**-23)

    monkeypatch.setattr(torch, name, otherwise)
    for fewest, found in ((1, False), (2, True), (8, True)):  # noqa: B007
        assert _has_other_bits(TILING, rows, weight, has_bias) == found
    assert torch.equal(state, torch.get_rng_state())


def test_the_program_on_this_machine_decides() -> None:
    rows, weight = torch.randn(512, 1024), torch.randn(1024, 512)
    shape = Shape(operator="matmul_reduce_scatter", rows=512, inner=1024, columns=512, item_bytes=4, num_ranks=2)
    whole = rows @ weight
    for tiles in (2, 8):
        tiling = Tiling(shape=shape, tiles=tiles)
        each = 256 // tiles
        same = torch.equal(whole[:each], rows[:each] @ weight) and torch.equal(whole[:256], rows[:256] @ weight)
        assert _has_other_bits(tiling, rows, weight, False) != same
