"""Steps in tiles: the bits of one step for all, and temporaries of one tile."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from mycel.errors import UsageError
from mycel.moe import MoE, TiledOptimizer, experts_apart
from mycel.moe.memory import on_disk

SHAPES = [(7, 33), (130, 17), (3,), (), (64, 64), (2, 3, 5, 4)]
INNER: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


def numbers(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)  # otherwise ordered in memory
    return made


def grads_of(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def untiled(inner: Any, options: dict[str, Any], dtype: torch.dtype, steps: int) -> tuple[list[Tensor], list[Any]]:
    """Torch's own on float32 numbers; each with the optimizer's state."""
    wide = [x.float() for x in numbers(dtype)]
    optimizer = inner(wide, **options)
    for step in range(steps):
        for x, grad in zip(wide, grads_of(step, dtype), strict=True):
            x.grad = torch.empty_like(x).copy_(grad)  # laid out as the parameter, which fused steps rely on
        optimizer.step()
    return wide, [optimizer.state[x] for x in wide]


def take(optimizer: TiledOptimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, grad in zip(parameters, grads_of(step, parameters[0].dtype), strict=True):
            p.grad = grad
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inner", "options"), INNER)
def test_tiles_give_the_bits_of_one_step(inner: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    wide, states = untiled(inner, options, dtype, 4)
    for tile in (64, 100, 1000, 1 << 20):
        parameters = [nn.Parameter(x) for x in numbers(dtype)]
        optimizer = TiledOptimizer(parameters, inner, tile=tile, **options)
        take(optimizer, parameters, range(4))
        for p, x, state in zip(parameters, wide, states, strict=True):
            assert torch.equal(p, x.to(dtype))
            mine = dict(optimizer.state[p])
            if dtype == torch.bfloat16:
                assert torch.equal(mine.pop("master"), x)
            assert mine.keys() == {name for name, value in state.items() if value is not None}
            assert all(torch.equal(mine[name], state[name]) for name in mine)


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that is made, and of all that is made at once in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        new = [t.numel() for t in made if t.untyped_storage()._cdata not in known]
        self.numel = max(self.numel, sum(new))
        return out


def test_temporaries_are_as_large_as_a_tile() -> None:
    found = {}
    for tile in (512, 1 << 20):
        parameters = [nn.Parameter(x) for x in numbers(torch.bfloat16)]
        optimizer = TiledOptimizer(parameters, torch.optim.AdamW, tile=tile, foreach=True)
        take(optimizer, parameters, range(1))  # makes the state
        for p, grad in zip(parameters, grads_of(1, torch.bfloat16), strict=True):
            p.grad = grad
        with Largest() as largest:
            optimizer.step()
        found[tile] = largest.numel
    everything = sum(x.numel() for x in numbers(torch.bfloat16))
    assert found[512] <= 512 and found[1 << 20] == everything > 4096


def test_state_is_whole_and_resumes_with_other_tiles() -> None:
    wide, _ = untiled(torch.optim.AdamW, {}, torch.bfloat16, 4)
    parameters = [nn.Parameter(x) for x in numbers(torch.bfloat16)]
    first = TiledOptimizer(parameters, torch.optim.AdamW, tile=100)
    take(first, parameters, range(2))
    again = [nn.Parameter(p.detach().clone()) for p in parameters]
    second = TiledOptimizer(again, torch.optim.AdamW, tile=700)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(second.state[p]["master"].dtype == torch.float32 for p in again)
    take(second, again, range(2, 4))
    assert all(torch.equal(second.state[p]["master"], x) for p, x in zip(again, wide, strict=True))


def test_experts_states_are_kept_by_expert() -> None:
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, dtype=torch.bfloat16)
    optimizer = TiledOptimizer(layer.parameters(), torch.optim.AdamW, tile=64)
    layer(torch.randn(9, 8, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(layer, optimizer)
    apart = experts_apart(layer, state)
    assert "master.3" in apart["state"]["experts.down_proj"] and "exp_avg.0" in apart["state"]["experts.down_proj"]
    twin = copy.deepcopy(layer)
    other = TiledOptimizer(twin.parameters(), torch.optim.AdamW, tile=4096)
    set_optimizer_state_dict(twin, other, state)
    mine, theirs = (o.state[m.experts.down_proj] for o, m in ((optimizer, layer), (other, twin)))
    assert all(torch.equal(mine[name], theirs[name]) for name in ("master", "exp_avg", "exp_avg_sq", "step"))


def test_a_scaler_is_followed_and_an_overflow_leaves_no_trace() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    p, plain = nn.Parameter(torch.linspace(-1, 1, 200).half()), torch.linspace(-1, 1, 200).half().float()
    optimizer, other = TiledOptimizer([p], torch.optim.AdamW, tile=64), torch.optim.AdamW([plain])
    for step, overflows in enumerate([False, True, False]):
        grad = torch.randn(200, generator=torch.Generator().manual_seed(step))
        scale = scaler.get_scale()
        p.grad = scaler.scale(grad).half()
        plain.grad = p.grad.float() / scale
        if overflows:
            p.grad[150] = float("inf")
        else:
            other.step()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(optimizer.state[p]["master"], plain)
    assert scaler.get_scale() == 128.0 and optimizer.state[p]["step"] == 2


def test_state_may_be_mapped_from_files(tmp_path: Path) -> None:
    wide, states = untiled(torch.optim.AdamW, {}, torch.bfloat16, 3)
    parameters = [nn.Parameter(x) for x in numbers(torch.bfloat16)]
    optimizer = TiledOptimizer(parameters, torch.optim.AdamW, tile=256, state_like=on_disk(tmp_path))
    take(optimizer, parameters, range(3))
    for p, x, state in zip(parameters, wide, states, strict=True):
        assert torch.equal(optimizer.state[p]["master"], x)
        assert torch.equal(optimizer.state[p]["exp_avg"], state["exp_avg"])
        assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    assert not list(tmp_path.iterdir())  # files have no names
    with pytest.raises(UsageError, match="no file for numbers can be made there"):
        on_disk(tmp_path / "nowhere")(torch.zeros(3), torch.float32)


def test_a_parameter_changed_between_steps_is_taken_over() -> None:
    p = nn.Parameter(torch.zeros(130, dtype=torch.bfloat16))
    optimizer = TiledOptimizer([p], torch.optim.SGD, tile=64, lr=2.0**-12)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[70] = 3.0
    optimizer.step()
    master = torch.full((130,), -(2.0**-11))
    master[70] = 3.0 - 2.0**-12
    assert torch.equal(optimizer.state[p]["master"], master)


def test_schedules_closures_and_parameters_without_gradients() -> None:
    a, b = (nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer = TiledOptimizer([{"params": [a], "lr": 0.5}, {"params": [b]}], torch.optim.SGD, lr=0.25)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = a.sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 5.0
    schedule.step()
    optimizer.step(closure)
    assert torch.equal(a, torch.full((5,), 1 - 0.5 - 0.25)) and torch.equal(b, torch.ones(5))


def test_what_cannot_be_tiled_is_named() -> None:
    def some(*shape: int, dtype: torch.dtype | None = None) -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(shape, dtype=dtype))]

    with pytest.raises(UsageError, match="a step of Adafactor in parts is not the step of the whole"):
        TiledOptimizer(some(4, 4), torch.optim.Adafactor)
    with pytest.raises(UsageError, match=r"LBFGS .*closure"):
        TiledOptimizer(some(4), torch.optim.LBFGS)
    with pytest.raises(UsageError, match="a tile of 8 numbers"):
        TiledOptimizer(some(4), torch.optim.SGD, tile=8)
    with pytest.raises(UsageError, match="complex64"):
        TiledOptimizer(some(4, dtype=torch.complex64), torch.optim.SGD)
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = TiledOptimizer(table.parameters(), torch.optim.SGD)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
