"""Models by their sizes: parameters as published, every file form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mycel.errors import UsageError
from mycel.planning.models import (
    ModelShape,
    from_hugging_face,
    from_json,
    from_megatron,
    load_model,
    megatron_arguments,
    named,
    padded_vocab,
    read_model,
)
from mycel.planning.models.hugging_face import FAMILIES

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
QWEN_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
#: Configurations as they are published, and parameters of the published weights, to the last one.
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    (
        "Llama 3.1 70B",
        LLAMA | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672},
        70_553_706_496,
    ),
    (
        "Llama 2 7B",
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
        },
        6_738_415_616,
    ),
    (
        "Mistral 7B",
        {
            "model_type": "mistral",
            "vocab_size": 32000,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
        },
        7_241_732_096,
    ),
    (
        "Mixtral 8x7B",
        {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    (
        "Qwen2 7B",
        {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
        },
        7_615_616_512,
    ),
    (
        "Qwen3 30B-A3B",
        QWEN_MOE
        | {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        30_532_122_624,
    ),
    (
        "GPT-2",
        {"model_type": "gpt2", "vocab_size": 50257, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
        124_439_808,
    ),
    (
        "OPT 1.3B",
        {
            "model_type": "opt",
            "vocab_size": 50272,
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
        },
        1_315_758_080,
    ),
    (
        "Gemma 7B",
        {
            "model_type": "gemma",
            "vocab_size": 256000,
            "num_hidden_layers": 28,
            "hidden_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 24576,
            "head_dim": 256,
        },
        8_537_680_896,
    ),
]


@pytest.mark.parametrize(("config", "count"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED])
def test_parameters_are_as_published(config: dict[str, Any], count: int) -> None:
    assert from_hugging_face(config).num_parameters == count


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama3-8B", 8_030_261_248), ("llama3.1 70b", 70_553_706_496), ("LLAMA3_405B", 405_853_388_800)],
)
def test_torchtitan_knows_models_by_name(name: str, count: int) -> None:
    assert named(name).num_parameters == count


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"), [(96, 12288, 96, 174.6), (128, 25600, 160, 1008.0)]
)
def test_megatron_counts_as_its_papers_do(layers: int, hidden: int, heads: int, billions: float) -> None:
    """SC 2021, table 1: 12 l h^2 (1 + 13/12h + (V + s)/12lh)."""
    words = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --vocab-size 51200"
    shape = from_megatron(megatron_arguments(words))
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    assert shape.num_parameters == pytest.approx(formula, rel=1e-6)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_only_chosen_experts_are_active() -> None:
    config = next(config for name, config, _ in PUBLISHED if name == "Mixtral 8x7B")
    assert from_hugging_face(config).num_active_parameters == 12_879_925_248


def test_flops_are_six_a_parameter_and_attention() -> None:
    shape = named("llama3-8b")
    matrices = shape.num_parameters - shape.embedding_parameters - (2 * 32 + 1) * 4096
    assert shape.flops_per_token(8192, is_causal=False) == 6 * matrices + 12 * 32 * 4096 * 8192


def test_a_description_comes_back_from_its_json() -> None:
    for _, config, _ in PUBLISHED:
        shape = from_hugging_face(config)
        assert from_json(json.loads(json.dumps(shape.to_json()))).shape == shape


def test_modules_of_a_description_are_kept() -> None:
    row = {
        "name": "layers.0",
        "kind": "Block",
        "flops": 1e9,
        "parameters": 5,
        "activation_bytes": 1 << 40,
        "layouts": {"w": "colwise"},
    }
    description = from_json({**named("llama3-8b").to_json(), "modules": [row]})
    assert description.to_json()["modules"] == [row]


def test_files_of_every_form_are_told_apart(tmp_path: Path) -> None:
    config = PUBLISHED[1][1]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).shape == from_hugging_face(config)
    megatron = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    assert read_model(megatron).shape == from_megatron(megatron)
    titan = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 100}
    assert read_model(titan).shape.ffn == 256
    assert read_model(from_megatron(megatron).to_json()).shape == from_megatron(megatron)


def test_vocabularies_are_padded_to_tensor_parallelism() -> None:
    assert [padded_vocab(50257, tp) for tp in (1, 8)] == [50304, 51200]


REFUSED: list[tuple[Any, str]] = [
    ({"model_type": "lama"}, "did you mean 'llama'"),
    ({"model_type": "llama"}, "there is no hidden_size"),
    (PUBLISHED[0][1] | {"num_attention_heads": 0}, "from 1"),
    (PUBLISHED[0][1] | {"num_key_value_heads": 7}, "evenly; 8 would do"),
    (PUBLISHED[0][1] | {"hidden_size": "big"}, "must be a whole number"),
    (PUBLISHED[0][1] | {"hidden_size": 10**12}, "must be from 1"),
    (PUBLISHED[5][1] | {"num_hidden_layers": 10**9}, "must be from 1 to 100000"),
    ({"version": 2}, "update mycel"),
    ({"version": 1, "hiden": 3}, "did you mean 'hidden'"),
    ({"version": 1, "name": "x"}, "there is no num_layers"),
    ({}, "neither Hugging Face's"),
    (
        {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "moe_layer_freq": "x", "num_experts": 2},
        "one a layer",
    ),
    (named("llama3-8b").to_json() | {"modules": [{"kind": "x"}]}, "with a name"),
    (named("llama3-8b").to_json() | {"modules": [{"name": "x", "flops": "many"}]}, "module x: flops"),
    (named("llama3-8b").to_json() | {"is_gated": 3}, "true or false"),
    (named("llama3-8b").to_json() | {"modules": [{"name": "x", "layouts": {"w": "col"}}]}, "must be one of colwise"),
    (named("llama3-8b").to_json() | {"modules": [{"name": "x", "layouts": {"w": []}}]}, "must be one of colwise"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused_says_the_nearest_way_out(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")) as caught:
        read_model(data)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    for text in ("", "[1]", "{", '{"model_type": NaN}', "[" * 100_000, "\x00"):
        file.write_text(text)
        with pytest.raises(UsageError):
            load_model(file)
    with pytest.raises(UsageError, match="no such file"):
        load_model(tmp_path / "other.json")
    with pytest.raises(UsageError, match="did you mean 'llama3-8b'"):
        load_model("llama3-8")


def test_mutated_configurations_give_a_model_or_one_line() -> None:
    """Every key of a configuration replaced by nonsense, one at a time."""
    nonsense: list[Any] = [
        None,
        -1,
        0,
        1,
        10**9,
        10**30,
        2.5,
        float("nan"),
        float("inf"),
        "x",
        [],
        {},
        True,
        [1, None],
    ]
    for _, config, _ in PUBLISHED:
        for key in config:
            for value in nonsense:
                try:
                    shape = read_model(config | {key: value}).shape
                except UsageError as error:
                    assert "\n" not in str(error)
                else:
                    assert isinstance(shape, ModelShape)


@pytest.mark.long
def test_counts_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    small = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    grouped = small | {"num_key_value_heads": 2}
    own: dict[str, dict[str, Any]] = {
        "gpt2": {"vocab_size": 1000, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
        "opt": small | {"ffn_dim": 160, "max_position_embeddings": 128, "word_embed_proj_dim": 64},
        "mpt": {"vocab_size": 1000, "d_model": 64, "n_layers": 3, "n_heads": 4},
        "gpt_neox": small,
        "mixtral": grouped | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen2_moe": grouped | QWEN_MOE | {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
        "qwen3_moe": grouped | QWEN_MOE | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    }
    for kind in FAMILIES:
        config = transformers.AutoConfig.for_model(kind, **own.get(kind, grouped))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        counted = sum(parameter.numel() for parameter in model.parameters())
        assert from_hugging_face(config.to_dict()).num_parameters == counted, kind
