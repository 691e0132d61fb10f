"""Attention over ranks equals dense masked softmax of one process: outputs and gradients, in float64."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.effort import long
from tests.oracles.attention import expected, got, scattered, tensors, visible, ways_over, worst
from tests.rank_threads import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, FULL, Layout, Mask, contiguous, per_document_zigzag, zigzag
from mycel.sequence import SequenceContext, Way, attention, explain, shape_of, tune_attention
from mycel.sequence.softmax import delivery, fabric, rows
from mycel.sequence.softmax.fabric import Fabric
from mycel.sequence.softmax.kernels import attend, attend_back, plain_attend, plain_attend_back
from mycel.sequence.softmax.predict import Handling, Kernels, Shape, predict

WINDOW, CHUNKED = Mask(kind="window", width=4), Mask(kind="chunked", width=4)
MASKS = (CAUSAL, FULL, WINDOW, CHUNKED)
#: Heads, key heads, width, value width.
FORMS = ((12, 12, 4, 4), (12, 4, 4, 6), (12, 1, 6, 4))
DOCUMENTS = (13, 0, 1, 9, 6)


def check(layout: Layout, mask: Mask, form: tuple[int, int, int, int], ways: list[Any], most: float = 1e-12) -> None:
    whole = tensors(layout, form)
    right = expected(layout, mask, whole, 0.37)

    def work(rank: int, group: dist.ProcessGroup) -> dict[Any, float]:
        context = SequenceContext(layout, group)
        calls = {way: partial(attention, mask=mask, scale=0.37, way=way) for way in ways}
        return {way: worst(context, got(context, whole, call), right) for way, call in calls.items()}

    for errors in on_ranks(layout.num_ranks, work):
        assert not {way: e for way, e in errors.items() if not e < most}, (layout, mask, form)


@pytest.mark.parametrize("mask", MASKS, ids=[m.kind for m in MASKS])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_way_is_dense_softmax(num_ranks: int, mask: Mask) -> None:
    makers = (contiguous, zigzag, per_document_zigzag)
    made: list[Layout] = [make(DOCUMENTS, num_ranks) for make in makers]
    made.append(scattered(DOCUMENTS, num_ranks, seed=5, leave_out=1))
    if num_ranks == 4:  # as threads they take turns: the two that look least alike
        made = made[1::2]
    for number, layout in enumerate(made):
        check(layout, mask, FORMS[(number + num_ranks) % len(FORMS)], ways_over(num_ranks))


def random_case(seed: int, ranks: tuple[int, ...]) -> None:
    choice = random.Random(seed)
    num_ranks = choice.choice(ranks)
    documents = tuple(choice.choice((0, 1, 2, 7, 19, 40)) for _ in range(choice.randrange(1, 7)))
    documents = documents if sum(documents) else (*documents, 3)
    mask = choice.choice((CAUSAL, FULL, replace(WINDOW, width=choice.randrange(1, 9)), replace(CHUNKED, width=3)))
    layout = scattered(documents, num_ranks, seed, leave_out=choice.randrange(-1, num_ranks))
    heads = num_ranks * choice.choice((1, 2, 3))
    key_heads = choice.choice([d for d in range(1, heads + 1) if heads % d == 0])
    ways = ways_over(num_ranks)
    check(layout, mask, (heads, key_heads, choice.choice((2, 5)), choice.choice((2, 5))), choice.sample(ways, 3))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_documents_and_pieces_of_any_length(first: int) -> None:
    for seed in range(first, first + 10):
        random_case(seed, (2, 3, 4))


@long
@pytest.mark.parametrize("first", range(1000, 1300, 10))
def test_documents_and_pieces_of_any_length_often(first: int) -> None:
    for seed in range(first, first + 10):
        random_case(seed, (1, 2, 3, 4, 7))


@pytest.mark.parametrize("width", [3, 130, 1100])
def test_wide_windows_over_long_segments(width: int) -> None:
    """Where queries are cut into tiles, and some tiles see no key of a segment."""
    layout = contiguous([700, 1900], 3)
    check(layout, Mask(kind="window", width=width), (1, 1, 2, 2), ["needed", "sliced"], most=1e-11)


@pytest.mark.parametrize("way", ["ring", "sliced", "needed", "ulysses"])
def test_recomputed_twice_and_beside_another_context(way: Any) -> None:
    """Checkpointed with the backward pass outside the block, two contexts alive, twice in a row."""
    one, other = per_document_zigzag(DOCUMENTS, 3), scattered((8, 5), 3, seed=1, leave_out=0)
    form = (6, 3, 4, 4)
    wholes = [tensors(one, form), tensors(other, form)]
    rights = [
        expected(lay, mask, w, 0.5) for lay, mask, w in zip((one, other), (CAUSAL, WINDOW), wholes, strict=True)
    ]

    def work(rank: int, group: dist.ProcessGroup) -> float:
        contexts = [SequenceContext(one, group), SequenceContext(other, group)]
        leaves = [[c.shard(x, 2).requires_grad_() for x in w[:3]] for c, w in zip(contexts, wholes, strict=True)]
        errors = []
        for _ in range(2):
            outs = [
                checkpoint(partial(attention, mask=mask, scale=0.5, way=way), *mine, context, use_reentrant=False)
                for mine, context, mask in zip(leaves, contexts, (CAUSAL, WINDOW), strict=True)
            ]
            torch.autograd.backward(outs, [c.shard(w[3], 2) for c, w in zip(contexts, wholes, strict=True)])
            for out, mine, context, right in zip(outs, leaves, contexts, rights, strict=True):
                errors.append(worst(context, [out.detach(), *(x.grad for x in mine)], right))
                for x in mine:
                    x.grad = None
        return max(errors)

    assert max(on_ranks(3, work)) < 1e-12


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 2.0), (torch.bfloat16, 2.0)])
def test_short_types_are_as_good_as_torch(dtype: torch.dtype, times: float) -> None:
    layout, form = contiguous([60, 4], 3), (6, 3, 8, 8)
    whole = tensors(layout, form, dtype)
    right = expected(layout, CAUSAL, whole, 0.3)
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    seen = visible(layout, CAUSAL)
    k, v = (x.repeat_interleave(2, 1) for x in leaves[1:])
    plain = torch.nn.functional.scaled_dot_product_attention(leaves[0], k, v, attn_mask=seen, scale=0.3)
    plain.backward(whole[3])
    of_torch = [
        float((a.double() - b).norm())
        for a, b in zip((plain.detach(), *(x.grad for x in leaves)), right, strict=True)
    ]  # type: ignore[union-attr]

    def work(rank: int, group: dist.ProcessGroup) -> list[list[float]]:
        context = SequenceContext(layout, group)
        found = [got(context, whole, partial(attention, scale=0.3, way=way)) for way in ways_over(3)]
        return [
            [float((a.double() - context.shard(b, 2)).norm()) for a, b in zip(f, right, strict=True)] for f in found
        ]

    by_rank = torch.tensor(on_ranks(3, work)).norm(dim=0)
    assert (by_rank <= times * torch.tensor(of_torch)).all(), (by_rank, of_torch)


# -- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_width", [4, 8, 12])
@pytest.mark.parametrize("seen", ["all", "triangle", "some"])
def test_kernels_are_what_plain_torch_gives(seen: str, value_width: int) -> None:
    q, k = torch.randn(2, 6, 5, 8).double(), torch.randn(2, 2, 5, 8).double()
    v, grad = torch.randn(2, 2, 5, value_width).double(), torch.randn(2, 6, 5, value_width).double()
    some = torch.rand(5, 5) > 0.4
    some[2] = False
    rule = {"all": None, "triangle": True, "some": some}[seen]
    found, right = attend(q, k, v, 0.3, rule), plain_attend(q, k, v, 0.3, rule)
    torch.testing.assert_close(found, right)
    if seen == "some":
        assert (found[1][:, :, 2] == -torch.inf).all() and (found[0][:, :, 2] == 0).all()
    whole = torch.logaddexp(right[1], torch.tensor(0.7).double())  # as if rows saw other keys as well
    arguments = (grad, q, k, v, right[0], whole, 0.3, rule)
    torch.testing.assert_close(attend_back(*arguments), plain_attend_back(*arguments))


def test_rows_that_saw_nothing_add_nothing() -> None:
    out, lse = torch.randn(3, 4), torch.tensor([0.5, -torch.inf, -torch.inf])
    other, other_lse = torch.randn(3, 4), torch.tensor([-torch.inf, 1.0, -torch.inf])
    wanted = torch.stack([out[0], other[1], torch.zeros(4)])
    rows.merge(out, lse, other, other_lse)
    torch.testing.assert_close(out, wanted)
    assert lse.tolist() == [0.5, 1.0, -float("inf")]


# -- what the tests above catch -------------------------------------------------------------------------------------


def mutants() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    """Wrong in one place each."""
    right_cut, right_merge, right_back = delivery.within, rows.merge, rows.attend_back

    def drop(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            delivery, "within", lambda b, *s: right_cut(b, *s) if b.key_position != b.query_position else []
        )

    def double(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(delivery, "within", lambda b, *s: right_cut(b, *s) * (1 + (b.sees == "all")))

    def shift(patch: pytest.MonkeyPatch) -> None:
        def moved(block: Any, *span: int) -> list[Any]:
            return [replace(b, query=b.query - 1) if b.query else b for b in right_cut(block, *span)]

        patch.setattr(delivery, "within", moved)

    def forget(patch: pytest.MonkeyPatch) -> None:
        def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
            wrong = torch.maximum(lse, other_lse)
            right_merge(out, lse, other, other_lse)
            lse.copy_(wrong)

        patch.setattr(rows, "merge", merge)

    def partial_rows(patch: pytest.MonkeyPatch) -> None:
        def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
            return right_back(grad, q, k, v, *attend(q, k, v, *rest), *rest)  # a block's own rows, not whole ones

        patch.setattr(rows, "attend_back", back)

    return {"drop": drop, "double": double, "shift": shift, "forget": forget, "partial": partial_rows}


@pytest.mark.parametrize("mutant", sorted(mutants()))
def test_wrong_ones_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants()[mutant](monkeypatch)
    with pytest.raises(AssertionError):
        check(zigzag(DOCUMENTS, 3), CAUSAL, FORMS[0], ["needed"])


def test_stale_keys_in_the_backward_pass_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = delivery.Delivery.start

    def stale(self: delivery.Delivery, of: Tensor, context: SequenceContext, name: str) -> Any:
        return right(self, of.roll(1, 0) if name.endswith("backward") else of, context, name)

    monkeypatch.setattr(delivery.Delivery, "start", stale)
    with pytest.raises(AssertionError):
        check(zigzag(DOCUMENTS, 3), CAUSAL, FORMS[0], ["needed"])


# -- which way ------------------------------------------------------------------------------------------------------


def test_the_choice_is_one_for_all_ranks_and_says_why() -> None:
    layout = per_document_zigzag([40, 9], 4)
    whole = tensors(layout, (4, 2, 4, 4))

    def work(rank: int, group: dist.ProcessGroup) -> tuple[Way, Way, dict[Way, float], str]:
        context = SequenceContext(layout, group)
        q, k, v = (context.shard(x, 2) for x in whole[:3])
        first = explain(context, shape_of(q, k, v))
        tuned = tune_attention(q, k, v, context, finalists=2)
        again = explain(SequenceContext(layout, group), shape_of(q, k, v))
        assert again.way == tuned.way and again.measured == tuned.measured
        assert tuned.measured[tuned.way] == min(tuned.measured.values())
        return first.way, tuned.way, tuned.measured, str(tuned)

    found = on_ranks(4, work)
    assert all(f == found[0] for f in found)
    assert len(found[0][2]) == 2 and found[0][3].count("measured") == 4  # two ways, the kernels, the wires


def test_memory_decides_how_many_slices() -> None:
    layout = contiguous([4096], 4)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(layout, group)
        q, k, v = (torch.empty(1, 4, context.num_tokens, 8) for _ in range(3))
        own = 2 * k.numel() * k.element_size()
        plain = explain(context, shape_of(q, k, v))
        tight = explain(context, shape_of(q, k, v), most_memory=int(2.5 * own))
        assert all(p.memory <= 2.5 * own for p in tight.predictions)
        assert len(tight.predictions) < len(plain.predictions)
        with pytest.raises(UsageError, match="are allowed: take more ranks"):
            explain(context, shape_of(q, k, v), most_memory=10)

    on_ranks(4, work)


def test_predictions_count_what_ranks_do_for_exchanges() -> None:
    """A ring starts one exchange a step, which computation does not hide; slices start one each."""
    shape = Shape(batch=1, heads=8, key_heads=8, width=4, value_width=4, dtype=torch.float32)
    wires = Fabric(
        gather=lambda num_bytes: 1e-9 * num_bytes,
        scatter=lambda num_bytes: 1e-9 * num_bytes,
        exchange=lambda matrix: 1e-9 * max(map(max, matrix)),
        permute=lambda matrix: 1e-9 * max(map(max, matrix)),
        nodes=(tuple(range(8)),),
        source="made up",
    )

    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(contiguous([64], 8), group)

        def seconds(way: Way, handling: Handling, kernel_s: float = 1.0) -> float:
            kernels = Kernels(forward_s=kernel_s, backward_s=kernel_s)
            return predict(way, context, shape, CAUSAL, wires, kernels, handling).seconds

        def starts(way: Way, kernel_s: float) -> float:
            free, taken = Handling(), Handling(start_s=1.0)
            return seconds(way, taken, kernel_s) - seconds(way, free, kernel_s)

        ring, slices, heads = (
            Way(between="ring"),
            Way(between="gathered", slices=4),
            Way(between="needed", groups=(tuple(range(8)),)),
        )
        # With nothing to compute they all count, in a chain or beside each other; else those of one's own thread do.
        assert starts(ring, 0.0) == pytest.approx(7 * 1 + 7 * 2 + 2 + 1)
        assert starts(ring, 1e6) == pytest.approx(7 * 1 + 8 * 2 + 1)
        assert starts(Way(between="gathered"), 0.0) == pytest.approx(3)
        assert starts(slices, 1e6) >= 3 * 4
        assert starts(heads, 1.0) == pytest.approx(4)
        for way in (ring, slices, heads):
            assert seconds(way, Handling(byte_s=1.0)) > seconds(way, Handling())

    on_ranks(8, work)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_first_call_measures_in_any_pass(is_recomputed: bool) -> None:
    """Where nothing needs gradients, and where a pass is to be computed again, whose hooks are not for measuring."""
    whole = tensors(contiguous([16], 2), FORMS[0])

    def work(rank: int, group: dist.ProcessGroup) -> None:
        def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return attention(q, k, v, SequenceContext(contiguous([16], 2), group))

        calls = 0
        parts = [SequenceContext(contiguous([16], 2), group).shard(x, 2) for x in whole[:3]]
        if is_recomputed:
            out = checkpoint(called, *(x.requires_grad_() for x in parts), use_reentrant=False)
            assert calls == 1
            out.sum().backward()
            assert calls == 2
        else:
            with torch.inference_mode():
                called(*parts)

    on_ranks(2, work)


def test_wires_are_corrected_by_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers take twice what the topology promises, and other exchanges 1.5 times that; starts do not count."""
    promised = 1e-7
    plain = Fabric(
        gather=lambda num_bytes: promised * num_bytes,
        scatter=lambda num_bytes: promised * num_bytes,
        exchange=lambda matrix: promised * max(map(sum, matrix)),
        permute=lambda matrix: promised * max(map(sum, matrix)),
        nodes=((0, 1),),
        source="topology two",
    )

    def points(group: object, device: object, sizes: tuple[int, ...]) -> dict[tuple[str, int], float]:
        off = {"gather": 2 * 2, "scatter": 2 * 2, "exchange": 1.5, "shift": 1.5 * 2}
        return {(kind, size): 0.5 + promised * size * each for kind, each in off.items() for size in sizes}

    monkeypatch.setattr(fabric, "_of_topology", lambda group: plain)
    monkeypatch.setattr(fabric, "_points", points)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        found = fabric.fabric_of(group, torch.device("cpu"))
        assert found.gather(1000) == pytest.approx(2000 * promised)
        assert found.scatter(1000) == pytest.approx(2000 * promised)
        assert found.exchange([[0, 100], [200, 0]]) == pytest.approx(300 * promised)
        assert found.permute([[0, 100], [100, 0]]) == pytest.approx(150 * promised)
        assert "corrected" in found.source

    on_ranks(2, work)


def test_only_what_is_seen_travels() -> None:
    """Bytes of one forward pass: a window's from the neighbour, documents of one rank's own none."""
    whole, width = 1 * 2 * (4 + 4) * 8, 5

    def sent(layout: Layout, mask: Mask, way: str) -> list[int]:
        def work(rank: int, group: dist.ProcessGroup) -> int:
            context = SequenceContext(layout, group)
            q, k, v = (torch.randn(1, 2, context.num_tokens, 4, dtype=torch.float64) for _ in range(3))
            attention(q, k, v, context, mask=mask, way=way)  # type: ignore[arg-type]
            return context.meter.total()

        return on_ranks(layout.num_ranks, work)

    window = replace(WINDOW, width=width)
    assert sent(contiguous([30], 3), window, "needed") == [(width - 1) * whole, (width - 1) * whole, 0]
    assert sent(contiguous([10, 10, 10], 3), CAUSAL, "needed") == [0, 0, 0]
    assert sent(contiguous([30], 3), CAUSAL, "all_gather") == [2 * 10 * whole] * 3
    assert sent(contiguous([30], 3), CAUSAL, "ring") == [2 * 10 * whole] * 3


class Peak(TorchDispatchMode):
    """Most bytes at once, of storages that one thread's operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self.known:
                    self.known.add(id(storage))
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.gone, id(storage), storage.nbytes())
        return made

    def gone(self, number: int, num_bytes: int) -> None:
        self.known.discard(number)
        self.now -= num_bytes


def test_slices_take_little_more_memory_on_more_ranks() -> None:
    """As many tokens on each rank: keys of all are on a rank at once by all_gather, and never by slices."""
    tokens = 96

    def peaks(num_ranks: int, way: str) -> float:
        def work(rank: int, group: dist.ProcessGroup) -> int:
            context = SequenceContext(contiguous([tokens * num_ranks], num_ranks), group)
            q, k, v = (torch.randn(1, 2, tokens, 64).requires_grad_() for _ in range(3))
            attention(q, k, v, context, way=way).sum().backward()  # type: ignore[arg-type]
            with Peak() as peak:
                attention(q, k, v, context, way=way).sum().backward()  # type: ignore[arg-type]
            return peak.most

        return max(on_ranks(num_ranks, work)) / (2 * 2 * tokens * 64 * 4)

    few, many = peaks(3, "sliced"), peaks(6, "sliced")
    more = peaks(6, "all_gather") - peaks(3, "all_gather")
    assert many - few < 1.5 < 9 < more, (few, many, more)  # in shards of keys and values, for three more ranks


# -- bad input ------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused() -> None:
    context = SequenceContext(contiguous([6], 1))
    q = torch.zeros(1, 4, 6, 8)
    for bad, message in (
        ((q, q[:, :3], q[:, :3]), "key heads divide heads"),
        ((q, q, q[:, :, :5]), "of one batch"),
        ((q[..., :4], q, q), "q and k have one width"),
        ((q[:, :, :5],) * 3, "rank 0 holds 6 tokens of the layout: give what context.shard gave"),
    ):
        with pytest.raises(UsageError, match=message):
            attention(*bad, context)
    with pytest.raises(UsageError, match="way 'fast': a Way, or one of auto, ring"):
        attention(q, q, q, context, way="fast")  # type: ignore[arg-type]
    for arguments, message in (
        ({"between": "rings"}, "one of gathered, needed, ring"),
        ({"between": "ring", "slices": 2}, "of a ring 1"),
        ({"between": "needed", "groups": ((0, 1), (2,))}, "equally many in each"),
        ({"between": "gathered", "groups": ((0,), (1,))}, "needed or ring"),
    ):
        with pytest.raises(UsageError, match=message):
            Way(**arguments)  # type: ignore[arg-type]


def test_heads_that_do_not_divide_are_refused() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(contiguous([6], 3), group)
        q = torch.zeros(1, 4, 2, 8)
        with pytest.raises(
            UsageError, match="4 heads do not divide over 3 ranks: ulysses goes over 1 of these ranks"
        ):
            attention(q, q, q, context, way="ulysses")
        with pytest.raises(UsageError, match=r"groups that exchange heads have ranks \[0, 1\]"):
            attention(q, q, q, context, way=Way(between="needed", groups=((0,), (1,))))

    on_ranks(3, work)
