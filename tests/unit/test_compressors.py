"""Compressors one by one: bytes, bias, contraction, strange tensors; compiled kernels beside torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from mycel.data_parallel import CompressionPolicy, ErrorFeedback
from mycel.data_parallel.compress import (
    COMPRESSORS,
    FP8,
    Compressor,
    Context,
    Item,
    PowerSGD,
    Quantised,
    RandomK,
    ShiftedLattice,
    Sign,
    TernGrad,
    TopK,
    make_compressor,
)
from mycel.data_parallel.compress.powersgd import orthonormal
from mycel.errors import UsageError
from mycel.wire.buckets import bucket_scales, pack, packed_bytes, unpack
from mycel.wire.digits import digits_bytes, pack_digits, unpack_digits
from mycel.wire.formats import Integers
from mycel.wire.noise import ternary, uniform

SHAPES = [(0,), (1,), (7,), (8, 1), (33, 65), (3, 0, 5), (), (5000,), (4, 3, 3, 3)]
#: As registered, and in the forms that claim something else.
KINDS: dict[str, Callable[[], Compressor]] = {
    **{name: partial(make_compressor, name) for name in COMPRESSORS},
    "terngrad, not clipped": partial(TernGrad, None),
    "terngrad, two bits": partial(TernGrad, packing="bits"),
    "random_k, unbiased": partial(RandomK, 0.1, unbiased=True),
    "int4, nearest": partial(Quantised, 4, stochastic=False),
    "fp8, e5m2": partial(FP8, torch.float8_e5m2),
    "lattice": partial(ShiftedLattice, bucket_size=8),  # a shift for each bucket: many buckets, for averages
    "powersgd, bfloat16": partial(PowerSGD, 2, wire=torch.bfloat16),
}
EVERY = sorted(KINDS)


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(compressor: Compressor, x: torch.Tensor, step: int = 0) -> torch.Tensor:
    context = Context(name="w", step=step)
    return compressor.decompress(compressor.compress(x, context), x.shape, context)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_payload_has_the_bytes_that_were_promised(name: str, shape: tuple[int, ...]) -> None:
    compressor, x = KINDS[name](), tensor(*shape)
    payload = compressor.compress(x, Context(name="w"))
    assert payload.dim() == 1
    assert payload.numel() * payload.element_size() == compressor.wire_bytes(shape)
    assert payload.is_floating_point() == compressor.aggregation.adds_payloads
    found = compressor.decompress(payload, shape, Context(name="w"))
    assert (found.shape, found.dtype) == (x.shape, torch.float32)


@pytest.mark.parametrize("name", EVERY)
def test_compressing_twice_gives_the_same_bytes(name: str) -> None:
    x = tensor(40, 30)
    assert torch.equal(KINDS[name]().compress(x, Context(name="w")), KINDS[name]().compress(x, Context(name="w")))


@pytest.mark.parametrize("name", EVERY)
def test_zeros_stay_zeros(name: str) -> None:
    assert torch.equal(there_and_back(KINDS[name](), torch.zeros(50, 40)), torch.zeros(50, 40))


@pytest.mark.parametrize("name", EVERY)
def test_strides_do_not_matter(name: str) -> None:
    x = tensor(30, 40)
    assert torch.equal(there_and_back(KINDS[name](), x.t()), there_and_back(KINDS[name](), x.t().contiguous()))


@pytest.mark.parametrize("name", EVERY)
def test_unbiased_where_it_says_so(name: str) -> None:
    compressor, x, draws = KINDS[name](), tensor(20, 50), 400
    if not compressor.is_unbiased:
        pytest.skip("does not claim to be")
    found = torch.stack([there_and_back(compressor, x, step) for step in range(draws)])
    # The error of the mean falls with the number of draws: a bias would stay.
    off = found.mean(dim=0) - x
    assert float(off.square().sum()) < 1.3 * float(found.var(dim=0).sum()) / draws + 1e-9
    for direction in (x, x.sign(), torch.ones_like(x)):
        along = ((found - x) * direction).sum(dim=(1, 2))
        assert abs(float(along.mean())) < 4 * float(along.std()) / draws**0.5 + 1e-4


@pytest.mark.parametrize("name", EVERY)
def test_contractive_where_it_says_so(name: str) -> None:
    compressor = KINDS[name]()
    if not compressor.is_contractive:
        pytest.skip("does not claim to be")
    for seed, shape in enumerate([(64, 64), (1000,), (5, 300)]):
        x = tensor(*shape, seed=seed)
        lost = torch.stack([(x - there_and_back(compressor, x, step)).norm() for step in range(5)])
        assert float(lost.mean()) < float(x.norm())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("stochastic", [True, False])
def test_quantised_is_off_by_less_than_a_level(bits: int, stochastic: bool) -> None:
    x = tensor(3000)
    found = there_and_back(Quantised(bits, bucket_size=256, stochastic=stochastic), x)
    level = bucket_scales(x, 256).repeat_interleave(256)[:3000] / ((1 << (bits - 1)) - 1)
    assert bool(((found - x).abs() <= level * (1.001 if stochastic else 0.501)).all())


def test_what_is_not_finite_is_seen() -> None:
    for bad in (float("inf"), float("nan")):
        x = tensor(2048)
        x[5] = bad
        found = there_and_back(Quantised(8), x)
        assert bool(found[:1024].isnan().all())
        assert bool(found[1024:].isfinite().all())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_no_compressor_hides_what_is_not_finite(name: str, bad: float) -> None:
    for place in (0, 777, 1999):
        x = tensor(40, 50)
        x.view(-1)[place] = bad
        assert not bool(there_and_back(KINDS[name](), x).isfinite().all())


def test_feedback_counts_whole_steps() -> None:
    feedback = ErrorFeedback()
    feedback.remember("w", torch.ones(2))
    assert feedback.memory == {}, "the step is not over"
    feedback.settle(keep=True)
    feedback.remember("w", torch.full((2,), 5.0))
    assert feedback.compensate("w", torch.zeros(2)).tolist() == [5.0, 5.0], (
        "twice in a step: what is left of the first"
    )
    feedback.settle(keep=False)
    assert feedback.memory["w"].tolist() == [1.0, 1.0]
    feedback.release("w")
    feedback.settle(keep=True, unused={"w"})
    assert feedback.memory["w"].tolist() == [1.0, 1.0]
    feedback.remember("w", torch.tensor([torch.inf, 2.0]))
    feedback.settle(keep=True)
    assert feedback.memory["w"].tolist() == [0.0, 2.0], "nothing that is not finite is remembered"
    feedback.release("w")
    feedback.settle(keep=True)
    assert feedback.memory == {}


def test_feedback_follows_a_scaler() -> None:
    class Falling:
        scale = 1024.0

        def get_scale(self) -> float:
            return self.scale

    scaler = Falling()
    feedback = ErrorFeedback(scaler=scaler)
    feedback.remember("w", torch.full((1,), 64.0))
    feedback.settle(keep=True)
    scaler.scale = 64.0
    feedback.follow_scaler()
    assert feedback.compensate("w", torch.zeros(1)).tolist() == [4.0]
    feedback.rescale(0.5)
    assert (feedback.memory["w"].item(), feedback.scale) == (2.0, 32.0)


def test_residuals_in_eight_bits_keep_the_same_rules() -> None:
    small = torch.full((3000,), 0.1)
    small[::1024] = 127.0  # steps of 1: to the nearest, nothing of the rest would be left
    feedback = ErrorFeedback(precision="int8")
    feedback.remember("w", small.clone())
    assert torch.equal(feedback.compensate("w", torch.zeros(3000)), feedback.compensate("w", torch.zeros(3000)))
    feedback.settle(keep=True)
    assert feedback.num_bytes == 3000 + 3 * 4
    kept = feedback.memory["w"]
    assert float(kept[kept < 100].mean()) == pytest.approx(0.1, abs=0.02)
    feedback.remember("w", torch.full((3000,), torch.nan))
    feedback.settle(keep=False)
    assert torch.equal(feedback.memory["w"], kept)
    feedback.rescale(0.25)
    assert torch.equal(feedback.memory["w"], kept / 4)
    feedback.remember("w", torch.tensor([1.0, torch.inf]))
    feedback.settle(keep=True)
    assert feedback.memory["w"].tolist() == [1.0, 0.0]
    feedback.release("w")
    feedback.settle(keep=True)
    assert not feedback.memory
    with pytest.raises(UsageError, match="int4"):
        ErrorFeedback(precision="int4")  # type: ignore[arg-type]
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="rescaled"):
            feedback.rescale(factor)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_packing_loses_nothing(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    packed = pack(codes, bits)
    assert len(packed) == packed_bytes(count, bits)
    assert torch.equal(unpack(packed, count, bits), codes)


@pytest.mark.parametrize("options", [{"bits": 1}, {"bits": 9}, {"bucket_size": 12}])
def test_quantised_refuses(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Quantised(**options)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(UsageError, match="known: "):
        make_compressor("zip")
    with pytest.raises(UsageError, match="int8"):
        make_compressor("int8", colour=3)


@pytest.mark.parametrize("base", [2, 3, 4, 5, 9, 17, 256, 257, 4000])
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_digits_lose_nothing(base: int, count: int) -> None:
    digits = torch.randint(0, base, (count,), generator=torch.Generator().manual_seed(count))
    packed = pack_digits(digits, base)
    assert len(packed) == digits_bytes(count, base)
    assert torch.equal(unpack_digits(packed, count, base).long(), digits)


def test_top_k_keeps_the_largest_across_blocks() -> None:
    x = torch.zeros(200_000)
    places = torch.tensor([3, 65_535, 65_536, 131_072, 199_999])
    x[places] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    assert torch.equal(there_and_back(TopK(5 / 200_000), x), x)


def test_random_k_takes_every_place_alike() -> None:
    x, compressor = torch.ones(103), RandomK(0.1)
    seen = sum(there_and_back(compressor, x, step) for step in range(1000))
    assert int(sum(there_and_back(compressor, x)).item()) == 11  # type: ignore[attr-defined]
    assert 60 < float(seen.min()) < float(seen.max()) < 150


def test_sign_has_the_mean_magnitude() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, -2.0, 10.0])
    assert there_and_back(Sign(bucket_size=4), x).tolist() == [2.0, -2.0, 2.0, -2.0, 10.0]


def test_terngrad_cuts_off_what_is_far_away() -> None:
    x = tensor(10_000)
    x[0] = 1000.0
    assert float(there_and_back(TernGrad(), x).abs().max()) <= 2.5 * float(x.std()) * 1.001
    assert float(there_and_back(TernGrad(None), x).abs().max()) == 1000.0


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_orthonormal_columns(columns: int) -> None:
    p = tensor(200, columns)
    p[:, -1] = p[:, 0] * (columns > 1) + 1e-4 * p[:, -1]  # nearly dependent
    found = orthonormal(p)
    assert torch.allclose(found.t() @ found, torch.eye(columns), atol=1e-5)
    assert torch.allclose(found @ (found.t() @ p), p, atol=1e-5 * float(p.abs().max()))


def test_orthonormal_where_columns_span_less() -> None:
    column = tensor(50, 1)
    found = orthonormal(torch.cat([column, 2 * column, torch.zeros(50, 1)], dim=1))
    assert bool(found.isfinite().all())
    assert float(torch.linalg.matrix_norm(found).square()) == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(orthonormal(torch.zeros(50, 3)), torch.zeros(50, 3))


def test_powersgd_is_exact_for_matrices_of_its_rank() -> None:
    x = tensor(60, 3) @ tensor(3, 40, seed=1)
    assert float((there_and_back(PowerSGD(3), x) - x).norm() / x.norm()) < 1e-5


def test_powersgd_begins_with_what_the_last_exact_step_showed() -> None:
    noisy = tensor(60, 4) @ tensor(4, 40, seed=1) + 0.5 * tensor(60, 40, seed=2)
    gradients = {"w": noisy, "zero": torch.zeros(60, 40)}
    best = PowerSGD(4).error(gradients["w"], 4.0)
    policy = CompressionPolicy(PowerSGD(4), start_step=3)
    compressor = policy.compressors()[0]
    for step in range(3):
        policy.observe(gradients, step)
        assert bool(compressor.state_dict()) == (step == 2), "the last exact step alone"
    for name, gradient in gradients.items():
        context = Context(name=name)
        found = compressor.decompress(compressor.compress(gradient, context), gradient.shape, context)
        assert bool(found.isfinite().all())
        assert float((found - gradient).norm()) <= 1.01 * best
    cold = there_and_back(PowerSGD(4), gradients["w"])
    assert float((cold - gradients["w"]).norm()) > 1.2 * best, "or there would be nothing to gain"


def test_powersgd_keeps_a_ranks_own_difference() -> None:
    """``M - P (M^T P)^T`` has nothing in the span of P, on any rank; the difference from the mean's product has."""
    matrices = [tensor(60, 40, seed=seed) for seed in range(3)]
    compressor = PowerSGD(4)
    talks = []
    for rank, matrix in enumerate(matrices):
        context = Context(name="w", rank=rank, world_size=3)
        talks.append(compressor.converse([Item(tensor=matrix, context=context)], keep_residual=True))
    requests = [next(talk) for talk in talks]
    total = torch.stack([request.tensor for request in requests]).sum(dim=0)  # type: ignore[union-attr]
    requests = [talk.send(total.clone()) for talk in talks]
    total = torch.stack([request.tensor for request in requests]).sum(dim=0)  # type: ignore[union-attr]
    for talk in talks:
        with pytest.raises(StopIteration) as end:
            talk.send(total.clone())
        (outcome,) = end.value.value
        assert float((outcome.mean.T @ outcome.residual).abs().max()) < 1e-4
        assert compressor.state_dict() == {}, "the step is not over"
    compressor.settle(keep=True)
    assert list(compressor.state_dict()) == ["w"]


def test_powersgd_is_not_primed_by_what_is_not_finite() -> None:
    compressor, bad = PowerSGD(2), tensor(30, 20)
    bad[3, 4] = torch.inf
    compressor.prime("w", bad)
    assert compressor.state_dict() == {}


def test_powersgd_knows_the_errors_of_its_ranks() -> None:
    x, compressor = tensor(60, 40), PowerSGD(4)
    errors = compressor.errors(x)
    assert list(errors) == sorted(errors, reverse=True)
    assert errors[1.0] < float(x.norm())
    assert errors[4.0] <= float((there_and_back(compressor, x) - x).norm()) * 1.0001
    assert errors[64.0] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stochastic", [True, False])
def test_kernels_and_torch_give_the_same_bytes(bits: int, stochastic: bool) -> None:
    x, seed = tensor(1000), 123 if stochastic else None
    scales = bucket_scales(x, 64)
    compiled = Integers(bits).encode(x, scales, bucket_size=64, seed=seed)
    inverse = ((1 << (bits - 1)) - 1) / scales
    levels = x * inverse.repeat_interleave(64)[:1000] + ((1 << (bits - 1)) - 1)
    levels += uniform(123, 1000) if stochastic else 0.5
    codes = levels.floor().clamp_(0, 2 * ((1 << (bits - 1)) - 1)).to(torch.uint8)
    assert torch.equal(compiled, pack(codes, bits))


def test_ternary_digits_and_torch_agree() -> None:
    x, scale = tensor(1000), torch.tensor(3.5)
    x[7] = torch.nan
    is_up = uniform(99, 1000) * scale < x.abs()
    assert torch.equal(ternary(x, scale, 99), (x.nan_to_num(nan=0.0).sign() * is_up).to(torch.int8))
