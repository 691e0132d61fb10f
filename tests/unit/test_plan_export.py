"""Plans as other programs read them: golden files, and every file read again by a parser of its own grammar.

``python tests/unit/test_plan_export.py`` rewrites the golden files.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.plans_by_hand import FIVE, five_plans, pieces_plan, unequal_plan

from mycel.errors import UsageError
from mycel.planning.models.megatron import from_megatron, megatron_arguments
from mycel.planning.plan import Plan
from mycel.planning.plan.export import FORMS, layout_string
from mycel.planning.plan.export.torchtitan import torchtitan_name

GOLDEN = Path(__file__).parents[1] / "golden" / "planning"
PLANS = five_plans()


def exported(plan: Plan, form: str) -> dict[str, str]:
    """Files of a form; of a plan that it has no words for, the reason in a file of its own."""
    try:
        return plan.export(form)
    except UsageError as error:
        return {"refused.txt": f"{error}\n"}


def readable(form: str) -> list[str]:
    """Plans that a form has words for."""
    return [name for name in FIVE if "refused.txt" not in exported(PLANS[name], form)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FIVE)
def test_golden(name: str, form: str) -> None:
    folder = GOLDEN / name / form
    found = exported(PLANS[name], form)
    # Python among them is kept as text, since it is no code of this repository.
    assert {file.name.removesuffix(".txt"): file.read_text() for file in folder.iterdir()} == {
        file.removesuffix(".txt"): text for file, text in found.items()
    }, f"run: python {__file__}"


def test_every_form_is_written_for_some_plan_and_every_refusal_says_what_to_do() -> None:
    written = dict.fromkeys(FORMS, 0)
    for plan in PLANS.values():
        for form in FORMS:
            files = exported(plan, form)
            if "refused.txt" not in files:
                written[form] += 1
                continue
            assert re.fullmatch(r"\S+ cannot carry out this plan: .+; .+\n", files["refused.txt"])
    assert all(count >= 2 for count in written.values()), written
    assert written["csv"] == written["mesh"] == len(FIVE)


# -- what is in the files ---------------------------------------------------------------------------------------


def stages_of_layout(text: str) -> list[str]:
    """Stages of Megatron's layout, by a descent over its grammar: items, ``x*3``, ``(group)*2``, ``|``."""
    place = 0

    def item() -> str:
        nonlocal place
        if text[place] == "(":
            place += 1
            inner = ""
            while text[place] != ")":
                inner += item()
            place += 1
        else:
            inner = text[place]
            assert inner in "EtmL|", f"{inner!r} at {place} of {text!r}"
            place += 1
        if place < len(text) and text[place] == "*":
            place += 1
            digits = re.match(r"\d+", text[place:])
            assert digits is not None, f"no count at {place} of {text!r}"
            place += len(digits[0])
            return inner * int(digits[0])
        return inner

    whole = ""
    while place < len(text):
        whole += item()
    return whole.split("|")


def test_the_parser_of_layouts_reads_what_is_published() -> None:
    assert stages_of_layout("Et*2|(tt|)*2t|mL") == ["Ett", "tt", "tt", "t", "mL"]
    with pytest.raises(AssertionError):
        stages_of_layout("Etx|L")


@pytest.mark.parametrize("name", FIVE)
def test_layout_strings_hold_every_layer_once(name: str) -> None:
    plan = PLANS[name]
    counts = [sum("layers." in module for module in stage) for stage in plan.cut]
    stages = stages_of_layout(layout_string(counts))
    assert [stage.count("t") for stage in stages] == counts
    assert stages[0].startswith("E")
    assert stages[-1].endswith("L")
    assert sum(stage.count("E") + stage.count("L") for stage in stages) == 2


def rows_of_csv(text: str) -> list[list[tuple[int, str, int]]]:
    """Actions of torch's CSV, by a pattern for whole cells."""
    rows = []
    for row in csv.reader(io.StringIO(text)):
        cells = [re.fullmatch(r"(\d+)(F|B|I|W)(\d+)", cell) for cell in row if cell]
        assert all(cells), row
        rows.append([(int(cell[1]), cell[2], int(cell[3])) for cell in cells if cell])
    return rows


@pytest.mark.parametrize("name", FIVE)
def test_schedules_do_all_work_once_where_the_plan_has_it(name: str) -> None:
    plan = PLANS[name]
    rows = rows_of_csv(plan.export("csv")["schedule.csv"])
    assert len(rows) == plan.job.mesh.pp
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], list[str]] = {}
    for place, row in enumerate(rows):
        for stage, kind, micro_batch in row:
            assert set(plan.stage_ranks[stage]) == set(plan.group(place))
            if kind == "F":
                assert (stage, micro_batch) not in forwards
                forwards[stage, micro_batch] = place
            else:
                backwards.setdefault((stage, micro_batch), []).append(kind)
    every = {(s, m) for s in range(plan.num_stages) for m in range(plan.job.num_micro_batches)}
    assert set(forwards) == set(backwards) == every
    assert all(sorted(kinds) in (["B"], ["I", "W"]) for kinds in backwards.values())


@pytest.mark.parametrize("name", readable("megatron"))
def test_megatron_reads_the_same_model_and_degrees(name: str) -> None:
    files = PLANS[name].export("megatron")
    plan, job = PLANS[name], PLANS[name].job
    words = megatron_arguments(files["megatron.args"])
    shape = from_megatron(words)
    for key in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "is_gated", "is_tied"):
        assert getattr(shape, key) == getattr(plan.model.shape, key), key
    degrees = {"tensor": job.mesh.tp, "pipeline": job.mesh.pp}
    assert {key: words[f"{key}_model_parallel_size"] for key in degrees} == degrees
    if job.mesh.pp > 1:
        stages = stages_of_layout(words["pipeline_model_parallel_layout"])
        assert len(stages) == job.mesh.pp * job.chunks
        assert sum(stage.count("t") for stage in stages) == shape.num_layers
    assert words["global_batch_size"] == job.global_batch


@pytest.mark.parametrize("name", readable("torchtitan"))
def test_torchtitan_reads_the_same_mesh_and_stages(name: str) -> None:
    files = PLANS[name].export("torchtitan")
    plan, mesh = PLANS[name], PLANS[name].job.mesh
    said = tomllib.loads(files["torchtitan.toml"])
    degrees = said["parallelism"]
    world = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    world *= degrees["tensor_parallel_degree"] * degrees["context_parallel_degree"]
    assert world * degrees["pipeline_parallel_degree"] == mesh.num_ranks
    training = said["training"]
    assert training["global_batch_size"] % (training["local_batch_size"] * mesh.dp) == 0
    if mesh.pp > 1:
        flat = [module for part in degrees["module_fqns_per_model_part"] for module in part]
        assert flat == [torchtitan_name(module) for module in plan.model.modules]
        assert flat[0] == "tok_embeddings"
        assert flat[-2:] == ["norm", "output"]
        micro_batches = training["local_batch_size"] // degrees["pipeline_parallel_microbatch_size"]
        assert micro_batches == plan.job.num_micro_batches
        if "schedule.csv" not in files:
            assert degrees["pipeline_parallel_schedule"] == "ZBVZeroBubble"
            return
        assert max(m for row in rows_of_csv(files["schedule.csv"]) for _, _, m in row) == micro_batches - 1


@pytest.mark.parametrize("name", readable("deepspeed"))
def test_deepspeed_batches_multiply(name: str) -> None:
    files = PLANS[name].export("deepspeed")
    said = json.loads(files["deepspeed.json"])
    each = said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"]
    assert each * PLANS[name].job.mesh.dp == said["train_batch_size"] == PLANS[name].job.global_batch
    assert said["zero_optimization"]["stage"] == PLANS[name].job.zero


@pytest.mark.parametrize("name", readable("accelerate"))
def test_accelerate_takes_its_configuration(name: str, tmp_path: Path) -> None:
    files = PLANS[name].export("accelerate")
    said: dict[str, Any] = yaml.safe_load(files["accelerate.yaml"])
    assert said["num_processes"] == PLANS[name].job.mesh.num_ranks
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    file = tmp_path / "accelerate.yaml"
    file.write_text(files["accelerate.yaml"])
    read = arguments.load_config_from_file(str(file))
    assert read.num_processes == PLANS[name].job.mesh.num_ranks
    assert read.distributed_type.value == said["distributed_type"]


@pytest.mark.parametrize("name", FIVE)
def test_the_mesh_is_python_with_the_plans_ranks(name: str) -> None:
    plan = PLANS[name]
    tree = ast.parse(plan.export("mesh")["mesh.py"])
    lists = [ast.literal_eval(node) for node in ast.walk(tree) if isinstance(node, ast.List) and _is_of_numbers(node)]
    assert list(plan.ranks) in lists
    assert all(list(ranks) in lists for ranks in plan.stage_ranks)


def _is_of_numbers(node: ast.List) -> bool:
    return all(isinstance(item, ast.Constant) and isinstance(item.value, int) for item in node.elts)


def test_ranks_out_of_order_come_with_a_file_that_says_where_each_starts() -> None:
    rows = PLANS["even"].export("csv")["rank_order.txt"].splitlines()[1:]
    assert [row.split()[0] for row in rows] == [str(place) for place in range(8)]
    assert [row.split()[1] for row in rows] == [
        PLANS["even"].cluster.rank_names[rank] for rank in (0, 4, 1, 5, 2, 6, 3, 7)
    ]
    assert "rank_order.txt" not in PLANS["sharded"].export("csv")


def test_unequal_shares_are_refused_but_for_the_mesh() -> None:
    plan = unequal_plan()
    for form in FORMS:
        if form == "mesh":
            assert "replica: 40, 24." in plan.export(form)["mesh.py"]
            continue
        with pytest.raises(
            UsageError, match=r"micro-batches, and the plan's have 40, 24; search with --limit shares"
        ):
            plan.export(form)


def test_layers_in_pieces_are_refused_where_a_reader_has_no_word_for_them() -> None:
    plan = pieces_plan()
    for form in FORMS:
        if form in ("csv", "mesh"):
            text = "".join(plan.export(form).values())
            assert ("in 8 pieces, one after the other" in text) == (form == "mesh")
            continue
        with pytest.raises(UsageError, match=r"in 8 pieces on each rank; search with --limit coshard=1"):
            plan.export(form)


def test_an_unknown_form_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'megatron'"):
        PLANS["sharded"].export("megatorn")


if __name__ == "__main__":
    for plan_name, each in PLANS.items():
        for form_name in FORMS:
            target = GOLDEN / plan_name / form_name
            target.mkdir(parents=True, exist_ok=True)
            for old in target.iterdir():
                old.unlink()
            for file_name, text in exported(each, form_name).items():
                (target / (f"{file_name}.txt" if file_name.endswith(".py") else file_name)).write_text(text)
