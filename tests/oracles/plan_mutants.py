"""Plans with one thing changed: an operation left out, doubled, exchanged, redirected, or another number."""

from __future__ import annotations

import copy
import random
from typing import Any

Json = dict[str, Any]


def mutant(plan: Json, chance: random.Random) -> tuple[str, Json]:
    """A mutant of a plan, and what was done to it."""
    while True:
        changed = copy.deepcopy(plan)
        what = chance.choice(_CHANGES)(changed, chance)
        if what and changed != plan:
            return what, changed


def _lists(plan: Json) -> list[list[Json]]:
    lists = [block["ops"] for gpu in plan["gpus"] for block in gpu["threadblocks"]]
    return [ops for ops in lists + [op["ops"] for ops in lists for op in ops if "ops" in op] if ops]


def _delete(plan: Json, chance: random.Random) -> str:
    ops = chance.choice(_lists(plan))
    return f"delete {ops.pop(chance.randrange(len(ops)))['name']}"


def _delete_everywhere(plan: Json, chance: random.Random) -> str:
    """The same operation on all ranks, so that signals and waits still match."""
    name = chance.choice([op["name"] for ops in _lists(plan) for op in ops])
    number = chance.randrange(3)
    for ops in _lists(plan):
        found = [at for at, op in enumerate(ops) if op["name"] == name]
        if len(found) > number:
            del ops[found[number]]
    return f"delete {name} {number} everywhere"


def _unmatch(plan: Json, chance: random.Random) -> str:
    """A signal and a wait, or a release and an acquire, everywhere."""
    first, second = chance.choice((("signal", "wait"), ("rlxsignal", "rlxwait"), ("sem_release", "sem_acquire")))
    last = chance.random() < 0.5
    for ops in _lists(plan):
        for name in (first, second):
            found = [at for at, op in enumerate(ops) if op["name"] == name]
            if found:
                del ops[found[-1 if last else 0]]
    return f"delete {first} and {second}"


def _repeat(plan: Json, chance: random.Random) -> str:
    ops = chance.choice(_lists(plan))
    at = chance.randrange(len(ops))
    ops.insert(chance.randrange(len(ops) + 1), copy.deepcopy(ops[at]))
    return f"repeat {ops[at]['name']}"


def _exchange(plan: Json, chance: random.Random) -> str:
    ops = chance.choice(_lists(plan))
    a, b = chance.randrange(len(ops)), chance.randrange(len(ops))
    ops[a], ops[b] = ops[b], ops[a]
    return f"exchange {ops[a]['name']} and {ops[b]['name']}"


def _move_block(plan: Json, chance: random.Random) -> str:
    """An operation in another thread block of the rank that can say it."""
    gpu = chance.choice(plan["gpus"])
    ops = chance.choice(gpu["threadblocks"])["ops"]
    if not ops:
        return ""
    op = ops.pop(chance.randrange(len(ops)))
    other = chance.choice(gpu["threadblocks"])["ops"]
    other.insert(chance.randrange(len(other) + 1), op)
    return f"move {op['name']}"


def _shift(plan: Json, chance: random.Random) -> str:
    op, span = _span(plan, chance)
    span["index"] = max(0, span["index"] + chance.choice((-2, -1, 1, 2)))
    return f"shift {op}"


def _buffer(plan: Json, chance: random.Random) -> str:
    op, span = _span(plan, chance)
    if "type" in span:
        span["type"] = chance.choice("ios")
    elif "buffer_id" in span:
        span["buffer_id"] += chance.choice((-1, 1))
    return f"buffer of {op}"


def _span(plan: Json, chance: random.Random) -> tuple[str, Json]:
    spans = [
        (op["name"], span)
        for ops in _lists(plan)
        for op in ops
        for side in ("src_buff", "dst_buff")
        for span in op.get(side, ())
    ]
    return chance.choice(spans)


def _rename(plan: Json, chance: random.Random) -> str:
    pairs = {
        "signal": "rlxsignal", "rlxsignal": "signal", "wait": "rlxwait", "rlxwait": "wait", "nop": "nop",
        "respkt": "repkt", "recpkt": "recspkt", "pwsf": "pws", "pws": "put", "glres": "gstore", "rres": "rre",
        "cpkt": "copy", "copy": "cpkt", "upkt": "copy", "ppkt": "put", "put": "ppkt",
    }  # fmt: skip
    op = chance.choice([op for ops in _lists(plan) for op in ops])
    before = op["name"]
    op["name"] = pairs.get(before, before)
    return f"{before} for {op['name']}"


def _numbers(plan: Json, chance: random.Random) -> str:
    """A channel, semaphore, barrier or part of a group that is another."""
    places = [
        (op, key)
        for ops in _lists(plan)
        for op in ops
        for key in ("channel_ids", "semaphore_ids", "tbg_info", "iter_context", "barrier_id", "num_threadblocks")
        if op.get(key) not in (None, [])
    ]
    if not places:
        return ""
    op, key = chance.choice(places)
    if isinstance(op[key], list):
        at = chance.randrange(len(op[key]))
        op[key][at] = max(0, op[key][at] + chance.choice((-1, 1)))
    elif isinstance(op[key], dict):
        inner = chance.choice(sorted(op[key]))
        value = op[key][inner]
        op[key][inner] = chance.choice((value * 2, value + 1, max(0, value - 1), value // 2))
    else:
        op[key] = max(0, op[key] + chance.choice((-1, 1)))
    return f"{key} of {op['name']}"


def _wiring(plan: Json, chance: random.Random) -> str:
    gpu, n = chance.choice(plan["gpus"]), len(plan["gpus"])
    if chance.random() < 0.5 and gpu["remote_buffers"]:
        chance.choice(gpu["remote_buffers"])[chance.choice(("rank", "type"))] = chance.choice([*range(n), *"ios"])
        return "remote buffer"
    if not gpu["channels"]:
        return ""
    entry = chance.choice(gpu["channels"])
    if "connected_to" in entry:
        entry["connected_to"][chance.randrange(len(entry["connected_to"]))] = chance.randrange(n)
    else:
        entry["rank_groups"][0]["ranks"] = chance.sample(range(n), chance.randrange(1, n + 1))
        entry["rank_groups"][0]["size"] = len(entry["rank_groups"][0]["ranks"])
    return "channel"


def _flag(plan: Json, chance: random.Random) -> str:
    key = chance.choice(("use_double_scratch_buffer", "inplace", "reuse_resources"))
    plan[key] = not plan[key]
    return key


def _semaphore(plan: Json, chance: random.Random) -> str:
    known = [entry for gpu in plan["gpus"] for entry in gpu["semaphores"]]
    if not known:
        return ""
    chance.choice(known)["init_value"] += 1
    return "a semaphore's first value"


_CHANGES = (
    _delete, _delete_everywhere, _unmatch, _repeat, _exchange, _move_block, _shift, _buffer, _rename, _numbers,
    _wiring, _flag, _semaphore,
)  # fmt: skip
