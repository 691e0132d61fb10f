"""A model as mycel's own JSON: sizes, and what ``mycel.parallel.describe`` saw of an ``nn.Module``.

The form, version 1: the fields of ``ModelShape`` by name, and optionally ``modules``, a list in order of execution
of objects with ``name`` (as ``named_modules`` gives it), ``kind``, ``flops`` (forward, of the example),
``parameters``, ``activation_bytes`` (kept for backward) and ``layouts``, an object that says for parameters by name
how tensor parallelism may share them, one of ``LAYOUTS``. Modules are what a pipeline may be cut between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from mycel.errors import UsageError
from mycel.names import nearest
from mycel.planning.models.fields import MOST, MOST_LAYERS, flag, listing, size
from mycel.planning.models.shape import ModelShape

__all__ = ["LAYOUTS", "ModelDescription", "ModuleDescription", "from_json"]

_VERSION = 1
#: Of a matrix: by columns of the result, by rows of it, or not at all.
LAYOUTS = ("colwise", "rowwise", "replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDescription:
    """One module of a chain that a pipeline may be cut between.

    Attributes:
        name: as ``named_modules`` gives it.
        kind: its class.
        flops: forward, for the example.
        num_parameters: of it and what is in it.
        activation_bytes: kept for its backward, for the example.
        layouts: parameters by name in it, each with one of ``LAYOUTS``.
    """

    name: str
    kind: str
    flops: float
    num_parameters: int
    activation_bytes: int
    layouts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model's sizes with its modules, where it was described from a module.

    Attributes:
        shape: the sizes.
        modules: in order of execution; empty where only sizes are known.
    """

    shape: ModelShape
    modules: tuple[ModuleDescription, ...] = ()

    def to_json(self) -> dict[str, object]:
        """As an object of JSON."""
        rows = [
            {
                "name": m.name,
                "kind": m.kind,
                "flops": m.flops,
                "parameters": m.num_parameters,
                "activation_bytes": m.activation_bytes,
                **({"layouts": dict(m.layouts)} if m.layouts else {}),
            }
            for m in self.modules
        ]
        return {**self.shape.to_json(), **({"modules": rows} if rows else {})}


def from_json(data: Mapping[str, Any], *, where: str = "model") -> ModelDescription:
    """A description from its JSON.

    Args:
        data: the object.
        where: the file, for messages.

    Raises:
        UsageError: another version, a key that is not known, a size out of range.

    Examples:
        >>> from mycel.planning.models.torchtitan import named
        >>> model = named("llama3-8b")
        >>> from_json(model.to_json()).shape == model
        True
    """
    version = data.get("version")
    if version != _VERSION:
        newer = isinstance(version, int) and version > _VERSION
        way = "update mycel" if newer else f'write "version": {_VERSION}'
        raise UsageError(f"{where}: version {version!r} of a model's description; this mycel reads {_VERSION}: {way}")
    known = {f.name: f for f in fields(ModelShape)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in ("version", "modules"):
            continue
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}{nearest(key, known)}; known: {', '.join(known)}")
        if key == "name":
            if not isinstance(value, str):
                raise UsageError(f"{where}: name is {value!r}; it must be a text")
            values[key] = value
        elif str(known[key].type) == "bool":
            values[key] = flag(data, key, where=where, default=False)
        else:
            most = MOST_LAYERS if key in ("num_layers", "num_heads") else MOST
            values[key] = size(data, key, where=where, most=most)
    missing = [f.name for f in fields(ModelShape) if f.name not in values and f.default is MISSING]
    if missing:
        raise UsageError(f"{where}: there is no {missing[0]}: add it")
    return ModelDescription(
        shape=ModelShape(**values), modules=tuple(_module(m, where) for m in listing(data, "modules", where=where))
    )


def _module(data: Any, where: str) -> ModuleDescription:
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise UsageError(f"{where}: a module is an object with a name, got {data!r}")
    at = f"{where}: module {data['name']}"
    flops = data.get("flops", 0)
    if isinstance(flops, bool) or not isinstance(flops, (int, float)) or not 0 <= flops < float("inf"):
        raise UsageError(f"{at}: flops is {flops!r}; it must be a number from 0")
    # Bytes of long examples pass what a size may be, so they are checked here.
    kept = data.get("activation_bytes", 0)
    if isinstance(kept, bool) or not isinstance(kept, int) or kept < 0:
        raise UsageError(f"{at}: activation_bytes is {kept!r}; it must be a whole number from 0")
    count = data.get("parameters", 0)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise UsageError(f"{at}: parameters is {count!r}; it must be a whole number from 0")
    layouts = data.get("layouts", {})
    if not isinstance(layouts, Mapping):
        raise UsageError(f"{at}: layouts is {layouts!r}; it must be an object of parameters by name")
    for name, layout in layouts.items():
        if layout not in LAYOUTS:
            raise UsageError(f"{at}: layout of {name} is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    return ModuleDescription(
        name=data["name"],
        kind=str(data.get("kind", "")),
        flops=float(flops),
        num_parameters=count,
        activation_bytes=kept,
        layouts=tuple((str(name), str(layout)) for name, layout in layouts.items()),
    )
