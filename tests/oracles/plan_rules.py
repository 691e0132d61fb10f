"""What makes a plan right, written a second time and without anything of mycel: rules over the JSON of plans.

Memory is the model's sizes in scalars (Korthikanti et al., MLSys 2023; Rajbhandari et al., SC 2020), for dense models
in 16 bits with attention on the chip, as the plans of the tests are; the docs state the same formulas.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

__all__ = ["wrong_with"]

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_SIZES = {"GiB": 1 << 30, "GB": 1 << 30, "MiB": 1 << 20}


def wrong_with(plan: dict[str, Any]) -> str:
    """The first rule that a plan breaks; empty where it keeps all."""
    for rule in (_mesh, _model, _cut, _order, _stages, _layouts, _memory, _limits, _times):
        if complaint := rule(plan):
            return f"{rule.__name__[1:]}: {complaint}"
    return ""


def _mesh(plan: dict[str, Any]) -> str:
    mesh, job = plan["mesh"], plan["job"]
    ranks, count = mesh["ranks"], len(plan["cluster"]["rank_names"])
    if mesh["pp"] * mesh["dp"] * mesh["cp"] * mesh["tp"] != len(ranks):
        return "does not multiply"
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < count for rank in ranks):
        return "a rank twice, or none of the cluster"
    if not _batches(plan) or job["seq"] % mesh["cp"]:
        return "batch or tokens do not divide"
    if "shares" in job and (mesh["ep"] > 1 or job["zero"] == 3):
        return "unequal shares of what replicas exchange for every micro-batch"
    if _pieces(plan) > 1 and (
        max(mesh["tp"], mesh["cp"], mesh["ep"]) > 1 or job["recompute"] not in ("none", "full")
    ):
        return "pieces of layers that are shared, or partly done again"
    if len(plan["memory"]) != count or len(plan["cluster"]["memory_bytes"]) != count:
        return "sizes of memory are not one a rank"
    return ""


def _pieces(plan: dict[str, Any]) -> int:
    """That layers are cut into."""
    return int(plan["job"].get("coshard", 1))


def _batches(plan: dict[str, Any]) -> list[int]:
    """Micro-batches of each replica; none where they do not make the batch."""
    mesh, job = plan["mesh"], plan["job"]
    each = job["global_batch"] // (mesh["dp"] * job["micro_batch"])
    shares: list[int] = job.get("shares", [each] * mesh["dp"])
    is_whole = min(shares) > 0 and sum(shares) * job["micro_batch"] == job["global_batch"]
    return shares if len(shares) == mesh["dp"] and is_whole else []


def _model(plan: dict[str, Any]) -> str:
    shape, mesh, model = plan["model"]["shape"], plan["mesh"], plan["model"]
    if shape["num_heads"] % mesh["tp"]:
        return "heads do not divide"
    if shape["num_kv_heads"] % mesh["tp"] and mesh["tp"] % shape["num_kv_heads"]:
        return "heads of keys do not divide"
    if mesh["ep"] > 1 and (not shape["num_experts"] or shape["num_experts"] % mesh["ep"]):
        return "experts do not divide"
    cut = (shape["num_heads"], shape["num_kv_heads"], shape["ffn"], shape["num_experts"])
    if _pieces(plan) < 1 or (
        _pieces(plan) > 1 and (any(size % _pieces(plan) for size in cut) or shape["num_experts"])
    ):
        return "heads or inner columns do not divide into pieces, or there are experts"
    if len(model["layers"]) != shape["num_layers"] or not set(model["layers"]) <= set(model["modules"]):
        return "layers are not those of the model"
    return ""


def _cut(plan: dict[str, Any]) -> str:
    if len(plan["cut"]) != plan["mesh"]["pp"] * plan["job"]["chunks"] or not all(plan["cut"]):
        return "not one list of modules a stage"
    if [name for stage in plan["cut"] for name in stage] != plan["model"]["modules"]:
        return "not all modules once, in order"
    return ""


def _order(plan: dict[str, Any]) -> str:
    order, mesh = plan["order"], plan["mesh"]
    micro_batches = max(_batches(plan))
    if len(order["rows"]) != mesh["pp"]:
        return "not one row a place"
    rows = []
    for row in order["rows"]:
        cells = [_CELL.fullmatch(cell) for cell in row]
        if not all(cells):
            return "an action that is none"
        rows.append([(cell[2], int(cell[1]), int(cell[3])) for cell in cells if cell])
    stages = len(plan["cut"])
    work: Counter[tuple[str, int, int]] = Counter(action for row in rows for action in row)
    if any(count > 1 for count in work.values()):
        return "work done twice"
    expected = {(stage, m) for stage in range(stages) for m in range(micro_batches)}
    if {(s, m) for kind, s, m in work if kind == "F"} != expected:
        return "forwards missing, or too many"
    for stage, m in expected:
        kinds = sorted(kind for kind in "BIW" if (kind, stage, m) in work)
        if kinds not in (["B"], ["I", "W"]):
            return "a backward missing, or too many"
    if {(s, m) for kind, s, m in work if kind != "F"} != expected:
        return "backwards of what there is not"
    homes: dict[int, set[int]] = {}
    for place, row in enumerate(rows):
        for _, stage, _ in row:
            homes.setdefault(stage, set()).add(place)
    if any(len(places) > 1 for places in homes.values()):
        return "a stage at two places"
    for count in set(_batches(plan)):
        if not _ends([[action for action in row if action[2] < count] for row in rows], stages):
            return "waits for ever"
    return ""


def _ends(rows: list[list[tuple[str, int, int]]], stages: int) -> bool:
    """Whether everything is done if each row does its next action as soon as what it needs is done."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for place, row in enumerate(rows):
            while at[place] < len(row):
                kind, stage, m = row[at[place]]
                if kind == "F":
                    ready = stage == 0 or ("F", stage - 1, m) in done
                elif kind == "W":
                    ready = ("I", stage, m) in done
                else:
                    above = stage == stages - 1 or ("B", stage + 1, m) in done or ("I", stage + 1, m) in done
                    ready = ("F", stage, m) in done and above
                if not ready:
                    break
                done.add((kind, stage, m))
                at[place] += 1
                moved = True
    return all(place == len(row) for place, row in zip(at, rows, strict=True))


def _homes(plan: dict[str, Any]) -> dict[int, int]:
    found = {}
    for place, row in enumerate(plan["order"]["rows"]):
        for cell in row:
            found[int(re.match(r"\d+", cell)[0])] = place  # type: ignore[index]
    return found


def _group(plan: dict[str, Any], place: int) -> list[int]:
    size = len(plan["mesh"]["ranks"]) // plan["mesh"]["pp"]
    ranks: list[int] = plan["mesh"]["ranks"][place * size : (place + 1) * size]
    return ranks


def _stages(plan: dict[str, Any]) -> str:
    homes = _homes(plan)
    if len(plan["stage_ranks"]) != len(plan["cut"]):
        return "not one list of ranks a stage"
    for stage, ranks in enumerate(plan["stage_ranks"]):
        if ranks != _group(plan, homes[stage]):
            return "ranks of a stage are not those of its place"
    return ""


def _layouts(plan: dict[str, Any]) -> str:
    if (max(plan["mesh"]["tp"], _pieces(plan)) > 1) != bool(plan["layouts"]):
        return "layouts where nothing is shared or cut, or the other way round"
    for pattern, layout in plan["layouts"].items():
        if layout not in ("colwise", "rowwise", "replicate"):
            return "a layout that is none"
        found = False
        for module in plan["model"]["modules"]:
            own, other = module.split("."), pattern.split(".")
            ends = len(own) <= len(other)
            found |= ends and all(a == b or (b == "*" and a.isdigit()) for a, b in zip(own, other, strict=False))
        if not found:
            return "a layout of no module"
    return ""


def _needed(plan: dict[str, Any], place: int) -> float:
    """Bytes of a rank at a place."""
    shape, job, mesh = plan["model"]["shape"], plan["job"], plan["mesh"]
    hidden, heads, width = shape["hidden"], shape["num_heads"], shape["head_dim"]
    kv, ffn, vocab, tp = shape["num_kv_heads"], shape["ffn"], shape["vocab"], mesh["tp"]
    homes, layers = _homes(plan), set(plan["model"]["layers"])
    mine = [stage for stage, home in homes.items() if home == place]
    count = sum(name in layers for stage in mine for name in plan["cut"][stage])
    matrices = 3 if shape["is_gated"] else 2
    layer = hidden * width * 2 * (heads + kv) + matrices * hidden * ffn + 2 * hidden * shape["norm_width"]
    parameters = count * layer / tp
    parameters += (0 in mine) * vocab * hidden / tp
    is_last = len(plan["cut"]) - 1 in mine
    parameters += (is_last and not (shape["is_tied"] and mesh["pp"] == 1)) * vocab * hidden / tp
    shards, zero = mesh["dp"] * mesh["cp"], job["zero"]
    share = parameters / shards
    each = shape.get("element_bytes", 2)
    held = 4 * share if zero == 3 else each * parameters
    held += (4 if zero == 3 else job["gradient_bytes"]) * (share if zero >= 2 else parameters)
    if not job["is_offloaded"]:
        held += (8 if zero == 3 or each == 4 else 12) * (share if zero >= 1 else parameters)
    tokens = job["micro_batch"] * job["seq"] / mesh["cp"]
    row, alone = tokens * hidden, tp if job["is_sequence_parallel"] else 1
    core, keys = heads * width, 2 * kv * width
    inner = (2 + 2 * shape["is_gated"]) * ffn
    whole = each * (4 * row / alone + tokens * (core + keys + core + inner) / tp) + 4 * tokens * heads / tp
    norms, pieces = 4 * each * row / alone, _pieces(plan)
    products = each * (tokens * (core + keys + ffn * (1 + shape["is_gated"])) / 2 / tp + row / alone)
    kept = {
        "none": whole if pieces == 1 else norms,
        "full": each * row / alone,
        "alternate": products + each * (row / alone + tokens * core / tp),
        "attention": whole - 4 * tokens * heads / tp,
    }[job["recompute"]]
    flight = most = 0
    for cell in plan["order"]["rows"][place]:
        flight += ("F" in cell) - ("B" in cell or "W" in cell)
        most = max(most, flight)
    held += count / job["chunks"] * kept * most
    if pieces > 1:
        held += norms * (job["recompute"] == "full") + (whole - norms) / pieces + each * layer
    elif job["recompute"] in ("full", "alternate"):
        held += whole
    if mesh["pp"] > 1:
        message = each * row / (tp if job["is_sequence_parallel"] or job["is_scattered"] else 1)
        ends = job["chunks"] > 1
        held += message * (2 * (place > 0 or ends) + (place < mesh["pp"] - 1 or ends))
    held += is_last * (2 * each if job["is_loss_fused"] else 12 if each == 2 else 8) * tokens * vocab / tp
    if zero == 3 and shards > 1:
        edge = vocab * hidden / tp if 0 in mine or is_last else 0
        held += (each + job["gradient_bytes"]) * parameters if mesh["pp"] > 1 else 2 * each * max(layer / tp, edge)
    if job["is_sequence_parallel"] and tp > 1:
        held += (2 if job["is_async_tp"] else 4) * each * row
    return 1.06 * held + 2 * (1 << 30)


def _memory(plan: dict[str, Any]) -> str:
    used = set(plan["mesh"]["ranks"])
    if any(held for rank, held in enumerate(plan["memory"]) if rank not in used):
        return "a rank without a place holds something"
    for place in range(plan["mesh"]["pp"]):
        needed = _needed(plan, place)
        for rank in _group(plan, place):
            if needed > 1.01 * plan["cluster"]["memory_bytes"][rank]:
                return "a rank holds more than it has"
            if abs(plan["memory"][rank] - needed) > 0.03 * needed:
                return "a rank holds another amount than is said"
    return ""


def _limits(plan: dict[str, Any]) -> str:
    mesh, job, cluster = plan["mesh"], plan["job"], plan["cluster"]
    numbers = {**{k: mesh[k] for k in ("pp", "dp", "tp", "cp", "ep")}, "micro_batch": job["micro_batch"]}
    numbers["coshard"] = _pieces(plan)
    for text in plan["limits"]:
        if found := re.fullmatch(r"(\w+) ?(<=|=) ?(\d+)", text):
            value = numbers.get(found[1])
            if value is None or not (value <= int(found[3]) if found[2] == "<=" else value == int(found[3])):
                return text
        elif found := re.fullmatch(r"memory<=(\d+)(GiB|MiB|GB)", text):
            if max(plan["memory"]) > int(found[1]) * _SIZES[found[2]]:
                return text
        elif text in ("shares=equal", "shares=unequal"):
            if (text == "shares=unequal") != ("shares" in job):
                return text
        elif text == "tp in node":
            for first in range(0, len(mesh["ranks"]), mesh["tp"]):
                group = mesh["ranks"][first : first + mesh["tp"]]
                if len({cluster["nodes"][rank] for rank in group}) > 1:
                    return text
        elif found := re.fullmatch(r"stage (\d+) on (\S+)", text):
            if int(found[1]) >= len(plan["stage_ranks"]):
                return text
            for rank in plan["stage_ranks"][int(found[1])]:
                if found[2] not in (cluster["nodes"][rank], cluster["rank_names"][rank]):
                    return text
        else:
            return f"no limit that is known: {text}"
    return ""


def _times(plan: dict[str, Any]) -> str:
    homes, batches = _homes(plan), _batches(plan)
    of_replicas = plan.get("replica_seconds", [plan["stage_seconds"]] * len(batches))
    if ("replica_seconds" in plan) != ("shares" in plan["job"]) or len(of_replicas) != len(batches):
        return "times of replicas without shares of theirs, or the other way round"
    for count, stages in zip(batches, of_replicas, strict=True):
        if len(stages) != len(plan["cut"]):
            return "not one time a stage"
        load: Counter[int] = Counter()
        for stage, seconds in enumerate(stages):
            load[homes[stage]] += sum(seconds) * count
            if sum(seconds) > 1.01 * sum(plan["stage_seconds"][stage]):
                return "a replica is slower than the slowest"
        if max(load.values()) > 1.01 * plan["predicted"]["seconds"]:
            return "a step is shorter than its work"
    return ""
