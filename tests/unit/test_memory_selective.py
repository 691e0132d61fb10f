"""Offload policies of selective checkpoints do what they say in eager."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from mycel.errors import UsageError
from mycel.memory import EmulatedLink, FarMemory, offload_contexts

P = CheckpointPolicy


@pytest.mark.parametrize("policy", [P.MUST_CPU_OFFLOAD, P.PREFER_CPU_OFFLOAD, P.MUST_SAVE, P.MUST_RECOMPUTE])
def test_gradients_are_the_same_and_the_policy_is_done(policy: CheckpointPolicy) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    x = torch.randn(8, 16, requires_grad=True)
    block(x).sum().backward()
    wanted = [p.grad.clone() for p in (x, *block.parameters()) if p.grad is not None]
    again: list[int] = []

    def policy_fn(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if func is torch.ops.aten.addmm.default else P.PREFER_RECOMPUTE

    link, far = EmulatedLink(bandwidth_gbps=5), FarMemory()
    contexts = partial(offload_contexts, policy_fn, link=link, far=far)
    for number in range(2):
        block.zero_grad()
        x.grad = None
        out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        out.sum().backward()
        got = [p.grad for p in (x, *block.parameters()) if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), number
        del out
        again.append(far.held_bytes)
    products = 8 * (64 + 64 + 16) * 4
    moved = products if policy in (P.MUST_CPU_OFFLOAD, P.PREFER_CPU_OFFLOAD) else 0
    assert link.stored_bytes == 2 * moved
    assert link.fetched_bytes == 2 * moved
    assert again[0] == again[1] == moved
    link.close()


def test_a_result_that_is_written_in_place() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y.sin()
            y.add_(1)
            return z.cos()

    def policy_fn(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return P.MUST_CPU_OFFLOAD if func is torch.ops.aten.mul.Tensor else P.PREFER_RECOMPUTE

    link = EmulatedLink(bandwidth_gbps=5)
    contexts = partial(offload_contexts, policy_fn, link=link)
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(UsageError, match=r"shape \[4\] that a checkpoint saved was modified in place"):
        checkpoint(Writes(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    link.close()
