"""Models described without computing: the chain of modules, sizes, operations; and what cannot be cut is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.memory import needs_of
from mycel.parallel import describe
from mycel.parallel.chain import check_chain
from mycel.parallel.planned.parts import part_of
from mycel.parallel.planned.tensor import layout_of, on_shares
from mycel.planning.layouts import change_bytes
from mycel.planning.models import load_model, read_model

ROOT = Path(__file__).resolve().parents[2]
TOKENS = torch.zeros(2, 16, dtype=torch.long)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planned_model", ROOT / "examples" / "planned" / "model.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def test_the_tiny_model_that_the_planner_knows_is_the_example(example: ModuleType) -> None:
    with torch.device("meta"):
        model = example.TinyGPT(example.Sizes())
    said = describe(model, torch.zeros(1, 128, dtype=torch.long), name="tiny")
    assert read_model(said) == load_model("tiny")
    assert load_model("tiny").shape.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_model_is_planned_in_the_type_that_it_is_made_in(
    example: ModuleType, dtype: torch.dtype, expected: int
) -> None:
    with torch.device("meta"):
        model = example.TinyGPT(example.Sizes()).to(dtype)
    said = read_model(describe(model, torch.zeros(1, 128, dtype=torch.long)))
    assert said.shape.element_bytes == expected
    assert read_model(said.to_json()) == said


def test_operations_and_parameters_are_those_of_the_matrices(example: ModuleType) -> None:
    sizes = example.Sizes(width=32, head_width=8, num_layers=3, length=16)
    said = describe(example.TinyGPT(sizes), TOKENS)
    names = [module["name"] for module in said["modules"]]
    assert names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    block = said["modules"][1]
    matrices, scores = 2 * 32 * 12 * 32 * 32, 2 * 2 * 2 * 16 * 16 * 32
    assert block["flops"] == matrices + scores
    assert block["parameters"] == 12 * 32 * 32 + 4 * 32
    assert block["layouts"] == {
        "q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise", "up": "colwise", "down": "rowwise",
    }  # fmt: skip
    assert said["modules"][-1]["flops"] == 2 * 32 * 32 * 256
    assert block["activation_bytes"] > 2 * 16 * 32 * 4  # at least its input is kept
    shape = read_model(said).shape
    assert (shape.num_heads, shape.head_dim, shape.ffn, shape.vocab) == (4, 8, 128, 256)


def test_hugging_face_models_are_described_as_their_configurations_are() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    said = read_model(describe(model, name="llama"))
    assert said.shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert [m.name for m in said.modules] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    ]  # fmt: skip
    json.dumps(describe(model))


def test_kept_bytes_are_those_that_a_step_of_memory_holds(example: ModuleType) -> None:
    """What a module keeps counts with who saves it here, and with who makes it there: all but the two ends agree."""
    model = example.TinyGPT(example.Sizes(width=32, head_width=8, num_layers=3, length=16))
    kept = {m["name"]: m["activation_bytes"] for m in describe(model, TOKENS)["modules"]}
    needs = needs_of(model, (TOKENS,), optimizer=None, loss=lambda logits: logits.sum(), blocks=list(kept))
    held = {block.name: block.saved for block in needs.blocks}
    assert {name: kept[name] for name in kept if name.startswith("blocks.")} == {
        name: held[name] for name in held if name.startswith("blocks.")
    }
    logits = 2 * 16 * 256 * 4
    assert sum(kept.values()) - TOKENS.nbytes + logits == sum(held.values())


def test_buffers_are_not_kept_and_types_are_the_models_own() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    norms = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    _, norm, _ = describe(norms, torch.zeros(2, 3, 8, 8))["modules"]
    assert norm["activation_bytes"] == (2 * 8 * 6 * 6 + 2 * 8) * 4  # its input, means and deviations; no running ones
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, num_local_experts=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    said = {m["name"]: m["activation_bytes"] for m in describe(model)["modules"]}
    tokens = 64
    assert said["model.embed_tokens"] == tokens * 8  # the tokens, once
    # In float32, as the model is, though torch's rule for grouped products without numbers takes bfloat16 only.
    assert said["model.norm"] == (2 * tokens * 32 + tokens) * 4
    assert said["lm_head"] == tokens * 32 * 4


class Adding(nn.Module):
    """Does something between two modules that belongs to neither."""

    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(x))
        x = self.layers[1](x + 1 if self.between else x)
        logits: Tensor = self.head(x)
        return logits if self.between else logits * 2


NAMES = ["embedding", "layers.0", "layers.1", "head"]


def test_what_is_done_between_modules_is_refused_by_place() -> None:
    with pytest.raises(UsageError, match=r"between layers\.0 and layers\.1 the forward of Adding"):
        check_chain(Adding(between=True), NAMES, (TOKENS,))
    with pytest.raises(UsageError, match=r"between head and the model's result"):
        check_chain(Adding(between=False), NAMES, (TOKENS,))
    with pytest.raises(UsageError, match="no chain of modules"):
        describe(Adding(between=True), TOKENS)


def test_wrong_names_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256))
    check_chain(model, ["0", "1", "2"], (TOKENS,))
    with pytest.raises(UsageError, match="no module '3'"):
        check_chain(model, ["0", "1", "2", "3"], (TOKENS,))
    with pytest.raises(UsageError, match=r"parameter 1\.weight is in no module"):
        check_chain(model, ["0", "2"], (TOKENS,))
    with pytest.raises(UsageError, match="called in the order 0, 1, 2"):
        check_chain(model, ["1", "0", "2"], (TOKENS,))
    with pytest.raises(UsageError, match="give an example"):
        describe(model)
    with pytest.raises(UsageError, match="cannot be run on tensors"):
        describe(model, torch.zeros(2, 3))


def test_parts_together_are_the_model(example: ModuleType) -> None:
    model = example.TinyGPT(example.Sizes(width=32, num_layers=2, length=16))
    names = ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    first, second = part_of(model, names[:2], names[2:]), part_of(model, names[2:], names[:2])
    known = dict(model.named_parameters())
    found = {**dict(first.named_parameters()), **dict(second.named_parameters())}
    assert found.keys() == known.keys() and all(found[name] is known[name] for name in known)
    assert not set(dict(first.named_parameters())) & set(dict(second.named_parameters()))
    torch.testing.assert_close(second(first(TOKENS)), model(TOKENS), rtol=0, atol=0)


class Attention(nn.Module):
    """With a norm of heads, which works on a rank's own heads, and one of the whole, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.of_heads, self.after = nn.LayerNorm(4), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.of_heads(self.q(self.norm(x)).unflatten(-1, (-1, 4)))
        after: Tensor = self.after(x + self.out(heads.flatten(-2)))
        return after


def test_parameters_that_are_used_on_shares_are_found() -> None:
    layouts = (("*.q", "colwise"), ("*.out", "rowwise"))
    model = nn.Sequential(Attention(), Attention())
    assert on_shares(model, layouts, (torch.zeros(2, 3, 16),)) == {
        f"{layer}.of_heads.{name}" for layer in (0, 1) for name in ("weight", "bias")
    }
    assert layout_of("1.q", layouts) == "colwise" and layout_of("1.norm", layouts) == "replicate"


def test_changes_of_layouts() -> None:
    assert change_bytes("S0", "S1", 12, 3) == 8 and change_bytes("B", "S0", 12, 3) == 0
    assert change_bytes("P", "B", 12, 3) == change_bytes("P", "S0", 12, 3) + change_bytes("S0", "B", 12, 3)
    for before, after in (("S0", "P"), ("B", "P"), ("X", "B")):
        with pytest.raises(UsageError):
            change_bytes(before, after, 12, 3)
