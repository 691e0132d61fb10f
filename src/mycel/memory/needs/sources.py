"""A model from what a person names on the command line, and a batch for it; made where tensors are fake."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.extras import needs
from mycel.planning.models import ModelShape, load_model
from mycel.planning.models.load import read_object

__all__ = ["Subject", "subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model that can be made, and what a step of it gets.

    Attributes:
        name: for people.
        make: the module.
        batch: its arguments, made where it is called.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Sequence[Any] | Mapping[str, Any]]


def subject(source: str, *, batch: int = 1, seq: int = 1024, dtype: str = "float32") -> Subject:
    """What a person means: a configuration of Hugging Face, a name, or a function of theirs.

    Args:
        source: ``config.json`` or a folder with one; a name that ``mycel plan search`` knows, as ``llama3-8b``; or
            ``package.module:function`` or ``file.py:function``, which gives the module and its arguments, as a tuple
            or by name.
        batch: sequences of a step, of language models.
        seq: tokens of a sequence.
        dtype: of parameters, as torch calls it.

    Raises:
        UsageError: there is no such file, name or function, or it gives something else.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UsageError(f"dtype {dtype!r}: one of float32, bfloat16, float16, float64")
    if batch < 1 or seq < 1:
        raise UsageError(f"a batch of {batch} sequences of {seq} tokens: at least 1 of each")
    module, colon, name = source.rpartition(":")
    if colon and module:
        return _function(module, name, kind)
    return _language_model(source, batch, seq, kind)


# -- language models --------------------------------------------------------------------------------------------


def _language_model(source: str, batch: int, seq: int, kind: torch.dtype) -> Subject:
    needs(f"a model from {source}", "transformers")
    config = _config(source)
    vocab = getattr(config, "vocab_size", None)
    if not isinstance(vocab, int):
        raise UsageError(
            f"{source}: {config.model_type} has no vocab_size, so it is no language model; name a function"
        )

    def make() -> nn.Module:
        from transformers import AutoModelForCausalLM

        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=kind)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise UsageError(f"{source}: {str(error).splitlines()[0]}") from None
        return model.train()

    def tokens() -> dict[str, Tensor]:
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    return Subject(name=Path(source).name if "/" in source else source, make=make, batch=tokens)


def _config(source: str) -> Any:
    from transformers import AutoConfig

    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        data = read_object(path)
        if "model_type" in data:
            options = {key: value for key, value in data.items() if key not in ("model_type", "transformers_version")}
            try:
                return AutoConfig.for_model(data["model_type"], **options)
            except (ValueError, TypeError) as error:
                raise UsageError(f"{source}: {str(error).splitlines()[0]}") from None
    described = load_model(source)  # says what is wrong with a file or a name
    if described.modules:
        raise UsageError(
            f"{source}: describes sizes, and no module can be made of them; give a config.json of Hugging Face, or a "
            "function as package.module:function"
        )
    return _like(described.shape)


def _like(shape: ModelShape) -> Any:
    """Hugging Face's configuration of these sizes."""
    from transformers import AutoConfig

    if not shape.is_gated or shape.num_experts or shape.norm_width != 1 or shape.has_qkv_bias:
        raise UsageError(f"{shape.name}: known by its sizes only; give a config.json of Hugging Face")
    return AutoConfig.for_model(
        "qwen3" if shape.has_qk_norm else "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_seq,
        tie_word_embeddings=shape.is_tied,
    )


# -- functions --------------------------------------------------------------------------------------------------


def _function(module: str, name: str, kind: torch.dtype) -> Subject:
    function = getattr(_imported(module), name, None)
    if not callable(function):
        raise UsageError(f"{module}: there is no function {name!r} in it")
    made: dict[str, Any] = {}

    def make() -> nn.Module:
        given: Any = function()
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)):
            raise UsageError(
                f"{module}:{name} gave {type(given).__name__}; it has to give a module and its arguments: "
                "return model, (x,)"
            )
        model: nn.Module = given[0]
        made["batch"] = given[1]
        return model.to(kind) if kind is not torch.float32 else model

    return Subject(name=name, make=make, batch=lambda: made["batch"])


def _imported(module: str) -> ModuleType:
    path = Path(module)
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"{module}: there is no such file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{module}: cannot be read as a module of Python")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = loaded
        spec.loader.exec_module(loaded)
        return loaded
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as python -m does
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{module}: {error}") from None
