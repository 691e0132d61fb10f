"""The compiled reductions, against torch bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from mycel.runtime.reduce_kernels import ITEM_SIZE, DType, ReduceOp, combine, copy, item_size, scale
from mycel.standalone import standalone

TORCH_TYPE = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
    DType.INT16: torch.int16,
}
TORCH_OP = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
ARITHMETIC = [op for op in ReduceOp if op not in BITWISE]
BITS_TYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALVES = (DType.FLOAT16, DType.BFLOAT16)
FLOATS = (DType.FLOAT32, DType.FLOAT64, *HALVES)


def combined(dtype: DType, op: ReduceOp, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(a)
    combine(int(dtype), int(op), result.data_ptr(), a.data_ptr(), b.data_ptr(), a.numel())
    return result


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, *, zeros_may_differ: bool = False) -> None:
    """Equal bits; any NaN equals any NaN, and on request either zero the other."""
    bits = BITS_TYPE[got.element_size()]
    same = got.view(bits) == expected.view(bits)
    if got.is_floating_point():
        same |= got.isnan() & expected.isnan()
        if zeros_may_differ:
            same |= (got == 0) & (expected == 0)
    wrong = (~same).nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} differ; first at {wrong[0]}: got {got[wrong[0]]}, expected {expected[wrong[0]]}"


def random_tensor(dtype: DType, count: int, seed: int) -> torch.Tensor:
    """Every bit pattern is as likely as any other, so NaN, infinities, subnormals and wrap-round all occur."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is DType.BOOL:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8).to(torch.bool)
    raw = torch.randint(0, 256, (count * ITEM_SIZE[dtype],), generator=generator, dtype=torch.uint8)
    return raw.view(TORCH_TYPE[dtype])


def test_item_sizes_are_those_of_torch() -> None:
    for dtype, torch_type in TORCH_TYPE.items():
        assert ITEM_SIZE[dtype] == item_size(int(dtype)) == torch_type.itemsize
    assert len(ITEM_SIZE) == len(DType) == len(TORCH_TYPE)


@pytest.mark.parametrize(
    ("dtype", "op"), [(d, op) for d in DType for op in ReduceOp if not (d in FLOATS and op in BITWISE)]
)
def test_random_patterns_equal_torch(dtype: DType, op: ReduceOp) -> None:
    a, b = random_tensor(dtype, 10_007, seed=1), random_tensor(dtype, 10_007, seed=2)
    extreme = op in (ReduceOp.MAX, ReduceOp.MIN)
    assert_same_bits(combined(dtype, op, a, b), TORCH_OP[op](a, b), zeros_may_differ=extreme)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_every_16_bit_float_equals_torch(dtype: DType, op: ReduceOp) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(TORCH_TYPE[dtype])
    tiny = torch.finfo(TORCH_TYPE[dtype]).tiny
    ordinary = [0.0, -0.0, 1.0, -1.0, 0.5, 1 / 3, -2.7, 1.0078125, 2048.0, torch.finfo(TORCH_TYPE[dtype]).max]
    special = [tiny, -tiny, tiny / 2, 2.0**-24, float("inf"), float("-inf"), float("nan")]
    partners = torch.tensor([*ordinary, *special], dtype=torch.float64).to(TORCH_TYPE[dtype])
    for partner in partners:
        other = partner.expand(65536).contiguous()
        expected = TORCH_OP[op](every, other)
        extreme = op in (ReduceOp.MAX, ReduceOp.MIN)
        assert_same_bits(combined(dtype, op, every, other), expected, zeros_may_differ=extreme)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_on_either_side_survives_max_and_min(dtype: DType) -> None:
    nan = torch.full((33,), float("nan"), dtype=TORCH_TYPE[dtype])
    one = torch.ones(33, dtype=TORCH_TYPE[dtype])
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        assert combined(dtype, op, nan, one).isnan().all()
        assert combined(dtype, op, one, nan).isnan().all()


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("count", [0, 1, 3, 31, 4096, 20_001])
def test_in_place_and_apart_agree_and_touch_nothing_else(dtype: DType, count: int) -> None:
    size = ITEM_SIZE[dtype]
    a, b = random_tensor(dtype, count + 2, seed=3), random_tensor(dtype, count + 2, seed=4)
    apart, over_a, over_b = a.clone(), a.clone(), b.clone()
    code, op, inside = int(dtype), int(ReduceOp.MAX), slice(1, count + 1)
    combine(code, op, apart.data_ptr() + size, a.data_ptr() + size, b.data_ptr() + size, count)
    combine(code, op, over_a.data_ptr() + size, over_a.data_ptr() + size, b.data_ptr() + size, count)
    combine(code, op, over_b.data_ptr() + size, a.data_ptr() + size, over_b.data_ptr() + size, count)
    expected = TORCH_OP[ReduceOp.MAX](a[inside], b[inside])
    for result, untouched in ((apart, a), (over_a, a), (over_b, b)):
        assert_same_bits(result[inside], expected, zeros_may_differ=True)
        assert_same_bits(result[[0, -1]], untouched[[0, -1]])


@pytest.mark.parametrize("dtype", [d for d in DType if d not in (*FLOATS, DType.BOOL)])
def test_integers_wrap_round(dtype: DType) -> None:
    limits = torch.iinfo(TORCH_TYPE[dtype])
    top = torch.full((17,), limits.max, dtype=TORCH_TYPE[dtype])
    one = torch.ones(17, dtype=TORCH_TYPE[dtype])
    assert (combined(dtype, ReduceOp.SUM, top, one) == limits.min).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 8, 1000])
def test_scale_divides_floats_as_torch_does(dtype: DType, divisor: int) -> None:
    value = random_tensor(dtype, 65_537, seed=5)
    expected = value.div(torch.full_like(value, divisor))
    scale(int(dtype), value.data_ptr(), value.numel(), divisor)
    assert_same_bits(value, expected)


@pytest.mark.parametrize("dtype", [DType.INT32, DType.INT64, DType.INT16, DType.INT8, DType.UINT8])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7])
def test_scale_divides_integers_towards_zero(dtype: DType, divisor: int) -> None:
    value = random_tensor(dtype, 1001, seed=6)
    expected = torch.div(value, divisor, rounding_mode="trunc")
    scale(int(dtype), value.data_ptr(), value.numel(), divisor)
    assert torch.equal(value, expected)


def test_scale_leaves_bool_alone() -> None:
    value = random_tensor(DType.BOOL, 100, seed=7)
    before = value.clone()
    scale(int(DType.BOOL), value.data_ptr(), 100, 4)
    assert torch.equal(value, before)


@pytest.mark.parametrize(("dst", "src"), [(0, 5), (5, 0), (3, 3), (0, 600)])
def test_copy_moves_bytes_even_where_they_overlap(dst: int, src: int) -> None:
    memory = np.arange(1200, dtype=np.int64).astype(np.uint8)
    expected = memory.copy()
    expected[dst : dst + 500] = memory[src : src + 500]
    copy(memory.ctypes.data + dst, memory.ctypes.data + src, 500)
    assert (memory == expected).all()
    copy(memory.ctypes.data, memory.ctypes.data + 700, 0)
    assert (memory == expected).all()


def test_compiled_code_can_call_them() -> None:
    @standalone
    def average(dst: int, a: int, b: int, count: int) -> None:
        copy(dst, a, count * item_size(0))
        combine(0, 0, dst, dst, b, count)
        scale(0, dst, count, 2)

    a, b, result = torch.rand(100), torch.rand(100), torch.empty(100)
    average(result.data_ptr(), a.data_ptr(), b.data_ptr(), 100)
    assert torch.equal(result, (a + b) / 2)


def test_another_process_finds_the_compiled_code() -> None:
    value = torch.ones(4)
    combine(0, 0, value.data_ptr(), value.data_ptr(), value.data_ptr(), 4)
    program = (
        "import numpy as np\n"
        "from mycel.runtime.reduce_kernels import combine\n"
        "x = np.ones(4, np.float32)\n"
        "combine(0, 0, x.ctypes.data, x.ctypes.data, x.ctypes.data, 4)\n"
        "print(combine.was_compiled, x[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "2.0"]
