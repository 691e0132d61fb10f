"""Torch's own context parallelism on CPU tensors, its calls as its documentation has them, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_own
from torch.distributed.tensor.parallel import parallelize_module

from mycel.errors import UsageError
from mycel.sequence import serve_context_parallel

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """What ``_ContextParallel`` wraps: a module that is attention and nothing else."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=0.3, enable_gqa=grouped)


class Net(nn.Module):
    """Two layers with attention."""

    def __init__(self, *, is_causal: bool, key_heads: int = HEADS) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.embed, self.places = nn.Embedding(32, WIDTH), nn.Embedding(64, WIDTH)
        self.q = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH * key_heads // HEADS) for _ in range(2))
        self.attention = nn.ModuleList(Attention(is_causal) for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(positions)
        for to_q, to_kv, attention in zip(self.q, self.kv, self.attention, strict=True):
            q = to_q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            k, v = (y.unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for y in to_kv(x).chunk(2, -1))
            x = x + attention(q, k, v).transpose(1, 2).flatten(2)
        return x.tanh()


def batch(world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (2, 8 * world_size), generator=generator)
    return tokens, torch.arange(8 * world_size).expand(2, -1).contiguous()


def one_process(net: Net, world_size: int) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of a loss that weighs every place otherwise."""
    whole = copy.deepcopy(net)
    tokens, positions = batch(world_size)
    out = whole(tokens, positions)
    (out * weights(positions)).sum().backward()
    return out.detach(), gradients(whole)


def weights(positions: Tensor) -> Tensor:
    return torch.cos(positions.double())[..., None]


def gradients(net: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in net.parameters()]


def farthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def summed(found: list[Tensor]) -> list[Tensor]:
    for gradient in found:
        torch.distributed.all_reduce(gradient)
    return found


def by_context(net: Net, mesh: DeviceMesh) -> tuple[Tensor, list[Tensor]]:
    """As torch's tutorial has it; the whole output on every rank, and gradients added up."""
    tokens, positions = batch(mesh.size())
    with context_parallel(
        mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1], no_restore_buffers={tokens, positions}
    ):
        out = net(tokens, positions)
        (out * weights(positions)).sum().backward()
        (whole,) = torch_own.context_parallel_unshard(mesh, [out.detach()], [1])
    return whole, summed(gradients(net))


def by_modules(net: Net, mesh: DeviceMesh, *, balanced: bool) -> tuple[Tensor, list[Tensor]]:
    """As torch's later interface has it, which wraps modules instead of replacing a function."""
    for module in net.attention:
        style = torch_own._ContextParallel(2, torch_own._ContextParallel.AttentionType.SDPA)
        parallelize_module(module, mesh, style)
    tokens, positions = batch(mesh.size())
    balancer = None
    if balanced:
        balancer = torch_own._create_default_load_balancer(tokens.shape[1], mesh.size(), "cpu")
    here = torch_own._context_parallel_shard(mesh, [tokens, positions], [1, 1], balancer)
    torch_own._enable_context_parallel_dispatcher()
    try:
        out = net(*here)
        (out * weights(here[1])).sum().backward()
    finally:
        torch_own._disable_context_parallel_dispatcher()
    (whole,) = torch_own.context_parallel_unshard(mesh, [out.detach()], [1], balancer)
    return whole, summed(gradients(net))


def served(rank: int, world_size: int) -> dict[str, Any]:
    """Errors of outputs and gradients by case, and what is said of calls that cannot be right."""
    mesh = init_device_mesh("cpu", (world_size,))
    own = set(torch_own.custom_ops)
    errors: dict[str, float] = {}
    with serve_context_parallel() as handle:
        for is_causal in (True, False):
            torch.manual_seed(1)
            net = Net(is_causal=is_causal, key_heads=2 if is_causal else HEADS).double()
            out, wanted = one_process(net, world_size)

            def compare(
                name: str, way: Callable[..., Any], *, net: Any = net, right: Any = (out, wanted), **how: Any
            ) -> None:
                found, theirs = way(copy.deepcopy(net), mesh, **how)
                errors[name] = max(farthest([found], [right[0]]), farthest(theirs, right[1]))

            for rotation in ("allgather", "alltoall"):
                torch_own.set_rotate_method(rotation)
                for balanced in (True, False):
                    torch_own._cp_options.enable_load_balance = balanced
                    compare(f"context {is_causal} {rotation} {balanced}", by_context)
                    compare(f"modules {is_causal} {rotation} {balanced}", by_modules, balanced=balanced)
                torch_own._cp_options.enable_load_balance = True
        lengths = len(handle.contexts)
        said = refused(mesh)
    return {"errors": errors, "said": said, "lengths": lengths, "left": set(torch_own.custom_ops) == own}


def refused(mesh: DeviceMesh) -> dict[str, str]:
    said = {}
    q = torch.randn(1, 2, 4 * mesh.size(), 4)  # four tokens a rank
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "mask": lambda x: F.scaled_dot_product_attention(
            x, x, x, attn_mask=torch.zeros(1, 1, x.shape[2], mesh.size() * x.shape[2])
        ),
        "parts": lambda x: F.scaled_dot_product_attention(x, x[:, :, :2], x[:, :, :2]),
    }
    for name, call in calls.items():
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
            try:
                call(q)
            except UsageError as error:
                said[name] = str(error)
    return said
