"""Linear attention over ranks equals the recurrence of one process, token by token, in every form and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracles.sequences import decayed, delta_ruled, random_layout
from tests.rank_threads import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mycel.errors import UsageError
from mycel.planning.sequence import Layout, contiguous, per_document_zigzag, zigzag
from mycel.sequence import SequenceContext
from mycel.sequence.linear import linear_attention, parallel_scan
from mycel.sequence.linear.table import table_of
from mycel.sequence.scan import WAYS
from mycel.sequence.scan.ways import Nodes

KEYS, VALUES = 4, 3
FORMS = ["plain", "constant", "token", "key", "delta", "delta key"]
#: Log decays of every strength.
STRONGEST = -30.0


def inputs_of(form: str, layout: Layout, seed: int) -> dict[str, Tensor]:
    """Of all tokens, documents in order, in (batch, heads, tokens, ...)."""
    chance = torch.Generator().manual_seed(seed)
    tokens = layout.num_tokens
    numbers = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=chance)  # noqa: E731
    found = {"q": numbers(2, 1, tokens, KEYS), "k": numbers(2, 1, tokens, KEYS), "v": numbers(2, 2, tokens, VALUES)}
    found["k"] = found["k"] / found["k"].norm(dim=-1, keepdim=True)
    shapes = {"constant": (2,), "token": (2, 2, tokens), "delta": (2, 2, tokens)}
    shapes |= dict.fromkeys(("key", "delta key"), (2, 2, tokens, KEYS))
    if form != "plain":
        found["decay"] = STRONGEST * torch.rand(shapes[form], dtype=torch.float64, generator=chance) ** 6
    if form.startswith("delta"):
        found["beta"] = torch.rand(2, 2, tokens, dtype=torch.float64, generator=chance)
    return found


def expected_of(layout: Layout, given: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one process."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    q, k = (leaves[n].repeat_interleave(2, 1) for n in "qk")
    g = leaves.get("decay", torch.zeros(2, dtype=torch.float64))
    g = g[None, :, None].expand(2, 2, layout.num_tokens) if g.dim() == 1 else g
    rows = []
    for start, stop in zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True):
        parts = (q[:, :, start:stop], k[:, :, start:stop], leaves["v"][:, :, start:stop], g[:, :, start:stop])
        if "beta" in leaves:
            rows.append(delta_ruled(*parts, leaves["beta"][:, :, start:stop]))
        else:
            rows.append(decayed(*parts))
    out = torch.cat(rows, 2)
    (out * weight).sum().backward()
    return {
        "out": out.detach(),
        **{n: x.grad if x.grad is not None else torch.zeros_like(x) for n, x in leaves.items()},
    }


def far(got: Tensor, want: Tensor) -> float:
    return float((got.detach() - want).abs().max() / want.abs().max().clamp(min=1.0)) if want.numel() else 0.0


def compare(form: str, layout: Layout, way: str, seed: int, chunk: int = 4, *, again: bool = False) -> None:
    given = inputs_of(form, layout, seed)
    weight = torch.randn(2, 2, layout.num_tokens, VALUES, dtype=torch.float64)
    expected = expected_of(layout, given, weight)
    size = layout.num_ranks
    cut = max(1, size // 2)
    nodes: Nodes = tuple(n for n in (tuple(range(cut)), tuple(range(cut, size))) if n)

    def work(rank: int, group: dist.ProcessGroup) -> Tensor | None:
        context = SequenceContext(layout, group)
        here = {n: x.clone() if x.dim() == 1 else x.index_select(2, context.indices) for n, x in given.items()}
        leaves = {n: x.requires_grad_() for n, x in here.items()}

        def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
            return linear_attention(
                q, k, v, context, decay=decay, beta=beta, chunk=chunk, way=way, nodes=nodes
            )  # backwards it is called a second time, outside

        tensors = [leaves.get(n) for n in ("q", "k", "v", "decay", "beta")]
        out = checkpoint(run, *tensors, use_reentrant=False) if again else run(*tensors)
        (out * weight.index_select(2, context.indices)).sum().backward()
        assert far(out, expected["out"].index_select(2, context.indices)) < 1e-12
        for name, leaf in leaves.items():
            want = expected[name]
            if leaf.dim() > 1:
                assert far(leaf.grad, want.index_select(2, context.indices)) < 1e-12, (name, way)
        return leaves["decay"].grad if form == "constant" else None

    grads = on_ranks(size, work)
    if form == "constant":
        assert far(sum(grads), expected["decay"]) < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3])
def test_every_form_equals_the_recurrence(form: str, size: int) -> None:
    layouts = [contiguous([9, 0, 1, 20], size), zigzag([23], size), per_document_zigzag([9, 17], size)]
    layouts += [random_layout(seed, size) for seed in range(2)]
    for number, layout in enumerate(layouts):
        compare(form, layout, list(WAYS)[number], number)


@pytest.mark.parametrize("size", [2, 4, 7])
def test_other_numbers_of_ranks(size: int) -> None:
    for seed, form in enumerate(FORMS):
        compare(form, random_layout(10 * size + seed, size), list(WAYS)[seed % 5], seed, chunk=16 if seed % 2 else 1)


@pytest.mark.parametrize("form", ["key", "delta"])
def test_computed_again_in_the_backward_pass(form: str) -> None:
    compare(form, zigzag([23], 3), "two_exchanges", 5, again=True)


def test_no_decay_is_too_strong_and_float32_is_as_good_as_plain() -> None:
    layout = contiguous([400], 2)
    given = inputs_of("token", layout, 0)
    exact = expected_of(layout, given, torch.ones(2, 2, 400, VALUES, dtype=torch.float64))["out"]
    single = {n: x.float() for n, x in given.items()}
    plain = expected_of(layout, single, torch.ones(2, 2, 400, VALUES))["out"]

    def work(rank: int, group: dist.ProcessGroup) -> tuple[float, float]:
        context = SequenceContext(layout, group)
        here = {n: x.index_select(2, context.indices) for n, x in single.items()}
        want, by_token = (x.index_select(2, context.indices) for x in (exact, plain))
        out = linear_attention(**here, context=context, way="all_gather")
        half = linear_attention(
            **{n: x if n == "decay" else x.bfloat16() for n, x in here.items()}, context=context, way="chain"
        )
        assert half.dtype == torch.bfloat16 and far(half.double(), want) < 2e-2
        return far(out.double(), want), far(by_token.double(), want)

    errors = on_ranks(2, work)
    assert max(a for a, _ in errors) <= 2 * max(b for _, b in errors)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Any, output_final_state: bool
) -> Any:
    """A kernel as foreign ones are: tokens in dimension 1, a state before and after."""
    b, h = v.shape[0], v.shape[2]
    state = v.new_zeros(b, h, q.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state if output_final_state else None


def over_ranks(kernel: Callable[..., Any], layout: Layout, dtype: torch.dtype, within: float, **options: Any) -> None:
    """A kernel over ranks beside the same kernel on whole documents."""
    given = inputs_of("delta", layout, 4)
    given["q"], given["k"] = (given[n].repeat_interleave(2, 1) for n in "qk")
    given = {n: x.transpose(1, 2).to(dtype).contiguous() for n, x in given.items()}
    weight = torch.randn(2, layout.num_tokens, 2, VALUES, dtype=dtype)
    leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
    rows = []
    for start, stop in zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True):
        if start < stop:
            q, k, v, g, beta = (leaves[n][:, start:stop] for n in ("q", "k", "v", "decay", "beta"))
            rows.append(kernel(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, **options)[0])
    out = torch.cat(rows, 1)
    (out * weight).sum().backward()

    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(layout, group)
        mine = {n: x.index_select(1, context.indices).requires_grad_() for n, x in given.items()}
        run = parallel_scan(kernel, context, way="two_exchanges")
        for _ in range(2):
            got, state = run(mine["q"], mine["k"], mine["v"], g=mine["decay"], beta=mine["beta"], **options)
            assert state is None
            (got * weight.index_select(1, context.indices)).sum().backward()
        assert far(got, out.detach().index_select(1, context.indices)) < within
        for name, leaf in mine.items():
            want = leaves[name].grad.index_select(1, context.indices)
            assert far(leaf.grad / 2, want) < within, name

    on_ranks(layout.num_ranks, work)


@pytest.mark.parametrize(
    "layout", [contiguous([9, 0, 1, 13], 3), zigzag([17], 3), contiguous([2], 4), random_layout(8, 3)]
)
def test_any_kernel_runs_over_ranks(layout: Layout) -> None:
    over_ranks(recurrent, layout, torch.float64, 1e-12)


def test_hugging_faces_kernel_runs_over_ranks() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    over_ranks(module.torch_chunk_gated_delta_rule, contiguous([90, 3, 80], 3), torch.float32, 2e-5)


def test_chunks_hold_every_token_once() -> None:
    for borders in ((0,), (0, 0), (0, 5, 5, 6, 14), (0, 8)):
        table = table_of(borders, 4)
        assert table.index.flatten()[table.place].tolist() == list(range(borders[-1]))
        assert sum(table.sizes) == len(table.index)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.ones(1, 1, 4, 3)}, "queries like keys"),
        (
            {"v": torch.ones(1, 3, 4, 2), "k": torch.ones(1, 2, 4, 2), "q": torch.ones(1, 2, 4, 2)},
            "3 heads of values",
        ),
        ({n: torch.ones(1, 1, 5, 2) for n in "qkv"}, "5 tokens; rank 0 holds 4"),
        ({"decay": torch.ones(2)}, "decays of shape"),
        ({"beta": torch.ones(1, 1, 3)}, "beta of shape"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], says: str) -> None:
    given = {n: torch.ones(1, 1, 4, 2) for n in "qkv"} | change
    with pytest.raises(UsageError, match=says):
        linear_attention(**given, context=SequenceContext(contiguous([4], 1)))


def test_kernels_that_do_not_fit_are_refused() -> None:
    context, one = SequenceContext(contiguous([4], 1)), torch.ones(1, 4, 1, 1)
    run = parallel_scan(recurrent, context)
    with pytest.raises(UsageError, match="states of a cache"):
        run(one, one, one, initial_state=one)
    with pytest.raises(UsageError, match="with the 4 tokens of rank 0 in dimension 1"):
        run(one, one, torch.ones(1, 3, 1, 1))
    with pytest.raises(UsageError, match="<lambda> gave no final state"):
        parallel_scan(lambda *_, **__: (one, None), context)(one, one, one)
