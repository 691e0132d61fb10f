"""The channel language: plans that come out right in a machine that hurries nobody, and errors at authors' lines."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import random
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.oracles.plan_machine import defect
from tests.oracles.plan_mutants import mutant

from mycel.collectives.channels import ChannelPlan
from mycel.collectives.export import export
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import check_plan
from mycel.errors import ScheduleError, UsageError, VerificationError
from mycel.topology import load_topology
from mycel.topology.builders import star

Json = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "examples" / "plans.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_plans", EXAMPLES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


examples = _load()
MAKERS = examples.PLANS


def sizes_of(plan: Json) -> list[Json]:
    ops = all_ops(plan)
    steps = [op["iter_context"]["unit_size"] for op in ops if "iter_context" in op]
    runs = 4 if plan["use_double_scratch_buffer"] else 2
    if steps:
        return [{"units": units, "unit_bytes": max(16, min(steps)), "runs": runs} for units in (1, 3)]
    parts = max([op["tbg_info"]["tbg_size"] for op in ops if "tbg_info" in op], default=1)
    return [{"units": units, "runs": runs} for units in ((parts, parts + 2) if parts > 1 else (1,))]


def machine(plan: Json, seeds: range = range(3)) -> str | None:
    return next((found for size in sizes_of(plan) if (found := defect(plan, seeds, **size))), None)


def all_ops(plan: Json) -> list[Json]:
    return [op for gpu in plan["gpus"] for block in gpu["threadblocks"] for op in block["ops"]]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_examples_are_right_in_the_machine(make: Any, num_ranks: int) -> None:
    plan = make(num_ranks).build()
    assert check_plan(plan)["num_ranks"] == num_ranks
    assert json.loads(make(num_ranks).to_text()) == plan
    assert machine(plan) is None


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_meeting_stands_only_where_it_is_needed(make: Any) -> None:
    plan = make(2).build()
    for gpu in plan["gpus"]:
        for block in gpu["threadblocks"]:
            for ops in [block["ops"], *(op["ops"] for op in block["ops"] if "ops" in op)]:
                for at, op in enumerate(ops):
                    if op["name"] == "nop":
                        del ops[at]
                        with pytest.raises(VerificationError):
                            check_plan(plan)
                        ops.insert(at, op)


def test_what_mutants_become() -> None:
    """Whatever passes is right in the machine. ``benchmarks/plan_mutants.py`` does more of them."""
    chance = random.Random(11)
    plans = [make(2).build() for make in MAKERS] + [make(3).build() for make in MAKERS]
    seen: Counter[str] = Counter()
    for _ in range(250):
        what, changed = mutant(chance.choice(plans), chance)
        try:
            check_plan(changed)
        except ScheduleError:
            seen["refused"] += 1
            continue
        seen["taken"] += 1
        assert machine(changed, range(2)) is None, (what, changed)
    assert seen["refused"] > 3 * seen["taken"] > 0


def test_a_plan_without_a_put_is_refused_at_the_statement() -> None:
    """All of all_gather but what it is for: the signals and waits match."""
    plan = ChannelPlan("all_gather", 2, in_place=True)
    blocks = [rank.block() for rank in plan.ranks]
    for end in plan.memory(*blocks):
        end.signal()
        end.wait()
    with pytest.raises(VerificationError, match="contribution of rank 1 is missing"):
        plan.build()


def test_errors_point_at_the_authors_line() -> None:
    plan = ChannelPlan("all_gather", 2, in_place=True)
    blocks = [rank.block() for rank in plan.ranks]
    for end in plan.memory(*blocks):
        mine = end.block.rank
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        end.put(plan.ranks[mine].output[mine], plan.ranks[end.peer].output[mine])
        end.signal()
        end.wait()
    with pytest.raises(VerificationError, match=rf"\(put\).*\(written at test_channels\.py:{line}\)"):
        plan.build()


def test_a_block_of_another_rank_is_not_reached_by_hand() -> None:
    plan = ChannelPlan("all_reduce", 2, chunks=2)
    first, second = plan.ranks
    block = first.block()
    with pytest.raises(UsageError, match=r"output\[0:1\] of rank 1 is not this rank's"):
        block.copy(first.input[0], second.output[0])
    with pytest.raises(UsageError, match=r"chunks 2\.\.2, but it has 2"):
        first.input[2]
    with pytest.raises(UsageError, match="no run of chunks"):
        first.scratch[3:3]
    with pytest.raises(UsageError, match="semaphore 0 is of rank 1"):
        block.acquire(second.semaphore())
    with pytest.raises(UsageError, match="to itself"):
        plan.memory(block, first.block())
    with pytest.raises(UsageError, match="at least two parts"):
        block.reduce(first.input[0], first.input[0])
    end, _ = plan.memory(block, second.block())
    with pytest.raises(UsageError, match="on a channel to rank 1"):
        end.put(first.input[0], first.output[0])
    with pytest.raises(UsageError, match="for a thread block of rank 1"):
        end.of(second.block())
    with pytest.raises(UsageError, match="sing"):
        ChannelPlan("sing", 2)


def test_packets_of_one_run_wait_for_the_run_before() -> None:
    """With one scratch for all runs, a rank may overwrite a packet that has not been read."""
    plan = examples.packets(3).build()
    assert check_plan(plan)
    ours = copy.deepcopy(plan)
    for gpu in ours["gpus"]:  # nobody hears any more of those that have read: results go nowhere
        gpu["threadblocks"][0]["ops"] = [op for op in gpu["threadblocks"][0]["ops"] if op["name"] == "ppkt"]
    with pytest.raises(VerificationError):
        check_plan(ours)
    one_way = ChannelPlan("sendrecv", 2, protocol="LL")
    blocks = [rank.block() for rank in one_way.ranks]
    for end in one_way.memory(*blocks):
        mine, other = one_way.ranks[end.block.rank], one_way.ranks[end.peer]
        end.put_packets(mine.input[0], other.scratch[0])
        end.block.unpack(mine.scratch[0], mine.output[0])
    assert machine(one_way._json(), range(40)) is not None
    with pytest.raises(VerificationError, match=r"of run 1 and .* of run 2 touch it in no fixed order"):
        one_way.build()


def test_a_packet_is_written_once_and_read_where_it_is() -> None:
    plan = examples.packets(2).build()
    twice = copy.deepcopy(plan)
    ops = twice["gpus"][0]["threadblocks"][0]["ops"]
    ops.insert(0, copy.deepcopy(ops[0]))
    with pytest.raises(VerificationError, match="nobody could tell them apart"):
        check_plan(twice)
    ops.pop(0)
    ops.pop(0)
    with pytest.raises(VerificationError, match="waits for ever for packets in scratch"):
        check_plan(twice)


def test_a_pipeline_that_goes_round_in_its_scratch() -> None:
    """Scratch of a fixed length: a step that waits for nobody overwrites what an earlier one has put there."""

    def make(credits: int | None, longest: int) -> ChannelPlan:
        plan = ChannelPlan("all_gather", 2, reuses_scratch=True, message_bytes=(0, longest), name="round", chunks=1)
        for one, other in (plan.ranks, plan.ranks[::-1]):
            sender, taker = one.block(), other.block()
            there, here = plan.memory(sender, taker)
            back = plan.memory(sender, taker) if credits is not None else None
            here.signal(is_relaxed=True)
            there.wait(is_relaxed=True)
            for _ in range(credits or 0):
                back[1].signal()  # type: ignore[index]
            with sender.pipeline(1 << 23):
                if back:
                    back[0].wait()
                there.put(one.input[0], other.scratch[one.number])
                there.signal()
            with taker.pipeline(1 << 23):
                here.wait()
                taker.copy(other.scratch[one.number], other.output[one.number])
                if back:
                    back[1].signal()
            for _ in range(credits or 0):
                back[0].wait()  # type: ignore[index]
            here.signal()
            there.wait()
            one.block().copy(one.input[0], one.output[one.number])
        return plan

    assert make(None, 1 << 26).build()  # 32 MB a chunk, as long as its scratch
    with pytest.raises(VerificationError, match="which do not fit into scratch at once"):
        make(None, 1 << 27).build()
    assert make(4, 1 << 30).build()
    with pytest.raises(VerificationError, match=r"fit into scratch at once.*written at test_channels\.py"):
        make(5, 1 << 30).build()


def test_what_would_take_hours_is_refused() -> None:
    plan = examples.pipeline(2).build()
    for op in all_ops(plan):
        if "iter_context" in op:
            op["iter_context"]["unit_size"] = 16 if op["ops"][0]["name"] == "put" else 1 << 30
    with pytest.raises(ScheduleError, match="rounds of its pipelines"):
        check_plan(plan)
    plan = examples.group(2).build()
    for op in all_ops(plan):
        if "tbg_info" in op:
            op["tbg_info"]["tbg_size"] = 97
    with pytest.raises(ScheduleError, match="97 sizes at which groups"):
        check_plan(plan)
    plan = examples.packets(2).build()
    for gpu in plan["gpus"]:
        for key in ("input_chunks", "output_chunks", "scratch_chunks"):
            gpu[key] = 1 << 20
    for op in all_ops(plan):
        for side in (*op.get("src_buff", ()), *op.get("dst_buff", ())):
            side["size"] = 1 << 19
    with pytest.raises(ScheduleError, match=r"\d+ packets; up to"):
        check_plan(plan)


def test_schedules_of_switches_that_add_are_exported_through_them() -> None:
    for fabric in (star(num_ranks=3, computes=True), load_topology("dgx_h100:nodes=1,nvls=true")):
        schedule = synthesize(fabric, Collective(name="all_reduce", num_ranks=fabric.num_ranks))
        plan = json.loads(export(schedule, "mscclpp_json"))
        kinds = {entry["channel_type"] for gpu in plan["gpus"] for entry in gpu["channels"]}
        assert kinds == {"memory", "switch"} and "glres" in {op["name"] for op in all_ops(plan)}
        assert machine(plan, range(1)) is None
    wide = load_topology("dgx_h100:nodes=2,nvls=true")
    with pytest.raises(ScheduleError, match="a switch channel is one switch that all ranks reach"):
        export(synthesize(wide, "all_reduce"), "mscclpp_json")


def test_broken_json_gives_an_error_line_and_nothing_else() -> None:
    """Any value in place of any other, or left out, in everything that the format has."""
    chance = random.Random(5)
    junk: tuple[Any, ...] = (None, True, -1, 0, 1, 4096, 1 << 20, 1 << 40, 1.5, "", "s", "switch", [], [0], {}, [[]])
    originals = [make(2).build() for make in MAKERS]
    for _ in range(300):
        plan = copy.deepcopy(chance.choice(originals))
        at: Any = plan
        while True:
            key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or chance.random() < 0.15:
                break
            at = at[key]
        at[key] = chance.choice(junk)
        try:
            check_plan(plan)
        except ScheduleError as error:
            assert "\n" not in str(error)
