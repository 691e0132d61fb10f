"""What a step needs: predicted on fake tensors, beside what the allocator was really asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.errors import UsageError
from mycel.memory.needs import (
    Needs,
    Storages,
    blocks_of,
    counted_peak,
    loss_of,
    needs_of,
    recomputed,
    subject,
)

TOKENS = 64


class Layer(nn.Module):
    """A layer of attention and a network, of torch's own modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3, vocab: int = 500) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def ids() -> Tensor:
    return torch.randint(0, 500, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def hugging_face(kind: str, **sizes: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, vocab_size=500, bos_token_id=1, eos_token_id=1, **sizes)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (Model, False),
    "llama": (lambda: hugging_face("llama", intermediate_size=160, **SIZES), True),
    "qwen3_moe": (
        lambda: hugging_face(
            "qwen3_moe", moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, head_dim=16, **SIZES
        ),
        True,
    ),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_what_the_allocator_was_asked_for(name: str, recompute: bool) -> None:
    make, is_theirs = MODELS[name]
    batch: Any = {"input_ids": ids(), "labels": ids()} if is_theirs else (ids(),)
    needs = needs_of(make, batch, recompute=recompute)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model(**batch) if is_theirs else model(*batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with recomputed(blocks_of(model)) if recompute else nullcontext():
        step()
        held = [*model.parameters(), *model.buffers(), *(t for s in optimizer.state.values() for t in s.values())]
        held += list(batch.values())[:1] if is_theirs else list(batch)
        counted = counted_peak(step) + sum(tensor.nbytes for tensor in held)
    assert 0.98 * counted <= needs.peak <= 1.08 * counted


def test_recomputation_holds_less_and_computes_more() -> None:
    plain = needs_of(Model, (ids(),))
    again = needs_of(Model, (ids(),), recompute=[f"layers.{i}" for i in range(3)])
    assert again.peak < plain.peak and again.flops > plain.flops
    assert again.blocks[1].saved < plain.blocks[1].saved / 4
    assert [block.name for block in plain.blocks] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]


def test_a_model_is_not_touched() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    before = [parameter.clone() for parameter in model.parameters()]
    needs = needs_of(model, (ids(),), optimizer=optimizer)
    assert needs.most("optimizer") == needs.most("gradients") == sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state and not model._forward_hooks and all(p.grad is None for p in model.parameters())


def test_storages_count_once() -> None:
    with Storages() as storages:
        storages.mark("forward", "")
        x = torch.ones(1000)
        y = x.view(10, 100)[1:]
        storages.mark("forward", "later")
        del x
        z = torch.empty(0)
        z.untyped_storage().resize_(400)
        storages.mark("forward", "last")
        del y
    first, later, last = storages.moments()
    assert (first.total, later.total, last.total) == (4000, 4400, 4400)
    assert later.exchanges == 400
    assert "resize_" not in vars(torch.UntypedStorage)


def test_json_comes_back() -> None:
    needs = needs_of(Model, (ids(),))
    assert Needs.from_json(json.loads(json.dumps(needs.to_json()))) == needs
    with pytest.raises(UsageError, match="version 1, got 2"):
        Needs.from_json({"version": 2})
    with pytest.raises(UsageError, match="whole number from 0"):
        Needs.from_json({"version": 1, "name": "", "blocks": [], "moments": [_moment(temporary=float("nan"))]})
    with pytest.raises(UsageError, match="without moments"):
        Needs.from_json({"version": 1, "name": "", "blocks": [], "moments": []})


def _moment(**changed: Any) -> dict[str, Any]:
    kinds = ("parameters", "gradients", "optimizer", "inputs", "activations", "exchanges", "temporary")
    return {"phase": "forward", "block": "", "working": 0, "flops": 0, **dict.fromkeys(kinds, 0), **changed}


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x[:, 0] > 0]).sum()


def test_what_depends_on_values_is_named() -> None:
    with pytest.raises(UsageError, match=r"nonzero.* depends on the values"):
        needs_of(Picky, (torch.ones(3, 4),))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute": ["layers.9"]}, "'layers.9' is no block; blocks are embedding, "),
        ({"blocks": ["nowhere"]}, "there is no module 'nowhere' in Model"),
    ],
)
def test_blocks_that_are_not_there(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        needs_of(Model, (ids(),), **options)


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(UsageError, match="not the model's"):
        needs_of(Model(), (ids(),), optimizer=torch.optim.SGD(Model().parameters()))


# -- sharded over ranks -----------------------------------------------------------------------------------------


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """Rank 0 of four of which the others are not there: collectives give something at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_what_fsdp2_shards_and_gathers(four_ranks: DeviceMesh) -> None:
    x = torch.ones(8, 64)

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=four_ranks)
        return fully_shard(model, mesh=four_ranks)

    needs = needs_of(make, (x,))
    whole = 4 * (64 * 64 + 64) * 4
    assert needs.most("parameters") == needs.most("gradients") == whole // 4
    assert 0 < needs.most("exchanges") < whole
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held: list[Any] = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    counted = counted_peak(step) + x.nbytes + sum(getattr(t, "_local_tensor", t).nbytes for t in held)
    assert 0.98 * counted <= needs.peak <= 1.08 * counted


# -- the command ------------------------------------------------------------------------------------------------

CONFIG = {"model_type": "llama", "vocab_size": 500, "intermediate_size": 160, **SIZES}


def test_the_command_shows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    picture = tmp_path / "memory.png"
    run = CliRunner().invoke(
        build_app(), ["memory", "show", str(tmp_path), "--seq", "32", "--budget", "1MB", "--plot", str(picture)]
    )
    assert run.exit_code == 0, run.output
    assert "does not fit 1.0 MiB" in run.output and "model.layers.1" in run.output
    assert picture.read_bytes()[1:4] == b"PNG"
    run = CliRunner().invoke(build_app(), ["memory", "show", str(tmp_path), "--seq", "32", "--json"])
    needs = Needs.from_json(json.loads(run.output))
    assert needs.peak == json.loads(run.output)["peak"] > 0


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("nowhere.json", {}, "there is no such file"),
        ("lama3-8b", {}, "did you mean"),
        ("tiny", {}, "describes sizes, and no module"),
        ("llama3-8b", {"dtype": "int8"}, "dtype 'int8'"),
        ("llama3-8b", {"batch": 0}, "a batch of 0 sequences"),
        ("nowhere.py:model", {}, "there is no such file"),
        ("mycel.nowhere:model", {}, "No module named"),
        ("mycel.memory:nothing", {}, "no function 'nothing'"),
    ],
)
def test_models_that_are_not_there(source: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        subject(source, **options)


def test_a_function_gives_model_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine_to_show.py").write_text(
        "import torch\ndef good(): return torch.nn.Linear(3, 2), (torch.ones(5, 3),)\ndef bad(): return 3\n",
        encoding="utf-8",
    )
    good = subject(f"{tmp_path}/mine_to_show.py:good")
    assert needs_of(good.make, good.batch).most("parameters") == 4 * 8
    bad = subject(f"{tmp_path}/mine_to_show.py:bad")
    with pytest.raises(UsageError, match="return model, "):
        needs_of(bad.make, bad.batch)
