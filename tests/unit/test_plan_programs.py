"""Plans as programs: right by the verifier, and by the same numbers as the plan, whatever the length."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from tests.unit.test_channels import MAKERS, examples

import judge
import mutants
from mycel.collectives.export import export
from mycel.collectives.plan_programs import PlanPart, load_plan, programs_of
from mycel.collectives.program import Buffer, Channel, Instruction, Op, Program
from mycel.collectives.simulate import _Traffic
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import program_sums_agree, verify_programs
from mycel.errors import ScheduleError, UsageError, VerificationError
from mycel.topology import load_topology
from mycel.topology.builders import star

Json = dict[str, Any]


def exported(method: str, name: str, num_ranks: int = 3) -> Json:
    made = synthesize(star(num_ranks=num_ranks), name, method)  # type: ignore[arg-type]
    return json.loads(export(made, "mscclpp_json"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_length(make: Any, num_ranks: int) -> None:
    template = load_plan(make(num_ranks).build())
    for count in (1, 2, 3, 7, 100):
        num_elements = count if template.collective.name == "all_reduce" else count * num_ranks
        for pieces in (None, 3):
            programs = programs_of(template, num_elements, piece_elements=pieces)
            verify_programs(programs)
            longest = max(int(p.columns["count"][p.columns["channel"] >= 0].max(initial=0)) for p in programs)
            assert pieces is None or longest <= pieces
    assert program_sums_agree(programs)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_exported_schedules_come_back(name: str) -> None:
    template = load_plan(exported("direct" if name == "all_to_all" else "tree", name))
    for num_elements in (9, 90):
        verify_programs(programs_of(template, num_elements))


def test_a_sendrecv_is_an_all_to_all_with_a_block_a_rank() -> None:
    template = load_plan(examples.shift(3).build())
    assert template.collective.to_text() == "all_to_all 3 weights 0,1,0,0,0,1,1,0,0"
    programs = programs_of(template, 6)
    verify_programs(programs)
    assert [p.length(Buffer.INPUT) for p in programs] == [2, 2, 2]


def test_one_rank_at_a_time() -> None:
    template = load_plan(examples.pairs(3).build())
    parts = [PlanPart(template=template, rank=rank) for rank in range(3)]
    programs = [part.expand(12, 1 << 10) for part in parts]
    verify_programs(programs)
    assert [program.channels for program in programs] == [part.channels for part in parts]
    with pytest.raises(ScheduleError, match="equal blocks only"):
        parts[0].expand(12, 4, block_elements=(6, 3, 3))


def test_what_does_not_fit() -> None:
    plan = examples.pairs(4).build()
    with pytest.raises(ScheduleError, match="13 elements do not divide into 4 blocks"):
        programs_of(plan, 13)
    with pytest.raises(UsageError, match="a plan for 4 ranks on star_3, which has 3"):
        load_plan(plan, star(num_ranks=3))
    with pytest.raises(ScheduleError, match="through other ranks only"):
        programs_of(plan, 16, topology=load_topology("ring:ranks=4"))
    verify_programs(programs_of(plan, 16, topology=star(num_ranks=4)))
    plan["gpus"][0]["threadblocks"][0]["ops"].pop(3)
    with pytest.raises(VerificationError):
        load_plan(plan)


def test_plans_with_the_same_content_have_the_same_digest() -> None:
    one, other = load_plan(examples.pairs(3).build()), load_plan(json.loads(examples.pairs(3).to_text()))
    assert one.digest == other.digest != load_plan(examples.pairs(2).build()).digest


def test_the_simulator_plays_local_instructions_after_what_they_need() -> None:
    programs = programs_of(examples.packets(3).build(), 30)
    traffic = _Traffic.of(programs)
    total = sum(len(program.columns) for program in programs)
    num_local = sum(int((program.columns["op"] >= Op.COPY).sum()) for program in programs)
    assert num_local and len(traffic.waits_for) == total == 2 * len(traffic.channel) + num_local
    starts, successors = traffic.successors
    left = traffic.waits_for.copy()
    left[len(traffic.channel) : 2 * len(traffic.channel)] -= 1  # messages arrive
    ready = [node for node in range(total) if left[node] == 0]
    for node in ready:
        for other in successors[starts[node] : starts[node + 1]]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(int(other))
    assert len(ready) == total


def test_mutants_of_programs_with_local_sums_are_refused_as_the_judge_does() -> None:
    """In both directions: what is refused is wrong, and what is taken is right."""
    chance = random.Random(3)
    sources = [programs_of(make(2).build(), 6) for make in MAKERS] + [programs_of(exported("tree", "all_reduce"), 9)]
    assert any(Op.REDUCE in {i.op for p in programs for i in p.instructions} for programs in sources)
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(600):
        try:
            changed = mutants.program_mutant(chance.choice(sources), chance.choice(mutants.PROGRAM_KINDS), chance)
        except ScheduleError:
            continue
        if changed is None:
            continue
        try:
            verify_programs(changed)
            taken = True
        except VerificationError:
            taken = False
        found = judge.judge_programs(changed)
        assert taken == (found is None), (found, [program.to_text() for program in changed])
        seen[taken, found is None] += 1
    assert seen[True, True] > 20 and seen[False, False] > 100


CHANNELS = (Channel(src=0, dst=1, path=(0, 1)), Channel(src=1, dst=0, path=(1, 0)))


def pair(final: bool = True, needs: tuple[int, ...] = (1,), sends_first: bool = True) -> list[Program]:
    """Two ranks that put each other's array into scratch and add it then."""
    made = []
    for rank in range(2):
        send = Instruction(op=Op.SEND, channel=rank, buffer=Buffer.OUTPUT, offset=0, count=4)
        take = Instruction(op=Op.RECV, channel=1 - rank, buffer=Buffer.SCRATCH, offset=0, count=4)
        add = Instruction(
            op=Op.REDUCE,
            channel=-1,
            buffer=Buffer.OUTPUT,
            offset=0,
            count=4,
            operand_buffer=Buffer.SCRATCH,
            final=final,
            needs=(*needs, 0) if sends_first else needs,
        )
        made.append(
            Program.from_instructions(
                [send, take, add],
                collective=Collective(name="all_reduce", num_ranks=2),
                rank=rank,
                num_elements=4,
                scratch_elements=4,
                channels=CHANNELS,
            )
        )
    return made


def test_a_local_sum_is_proved_as_others_are() -> None:
    verify_programs(pair())
    with pytest.raises(VerificationError, match="no reduction of it is marked final"):
        verify_programs(pair(final=False))
    with pytest.raises(VerificationError, match="in no fixed order"):
        verify_programs(pair(sends_first=False))
    with pytest.raises(VerificationError):
        verify_programs(pair(needs=()))
    assert "2: reduce output[0:+4] with scratch[0] final needs 1,0" in pair()[0].to_text()
