"""Whether plans are right: mutants against rules written a second time, fuzzed files, and messages for people."""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.plan_rules import wrong_with
from tests.plans_by_hand import by_hand, described, five_plans, job, pieces_plan, unequal_plans

from mycel.errors import MycelError, UsageError
from mycel.planning.cluster import load_cluster
from mycel.planning.models import from_hugging_face, load_model, read_model
from mycel.planning.plan import Plan, read_plan

UNEQUAL = unequal_plans()
PLANS = five_plans() | {"unequal": UNEQUAL["unequal"], "pieces": pieces_plan()}
EVERY = PLANS | UNEQUAL
Change = Callable[[dict[str, Any], random.Random], None]


@pytest.mark.parametrize("name", EVERY)
def test_right_plans_pass_and_survive_their_json(name: str) -> None:
    plan = EVERY[name]
    plan.validate()
    assert wrong_with(plan.to_json()) == ""
    assert Plan.from_json(plan.to_text()) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# -- mutants ----------------------------------------------------------------------------------------------------


def degree(plan: dict[str, Any], rng: random.Random) -> None:
    """Another degree, or two of them changed so that they multiply as before."""
    mesh = plan["mesh"]
    first, second = rng.sample(["pp", "dp", "tp", "cp"], 2)
    if rng.random() < 0.5:
        mesh[first], mesh[second] = mesh[second], mesh[first]
    elif mesh[first] % 2 == 0 and rng.random() < 0.7:
        mesh[first], mesh[second] = mesh[first] // 2, mesh[second] * 2
    else:
        mesh[first] = rng.choice([1, 2, 3, 4, 8, 16, 0, -1])


def experts(plan: dict[str, Any], rng: random.Random) -> None:
    """Expert parallelism of a model without experts."""
    plan["mesh"]["ep"] = rng.choice([2, 3, 4, 0])


def ranks(plan: dict[str, Any], rng: random.Random) -> None:
    """Ranks swapped, doubled, out of range, one too few; sometimes with what follows from it put right."""
    places = plan["mesh"]["ranks"]
    i, j = rng.sample(range(len(places)), 2)
    kind = rng.randrange(5)
    if kind == 0:
        places[i], places[j] = places[j], places[i]
    elif kind == 1:
        places[i] = places[j]
    elif kind == 2:
        places[i] = len(plan["cluster"]["rank_names"]) + rng.randrange(3)
    elif kind == 3:
        places.pop(i)
    else:
        rng.shuffle(places)
    if rng.random() < 0.6 and len(places) == len(PLANS_RANKS[plan["cluster"]["name"]]):
        derive(plan)


def derive(plan: dict[str, Any]) -> None:
    """Ranks of stages as mesh and order say; memory goes with the place."""
    size = max(1, len(plan["mesh"]["ranks"]) // max(1, len(plan["order"]["rows"])))
    for place, row in enumerate(plan["order"]["rows"]):
        group = plan["mesh"]["ranks"][place * size : (place + 1) * size]
        for cell in row:
            stage = int(cell.split("F")[0].split("B")[0].split("I")[0].split("W")[0])
            held = plan["memory"][plan["stage_ranks"][stage][0]] if stage < len(plan["stage_ranks"]) else 0
            plan.setdefault("held", {})[stage] = (group, held)
    for stage, (group, _) in plan.pop("held").items():
        plan["stage_ranks"][stage] = list(group)


def stage_ranks(plan: dict[str, Any], rng: random.Random) -> None:
    """Stages on other ranks than the mesh says."""
    rows = plan["stage_ranks"]
    i = rng.randrange(len(rows))
    if rng.random() < 0.5 and len(rows) > 1:
        j = rng.choice([k for k in range(len(rows)) if k != i])
        rows[i], rows[j] = rows[j], rows[i]
    elif rng.random() < 0.5:
        rows[i][rng.randrange(len(rows[i]))] += 1
    else:
        rng.shuffle(rows[i])


def cut(plan: dict[str, Any], rng: random.Random) -> None:
    """Boundaries moved, modules swapped, left out, doubled, misspelt; a stage left empty."""
    stages = plan["cut"]
    i = rng.randrange(len(stages))
    kind = rng.randrange(6)
    if kind == 0 and i + 1 < len(stages):
        count = rng.randint(1, len(stages[i]))
        stages[i + 1][:0] = stages[i][-count:]
        del stages[i][-count:]
    elif kind == 1 and len(stages[i]) > 1:
        a, b = rng.sample(range(len(stages[i])), 2)
        stages[i][a], stages[i][b] = stages[i][b], stages[i][a]
    elif kind == 2:
        stages[i].pop(rng.randrange(len(stages[i])))
    elif kind == 3:
        stages[i].append(rng.choice(plan["model"]["modules"]))
    elif kind == 4:
        stages[i][rng.randrange(len(stages[i]))] += rng.choice(["0", "x", "."])
    else:
        stages.pop(i)


def layout(plan: dict[str, Any], rng: random.Random) -> None:
    """Layouts that are none, of no module, or where nothing is shared."""
    layouts = plan["layouts"]
    if not layouts:
        layouts["model.layers.*.self_attn.q_proj"] = "colwise"
        return
    name = rng.choice(list(layouts))
    kind = rng.randrange(4)
    if kind == 0:
        layouts[name] = rng.choice(["columnwise", "rowise", "S(0)", "", "replicate"])
    elif kind == 1:
        layouts[name.replace("layers", "layer").replace("lm_", "ln_")] = layouts.pop(name)
    elif kind == 2:
        layouts.clear()
    else:
        layouts[f"decoder.{name}"] = "rowwise"


_LIMITS = [
    *("tp<=1", "tp<=8", "pp=2", "pp=4", "dp<=1", "micro_batch=1", "memory<=20GiB", "memory<=79GiB", "tp in node"),
    *("stage 0 on node0", "stage 1 on node0", "stage 9 on node0", "stage 0 on nowhere"),
]


def limit(plan: dict[str, Any], rng: random.Random) -> None:
    """Limits that the plan breaks, or keeps; and clusters with less memory."""
    plan["limits"].append(rng.choice(_LIMITS))
    if rng.random() < 0.4:
        sizes = plan["cluster"]["memory_bytes"]
        for rank in rng.sample(range(len(sizes)), rng.randint(1, len(sizes))):
            sizes[rank] = int(sizes[rank] * rng.uniform(0.1, 1.0))


def memory(plan: dict[str, Any], rng: random.Random) -> None:
    """Other amounts than the stages need."""
    rank = rng.randrange(len(plan["memory"]))
    plan["memory"][rank] = int(plan["memory"][rank] * rng.choice([0, 0.5, 0.9, 1.1, 2]))


def work(plan: dict[str, Any], rng: random.Random) -> None:
    """Actions doubled, left out, swapped, moved to another row."""
    rows = plan["order"]["rows"]
    row = rng.choice(rows)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    kind = rng.randrange(4)
    if kind == 0:
        row.insert(j, row[i])
    elif kind == 1:
        row.pop(i)
    elif kind == 2:
        row[i], row[j] = row[j], row[i]
    else:
        rng.choice(rows).append(row.pop(i))


def batch(plan: dict[str, Any], rng: random.Random) -> None:
    """Another batch, length, policy or sharding than memory and order were worked out for."""
    sizes = ["global_batch", "micro_batch", "seq", "chunks", "recompute", "zero", "is_offloaded", "coshard"]
    name, said = rng.choice(sizes), plan["job"]
    if name == "recompute":
        said[name] = rng.choice(["none", "full", "attention", "alternate"])
    elif name == "is_offloaded":
        said[name] = not said[name]
    elif name == "coshard":
        said[name] = rng.choice([1, 2, 4, 8, 16, 3, 0])
    else:
        said[name] = rng.choice([said[name] * 2, said[name] + 1, max(0, said[name] - 1), 1, 3])


def times(plan: dict[str, Any], rng: random.Random) -> None:
    """A step that is shorter than its work."""
    if rng.random() < 0.5:
        plan["predicted"]["seconds"] *= rng.uniform(0.05, 1.5)
    else:
        pair = rng.choice(plan["stage_seconds"])
        pair[rng.randrange(2)] *= rng.choice([2, 100])


def shares(plan: dict[str, Any], rng: random.Random) -> None:
    """Other shares of the batch, or none; times of replicas that are not theirs; what goes with no shares."""
    said = plan["job"].setdefault("shares", [plan["job"]["global_batch"]])
    i = rng.randrange(len(said))
    kind = rng.randrange(7)
    if kind == 0:
        said[i] += rng.choice([-1, 1])
    elif kind == 1:
        said[i], said[-1 - i] = said[i] + 1, said[-1 - i] - 1
    elif kind == 2:
        rng.shuffle(said)
    elif kind == 3:
        said.append(said.pop(i) // 2)
    elif kind == 4:
        plan["job"]["zero"] = 3
    elif kind == 5:
        del plan["job"]["shares"]
    else:
        plan["replica_seconds"][i][0][0] *= rng.choice([0.5, 2, 100])


def model(plan: dict[str, Any], rng: random.Random) -> None:
    """Another model under the same name."""
    shape = plan["model"]["shape"]
    key = rng.choice(["num_layers", "hidden", "num_heads", "num_kv_heads", "ffn", "vocab"])
    shape[key] = rng.choice([shape[key] + 1, shape[key] * 2, max(1, shape[key] // 2)])


CHANGES: list[Change] = [
    *(degree, experts, ranks, ranks, stage_ranks, cut, cut, layout, limit, limit),
    *(memory, work, batch, batch, times, shares, model),
]
#: Most of what these change is what replicas share.
UNEQUAL_CHANGES: list[Change] = [*CHANGES, *(shares,) * 8, *(times, work, batch)]
PLANS_RANKS = {plan.cluster.name: plan.cluster.rank_names for plan in EVERY.values()}


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 250), pytest.param(1, 5000, marks=pytest.mark.long)], ids=["some", "many"]
)
@pytest.mark.parametrize(
    ("plans", "kinds"), [(PLANS, CHANGES), (UNEQUAL, UNEQUAL_CHANGES)], ids=["all", "unequal shares"]
)
def test_no_wrong_mutant_is_accepted(plans: dict[str, Plan], kinds: list[Change], seed: int, count: int) -> None:
    rng = random.Random(seed)
    told = [plan.to_json() for plan in plans.values()]
    verdicts: Counter[str] = Counter()
    for number in range(count):
        mutant = copy.deepcopy(rng.choice(told))
        changes = rng.sample(kinds, rng.choice([1, 1, 1, 2]))
        names = [change.__name__ for change in changes]
        try:
            for change in changes:
                change(mutant, rng)
        except (IndexError, KeyError, ValueError):
            continue  # the second change found nothing left to change
        try:
            Plan.from_json(mutant).validate()
        except MycelError as error:
            assert str(error)
            assert "\n" not in str(error)
            verdicts["refused"] += 1
            continue
        why = wrong_with(mutant)
        assert why == "", f"mutant {number} ({', '.join(names)}) was accepted: {why}"
        verdicts["accepted"] += 1
    # Some mutants are right (limits that are kept, ranks that change places): who refuses all proves nothing.
    assert verdicts["refused"] > 0.6 * count
    assert verdicts["accepted"] > 0.03 * count


def test_the_rules_themselves_see_what_is_wrong() -> None:
    """The oracle, with mutants of one kind each that can only be wrong."""
    told = PLANS["pipeline"].to_json()

    def judged(change: Callable[[dict[str, Any]], None]) -> str:
        mutant = copy.deepcopy(told)
        change(mutant)
        return wrong_with(mutant).partition(":")[0]

    assert judged(lambda p: p["mesh"]["ranks"].pop()) == "mesh"
    assert judged(lambda p: p["mesh"].update(tp=4, dp=1)) == "order"
    assert judged(lambda p: p["cut"][0].reverse()) == "cut"
    assert judged(lambda p: p["order"]["rows"][0].reverse()) == "order"
    assert judged(lambda p: p["stage_ranks"].reverse()) == "stages"
    assert judged(lambda p: p["layouts"].update({"lm_head": "both"})) == "layouts"
    assert judged(lambda p: p["cluster"]["memory_bytes"].__setitem__(0, 1 << 30)) == "memory"
    assert judged(lambda p: p["limits"].append("tp<=1")) == "limits"
    assert judged(lambda p: p["predicted"].update(seconds=1.0)) == "times"
    told = PLANS["pieces"].to_json()
    assert wrong_with(told) == ""
    assert judged(lambda p: p["job"].update(coshard=3)) == "model"
    assert judged(lambda p: p["job"].update(coshard=2)) == "memory"
    assert judged(lambda p: p["job"].update(recompute="alternate")) == "mesh"
    assert judged(lambda p: p["job"].pop("coshard")) == "layouts"
    assert judged(lambda p: p["limits"].append("coshard<=4")) == "limits"
    told = PLANS["unequal"].to_json()
    assert wrong_with(told) == ""
    assert judged(lambda p: p["job"].update(shares=[39, 24])) == "mesh"
    assert judged(lambda p: p["job"].update(zero=3)) == "mesh"
    assert judged(lambda p: p["job"].update(shares=[41, 23])) == "order"
    assert judged(lambda p: p.pop("replica_seconds")) == "times"
    assert judged(lambda p: p["replica_seconds"][1][0].__setitem__(0, 1e9)) == "times"


# -- fuzz -------------------------------------------------------------------------------------------------------

_ODD: list[Any] = [
    *(None, True, "", "x" * 300, [], {}, -1, 0, 1.5, 10**12, 10**30, [[]], {"a": 1}, "\u202e", "\x00"),
    *(float("inf"), float("nan"), 2**63, [None], "1", 1e308),
]


def damaged(text: str, rng: random.Random) -> str:
    """A text with some letters changed, or a part of its JSON replaced by something odd."""
    if rng.random() < 0.3:
        letters = list(text)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(letters))
            letters[place] = rng.choice(
                ['"', "{", "}", "[", "]", ",", ":", "9", "-", "e", "\\", "\x00", "\u00fc", ""]
            )
        return "".join(letters)[: rng.choice([len(letters), rng.randrange(len(letters))])]
    data = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        at, key = data, None
        while isinstance(at, (dict, list)) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = rng.choice(keys)
            if rng.random() < 0.4 or not isinstance(at[key], (dict, list)) or not at[key]:
                break
            at = at[key]
        if key is None:
            break
        kind = rng.randrange(4)
        if kind == 0:
            at[key] = copy.deepcopy(rng.choice(_ODD))
        elif kind == 1:
            del at[key]
        elif kind == 2 and isinstance(at, dict):
            at[f"{key}_"] = at.pop(key)
        elif isinstance(at[key], (int, float)) and not isinstance(at[key], bool):
            at[key] = at[key] * rng.choice([-1, 2, 10**6, 10**9])
    return json.dumps(data)


def texts_of_models() -> list[str]:
    llama = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    megatron = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "swiglu": True}
    titan = {"dim": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 256, "ffn_dim_multiplier": 1.3}
    files: list[dict[str, Any]] = [
        llama | {"intermediate_size": 128, "vocab_size": 256},
        megatron,
        titan,
        load_model("tiny").to_json(),
        load_model("llama3-8b").to_json(),
    ]
    return [json.dumps(file) for file in files]


@pytest.mark.parametrize(
    ("seed", "count"), [(2, 300), pytest.param(3, 3000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_fuzzed_files_give_an_error_line_or_a_plan(seed: int, count: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    plans = [plan.to_text() for plan in EVERY.values()]
    models = texts_of_models()
    slowest, ended = 0.0, Counter[str]()
    for number in range(count):
        is_plan = number % 2 == 0
        text = damaged(rng.choice(plans if is_plan else models), rng)
        file = tmp_path / "fuzzed.json"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        began = time.process_time()
        try:
            if is_plan:
                read_plan(file).validate()
            else:
                load_model(str(file)).shape.flops_per_token(128)
            ended["read"] += 1
        except MycelError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 2100
            ended["refused"] += 1
        slowest = max(slowest, time.process_time() - began)
    assert ended["refused"] > count / 4
    assert slowest < 1.0, f"{slowest:.2f} s of processor time for one file"


# -- messages ---------------------------------------------------------------------------------------------------


def refused(plan: dict[str, Any] | Plan, **given: Any) -> str:
    with pytest.raises(MycelError) as caught:
        (plan if isinstance(plan, Plan) else Plan.from_json(plan)).validate(**given)
    return str(caught.value)


def changed(name: str = "pipeline", **parts: Any) -> dict[str, Any]:
    told = copy.deepcopy(PLANS[name].to_json())
    for key, value in parts.items():
        told[key] = {**told[key], **value} if isinstance(value, dict) else value
    return told


def test_a_mesh_that_does_not_multiply() -> None:
    assert "pp 4 x dp 4 x cp 1 x tp 2 has 32 ranks, and the plan names 16" in refused(changed(mesh={"dp": 4}))


def test_a_newer_version_says_to_update() -> None:
    text = refused(changed(version=2))
    assert "version 2" in text
    assert "update mycel" in text


def test_an_unknown_key_names_the_nearest() -> None:
    told = changed()
    told["stage_rank"] = told.pop("stage_ranks")
    assert "did you mean 'stage_ranks'" in refused(told)


def test_a_plan_for_another_model_says_what_differs() -> None:
    plan = PLANS["pipeline"]
    other = described("llama3-70b")
    assert "with num_layers 32, and 'llama3-70b' has 80" in refused(plan, model=other)
    tiny = load_model("tiny")
    assert "search for a plan of this model" in refused(plan, model=tiny)
    ours = by_hand(load_cluster("h100:nodes=1"), tiny, job(pp=4, dp=2, seq=128), (3, 3, 3, 3))
    renamed = tuple(replace(m, name=f"{m.name}_") for m in tiny.modules)
    text = refused(ours, model=replace(tiny, modules=renamed))
    assert "which the model does not have (did you mean" in text


def test_pieces_of_what_ranks_share_or_of_what_does_not_divide() -> None:
    text = refused(changed("pieces", mesh={"dp": 2, "tp": 2}))
    assert "coshard=8 with tp=2" in text and "set tp=1, or coshard=1" in text
    assert "coshard=16 does not divide the 8 heads of keys" in refused(changed("pieces", job={"coshard": 16}))
    assert "every piece is done again whole" in refused(changed("pieces", job={"recompute": "attention"}))
    text = refused(changed("pieces", layouts={}) | {"layouts": {}})
    assert "coshard=8, and no module has a layout" in text


def test_ranks_of_plan_and_cluster_differ() -> None:
    plan = PLANS["pipeline"]
    text = refused(plan, cluster=load_cluster("h100:nodes=4"))
    assert "for the 16 ranks of h100_x2, and h100_x4 has 32: search for a plan of this cluster" in text
    plan.validate(cluster=load_cluster("h100:nodes=2"))


def test_an_unknown_module_names_the_closest() -> None:
    told = changed()
    told["cut"][1][0] = "model.layer.9"
    assert "'model.layer.9', which llama3-8b does not have (did you mean 'model.layers.9'?)" in refused(told)


def test_what_does_not_fit_says_which_rank_and_what() -> None:
    told = changed()
    told["cluster"]["memory_bytes"][2] = 20 << 30
    text = refused(told)
    assert "rank 2 (node0/2) at place 0" in text
    assert "most of it" in text
    assert "too much" in text


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (("no.json", None), ("half.json", "{"), ("list.json", "[]"), ("bytes.json", "\xff")):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content.encode("latin-1"))
        with pytest.raises(UsageError, match=name):
            read_plan(file)


def test_models_of_unknown_families_name_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'llama'"):
        from_hugging_face({"model_type": "lama"})
    with pytest.raises(UsageError, match="neither Hugging Face"):
        read_model({"layers": 3})
