"""Plans as JSON, version 1: written, and read back with everything looked at that a file can have wrong.

The form: an object with ``"format": "mycel.plan"`` and ``"version": 1``, and in it ``model`` (sizes, digest, names of
modules and layers), ``cluster`` (name, digest, names, memory and devices of ranks), ``mesh`` (degrees and the ranks
in its order), ``job`` (all else of ``Job``), ``cut``, ``stage_ranks``, ``layouts``, ``order`` (the JSON of orders),
``stage_seconds``, ``predicted``, ``memory``, ``limits``, ``runners_up`` and ``binding``. Where replicas have unlike
many micro-batches, and only there, ``job`` has ``shares`` and the plan ``replica_seconds``; where layers are in
pieces, and only there, ``job`` has ``coshard``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from mycel.arguments import real_number, whole_number
from mycel.errors import MycelError, UsageError
from mycel.names import nearest
from mycel.pipeline.order import Order
from mycel.planning.job import Job, Mesh
from mycel.planning.models.json_format import from_json as model_from_json
from mycel.planning.plan.record import PLAN_VERSION, PlannedCluster, PlannedModel, PlanRecord, RunnerUp
from mycel.planning.predict import Prediction

__all__ = ["FORMAT", "fields_of_file", "fields_of_json", "fields_of_text", "json_of", "text_of"]

FORMAT = "mycel.plan"
#: Bytes of a file that is read: a plan for ten thousand ranks has a few million.
_LONGEST_FILE = 1 << 26
_MOST = 1 << 62
_MESH = ("pp", "dp", "tp", "cp", "ep")
_JOB = tuple(f.name for f in fields(Job) if f.name not in ("mesh", "shares", "coshard"))
_KEYS = (
    *("format", "version", "model", "cluster", "mesh", "job", "cut", "stage_ranks", "layouts", "order"),
    *("stage_seconds", "predicted", "memory", "limits", "runners_up", "binding", "replica_seconds"),
)

_Item = TypeVar("_Item")


# -- writing ----------------------------------------------------------------------------------------------------


def json_of(plan: PlanRecord) -> dict[str, Any]:
    """The JSON object of a plan.

    Args:
        plan: to be written.
    """
    model, cluster = plan.model, plan.cluster
    unequal = {"replica_seconds": [[list(pair) for pair in replica] for replica in plan.replica_seconds]}
    return {
        "format": FORMAT,
        "version": plan.version,
        "model": {
            "shape": model.shape.to_json(),
            "digest": model.digest,
            "modules": list(model.modules),
            "layers": list(model.layers),
        },
        "cluster": {
            "name": cluster.name,
            "digest": cluster.digest,
            "rank_names": list(cluster.rank_names),
            "memory_bytes": list(cluster.memory_bytes),
            "devices": list(cluster.devices),
            "nodes": list(cluster.nodes),
        },
        "mesh": {**_degrees(plan.job), "ranks": list(plan.ranks)},
        "job": _rest_of(plan.job),
        "cut": [list(stage) for stage in plan.cut],
        "stage_ranks": [list(ranks) for ranks in plan.stage_ranks],
        "layouts": dict(plan.layouts),
        "order": plan.order.to_json(),
        "stage_seconds": [list(pair) for pair in plan.stage_seconds],
        "predicted": {f.name: getattr(plan.predicted, f.name) for f in fields(Prediction)},
        "memory": list(plan.memory),
        "limits": list(plan.limits),
        "runners_up": [
            {
                "mesh": _degrees(other.job),
                "job": _rest_of(other.job),
                "layers": list(other.layers),
                "seconds": other.seconds,
                "memory_bytes": other.memory_bytes,
                "binding": other.binding,
            }
            for other in plan.runners_up
        ],
        "binding": plan.binding,
        **(unequal if plan.replica_seconds else {}),
    }


def text_of(plan: PlanRecord) -> str:
    """The JSON of a plan as a file has it: one line for each part.

    Args:
        plan: to be written.
    """
    rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in json_of(plan).items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _degrees(job: Job) -> dict[str, int]:
    return {name: getattr(job.mesh, name) for name in _MESH}


def _rest_of(job: Job) -> dict[str, Any]:
    shares = {"shares": list(job.shares)} if job.shares else {}
    pieces = {"coshard": job.coshard} if job.coshard > 1 else {}
    return {name: getattr(job, name) for name in _JOB} | shares | pieces


# -- reading ----------------------------------------------------------------------------------------------------


def fields_of_file(file: Path) -> dict[str, Any]:
    """The fields of the plan in a file.

    Args:
        file: its name.

    Raises:
        UsageError: it cannot be read, or holds no plan; the message names the file and the key.
    """
    try:
        if file.stat().st_size > _LONGEST_FILE:
            raise UsageError(f"{file}: more than {_LONGEST_FILE >> 20} MB, which no plan takes")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: no plan: not JSON in UTF-8") from None
    return fields_of_text(text, where=str(file))


def fields_of_text(text: str, *, where: str = "plan") -> dict[str, Any]:
    """The fields of the plan that a JSON text describes.

    Args:
        text: of the object.
        where: it is from, for messages.

    Raises:
        UsageError: no JSON, or no plan.
    """
    try:
        data = json.loads(text.removeprefix("\ufeff"), parse_int=_whole, parse_constant=_constant)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    return fields_of_json(data, where=where)


def fields_of_json(data: object, *, where: str = "plan") -> dict[str, Any]:
    """The fields of the plan that a decoded JSON object describes.

    Args:
        data: an object as ``json_of`` gives it.
        where: it is from, for messages.

    Raises:
        UsageError: a key is missing, unknown or of the wrong kind; a newer version; parts that do not go together.
    """
    try:
        return _fields(_object(data, "the plan"))
    except MycelError as error:
        raise UsageError(f"{where}: {error}") from None


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("format") != FORMAT:
        raise UsageError(f'a plan\'s JSON has "format": "{FORMAT}"; got {data.get("format")!r}')
    version = data.get("version")
    if type(version) is not int or version != PLAN_VERSION:
        newer = type(version) is int and version > PLAN_VERSION
        way = "update mycel, or write the plan again with the older one" if newer else "search for the plan again"
        raise UsageError(f"version {version!r} of plans; this mycel reads version {PLAN_VERSION}: {way}")
    _only(data, _KEYS, "the plan")
    mesh = _object(_value(data, "mesh", "the plan"), "mesh")
    _only(mesh, (*_MESH, "ranks"), "mesh")
    layouts = _object(_value(data, "layouts", "the plan"), "layouts")
    return {
        "model": _model(_object(_value(data, "model", "the plan"), "model")),
        "cluster": _cluster(_object(_value(data, "cluster", "the plan"), "cluster")),
        "job": _job(mesh, _object(_value(data, "job", "the plan"), "job"), "job"),
        "ranks": _each(mesh, "ranks", "mesh", _rank),
        "cut": _each(data, "cut", "the plan", lambda item, at: _list(item, at, _text)),
        "stage_ranks": _each(data, "stage_ranks", "the plan", lambda item, at: _list(item, at, _rank)),
        "layouts": tuple((_text(key, "layouts"), _text(value, f"layouts: {key}")) for key, value in layouts.items()),
        "order": Order.from_json(_object(_value(data, "order", "the plan"), "order")),
        "stage_seconds": _each(data, "stage_seconds", "the plan", _pair),
        "predicted": _prediction(_object(_value(data, "predicted", "the plan"), "predicted")),
        "memory": _each(data, "memory", "the plan", _bytes),
        "limits": _each(data, "limits", "the plan", _text),
        "runners_up": _each(data, "runners_up", "the plan", _runner_up),
        "binding": _text(_value(data, "binding", "the plan"), "binding"),
        "replica_seconds": _list(
            data.get("replica_seconds", []), "replica_seconds", lambda item, at: _list(item, at, _pair)
        ),
    }


def _model(data: Mapping[str, Any]) -> PlannedModel:
    _only(data, ("shape", "digest", "modules", "layers"), "model")
    shape = model_from_json(_object(_value(data, "shape", "model"), "model: shape"), where="model").shape
    return PlannedModel(
        shape=shape,
        digest=_text(_value(data, "digest", "model"), "model: digest"),
        modules=_each(data, "modules", "model", _text),
        layers=_each(data, "layers", "model", _text),
    )


def _cluster(data: Mapping[str, Any]) -> PlannedCluster:
    _only(data, ("name", "digest", "rank_names", "memory_bytes", "devices", "nodes"), "cluster")
    return PlannedCluster(
        name=_text(_value(data, "name", "cluster"), "cluster: name"),
        digest=_text(_value(data, "digest", "cluster"), "cluster: digest"),
        rank_names=_each(data, "rank_names", "cluster", _text),
        memory_bytes=_each(data, "memory_bytes", "cluster", _bytes),
        devices=_each(data, "devices", "cluster", _text),
        nodes=_each(data, "nodes", "cluster", _text),
    )


def _job(mesh: Mapping[str, Any], data: Mapping[str, Any], at: str) -> Job:
    _only(data, (*_JOB, "shares", "coshard"), at)
    for name in _JOB:
        value = _value(data, name, at)
        if name.startswith(("is_", "has_")) and not isinstance(value, bool):
            raise UsageError(f"{at}: {name} is {value!r}; it must be true or false")
        if name in ("recompute", "executor"):
            _text(value, f"{at}: {name}")
        elif not name.startswith(("is_", "has_")):
            whole_number(value, f"{at}: {name}", least=0, most=_MOST)
    degrees = {name: whole_number(_value(mesh, name, "mesh"), f"mesh: {name}", most=_MOST) for name in _MESH}
    shares = _list(data.get("shares", []), f"{at}: shares", lambda item, place: whole_number(item, place, most=_MOST))
    pieces = whole_number(data.get("coshard", 1), f"{at}: coshard", most=_MOST)
    return Job(mesh=Mesh(**degrees), **{name: data[name] for name in _JOB}, shares=shares, coshard=pieces)


def _prediction(data: Mapping[str, Any]) -> Prediction:
    _only(data, [f.name for f in fields(Prediction)], "predicted")
    parts = data.get("parts")
    return Prediction(
        seconds=real_number(_value(data, "seconds", "predicted"), "predicted: seconds", least=0),
        error=real_number(_value(data, "error", "predicted"), "predicted: error", least=0),
        parts=None
        if parts is None
        else {
            name: real_number(value, f"predicted: parts: {name}")
            for name, value in _object(parts, "predicted: parts").items()
        },
        num_rows=whole_number(data.get("num_rows", 0), "predicted: num_rows", least=0, most=_MOST),
        source=_text(data.get("source", ""), "predicted: source"),
    )


def _runner_up(item: object, at: str) -> RunnerUp:
    data = _object(item, at)
    _only(data, ("mesh", "job", "layers", "seconds", "memory_bytes", "binding"), at)
    mesh = _object(_value(data, "mesh", at), f"{at}: mesh")
    _only(mesh, _MESH, f"{at}: mesh")
    return RunnerUp(
        job=_job(mesh, _object(_value(data, "job", at), f"{at}: job"), f"{at}: job"),
        layers=_each(data, "layers", at, _rank),
        seconds=real_number(_value(data, "seconds", at), f"{at}: seconds", least=0),
        memory_bytes=_bytes(_value(data, "memory_bytes", at), f"{at}: memory_bytes"),
        binding=_text(data.get("binding", ""), f"{at}: binding"),
    )


def _whole(digits: str) -> int:
    """A whole number of a file. What is longer than any count here would overflow where it is divided."""
    if len(digits) > 20:
        raise UsageError(f"{digits[:20]}... is a number of {len(digits)} digits, which nothing in a plan has")
    return int(digits)


def _constant(word: str) -> float:
    raise UsageError(f"{word} is no number of JSON")


# -- kinds of values --------------------------------------------------------------------------------------------


def _object(value: object, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{at} is {_shown(value)}; it must be an object of JSON")
    return value


def _only(data: Mapping[str, Any], known: Any, at: str) -> None:
    for key in data:
        if key not in known:
            raise UsageError(f"{at} has an unknown key {key!r}{nearest(str(key), known)}; known: {', '.join(known)}")


def _value(data: Mapping[str, Any], key: str, at: str) -> Any:
    if key not in data:
        raise UsageError(f"{at}: the key {key!r} is missing{nearest(key, map(str, data), 'is it what you wrote as')}")
    return data[key]


def _text(value: object, at: str) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(f"{at} is {_shown(value)}; it must be a text that can be shown")
    return value


def _rank(value: object, at: str) -> int:
    return whole_number(value, at, least=0, most=_MOST)


def _bytes(value: object, at: str) -> int:
    return whole_number(value, at, least=0, most=_MOST)


def _pair(value: object, at: str) -> tuple[float, float]:
    seconds = _list(value, at, lambda item, place: real_number(item, place, least=0))
    if len(seconds) != 2:
        raise UsageError(f"{at} has {len(seconds)} numbers; it must have two, forward and backward")
    return seconds[0], seconds[1]


def _list(value: object, at: str, item: Callable[[object, str], _Item]) -> tuple[_Item, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{at} is {_shown(value)}; it must be a list")
    return tuple(item(one, f"{at}[{place}]") for place, one in enumerate(value))


def _each(data: Mapping[str, Any], key: str, at: str, item: Callable[[object, str], _Item]) -> tuple[_Item, ...]:
    return _list(_value(data, key, at), key if at == "the plan" else f"{at}: {key}", item)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."
