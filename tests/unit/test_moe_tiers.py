"""Experts in tiers: training with far experts is training, near are two layers, host memory keeps what is asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mycel.comm import Pending
from mycel.errors import UsageError
from mycel.moe import MoE, TiledOptimizer, clip_grad_norm, grad_norm
from mycel.moe.memory import DiskLink, EmulatedLink, Link, Offload, TrainingOffload, on_disk

LAYERS, DIM = 4, 16


class LateLink(Link):
    """Copies when someone waits; notes in which order what was asked for and when it was missed."""

    def __init__(self) -> None:
        self.words: list[tuple[str, int]] = []

    def fetch(self, copies: Any) -> Pending[None]:
        number, copies = len([1 for word, _ in self.words if word == "asked"]), list(copies)
        self.words.append(("asked", number))
        for _, near in copies:
            near.fill_(float("nan"))

        def carry() -> None:
            self.words.append(("waited", number))
            for far, near in copies:
                near.copy_(far)

        return Pending(carry)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.moe = MoE(DIM, 8, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        out: Tensor = x + self.moe(x)
        return out


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def checkpointed(*, use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(model: Any, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return run


WAYS = {
    "plain": plainly,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant": checkpointed(use_reentrant=True),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> list[float]:
    losses = []
    for step in range(3):
        for half in range(2):  # two micro-batches
            generator = torch.Generator().manual_seed(10 * step + half)
            x = torch.randn(12, DIM, generator=generator, requires_grad=True)
            loss = (run(model, x) - x.detach().roll(1, 1)).square().mean()
            loss.backward()
        losses += [loss.item(), clip_grad_norm(model, 0.1).item(), grad_norm(model).item()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(x.detach()).sum().item())
    return losses


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("disk", [False, True])
def test_training_with_far_experts_is_training(way: str, disk: bool, tmp_path: Path) -> None:
    model, plain = make_model(), make_model()
    late = LateLink()
    link: Link = DiskLink(late, tmp_path) if disk else late
    wanted = steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), WAYS[way])
    offload = TrainingOffload(model, link)
    assert torch.isnan(model[1].moe.experts.down_proj).all()
    got = steps(model, torch.optim.AdamW(offload.parameters(), lr=0.01), WAYS[way])
    assert got == wanted
    one = sum(p.nbytes for p in plain[0].moe.experts.parameters())
    assert 2 * one <= offload.peak_bytes <= 3 * one  # in the backward pass, one that just ends
    state = model.state_dict()
    offload.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    link.close()


def _note(words: list[tuple[str, int]], place: int, experts: nn.Module) -> None:
    def backward(module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(lambda _: words.append(("backward", place)))

    experts.register_forward_pre_hook(lambda *_: words.append(("computes", place)))
    experts.register_forward_hook(backward)


def test_layers_come_before_they_are_needed_in_both_passes() -> None:
    for prefetch in (True, False):
        model, link = make_model(), LateLink()
        words = link.words
        with TrainingOffload(model, link, prefetch=prefetch):
            for place, block in enumerate(model):
                _note(words, place, block.moe.experts)
            model(torch.randn(3, DIM)).sum().backward()
            got = list(words)
        asked = iter(range(100))
        wanted: list[tuple[str, int]] = []
        coming: list[int] = []
        for word, place in [("computes", n) for n in range(LAYERS)] + [("backward", n) for n in range(LAYERS)[::-1]]:
            last = LAYERS - 1 if word == "computes" else 0
            if (word, place) != ("backward", LAYERS - 1):  # that one stays between the passes
                if not coming:
                    coming.append(next(asked))
                    wanted.append(("asked", coming[0]))
                wanted.append(("waited", coming.pop()))
            if prefetch and place != last:
                coming.append(next(asked))
                wanted.append(("asked", coming[0]))
            wanted.append((word, place))
        assert got == wanted


def test_state_is_that_of_the_far_experts() -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.25)
    with TrainingOffload(model, EmulatedLink(bandwidth_gbps=100)):
        model.load_state_dict(other.state_dict())
        x = torch.randn(5, DIM)
        assert torch.equal(model(x), other(x))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_frozen_experts_pass_gradients_on() -> None:
    model, plain = make_model(), make_model()
    for some in (model, plain):
        for block in some:
            block.moe.experts.requires_grad_(False)
    x = torch.randn(5, DIM)
    plain(x).sum().backward()
    with TrainingOffload(model, LateLink()) as offload:
        model(x).sum().backward()
        one = sum(p.nbytes for p in plain[0].moe.experts.parameters())
        assert offload.peak_bytes <= 3 * one
    assert torch.equal(model[0].mix.weight.grad, plain[0].mix.weight.grad)


def test_masters_and_moments_may_be_on_a_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model().bfloat16()
    plain = copy.deepcopy(model)
    link = DiskLink(EmulatedLink(bandwidth_gbps=100), tmp_path)
    offload = TrainingOffload(model, link)
    ways = [
        (model, TiledOptimizer(offload.parameters(), torch.optim.AdamW, tile=128, state_like=on_disk(tmp_path))),
        (plain, TiledOptimizer(plain.parameters(), torch.optim.AdamW, tile=1 << 20)),
    ]
    for step in range(3):
        for some, optimizer in ways:
            generator = torch.Generator().manual_seed(step)
            some(torch.randn(7, DIM, generator=generator).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    offload.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_host_memory_keeps_what_is_asked_for_most(tmp_path: Path) -> None:
    rows = [torch.full((8,), float(n)) for n in range(6)]
    link = DiskLink(LateLink(), tmp_path, host_bytes=2 * rows[0].nbytes, fade=0.5, fade_every=8)
    far = [link.far(row) for row in rows]
    near = torch.empty(8)

    def ask(number: int) -> bool:
        before = link.hits
        link.fetch([(far[number], near)]).wait()
        assert torch.equal(near, rows[number])
        return link.hits > before

    assert [ask(n) for n in (0, 0, 1, 1, 2, 0, 1)] == [False, True, False, True, False, True, True]
    assert link.held_bytes == 2 * rows[0].nbytes and link.reads == 3
    assert [ask(n) for n in (3, 3, 3, 3)] == [False, False, True, True]  # counts have faded
    with torch.no_grad():
        far[3].fill_(9.0)
    rows[3] = torch.full((8,), 9.0)
    assert not ask(3)  # what was kept is of before
    assert ask(3)
    link.close()


def test_inference_from_a_disk(tmp_path: Path) -> None:
    model, x = make_model(), torch.randn(3, DIM)
    with torch.inference_mode():
        wanted = model(x)
        link = DiskLink(EmulatedLink(bandwidth_gbps=100), tmp_path, host_bytes=1 << 20)
        with Offload(model, link, "on_demand"):
            for _ in range(2):
                assert torch.allclose(model(x), wanted, rtol=1e-5, atol=1e-6)
        assert link.hits == link.reads > 0  # the second pass found all of the first
        assert torch.equal(model(x), wanted)


def test_what_cannot_be_far_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Linear: no experts in it"):
        TrainingOffload(nn.Linear(2, 2), LateLink())
    model = make_model()
    with TrainingOffload(model, LateLink()) as offload:
        with pytest.raises(UsageError, match="in far memory already"):
            TrainingOffload(model, LateLink())
        loss = model(torch.randn(3, DIM)).sum()
        with torch.no_grad():
            for p in offload.parameters():
                p.add_(1.0)
        with pytest.raises(UsageError, match=r"3\.moe\.experts: its experts changed between"):
            loss.backward()
    with pytest.raises(UsageError, match="fade 0"):
        DiskLink(LateLink(), tmp_path, fade=0)
