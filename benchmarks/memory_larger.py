"""Models of four times their near memory, trained: losses beside those of a process without limit, and what moved.

    python benchmarks/memory_larger.py                  # half an hour, most of it for ranks; prints
    python benchmarks/memory_larger.py --only one       # a part: one, ranks, trainer
    python benchmarks/memory_larger.py --write          # replaces lines of what ran, renews the guide's table
    python benchmarks/memory_larger.py --quick --check  # few steps; fails where a loss differs

Parameters, gradients and AdamW's state take four times the near budget; activations take about half of it at their
peak.

- *one*: one process whose allocator refuses what is beyond the budget (``RLIMIT_DATA``), at one, two and four
  micro-batches a step. Parameters that come near, counted by the link, beside the best fixed resident set, whose
  copies are as old after a step, and beside having everything far but what computes.
- *ranks*: four ranks whose model FSDP2 shards, over mycel, each with a quarter of what the states of its shards
  take; half of that is what activations take. The checkpoint is loaded by FSDP2
  without a budget, and training goes on.
- *trainer*: a Llama and a Qwen3-MoE of Hugging Face from their configurations, under ``Trainer``.

Losses have to be equal bit for bit. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn

from memory_prediction import Networks, child, hugging_face, stepper
from mycel.bench.measurement import describe_hardware
from mycel.memory import EmulatedLink, allocator_limit, needs_of, trainer_callback
from mycel.memory.needs import blocks_of, groups_of
from mycel.memory.residency import Residency, fixed_set, parts_of, schedule_of, sharded_parts
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "memory_larger.jsonl"
PAGE = ROOT / "docs" / "guides" / "models_that_do_not_fit.md"
MICRO = (1, 2, 4)
STEPS, QUICK, RANKS, ROWS, WIDTH, LAYERS = 50, 6, 4, 96, 256, 12
#: Of the model that is sharded: many layers, as some are gathered whole.
SHARDED_ROWS, SHARDED_WIDTH, SHARDED_LAYERS = 11, 128, 96
#: Of the budget that the allocator enforces, a part is for pages, products and the interpreter, which torch does not
#: ask it for.
ASKED = 0.92


def deep() -> nn.Module:
    """Layers of 525 thousand numbers each, 16 bytes of states for each."""
    torch.manual_seed(0)
    return Networks(width=WIDTH, layers=LAYERS)


def rows(step: int, rank: int | None = None) -> Tensor:
    """What a pass gets, in one process or on a rank."""
    shape = (ROWS, WIDTH) if rank is None else (SHARDED_ROWS, SHARDED_WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * (rank or 0) + step))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    micro: int,
    *,
    rank: int | None = None,
    first: int = 0,
) -> list[float]:
    """Losses of every pass."""
    found = []
    for step in range(first, first + steps):
        for part in range(micro):
            loss = model(rows(step * micro + part, rank))
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def said(losses: Sequence[float]) -> str:
    """Losses as words, every bit of them."""
    return "losses=" + ",".join(loss.hex() for loss in losses)


def heard(output: str) -> tuple[dict[str, int], list[float]]:
    """What a child said."""
    words = dict(word.split("=", 1) for word in output.split() if "=" in word)
    losses = [float.fromhex(loss) for loss in words.pop("losses").split(",")]
    return {key: int(value) for key, value in words.items() if value.lstrip("-").isdigit()}, losses


# -- one process ------------------------------------------------------------------------------------------------


def one(steps: int) -> list[dict[str, Any]]:
    """A line a number of micro-batches."""
    made = []
    for micro in MICRO:
        model = deep()
        wanted = train(model, torch.optim.AdamW(model.parameters()), steps, micro)
        done = child(__file__, "one", str(micro), str(steps))
        if done.returncode:
            raise SystemExit(f"training under the limit failed:\n{done.stderr}")
        numbers, got = heard(done.stdout)
        made.append({"part": "one", "micro": micro, "steps": steps, **numbers, "is_same": got == wanted})
        print(made[-1], file=sys.stderr)
    return made


def one_limited(micro: int, steps: int) -> None:
    """In a child: under a limit of a quarter of what the states take, enforced by the allocator."""
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters())
    needs = needs_of(model, (rows(0),), optimizer=optimizer)
    states = needs.most("parameters") + needs.most("gradients") + needs.most("optimizer")
    blocks = blocks_of(model)
    schedule = schedule_of(needs, parts_of(model, blocks), round(states / 4 * ASKED), micro_batches=micro)
    link = EmulatedLink(bandwidth_gbps=100)
    near, there = torch.zeros(1), torch.zeros(1)
    link.fetch([(there, near)]).wait()  # the stacks of its threads are no memory of the model's
    link.store([(there, near)]).wait()
    small = Networks(width=WIDTH, layers=1)  # code is loaded once, and products keep buffers of their own
    stepper(small, torch.optim.AdamW(small.parameters()), {0: rows(0)})()
    del small
    with Residency(model, optimizer, schedule, blocks, link), allocator_limit(states // 4):
        begun = link.fetched_bytes
        losses = train(model, optimizer, steps, micro)
    every = sum(schedule.demand.sizes[unit] for units in schedule.demand.uses for unit in units)
    loaded = (link.fetched_bytes - begun) // steps
    print(f"states={states} budget={states // 4} peak={schedule.peak} pinned={len(schedule.pinned)}")
    print(f"activations={needs.most('activations')} parameters={needs.most('parameters')}")
    print(f"loaded={loaded} fixed={fixed_set(schedule.demand).loaded_bytes} all={every}")
    print(said(losses))
    link.close()


# -- ranks ------------------------------------------------------------------------------------------------------


def ranks(steps: int) -> list[dict[str, Any]]:
    """A line a number of micro-batches."""
    import torch.multiprocessing as mp

    made = []
    for micro in MICRO:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_of, args=(folder, steps, micro), nprocs=RANKS)
            found = [(Path(folder) / f"said{rank}").read_text(encoding="utf-8") for rank in range(RANKS)]
        line = {"part": "ranks", "ranks": RANKS, "micro": micro, "steps": steps, **heard(found[0])[0]}
        line["is_same"] = all(heard(each)[0]["same"] and heard(each)[0]["reloaded"] for each in found)
        print(line, file=sys.stderr)
        made.append(line)
    return made


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model over all ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Networks(width=SHARDED_WIDTH, layers=SHARDED_LAYERS)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def rank_of(rank: int, folder: str, steps: int, micro: int) -> None:
    """One of four: without a budget, within one, and on from the checkpoint without one."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import mycel.runtime  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("mycel", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    model, optimizer = sharded()
    wanted = train(model, optimizer, steps + 2, micro, rank=rank)
    model, optimizer = sharded()
    batch = (rows(0, rank),)
    needs = needs_of(model, batch, optimizer=optimizer)
    states = needs.most("parameters") + needs.most("gradients") + needs.most("optimizer")
    works = max(moment.working for moment in needs.moments)
    link = EmulatedLink(bandwidth_gbps=100)
    budget = states // 4
    groups = groups_of(model)
    schedule = schedule_of(needs, sharded_parts(model, groups), budget, micro_batches=micro)
    with Residency(model, optimizer, schedule, groups, link):
        begun = link.fetched_bytes
        got = train(model, optimizer, steps, micro, rank=rank)
        loaded = (link.fetched_bytes - begun) // steps
        parameters, state = get_state_dict(model, optimizer)
        dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    fixed = fixed_set(schedule.demand).loaded_bytes
    every = sum(schedule.demand.sizes[unit] for units in schedule.demand.uses for unit in units)
    fresh, optimizer = sharded()
    parameters, state = get_state_dict(fresh, optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    set_state_dict(fresh, optimizer, model_state_dict=parameters, optim_state_dict=state)
    on = train(fresh, optimizer, 2, micro, rank=rank, first=steps)
    words = [
        f"states={states} works={works} budget={budget} peak={schedule.peak} needs={needs.peak}",
        f"loaded={loaded} fixed={fixed} all={every} parameters={needs.most('parameters')}",
        f"same={int(got == wanted[: steps * micro])} reloaded={int(on == wanted[steps * micro :])}",
        said(got),
    ]
    (Path(folder) / f"said{rank}").write_text("\n".join(words), encoding="utf-8")
    link.close()
    dist.destroy_process_group()


# -- Hugging Face -----------------------------------------------------------------------------------------------

_SIZES = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
_THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 384, "tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 24},
}


def trainer(steps: int) -> list[dict[str, Any]]:
    """A line a family."""
    made = []
    for kind, sizes in _THEIRS.items():
        torch.manual_seed(0)
        model = hugging_face(kind, **_SIZES, **sizes)()
        states = 4 * sum(p.nbytes for p in model.parameters())
        wanted = under_trainer(model, steps, [])
        torch.manual_seed(0)
        model = hugging_face(kind, **_SIZES, **sizes)()
        callback = trainer_callback(budget=states // 4, link=EmulatedLink(bandwidth_gbps=100))
        got = under_trainer(model, steps, [callback])
        chosen = next(choice for choice in callback.fitted.choices if choice.way == callback.fitted.way)
        line = {"part": "trainer", "model": kind, "steps": steps, "states": states, "budget": states // 4}
        line |= {"way": chosen.way, "peak": chosen.peak, "needs": callback.fitted.needs.peak}
        made.append(line | {"is_same": len(got) == steps and got == wanted})
        callback.fitted.close()
        print(made[-1], file=sys.stderr)
    return made


def under_trainer(model: nn.Module, steps: int, callbacks: list[Any]) -> list[float]:
    """Losses of steps of two sequences."""
    from transformers import Trainer, TrainingArguments

    data = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(3, 1000, (4 * steps, 24), generator=torch.Generator().manual_seed(0))
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        made = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        from transformers.trainer_callback import PrinterCallback

        made.remove_callback(PrinterCallback)
        made.train()
    return [line["loss"] for line in made.state.log_history if "loss" in line]


# -- tables -----------------------------------------------------------------------------------------------------


def table(lines: Sequence[dict[str, Any]]) -> str:
    """For the guide."""
    mib = float(1 << 20)
    cells: list[tuple[object, ...]] = []
    for line in lines:
        if line["part"] == "trainer":
            moved: tuple[str, ...] = ("", "", "")
        else:
            whole = line["parameters"]
            moved = (
                f"{line['loaded'] / whole:.2f}",
                f"{line['loaded'] / line['fixed']:.2f}",
                f"{line['loaded'] / line['all']:.2f}",
            )
        name = {
            "one": f"one process, {line.get('micro')} micro-batches a step",
            "ranks": f"{line.get('ranks')} ranks, FSDP2, {line.get('micro')} micro-batches a step",
            "trainer": f"{line.get('model')} under Trainer",
        }[line["part"]]
        same = f"{line['steps']} steps, {'the same bits' if line['is_same'] else 'NOT the same'}"
        budget = f"{line['states'] / mib:.1f} / {line['budget'] / mib:.1f}"
        cells.append((name, budget, *moved, same))
    heads = ("training", "states / budget, MiB", "parameters that came near a step, times all of them")
    return markdown((*heads, "over the best fixed set's", "over all far", "losses"), cells)


def main() -> None:
    """Train, print, and with ``--write`` record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} steps")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--only", choices=("one", "ranks", "trainer"))
    parser.add_argument("--write", action="store_true", help="replace recorded lines of what ran, and the table")
    parser.add_argument("--check", action="store_true", help="fail where losses differ")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        one_limited(int(options.child[1]), int(options.child[2]))
        return
    steps = QUICK if options.quick else options.steps
    parts = {"one": one, "ranks": ranks, "trainer": trainer}
    made = [line for name, part in parts.items() if options.only in (None, name) for line in part(steps)]
    print(table(made))
    if options.write:
        kept = [line for line in read(OUTPUT) if line["part"] not in {each["part"] for each in made}]
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, kept + [line | stamp() | {"hardware": describe_hardware()} for line in made])
        write_section(PAGE, "memory_larger", table(read(OUTPUT)))
    if options.check and not all(line["is_same"] for line in made):
        raise SystemExit("losses differ")


if __name__ == "__main__":
    main()
