"""The best plan of an iteration by CP-SAT, with its proof; starts from a plan and is stopped at any time.

Forwards are in one order and so are backwards, so computation is a chain of starts; transfers are optional intervals
that exclude each other on their stream; near memory is one cumulative resource, of intervals from the start of what
brings something to the end of what takes it away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from mycel.collectives.cp_sat import cp_sat
from mycel.pipeline.search.solving import Clock
from mycel.planning.residency.instance import MemoryInstance
from mycel.planning.residency.plan import POLICIES, MemoryPlan, Step

__all__ = ["Exact"]

#: Of a microsecond, in which sums of transfers are told as whole numbers.
_PARTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variables:
    forward: list[Any]
    backward: list[Any]
    again: list[Any]
    out: list[Any]
    back: list[Any]
    choice: list[list[Any]]
    end: Any


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A model of an iteration.

    Attributes:
        instance: what is planned.
        known: a plan to improve on.
        bound_us: that no plan is below.
    """

    instance: MemoryInstance
    known: MemoryPlan
    bound_us: int

    def solve(self, clock: Clock, told: Callable[[int, int], None]) -> tuple[MemoryPlan, int]:
        """The best plan found, and a bound.

        Args:
            clock: the time there is.
            told: is called with time and bound of each plan that is found.
        """
        cp = cp_sat("planning memory exactly")
        model = cp.CpModel()
        variables = self._build(model)
        self._hint(model, variables)

        def found(callback: Any) -> None:
            told(int(callback.objective_value), int(callback.best_objective_bound))

        answer, solver = clock.solve(model, found=found)
        bound = self.bound_us
        if answer != "late" or solver_began(solver):
            bound = max(bound, round(solver.best_objective_bound))
        if answer not in ("optimal", "found"):
            return self.known, min(bound, self.known.iteration_us)
        plan = self._plan(solver, variables, bound)
        return (plan if plan.iteration_us < self.known.iteration_us else self.known), bound

    def _build(self, model: Any) -> _Variables:
        instance, blocks = self.instance, self.instance.blocks
        count, horizon = len(blocks), self.known.iteration_us
        forward = [model.new_int_var(0, horizon, f"forward {k}") for k in range(count)]
        backward = [model.new_int_var(0, horizon, f"backward {k}") for k in range(count)]
        again = [model.new_int_var(0, horizon, f"recompute {k}") for k in range(count)]
        out = [model.new_int_var(0, horizon, f"out {k}") for k in range(count)]
        back = [model.new_int_var(0, horizon, f"in {k}") for k in range(count)]
        choice = [[model.new_bool_var(f"{policy} {k}") for policy in POLICIES] for k in range(count)]
        outs, backs, held, demands = [], [], [], []

        def hold(name: str, start: Any, end: Any, amount: int, on: Any) -> None:
            if amount:
                size = model.new_int_var(0, horizon, f"{name} size")
                held.append(model.new_optional_interval_var(start, size, end, on, name))
                demands.append(amount)

        for k, block in enumerate(blocks):
            keep, swap, recompute, both = choice[k]
            model.add_exactly_one(choice[k])
            f_end, b_end = forward[k] + block.forward_us, backward[k] + block.backward_us
            again_end = again[k] + block.forward_us
            rest = block.saved - block.input
            is_again = model.new_bool_var(f"again {k}")
            model.add(recompute + both == is_again)
            out_us = swap * instance.out_us(block.saved) + both * instance.out_us(block.input)
            back_us = swap * instance.in_us(block.saved) + both * instance.in_us(block.input)
            out_end = model.new_int_var(0, horizon, f"out end {k}")
            back_end = model.new_int_var(0, horizon, f"in end {k}")
            model.add(out_end == out[k] + out_us)
            model.add(back_end == back[k] + back_us)
            for on, amount in ((swap, block.saved), (both, block.input)):
                outs.append(model.new_optional_fixed_size_interval_var(out[k], instance.out_us(amount), on, f"o {k}"))
                backs.append(
                    model.new_optional_fixed_size_interval_var(back[k], instance.in_us(amount), on, f"i {k}")
                )
                model.add(out[k] >= f_end).only_enforce_if(on)
                model.add(back[k] >= out_end).only_enforce_if(on)
            model.add(back_end <= backward[k]).only_enforce_if(swap)
            model.add(back_end <= again[k]).only_enforce_if(both)
            model.add(again_end <= backward[k]).only_enforce_if(is_again)
            # What came before the backward on the chain of computations.
            if k + 1 < count:
                model.add(f_end <= forward[k + 1])
                before = backward[k + 1] + blocks[k + 1].backward_us
            else:
                before = f_end
            model.add(before + block.forward_us * is_again <= backward[k])
            model.add(before <= again[k]).only_enforce_if(is_again)
            hold(f"keep {k}", forward[k], b_end, block.saved, keep)
            hold(f"swap out {k}", forward[k], out_end, block.saved, swap)
            hold(f"swap in {k}", back[k], b_end, block.saved, swap)
            hold(f"rest {k}", forward[k], f_end, rest, is_again)
            hold(f"rest again {k}", again[k], b_end, rest, is_again)
            hold(f"input {k}", forward[k], b_end, block.input, recompute)
            hold(f"input out {k}", forward[k], out_end, block.input, both)
            hold(f"input in {k}", back[k], b_end, block.input, both)
        model.add_no_overlap(outs)
        model.add_no_overlap(backs)
        model.add_cumulative(held, demands, instance.capacity)
        self._links_have_time(model, forward, backward, choice)
        end = backward[0] + blocks[0].backward_us
        ideal = instance.ideal_us
        computed = sum(block.forward_us * (choice[k][2] + choice[k][3]) for k, block in enumerate(blocks))
        model.add(end >= ideal + computed)
        model.add(end >= self.bound_us)
        model.add(end <= horizon)
        model.minimize(end)
        return _Variables(forward=forward, backward=backward, again=again, out=out, back=back, choice=choice, end=end)

    def _links_have_time(self, model: Any, forward: list[Any], backward: list[Any], choice: list[list[Any]]) -> None:
        """What follows from the rules, as sums that linear relaxations see: equal blocks are proved by them.

        Of blocks ``j`` to ``i``, what has to be gone when the forward of ``i`` begins, even if all before ``j`` is
        gone, was dropped or had the way out since the forward of ``j`` ended; and what cannot be there yet when the
        backward of ``i`` begins has the way in until that of ``j``.
        """
        instance, blocks = self.instance, self.instance.blocks

        def time(num_bytes: int, rate: float) -> float:
            return num_bytes / rate * _PARTS

        for i, block in enumerate(blocks):
            beside = instance.capacity - block.saved
            held, dropped, coming, gone, stays = -beside, 0, 0, 0, 0
            there = ceil(time(beside, instance.in_bytes_per_us))
            for j in range(i - 1, -1, -1):
                keep, swap, recompute, both = choice[j]
                saved, input_, again = blocks[j].saved, blocks[j].input, recompute + both
                held += saved
                dropped += again * ceil(time(saved - input_, instance.out_bytes_per_us))
                coming += (keep + swap) * floor(time(saved, instance.in_bytes_per_us))
                coming += again * floor(time(input_, instance.in_bytes_per_us))
                gone += swap * saved + recompute * (saved - input_) + both * saved
                stays += keep * saved + recompute * input_
                if held <= 0:
                    continue
                need = floor(time(held, instance.out_bytes_per_us))
                model.add(need - dropped <= _PARTS * (forward[i] - forward[j] - blocks[j].forward_us))
                model.add(coming - there <= _PARTS * (backward[j] - backward[i]))
            if held > 0:
                model.add(gone >= held)
                model.add(stays <= beside)

    def _hint(self, model: Any, variables: _Variables) -> None:
        place = {
            "forward": variables.forward,
            "backward": variables.backward,
            "recompute": variables.again,
            "out": variables.out,
            "in": variables.back,
        }
        for step in self.known.schedule:
            model.add_hint(place[step.action][step.block], step.start_us)
        for k, policy in enumerate(self.known.policy):
            for name, var in zip(POLICIES, variables.choice[k], strict=True):
                model.add_hint(var, name == policy)

    def _plan(self, solver: Any, variables: _Variables, bound: int) -> MemoryPlan:
        steps: list[Step] = []
        policy = []
        for k in range(len(self.instance.blocks)):
            mine = next(name for name, var in zip(POLICIES, variables.choice[k], strict=True) if solver.value(var))
            policy.append(mine)
            steps.append(Step(action="forward", block=k, start_us=solver.value(variables.forward[k])))
            steps.append(Step(action="backward", block=k, start_us=solver.value(variables.backward[k])))
            if mine in ("recompute", "recompute_swap"):
                steps.append(Step(action="recompute", block=k, start_us=solver.value(variables.again[k])))
            if mine in ("swap", "recompute_swap"):
                steps.append(Step(action="out", block=k, start_us=solver.value(variables.out[k])))
                steps.append(Step(action="in", block=k, start_us=solver.value(variables.back[k])))
        end = solver.value(variables.end)
        steps.sort(key=lambda step: (step.start_us, step.block))
        return MemoryPlan(
            policy=tuple(policy),
            schedule=tuple(steps),
            iteration_us=end,
            lower_bound_us=min(bound, end),
            source="exact",
        )


def solver_began(solver: Any) -> bool:
    """Whether a search began at all, so that there is a bound to ask for."""
    try:
        return bool(solver.wall_time > 0)
    except RuntimeError:
        return False
