"""Codecs of rows on the wire: what they promise about errors, bytes, odd rows and rounding at random."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycel.errors import UsageError
from mycel.wire import CODECS, Float8Codec, Int4Codec, Int8Codec, WireCodec, make_codec
from mycel.wire.formats import Float8
from mycel.wire.noise import row_noise

NAMES = sorted(CODECS)
SCALED = ["fp8", "int4", "int8"]
every_codec = pytest.mark.parametrize("name", NAMES)
scaled_codec = pytest.mark.parametrize("name", SCALED)


def there_and_back(codec: WireCodec, rows: Tensor, *, gradient: bool = False) -> Tensor:
    back = codec.decode(codec.encode(rows, gradient=gradient), rows.shape[1], rows.dtype, gradient=gradient)
    assert back.dtype == rows.dtype and back.shape == rows.shape
    return back


def worst(got: Tensor, want: Tensor) -> float:
    """Largest error of a number as a part of the largest magnitude in its row."""
    if not want.numel():
        return 0.0
    top = want.double().abs().amax(dim=1)
    return float(((got.double() - want.double()).abs().amax(dim=1) / top.clamp_min(1e-300)).max())


rows_of = st.tuples(st.integers(0, 40), st.integers(1, 33), st.integers(0, 2**20), st.sampled_from([-12, -3, 0, 3]))


@settings(max_examples=80, deadline=None)
@given(
    rows_of,
    st.sampled_from(NAMES),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_errors_are_as_stated(sizes: tuple[int, ...], name: str, dtype: torch.dtype, gradient: bool) -> None:
    n, width, seed, decimals = sizes
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(n, 1, generator=generator).mul(2).exp() * torch.randn(n, width, generator=generator).exp()
    rows = (torch.randn(n, width, generator=generator) * spread * 10.0 ** max(decimals, -3)).to(dtype)
    if dtype in (torch.float64, torch.float32) and decimals < -3:
        rows = rows * 10.0 ** (decimals - 12)
        rows = rows[rows.abs().amax(dim=1) > 1e-30]  # smaller ones are beyond what is stated
    rows = rows.clamp(-torch.finfo(torch.float16).max, torch.finfo(torch.float16).max)
    if dtype == torch.float16:  # rows whose numbers have lost their last bits already
        rows = rows[rows.abs().amax(dim=1) > 1e-3]
    codec = make_codec(name)
    rounding = 0.0 if name == "identity" else torch.finfo(dtype).eps / 2 * (1 + codec.row_error(gradient=gradient))
    rounding += 2e-7 * codec.row_error(gradient=gradient)  # float32 products of numbers and steps
    got = there_and_back(codec, rows, gradient=gradient)
    assert worst(got, rows) <= codec.row_error(gradient=gradient) + rounding


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_numbers_of_float16_stay_finite(name: str) -> None:
    rows = torch.full((2, 8), 65504.0, dtype=torch.float16)
    rows[1] *= -1
    got = there_and_back(make_codec(name), rows)
    assert got.isfinite().all() and worst(got, rows) <= 0.1


@pytest.mark.parametrize("width", [1, 6, 7, 64])
def test_bytes_of_a_row(width: int) -> None:
    rows = torch.randn(5, width)
    sizes = {name: make_codec(name).encode(rows).nbytes / 5 for name in NAMES}
    half = math.ceil(width / 2)
    wanted = {"identity": 4 * width, "bf16": 2 * width, "fp8": width + 2, "int8": width + 2, "int4": half + 2}
    assert sizes == wanted
    assert {n: make_codec(n).encode(rows, gradient=True).nbytes / 5 for n in NAMES} == wanted


@scaled_codec
@pytest.mark.parametrize("gradient", [False, True])
def test_odd_rows_and_their_neighbours(name: str, gradient: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 9)
    rows[1] = 0
    rows[2, 3] = math.nan
    rows[3, 0] = -math.inf
    rows[4, 8] = 3e38
    got = there_and_back(make_codec(name), rows, gradient=gradient)
    assert torch.equal(got[1], rows[1])
    assert got[2:4].isnan().all()
    others = torch.tensor([0, 4, 5])
    assert worst(got[others], rows[others]) <= make_codec(name).row_error(gradient=gradient) * 1.0001
    least = torch.full((1, 9), 1e-44)  # smaller than any step: nothing is left of it, and nothing breaks
    assert there_and_back(make_codec(name), least, gradient=gradient).abs().max() <= 2.0**-120


@scaled_codec
def test_the_end_of_float16_is_not_left(name: str) -> None:
    rows = torch.tensor([[65504.0, 1.0], [-65504.0, 65504.0], [64000.0, -65000.0]], dtype=torch.float16)
    for gradient in (False, True):
        assert there_and_back(make_codec(name), rows, gradient=gradient).isfinite().all()


@every_codec
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3000, 33)  # more than one block
    codec = make_codec(name)
    wire = codec.encode(rows)
    for some in (slice(0, 1), slice(990, 1001), slice(2990, 3000)):
        assert torch.equal(wire[some], codec.encode(rows[some]))
        assert torch.equal(codec.decode(wire, 33, rows.dtype)[some], codec.decode(wire[some], 33, rows.dtype))
    assert torch.equal(codec.encode(rows.t().contiguous().t()), wire)


@scaled_codec
def test_gradients_are_right_on_average(name: str) -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 64)
    row[0, :8] = row.abs().max() * torch.linspace(0.001, 0.06, 8)
    draws = 4000
    got = there_and_back(make_codec(name), row.expand(draws, 64).contiguous(), gradient=True).double()
    # A draw moves by one step at most; five standard deviations, and what a 256th of a step may bias.
    step = make_codec(name).row_error(gradient=True) * float(row.abs().max())
    assert (got.mean(dim=0) - row[0].double()).abs().max() < 5 * 0.5 * step / draws**0.5 + step / 256
    assert got.std(dim=0).max() > 0.1 * step
    if name == "int4":  # what nearest rounding would have lost
        assert there_and_back(make_codec(name), row)[0, :8].abs().max() == 0.0


@scaled_codec
def test_noise_leaves_torch_alone_and_differs_between_seeds_and_rows(name: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 50)
    before = torch.get_rng_state()
    codec: Any = CODECS[name]
    a, b, c = (coded.encode(rows, gradient=True) for coded in (codec(), codec(seed=1), copy.deepcopy(codec())))
    assert torch.equal(a, c) and not torch.equal(a, b)
    other = rows.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(9.0))  # a bit moves, and all of the row rounds otherwise
    moved = codec().encode(other, gradient=True)
    assert (moved[0] != a[0]).sum() > 3 and torch.equal(moved[1:], a[1:])
    assert torch.equal(torch.get_rng_state(), before)


@scaled_codec
def test_noise_is_the_same_whatever_was_made_or_rounded_before(name: str) -> None:
    """What a run does that goes on from a checkpoint, and with other layers made first."""
    torch.manual_seed(0)
    rows = torch.randn(70, 600)  # more than one block
    first = make_codec(name).encode(rows, gradient=True)
    later = make_codec("int8"), make_codec(name)
    for codec in later:
        codec.encode(torch.randn(3, 5), gradient=True)
    assert torch.equal(later[1].encode(rows, gradient=True), first)


def test_noise_is_uniform_and_the_same_elsewhere() -> None:
    """Compiled for CPUs and as torch operations; every byte as often, rows and numbers independent."""
    torch.manual_seed(0)
    rows = torch.randn(1, 203).expand(400, 203).contiguous()  # equal rows: places alone tell them apart
    noise = row_noise(rows, seed=7)
    assert torch.equal(row_noise(rows[100:], seed=7, first_row=100), noise[100:])
    counts = torch.bincount(noise.flatten().int(), minlength=256).double()
    expected = noise.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 5 * (2 * 255) ** 0.5
    centred = noise.double() - 127.5
    for flat, other in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:])):
        assert abs(float((flat * other).mean())) < 5 * (256**2 / 12) / flat.numel() ** 0.5
    assert torch.equal(row_noise(rows.as_subclass(_Elsewhere), seed=7).as_subclass(Tensor), noise)


class _Elsewhere(Tensor):
    """A tensor that says it is not on a CPU, so that the torch operations are taken."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Float8Codec, Int8Codec, Int4Codec])
def test_exact_gradients(kind: type[Float8Codec | Int8Codec | Int4Codec]) -> None:
    codec = kind(gradients="exact")
    rows = torch.randn(4, 7, dtype=torch.float64)
    assert torch.equal(there_and_back(codec, rows, gradient=True), rows)
    assert codec.row_error(gradient=True) == 0.0 < codec.row_error()
    with pytest.raises(UsageError, match=r"gradients 'rounded'; expected 'coded' or 'exact'"):
        kind(gradients="rounded")  # type: ignore[arg-type]


def test_eight_bit_floats_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        theirs = codes.view(kind).float()
        finite = theirs.isfinite()
        assert finite.sum() > 240
        assert torch.equal(Float8(kind).from_codes(codes)[finite], theirs[finite])


def test_unknown_codecs_are_named() -> None:
    with pytest.raises(UsageError, match=r"unknown codec 'fp16'.*; known: bf16, fp8"):
        make_codec("fp16")
