"""Predicted memory beside what the allocator was asked for, and beside the least limit under which training runs.

    python benchmarks/memory_prediction.py                        # six minutes; prints
    python benchmarks/memory_prediction.py --only peaks --write   # a part replaces its lines, and renews the guide
    python benchmarks/memory_prediction.py --quick --check        # few models; fails where a figure is out of range

Three questions, each with ``--only``:

- *peaks*: the peak that is found on fake tensors over the peak that torch's allocator counted (its own events, not
  resident memory), for twelve models, as they are and computed again, near and held far by a schedule. Must be in
  0.98 to 1.08.
- *sharded*: the same for the models as rank 0 of four has them under FSDP2, of which the other three are not there:
  collectives leave numbers as they are, and allocate what they always do.
- *limits*: the least limit on a process's data (``RLIMIT_DATA``, beyond what it had before the model was made) under
  which three steps run, by bisection, each try a process of its own; beside the predicted peak. Small tensors
  take more of the system than their bytes, for pages and gaps: models of Hugging Face are larger here, since those of
  above, of 0.1 MB a tensor and less, need up to 12 % more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from mycel.bench.measurement import describe_hardware
from mycel.comm.pending import Pending
from mycel.memory import Link, allocator_limit
from mycel.memory.needs import blocks_of, counted_peak, groups_of, innermost, loss_of, needs_of, recomputed
from mycel.memory.residency import Residency, parts_of, schedule_of, sharded_parts
from mycel.memory.residency.schedule import least_budget
from mycel.memory.residency.slots import local
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "memory_prediction.jsonl"
PAGE = ROOT / "docs" / "guides" / "models_that_do_not_fit.md"
TOKENS, VOCAB = 128, 1000
#: Steps of a child that looks for a limit, and ranks of which one is there.
TRIED, RANKS = 3, 4
LOW, HIGH, NEAR = 0.98, 1.08, 0.08

Batch = dict[Any, Any]


class Convolutions(nn.Module):
    """Blocks of two convolutions with a way past them."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        block = [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        self.blocks = nn.ModuleList([nn.Sequential(*(_copy(each) for each in block * 2)) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.mean((2, 3))).square().mean()


def _copy(module: nn.Module) -> nn.Module:
    import copy

    made = copy.deepcopy(module)
    for child in made.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    return made


class Networks(nn.Module):
    """Layers with dropout and a way past them."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        make = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.layers = nn.ModuleList(make)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def hugging_face(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Makes a small model of a family, with the family's own layers."""

    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model.train()

    return make


def tokens(length: int = TOKENS) -> Batch:
    """A batch of a language model."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


_WIDE = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
_GROUPED = {**_WIDE, "num_key_value_heads": 2, "head_dim": 24}
_GATED = {**_GROUPED, "intermediate_size": 256}
_SPARSE = {**_GROUPED, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "networks": (Networks, lambda: {0: torch.ones(256, 128)}),
    "convolutions": (Convolutions, lambda: {0: torch.ones(4, 3, 32, 32)}),
    "llama": (hugging_face("llama", **_GATED), tokens),
    "qwen3_moe": (hugging_face("qwen3_moe", moe_intermediate_size=64, num_experts=8, **_SPARSE), tokens),
    "gpt2": (hugging_face("gpt2", n_embd=96, n_layer=4, n_head=4, n_positions=TOKENS), tokens),
    "qwen3": (hugging_face("qwen3", **_GATED), tokens),
    "mistral": (hugging_face("mistral", sliding_window=64, **_GATED), tokens),
    "gemma2": (hugging_face("gemma2", query_pre_attn_scalar=24, **_GATED), tokens),
    "opt": (
        hugging_face(
            "opt", ffn_dim=384, word_embed_proj_dim=96, max_position_embeddings=TOKENS, pad_token_id=0, **_WIDE
        ),
        tokens,
    ),
    "gpt_neox": (hugging_face("gpt_neox", intermediate_size=384, **_WIDE), tokens),
    "phi": (hugging_face("phi", intermediate_size=384, **_WIDE), tokens),
    "mixtral": (hugging_face("mixtral", intermediate_size=96, num_local_experts=4, **_SPARSE), tokens),
}


_WIDER = {**_GROUPED, "hidden_size": 256, "head_dim": 64}
_EXPERTS = {**_WIDER, "num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 256}
#: Of ``limits``.
LIMITED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "networks": MODELS["networks"],
    "convolutions": MODELS["convolutions"],
    "llama": (hugging_face("llama", intermediate_size=768, **_WIDER), partial(tokens, 2 * TOKENS)),
    "qwen3_moe": (hugging_face("qwen3_moe", **_EXPERTS), partial(tokens, 2 * TOKENS)),
}


class Plain(Link):
    """Copies at once, in the thread whose allocations are counted."""

    def fetch(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Pending[None]:
        for far, near in copies:
            near.copy_(far)
            self.fetched_bytes += near.nbytes
        return Pending.done(None)

    def store(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Pending[None]:
        super().store(copies).wait()
        held = list(copies)  # until it is waited for, as a link that takes its time has them
        return Pending(held.clear)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], float]:
    """One step, which gives its loss."""
    places = [batch[key] for key in sorted(key for key in batch if isinstance(key, int))]
    names = {key: value for key, value in batch.items() if isinstance(key, str)}

    def step() -> float:
        loss = loss_of(model(*places, **names))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# -- peaks ------------------------------------------------------------------------------------------------------


def peaks(names: Sequence[str]) -> list[dict[str, Any]]:
    """A line a model, computed again or not, near or far."""
    return [
        told({"part": "peaks", "model": name, "recomputed": again, "far": far}, *one(name, again=again, far=far))
        for name in names
        for again in (False, True)
        for far in (False, True)
    ]


def sharded(names: Sequence[str]) -> list[dict[str, Any]]:
    """The same over four ranks, as the first of them has it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    made = [
        told(
            {"part": "sharded", "model": name, "recomputed": again, "far": far},
            *one(name, again=again, far=far, shard=True),
        )
        for name in names
        for again in (False, True)
        for far in (False, True)
    ]
    dist.destroy_process_group()
    return made


def told(line: dict[str, Any], predicted: int, counted: int) -> dict[str, Any]:
    """The line, which is printed."""
    line |= {"predicted": predicted, "counted": counted, "ratio": predicted / counted}
    print(line, file=sys.stderr)
    return line


def one(name: str, *, again: bool, far: bool, shard: bool = False) -> tuple[int, int]:
    """Predicted and counted bytes of a model's step."""
    make, batch = MODELS[name]
    model, given = make(), batch()
    if shard:
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for child_ in module:
                    if any(True for _ in child_.parameters()):
                        fully_shard(child_)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    needs = needs_of(model, given, optimizer=optimizer, recompute=again)
    groups = groups_of(model) if shard else None
    blocks: dict[str, Any] = blocks_of(model) if groups is None else groups
    modules = blocks if groups is None else {name: group.modules[0] for name, group in groups.items()}
    parts = parts_of(model, blocks) if groups is None else sharded_parts(model, groups)
    predicted, schedule = needs.peak, None
    with ExitStack() as stack:
        if again:
            stack.enter_context(recomputed({name: modules[name] for name in innermost(modules)}))
        step = stepper(model, optimizer, given)
        if far:
            schedule = schedule_of(needs, parts, least_budget(needs, parts) * 5 // 4)
            predicted = schedule.peak
            stack.enter_context(Residency(model, optimizer, schedule, blocks, Plain()))
        step()
        before = sum(t.nbytes for t in {id(t): t for t in given.values()}.values())
        before += sum(b.nbytes for b in model.buffers())
        known = dict(model.named_parameters())
        near = [n for u in schedule.pinned for n in parts.parameters[u]] if schedule is not None else list(known)
        for parameter in (known[each] for each in near):
            before += local(parameter).nbytes
            before += sum(local(t).nbytes for t in optimizer.state[parameter].values())
        return predicted, before + counted_peak(step)


# -- limits -----------------------------------------------------------------------------------------------------


def limits(names: Sequence[str]) -> list[dict[str, Any]]:
    """A line a model: the least limit that its training ran under, and the predicted peak."""
    made = []
    for name in names:
        make, batch = LIMITED[name]
        predicted = needs_of(make, batch).peak
        low, high = predicted // 2, predicted * 2
        while high - low > predicted // 64:
            middle = (low + high) // 2
            if child(__file__, "try", name, str(middle)).returncode == 0:
                high = middle
            else:
                low = middle
        made.append(
            {"part": "limits", "model": name, "predicted": predicted, "least": high, "ratio": predicted / high}
        )
        print(made[-1], file=sys.stderr)
    return made


def child(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script again, with an allocator that gives memory back at once, so that a limit means what it says."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, script, "--child", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)


def try_limit(name: str, limit: int) -> None:
    """In a child: three steps under a limit; fails where memory is not enough."""
    make, batch = LIMITED[name]
    warm = make()  # what torch and a model's code hold once, whatever the limit
    stepper(warm, torch.optim.AdamW(warm.parameters()), batch())()
    del warm
    with allocator_limit(limit):
        model = make()
        step = stepper(model, torch.optim.AdamW(model.parameters()), batch())
        for _ in range(TRIED):
            step()


# -- tables -----------------------------------------------------------------------------------------------------


def table(lines: Sequence[dict[str, Any]]) -> str:
    """For the guide."""
    mib = float(1 << 20)
    by_model: dict[str, dict[tuple[str, bool, bool], str]] = {}
    for line in lines:
        if line["part"] in ("peaks", "sharded"):
            key = line["part"], line["recomputed"], line["far"]
            by_model.setdefault(line["model"], {})[key] = f"{line['ratio']:.3f}"
    ways = [(part, again, far) for part in ("peaks", "sharded") for again in (False, True) for far in (False, True)]
    heads = []
    for part, again, far in ways:
        of = ("shards of FSDP2", "all") if part == "sharded" else ("parameters", "all")
        heads.append(f"{of[0]} far" if far else f"{of[1]} near" + (", FSDP2" if part == "sharded" else ""))
        heads[-1] += ", recomputed" if again else ""
    rows: list[tuple[object, ...]] = [
        (name, *(found.get(way, "") for way in ways)) for name, found in by_model.items()
    ]
    parts = [markdown(("model", *heads), rows)] if rows else []
    found = [line for line in lines if line["part"] == "limits"]
    if found:
        rows = [
            (one["model"], f"{one['predicted'] / mib:.1f}", f"{one['least'] / mib:.1f}", f"{one['ratio']:.3f}")
            for one in found
        ]
        parts.append(markdown(("model", "predicted, MiB", "least limit, MiB", "predicted over least"), rows))
    return "\n".join(parts)


def is_right(line: dict[str, Any]) -> bool:
    """Whether a line is in the range that is promised."""
    if line["part"] == "limits":
        return abs(line["predicted"] / line["least"] - 1.0) <= NEAR
    return LOW <= line["ratio"] <= HIGH


def main() -> None:
    """Ask, print, and with ``--write`` record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--only", choices=("peaks", "sharded", "limits"))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="these alone")
    parser.add_argument(
        "--write", action="store_true", help="replace recorded lines of these, and the guide's tables"
    )
    parser.add_argument("--check", action="store_true", help="fail where a figure is out of its range")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        try_limit(options.child[1], int(options.child[2]))
        return
    names = options.models or (list(MODELS)[2:4] if options.quick else list(MODELS))
    made: list[dict[str, Any]] = []
    if options.only in (None, "peaks"):
        made += peaks(names)
    if options.only in (None, "sharded"):
        made += sharded(names)
    if options.only in (None, "limits"):
        made += limits(names[:1] if options.quick else [name for name in names if name in LIMITED])
    print(table(made))
    wrong = [line for line in made if not is_right(line)]
    if options.write:
        done = {(line["part"], line["model"]) for line in made}
        kept = [line for line in read(OUTPUT) if (line["part"], line["model"]) not in done]
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, kept + [line | stamp() | {"hardware": describe_hardware()} for line in made])
        write_section(PAGE, "memory_prediction", table(read(OUTPUT)))
    if options.check and wrong:
        raise SystemExit("out of range:\n" + "\n".join(map(str, wrong)))


if __name__ == "__main__":
    main()
