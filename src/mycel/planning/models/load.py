"""A model from whatever a person has: a file of any known form, or a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mycel.errors import UsageError
from mycel.planning.models.hugging_face import from_hugging_face
from mycel.planning.models.json_format import ModelDescription, from_json
from mycel.planning.models.megatron import from_megatron
from mycel.planning.models.torchtitan import from_torchtitan, named

__all__ = ["load_model", "read_model", "read_object"]

#: Configurations are a few kilobytes; what is longer is no configuration.
_LONGEST_FILE = 16 << 20
#: Models that are known with their modules, by name: what ``mycel.parallel.describe`` has written of them.
_DESCRIBED = {"tiny": Path(__file__).parent / "tiny.json"}


def load_model(source: str | Path) -> ModelDescription:
    """A model by file or by name.

    A file is Hugging Face's ``config.json`` (or a folder with one), Megatron-LM's or torchtitan's arguments as JSON,
    or mycel's own description; its keys say which.

    Args:
        source: path of a file or folder, or a name such as ``llama3-8b``; ``tiny`` is the byte-level model of
            ``examples/planned``.

    Raises:
        UsageError: no such file or name, or a file that cannot be read as a model.

    Examples:
        >>> load_model("llama3-8B").shape.num_parameters
        8030261248
    """
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
        is_file = path.is_file()
    except OSError:
        is_file = False
    if not is_file:
        if path.suffix == ".json" or len(path.parts) > 1:
            raise UsageError(
                f"{source}: there is no such file; a model is a config.json, or a name such as llama3-8b"
            )
        if str(source) in _DESCRIBED:
            return load_model(_DESCRIBED[str(source)])
        return ModelDescription(shape=named(str(source)))
    return read_model(read_object(path), where=str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object of JSON that a model's configuration is.

    Args:
        path: of the file.

    Raises:
        UsageError: it cannot be read, is too long, or holds something else.
    """
    try:
        if path.stat().st_size > _LONGEST_FILE:
            raise UsageError(f"{path}: {path.stat().st_size} bytes are too many for a model's configuration")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a model is an object of JSON, got {type(data).__name__}")
    return data


def read_model(data: Mapping[str, Any], *, where: str = "model") -> ModelDescription:
    """A model from an object of JSON in any known form.

    Raises:
        UsageError: it is of none.
    """
    if "model_type" in data or "text_config" in data:
        return ModelDescription(shape=from_hugging_face(data, where=where))
    if "hidden_size" in data:
        return ModelDescription(shape=from_megatron(data, where=where))
    if "dim" in data:
        return ModelDescription(shape=from_torchtitan(data, name=Path(where).stem, where=where))
    if "version" in data or "num_layers" in data:
        return from_json(data, where=where)
    raise UsageError(
        f"{where}: neither Hugging Face's config.json (model_type), nor arguments of Megatron-LM (hidden_size) or "
        "torchtitan (dim), nor mycel's own form (version)"
    )
