"""Plan: how one model is trained on one cluster. Which rank holds what, in what order stages work, what it costs.

A plan is a ``PlanRecord`` with what can be done with it: written and read, proved, simulated, explained, exported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycel.errors import MycelError, UsageError
from mycel.pipeline.simulate import Run
from mycel.planning.cluster import Cluster
from mycel.planning.models.json_format import ModelDescription
from mycel.planning.plan.explain import SEARCH_S, Explanation, explain_plan
from mycel.planning.plan.export import export_plan
from mycel.planning.plan.json_form import fields_of_file, fields_of_json, fields_of_text, json_of, text_of
from mycel.planning.plan.record import PlanRecord
from mycel.planning.plan.replay import check_cluster, simulate_plan
from mycel.planning.plan.rewrites import Rewrite, rewrites_of
from mycel.planning.plan.validate import check_form, check_limits, check_memory, check_model

__all__ = ["Plan", "read_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanRecord):
    """One way to train one model on one cluster. Frozen, with a JSON form that round-trips.

    Attributes are those of ``PlanRecord``: ``model``, ``cluster``, ``job``, ``ranks``, ``cut``, ``stage_ranks``,
    ``layouts``, ``order``, ``stage_seconds``, ``predicted``, ``memory``, ``limits``, ``runners_up``, ``binding``.
    """

    def to_json(self) -> dict[str, Any]:
        """A JSON object that ``from_json`` reads back to an equal plan."""
        return json_of(self)

    def to_text(self) -> str:
        """Its JSON as a file has it, one line a part."""
        return text_of(self)

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any], *, where: str = "plan") -> Plan:
        """The plan that a JSON object describes.

        Args:
            source: the object, or its text.
            where: it is from, for messages.

        Raises:
            UsageError: no such object, malformed, or of a newer version.
        """
        found = (
            fields_of_text(source, where=where) if isinstance(source, str) else fields_of_json(source, where=where)
        )
        return _made(found, where)

    def validate(self, model: ModelDescription | None = None, *, cluster: Cluster | None = None) -> None:
        """Prove the plan right, without looking at how it was found.

        Args:
            model: that is to be trained; then also that the plan is for it.
            cluster: that it is to run on; then also that the plan is for it.

        Raises:
            UsageError: something is wrong; the message says what, where, and the nearest way out.
            VerificationError: the order of actions is wrong.
        """
        check_memory(self, check_form(self))
        check_limits(self)
        if cluster is not None:
            check_cluster(self, cluster)
        if model is not None:
            check_model(self, model)

    def simulate(self, cluster: Cluster | None = None) -> Run:
        """The plan's pipeline in simulation, action by action: one chain of ranks, the first replica's.

        Args:
            cluster: whose wires messages take; without one they take no time.

        Returns:
            Starts and ends of every action, messages, bounds. Simulated figures are no measurements.

        Raises:
            UsageError: the cluster has other ranks than the plan's.
        """
        return simulate_plan(self, cluster)

    def explain(
        self, cluster: Cluster, *, limit_s: float | None = SEARCH_S, told: Callable[[str], None] | None = None
    ) -> Explanation:
        """Why the plan is as it is: what binds, who came second, why each other degree lost, what more would buy.

        Args:
            cluster: that it is for.
            limit_s: seconds for each of about ten searches.
            told: called with what is being searched.

        Raises:
            UsageError: the plan is for another cluster.
        """
        return explain_plan(self, cluster, limit_s=limit_s, told=told)

    def rewrites(self, cluster: Cluster) -> tuple[Rewrite, ...]:
        """What could be sent otherwise with the same result: boundaries in shares, the optimizer between two halves.

        Args:
            cluster: that the plan is for.

        Returns:
            Each with its cost before and after, done already or not.
        """
        return rewrites_of(self, cluster)

    def export(self, form: str) -> dict[str, str]:
        """The plan as another program reads it.

        Args:
            form: one of ``torchtitan``, ``megatron``, ``accelerate``, ``deepspeed``, ``csv``, ``mesh``.

        Returns:
            Text of each file, by its name, the most important first.

        Raises:
            UsageError: an unknown form, or a plan that its reader cannot carry out, with the reason.
        """
        return export_plan(self, form)


def read_plan(file: str | Path) -> Plan:
    """The plan in a file.

    Args:
        file: its name.

    Raises:
        UsageError: it cannot be read, or holds no plan; the message names the file and the key.
    """
    return _made(fields_of_file(Path(file)), str(file))


def _made(found: dict[str, Any], where: str) -> Plan:
    try:
        return Plan(**found)
    except MycelError as error:
        raise UsageError(f"{where}: {error}") from None
