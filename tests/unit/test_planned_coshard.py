"""Layers in pieces on one rank: the same numbers, one piece in memory at a time, and as much of it as plans say."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mycel.errors import UsageError
from mycel.memory.needs import Storages
from mycel.parallel.planned.coshard import blocks_of, coshard
from mycel.parallel.planned.recompute import recompute
from mycel.planning.job import Job, Mesh
from mycel.planning.memory import activation_bytes, again_bytes
from mycel.planning.models import ModelShape
from mycel.planning.step.points import Points

LAYOUTS = (
    *(("*.attention.q", "colwise"), ("*.attention.k", "colwise"), ("*.attention.v", "colwise")),
    *(("*.attention.out", "rowwise"), ("*.feed.gate", "colwise"), ("*.feed.up", "colwise")),
    ("*.feed.down", "rowwise"),
)
WIDTH, HEADS, KEYS, HEAD, INNER = 64, 8, 4, 8, 256


class Attention(nn.Module):
    """Gives a tuple, as Hugging Face's do."""

    def __init__(self, width: int, heads: int, keys: int, head: int, *, bias: bool = False) -> None:
        super().__init__()
        self.head = head
        self.q = nn.Linear(width, heads * head, bias=bias)
        self.k, self.v = (nn.Linear(width, keys * head, bias=bias) for _ in range(2))
        self.out = nn.Linear(heads * head, width, bias=bias)

    def forward(self, x: Tensor, *, scale: float | None = None) -> tuple[Tensor, None]:
        q, k, v = (made(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for made in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2)), None


class Feed(nn.Module):
    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, *sizes: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(sizes[0]) for _ in range(2))
        self.attention, self.feed = Attention(*sizes, bias=bias), Feed(sizes[0], inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), scale=0.3)[0]
        return x + self.feed(self.norms[1](x))


def chain(count: int = 2, *, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(WIDTH, HEADS, KEYS, HEAD, inner=INNER, bias=bias) for _ in range(count)))


@pytest.mark.parametrize("what", ["none", "full"])
@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_pieces_add_up(what: Any, pieces: int, bias: bool) -> None:
    """In float64 results and all gradients are those of whole layers; pieces are done with their share, and again.

    Where the layer is done again, too, attention is once more: what follows it needs its result.
    """
    whole = chain(bias=bias).double()
    cut = copy.deepcopy(whole)
    names = list(dict(cut.named_parameters()))
    coshard(cut, ["0", "1"], LAYOUTS, pieces)
    recompute(cut, ["0", "1"], what)
    assert list(dict(cut.named_parameters())) == names
    fed: list[int] = []
    seen: list[int] = []
    cut[1].feed.down.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[-1]))
    cut[1].attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    given = [x.clone().requires_grad_() for _ in range(2)]
    results = [model(each) for model, each in zip((whole, cut), given, strict=True)]
    assert torch.allclose(*results, rtol=1e-12, atol=1e-12)
    for result in results:
        result.square().sum().backward()
    assert torch.allclose(given[0].grad, given[1].grad, rtol=1e-11, atol=1e-11)
    for (name, one), other in zip(whole.named_parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-11, atol=1e-11), name
    assert fed == [INNER // pieces] * pieces * 2
    assert seen == [HEADS * HEAD // pieces] * pieces * (3 if what == "full" else 2)


def job(what: Any, pieces: int, seq: int) -> Job:
    return Job(mesh=Mesh(), global_batch=1, micro_batch=1, seq=seq, recompute=what, coshard=pieces)


@contextmanager
def _in_16_bits() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("what", "pieces"), [("none", 1), ("none", 4), ("full", 1), ("full", 2), ("full", 8)])
def test_layers_hold_what_plans_say(what: Any, pieces: int) -> None:
    """Layers of 8 billion parameters in 16 bits, without numbers: the most that is held beside parameters."""
    count, seq = 4, 8192
    shape = ModelShape(
        name="llama", num_layers=count, hidden=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn=14336, vocab=256
    )
    with FakeTensorMode(), _in_16_bits():
        model = nn.Sequential(*(Layer(4096, 32, 32, 128, inner=14336) for _ in range(count)))
        names = [str(number) for number in range(count)]
        if pieces > 1:
            coshard(model, names, LAYOUTS, pieces)
        recompute(model, names, what)
        x = torch.zeros(1, seq, 4096, dtype=torch.bfloat16)
        with Storages(cpu_kernels=False) as storages:
            storages.mark("forward", "")
            for parameter in model.parameters():
                storages.see(parameter, "parameters")
                parameter.register_post_accumulate_grad_hook(lambda given: setattr(given, "grad", None))
            model(x).sum().backward()
    most = max(moment.total for moment in storages.moments())
    points = Points.of([(shape, job(what, pieces, seq))])
    kept, _ = activation_bytes(points)
    told = float(count * kept[0] + again_bytes(points)[0])
    # What is on its way between operations is no part of what plans say.
    held = most - 2 * sum(parameter.numel() for parameter in model.parameters())
    assert 0.9 < held / told < 1.25, (held, told)


def test_layers_that_have_no_pieces_are_refused() -> None:
    model = chain()
    assert [block.name for block in blocks_of(model, ["0"], LAYOUTS, 2)] == ["0.attention", "0.feed"]
    for change, pieces, said in (
        ({"*.feed.down": "replicate"}, 2, "0.feed holds 2 matrices that are cut by columns and 0 by rows"),
        ({}, 12, "does not divide the 64 columns of 0.attention.q"),
    ):
        layouts = [(name, change.get(name, kind)) for name, kind in LAYOUTS]
        with pytest.raises(UsageError, match=said):
            blocks_of(model, ["0"], layouts, pieces)
    with pytest.raises(UsageError, match="no matrix with a layout"):
        blocks_of(model, ["0.norms"], LAYOUTS, 2)
    model[0].attention.sinks = nn.Parameter(torch.zeros(8))
    with pytest.raises(UsageError, match="a parameter 'sinks' of its own"):
        blocks_of(model, ["0"], LAYOUTS, 2)
