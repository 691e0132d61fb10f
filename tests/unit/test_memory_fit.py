"""One call that makes a model fit: what it chooses, and that nothing else changes."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mycel.errors import SynthesisError, UsageError
from mycel.memory import EmulatedLink, attach, fit, measure, needs_of
from mycel.memory.needs import blocks_of, loss_of, recomputed
from mycel.memory.ways import Rates, activations
from mycel.planning.residency import fast_plan

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Model(nn.Module):
    def __init__(self, layers: int = 8, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.layers = nn.ModuleList(make)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def batch(rows: int, step: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(step))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> list[float]:
    found = []
    for step in range(3):
        loss = model(batch(rows, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("rows", "part", "ways"),
    [
        (8, 1.01, {"keep"}),
        (8, 0.3, {"residency", "residency, recomputed"}),
        (1024, 0.75, {"activations", "residency"}),
        (1024, 0.35, {"residency, recomputed", "activations"}),
    ],
)
def test_what_is_chosen_fits_and_changes_no_bit(rows: int, part: float, ways: set[str]) -> None:
    wanted, model = Model(), Model()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (wanted, model)]
    budget = round(part * needs_of(model, (batch(rows),)).peak)
    with fit(model, optimizers[1], (batch(rows),), budget=budget) as fitted:
        assert fitted.way in ways, fitted.explain()
        assert losses(model, optimizers[1], rows) == losses(wanted, optimizers[0], rows)
        told = fitted.explain()
        chosen = next(choice for choice in fitted.choices if choice.way == fitted.way)
        assert chosen.peak <= budget and f"* {fitted.way}: " in told
        assert all(choice.peak > budget for choice in fitted.choices if choice.seconds is None)
    assert losses(model, optimizers[1], rows) == losses(wanted, optimizers[0], rows)  # closed, and goes on


def test_what_fits_in_no_way_says_which_is_nearest() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        SynthesisError,
        match=r"nothing fits; nearest is residency.* \(fullest in .+\), which needs \d+, \d+ bytes more: a smaller",
    ):
        fit(model, optimizer, (batch(8),), budget=20_000)
    with pytest.raises(SynthesisError) as refused:
        fit(model, optimizer, (batch(8),), budget=20_000)
    enough = int(str(refused.value).split("which needs ")[1].split(",")[0])
    with fit(model, optimizer, (batch(8),), budget=enough) as fitted:  # what it says is true
        assert losses(model, optimizer, 8)
        assert fitted.way.startswith("residency")
    with pytest.raises(SynthesisError):
        fit(model, optimizer, (batch(8),), budget=enough - 1)
    for wrong, says in (
        ({"budget": 0}, "a budget in bytes: 0 is not at least 1"),
        ({"budget": float("nan")}, "a budget in bytes: nan is not a whole number"),
        ({"budget": 1 << 30, "micro_batches": 0}, "a number of micro-batches: 0 is not at least 1"),
    ):
        with pytest.raises(UsageError, match=says):
            fit(model, optimizer, (batch(8),), **wrong)  # type: ignore[arg-type]


def test_a_way_without_a_plan_says_why_and_no_negative_shortage() -> None:
    """More blocks than are planned: the least that they need would fit, so that nobody knows what is missing."""
    model = Model()
    needs = needs_of(model, (batch(64),))
    budget = needs.peak - 1
    many = replace(needs, blocks=needs.blocks * 2000)
    rates = Rates(flops_per_s=1e9, gbps=1.0, exchange_s=0.0, micro_batches=1)
    choice, plan = activations(many, budget, rates)
    assert plan is None and choice.seconds is None
    assert "blocks: 16000; at most" in choice.says and "-" not in choice.says
    assert choice.peak == needs.peak
    short, none = activations(needs, 1, rates)
    assert none is None and short.says.endswith(f"{short.peak - 1} bytes too little")


@pytest.mark.parametrize("slots", [2, 3])
def test_a_ring_of_dense_blocks_changes_no_bit_and_moves_what_it_says(slots: int) -> None:
    free = Model()
    wanted = losses(free, torch.optim.AdamW(free.parameters()), 8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    link = EmulatedLink(bandwidth_gbps=10)
    budget = int(0.6 * needs_of(model, (batch(8),), optimizer=optimizer).peak)
    with fit(model, optimizer, (batch(8),), budget=budget, link=link, slots=slots) as fitted:
        before = link.fetched_bytes + link.stored_bytes
        assert losses(model, optimizer, 8) == wanted
        moved = link.fetched_bytes + link.stored_bytes - before
        residency = fitted.handles[-1]
        unit = residency.schedule.parts.sizes[0]
        # Forward brings every unit, backward those that the ring has let go; each sends its gradients.
        assert residency.schedule.plan.loaded_bytes == (8 + 8 - slots) * unit
        assert moved == 3 * residency.schedule.moved_bytes
        assert residency.peak_bytes == slots * unit and residency.off_schedule == 0
        assert f"ring of {slots} slots" in fitted.explain()
        for _ in range(2):
            before = link.fetched_bytes
            with torch.no_grad():
                model(batch(8))
            assert link.fetched_bytes - before == 8 * unit
    link.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), free.parameters(), strict=True))


def test_one_budget_at_a_time() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = round(0.3 * needs_of(model, (batch(8),)).peak)
    for _ in range(2):
        with fit(model, optimizer, (batch(8),), budget=budget):
            before = threading.active_count()
            with pytest.raises(UsageError, match=r"^Model trains within a budget already; close that first$"):
                fit(model, optimizer, (batch(8),), budget=budget)
            assert threading.active_count() == before
    with pytest.raises(UsageError, match="a link"):
        fit(model, optimizer, (batch(8),), budget=budget, link="fast")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="far memory"):
        fit(model, optimizer, (batch(8),), budget=budget, far="/data")  # type: ignore[arg-type]


def test_activations_or_parameters_are_held_and_not_both_by_hand() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    x, link = torch.randn(4, 32), EmulatedLink(bandwidth_gbps=5)
    found = measure(model, list(model), lambda: model(x).sum(), link=link, budget=1 << 30, runs=1)
    plan = fast_plan(found)
    with (
        attach(model, list(model), found, plan, link=link),
        pytest.raises(UsageError, match=r"^Sequential: a plan is carried out on '0' already; close that first$"),
    ):
        fit(model, optimizer, (x,), budget=60_000)
    with fit(model, optimizer, (x,), budget=60_000) as fitted:
        assert fitted.way == "residency"
        with pytest.raises(UsageError, match=r"^Sequential: its parameters come and go by a schedule already"):
            attach(model, list(model), found, plan, link=link)
    attach(model, list(model), found, plan, link=link).close()
    link.close()


def test_a_plan_is_made_under_a_tight_limit_that_came_first() -> None:
    """Loading numba there would never come back: the linear algebra below it waits for memory for ever."""
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LIMIT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "activations"


_UNDER_A_LIMIT = """
import torch
from torch import nn
from mycel.memory import allocator_limit, fit, needs_of
torch.set_num_threads(1)
make = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
model, x = nn.Sequential(*make), torch.randn(1024, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(x).square().mean().backward()
optimizer.step()
needs = needs_of(model, (x,), optimizer=optimizer)
with allocator_limit(48 << 20), fit(model, optimizer, (x,), budget=round(needs.peak * 0.7)) as fitted:
    model(x).square().mean().backward()
    optimizer.step()
    print(fitted.way)
"""


def hugging_face(kind: str, **sizes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    common = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=96, **common, **sizes))
    return model


THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 320, "tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.parametrize("kind", THEIRS)
def test_models_of_hugging_face_unedited(kind: str) -> None:
    found = []
    for is_held in (False, True):
        model = hugging_face(kind, **THEIRS[kind])
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.arange(24).reshape(1, 24)
        batch = {"input_ids": ids, "labels": ids}
        link = EmulatedLink(bandwidth_gbps=50)
        if is_held:
            budget = round(1.05 * sum(p.nbytes for p in model.parameters()))
            fitted = fit(model, optimizer, batch, budget=budget, link=link)
            assert fitted.way.startswith("residency")
        for _ in range(2):
            loss = loss_of(model(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([loss.item(), *(float(p.detach().double().sum()) for p in model.parameters())])
        link.close()
    assert found[0] == found[1]


def test_recomputation_fills_no_cache_of_keys_twice() -> None:
    sizes = {"intermediate_size": 128, "sliding_window": 8, "head_dim": 16}
    ids = torch.arange(24).reshape(1, 24)
    found = []
    for again in (False, True):
        model = hugging_face("mistral", **sizes)
        with recomputed(blocks_of(model)) if again else nullcontext():
            loss = loss_of(model(input_ids=ids, labels=ids))  # with the cache that its configuration asks for
            loss.backward()
        found.append([loss.item(), *(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)])
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "part"),
    [
        *(("memory_prediction", part) for part in ("peaks", "sharded", "limits")),
        *(("memory_larger", part) for part in ("one", "ranks", "trainer")),
    ],
)
def test_the_benchmarks_hold(script: str, part: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", "--only", part, "--check"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
