"""Chooses a schedule for every load: proposed by a cost model, corrected by a few measured steps, remembered."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.brief import brief
from mycel.comm.groups import flat_group
from mycel.errors import UsageError
from mycel.moe.flex.cost import CostModel, Load
from mycel.moe.flex.measure import measure_costs, now
from mycel.moe.overlap import Beside
from mycel.moe.recompute import Memo, recomputing
from mycel.moe.routed import HeldExperts, RoutedExperts
from mycel.moe.schedule import ExpertSchedule, Tuner
from mycel.moe.slots import RoutingResult
from mycel.untraced import untraced

__all__ = ["Chooser"]

#: A load's order of magnitude: slots a token, tokens in octaves, and whether there is a backward pass.
Bucket = tuple[int, int, bool]


@dataclass(slots=True, kw_only=True)
class Record:
    """A step under measurement.

    Attributes:
        bucket: of its load.
        plan: it is carried out by.
        spent_s: of the forward pass and, once it has ended, of the backward pass.
        ended: both have.
    """

    bucket: Bucket
    plan: ExpertSchedule
    spent_s: float = 0.0
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class Choice:
    """What is known of a bucket.

    Attributes:
        predicted_s: of every plan.
        measured_s: steps of those tried.
        chosen: once there is one.
    """

    predicted_s: dict[ExpertSchedule, float]
    measured_s: dict[ExpertSchedule, list[float]] = field(default_factory=dict)
    chosen: ExpertSchedule | None = None

    __repr__ = brief


class Chooser:
    """Chooses for one layer. All ranks choose alike: what they look at is agreed upon by one small all_reduce a call.

    Once a bucket's plan is chosen, a call costs that all_reduce, or nothing where ``same_load`` is promised.

    Args:
        settings: what to choose from.
        routed: of the layer.

    Attributes:
        table: what is known, by bucket.
    """

    def __init__(self, settings: Tuner, routed: RoutedExperts) -> None:
        self.settings, self.routed = settings, routed
        self.table: dict[Bucket, Choice] = {}
        self.costs: CostModel | None = None
        self.plans = self._plans()
        self._open: deque[Record] = deque()
        self._off: dict[ExpertSchedule, float] = {}
        self._runs: dict[ExpertSchedule, int] = {}
        self._last: dict[tuple[int, int], ExpertSchedule] = {}
        #: Plans of the latest passes of a load, until all of them had the chosen one.
        self._tried: dict[tuple[int, int], Memo[ExpertSchedule]] = {}

    def _plans(self) -> list[ExpertSchedule]:
        parallel, wanted = self.routed, self.settings
        algorithms = parallel.algorithms if wanted.algorithms is None else wanted.algorithms
        ways = parallel.layout.ways if wanted.ways is None else wanted.ways
        if parallel.layout.num_ranks == 1:  # nothing travels
            return [parallel.default]
        plans: set[ExpertSchedule] = set()
        for r in ways:
            if r == 0:
                plans.add(parallel.schedule(r=0, degree=1))
                continue
            for algorithm in algorithms:
                for degree in wanted.degrees:
                    for partition in wanted.partitions if degree > 1 else wanted.partitions[:1]:
                        if partition == "tokens" or degree <= parallel.layout.width:
                            plan = parallel.schedule(r=r, degree=degree, algorithm=algorithm, partition=partition)
                            plans.add(plan)
        return sorted(plans)

    @untraced  # it measures
    def __call__(
        self,
        experts: HeldExperts,
        x_TD: Tensor,
        routing: RoutingResult,
        schedule: ExpertSchedule | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        """As ``RoutedExperts``; where the call brings no schedule, by the one chosen for its load."""
        if schedule is not None:
            return self.routed(experts, x_TD, routing, schedule, beside)
        weights_TK = routing.top_k_weights
        training = torch.is_grad_enabled() and (x_TD.requires_grad or weights_TK.requires_grad)
        plan, record = self._begin(experts, x_TD, weights_TK.shape[1], training=training)
        if record is None:
            return self.routed(experts, x_TD, routing, plan, beside)
        begin = now(x_TD.device)
        if training:  # what needs no gradient stays that way, as when it is computed again, which is not measured
            wanted = [t for t in (x_TD, weights_TK) if t.requires_grad]
            begun = iter(_Watch.apply(record, False, *wanted))  # type: ignore[no-untyped-call]
            x_TD, weights_TK = [next(begun) if t.requires_grad else t for t in (x_TD, weights_TK)]
            routing = routing._replace(top_k_weights=weights_TK)
        y_TD = self.routed(experts, x_TD, routing, plan, beside)
        watched: tuple[Tensor, ...] = _Watch.apply(record, True, y_TD)  # type: ignore[no-untyped-call]
        record.spent_s = now(x_TD.device) - begin
        record.ended = not training
        return watched[0]

    def _begin(
        self, experts: HeldExperts, x: Tensor, slots_per_token: int, *, training: bool
    ) -> tuple[ExpertSchedule, Record | None]:
        """The plan of a call, and where to note how long it takes, if that is wanted."""
        local = (x.shape[0], slots_per_token)
        if recomputing() and local in self._last:
            tried = self._tried.get(local)
            return self._last[local] if tried is None else tried.again(x, self._last[local]), None
        if self.costs is None:
            self.costs = measure_costs(self.routed, experts, x.detach().new_zeros(1, x.shape[1]))
            self._read(x.device)
        bucket, choice = self._agree(x, slots_per_token, training)
        plan = choice.chosen
        if plan is not None:
            self._last[local] = plan
            if local in self._tried:  # passes of other plans may still be under way
                self._tried[local].note(x, plan)
                if self._tried[local].agrees(plan):
                    del self._tried[local]
            return plan, None
        plan = self._last[local] = self._trials(choice)[0]
        self._tried.setdefault(local, Memo()).note(x, plan)
        self._open.append(Record(bucket=bucket, plan=plan))
        return plan, self._open[-1]

    def _agree(self, x: Tensor, slots_per_token: int, training: bool) -> tuple[Bucket, Choice]:
        """The greatest load of all ranks, and with the same all_reduce the time of a step that has ended."""
        ended = self._take_ended()
        num_tokens, spent = x.shape[0], -1.0 if ended is None else ended.spent_s
        mesh = self.routed.mesh
        if mesh is not None and mesh.size() > 1 and (ended is not None or not self.settings.same_load):
            numbers = torch.tensor([float(num_tokens), spent], dtype=torch.float64, device=x.device)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=flat_group(mesh))
            most, spent = numbers.tolist()
            num_tokens = int(most)
        if ended is not None:
            self._note(ended, spent)
        octave = max(0, math.ceil(math.log2(max(1, num_tokens))))
        bucket = (slots_per_token, octave, training)
        if bucket not in self.table:
            load = Load(num_tokens=2**octave, slots_per_token=slots_per_token)
            self.table[bucket] = Choice(predicted_s=self._predict(load, training=training))
        return bucket, self.table[bucket]

    def _predict(self, load: Load, *, training: bool) -> dict[ExpertSchedule, float]:
        if self.costs is None:
            raise UsageError("the cost model has not been measured")
        return {plan: self.costs.seconds(plan, load, training=training) for plan in self.plans}

    def _take_ended(self) -> Record | None:
        """The oldest step that has ended; in the order of the program, so on all ranks the same one."""
        while len(self._open) > 64:  # never went backward
            self._open.popleft()
        ended = next((record for record in self._open if record.ended), None)
        if ended is not None:
            self._open = deque(record for record in self._open if record is not ended)
        return ended

    def _note(self, record: Record, spent: float) -> None:
        choice, plan = self.table[record.bucket], record.plan
        self._runs[plan] = self._runs.get(plan, 0) + 1
        if choice.chosen is not None or self._runs[plan] == 1:
            return
        choice.measured_s.setdefault(plan, []).append(spent)
        ratio = math.log(spent / max(1e-9, choice.predicted_s[plan]))
        self._off[plan] = ratio if plan not in self._off else 0.5 * (self._off[plan] + ratio)
        if not self._trials(choice):
            medians = {plan: statistics.median(found) for plan, found in choice.measured_s.items()}
            choice.chosen = min(medians, key=lambda plan: (medians[plan], plan))
            self._write()

    def _corrected(self, choice: Choice, plan: ExpertSchedule) -> float:
        """Predicted, by as much off as other loads were; what is unknown of a plan is taken from all others."""
        usual = statistics.fmean(self._off.values()) if self._off else 0.0
        return choice.predicted_s[plan] * math.exp(self._off.get(plan, usual))

    def _trials(self, choice: Choice) -> list[ExpertSchedule]:
        """Plans that are worth another step of measurement, those measured least first."""
        best = min((min(found) for found in choice.measured_s.values()), default=math.inf)
        order = sorted(self.plans, key=lambda plan: (self._corrected(choice, plan), plan))
        finalists = dict.fromkeys([*choice.measured_s, *order])
        worth = []
        for plan in list(finalists)[: max(self.settings.finalists, len(choice.measured_s))]:
            found = choice.measured_s.get(plan, [])
            if len(found) < self.settings.trials and (not found or min(found) <= best * self.settings.give_up):
                worth.append(plan)
        return sorted(worth, key=lambda plan: len(choice.measured_s.get(plan, [])))

    # -- remembered ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Choices made so far, for JSON."""
        return {
            "layout": asdict(self.routed.layout),
            "choices": [
                {
                    "bucket": list(bucket),
                    "chosen": asdict(choice.chosen),
                    "measured_s": [[asdict(plan), found] for plan, found in choice.measured_s.items()],
                    "predicted_s": [[asdict(plan), found] for plan, found in choice.predicted_s.items()],
                }
                for bucket, choice in self.table.items()
                if choice.chosen is not None
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Choices of ``state``; the same on all ranks.

        Raises:
            UsageError: they were made for another layout.
        """
        if state["layout"] != asdict(self.routed.layout):
            raise UsageError(f"choices are for {state['layout']}, the layer has {asdict(self.routed.layout)}")
        for kept in state["choices"]:
            slots_per_token, octave, training = kept["bucket"]
            self.table[slots_per_token, octave, training] = Choice(
                predicted_s={ExpertSchedule(**plan): found for plan, found in kept["predicted_s"]},
                measured_s={ExpertSchedule(**plan): found for plan, found in kept["measured_s"]},
                chosen=self.routed.schedule(ExpertSchedule(**kept["chosen"])),
            )

    def _read(self, device: torch.device) -> None:
        """From the first rank's file."""
        file, mesh = self.settings.file, self.routed.mesh
        if file is None:
            return
        text = file.read_text(encoding="utf-8") if self.routed.rank == 0 and file.exists() else ""
        if mesh is not None and mesh.size() > 1:
            group = flat_group(mesh)
            first = dist.get_process_group_ranks(group)[0]
            read = [text]
            dist.broadcast_object_list(read, src=first, group=group, device=device)
            text = read[0]
        if text:
            self.load(json.loads(text))

    def _write(self) -> None:
        if self.settings.file is not None and self.routed.rank == 0:
            self.settings.file.write_text(json.dumps(self.state(), indent=1) + "\n", encoding="utf-8")

    def explain(self) -> str:
        """For every bucket each plan that was tried, and the best that was not: predicted and measured ms."""
        lines = [f"{'load':24} {'r':>2} {'degree':>6} {'exchange':20} {'predicted':>9} {'measured':>9}"]
        for (slots, octave, training), choice in sorted(self.table.items()):
            load = f"<= {2**octave} tokens x {slots}" + (" train" if training else "")
            rank = {plan: self._corrected(choice, plan) for plan in choice.predicted_s}
            order = sorted(rank, key=lambda plan: (plan not in choice.measured_s, rank[plan]))
            for plan in order[: len(choice.measured_s) + 1]:
                found = choice.measured_s.get(plan, [])
                measured = f"{1e3 * statistics.median(found):9.2f}" if found else f"{'-':>9}"
                why = ""
                if plan == choice.chosen:
                    why = f"  <- fastest of {len(choice.measured_s)} tried, of {len(choice.predicted_s)}"
                exchange = "weights travel" if plan.r == 0 else plan.algorithm
                exchange += " by experts" if plan.partition == "experts" else ""
                predicted = 1e3 * choice.predicted_s[plan]
                lines.append(f"{load:24} {plan.r:2} {plan.degree:6} {exchange:20} {predicted:9.2f} {measured}{why}")
            if choice.chosen is None:
                lines.append(f"{load:24} still trying")
        return "\n".join(lines)


class _Watch(torch.autograd.Function):
    """Identity that notes when the backward pass begins, at the end of a layer, and ends, at its beginning."""

    @staticmethod
    def forward(record: Record, at_end: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.record, ctx.at_end = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        record, moment = ctx.record, now(grads[0].device)
        if not record.ended:
            record.spent_s += -moment if ctx.at_end else moment
            record.ended = not ctx.at_end
        return None, None, *grads
