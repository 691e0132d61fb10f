"""Runs the Python of a page of the documents on ranks: block after block, each with the names of those before.

What a page takes as given (a model, a mesh, batches) is prepared here, in ``BEFORE``: a piece of text of a block, and
what is run in front of it. A text that no block has any more is an error, so that this list stays true.
"""

from __future__ import annotations

import os
import re
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Ranks of a page; two where it does not matter.
RANKS = {
    "docs/concepts/compression_fsdp.md": 4,
    "docs/concepts/flex.md": 8,
    "docs/concepts/moe_placement.md": 4,
    "docs/concepts/encrypted_sums.md": 1,  # who makes a key is one
    "docs/guides/moe.md": 4,
    "docs/guides/moe_hugging_face.md": 4,
    "docs/guides/tasks_and_ensembles.md": 4,
    "docs/guides/torch-backend.md": 4,
}
#: Pages whose blocks start ranks of their own, on emulated clusters.
EMULATED = ("docs/guides/bench.md", "docs/guides/emulate.md")

#: Pages whose blocks are run, in their order, by a test of their own.
ELSEWHERE = {
    "docs/guides/one_controller.md": "tests/distributed/test_controller.py",
    "docs/guides/write_a_collective.md": "tests/distributed/test_guide_written.py",
}

#: Where ranks save a file of one name each, and read it back.
OWN_FOLDER = """
import os
os.makedirs(str(rank), exist_ok=True)
os.chdir(str(rank))
"""
#: A model of two layers, its batches, and an optimizer.
NET = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
total_steps = 100
"""
#: One step of it.
STEP = """
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
WORLD = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
"""
FSDP = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
model.blocks = list(model)
"""
#: In place of TensorBoard, which need not be there.
TENSORBOARD = """
import sys, types
class SummaryWriter:
    def __init__(self, log_dir):
        self.tags = set()
    def add_scalar(self, tag, scalar_value, global_step=None):
        assert scalar_value >= 0 and global_step == 0
        self.tags.add(tag)
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
"""
MIXTRAL = """
import transformers
tiny_config = transformers.AutoConfig.for_model(
    "mixtral", vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
)
def tiny(*arguments, num_experts=8, **options):
    torch.manual_seed(0)
    tiny_config.num_local_experts = num_experts
    return transformers.AutoModelForCausalLM.from_config(tiny_config)
model = tiny()
"""
DEEPSEEK = """
tiny_config = transformers.AutoConfig.for_model(
    "deepseek_v3", vocab_size=64, hidden_size=32, intermediate_size=40, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=256, num_experts_per_tok=2, n_group=4,
    topk_group=2, first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64,
)
model = transformers.AutoModelForCausalLM.from_config(tiny_config)
"""
WITHOUT_DOWNLOADS = "\ntransformers.AutoModelForCausalLM.from_pretrained = tiny\n"
TRAINER = """
import transformers
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(output_dir="out", use_cpu=True, max_steps=2, save_strategy="no", report_to=[],
                              disable_tqdm=True, dataloader_pin_memory=False)
rows = [{"x": torch.randn(64), "labels": torch.randn(64)} for _ in range(16)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
    def forward(self, x, labels):
        y = self.inner(x)
        return {"loss": (y - labels).square().mean(), "logits": y}
trainer = Trainer(model=Net(), args=arguments, train_dataset=rows)
"""

#: Handles go over a store beside, as soon as one is asked for.
HANDLES = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from mycel import elastic
dist.destroy_process_group()
beside, handles, own_handle, model = dist.FileStore("handles"), [], elastic.get_handle, torch.nn.Linear(4, 4)
def get_handle():
    beside.set(str(rank), own_handle())
    handles.extend(beside.get(str(other)).decode() for other in range(world_size))
    elastic.get_handle = own_handle
    return handles[rank]
elastic.get_handle = get_handle
"""
ROSTER = """
from datetime import timedelta
store, place, step, train = dist.PrefixStore("roster", beside), rank, 0, lambda: True
"""
#: The order that a training program is given.
ORDER_FILE = """
import sys
from pathlib import Path
from mycel.pipeline.known import one_f_one_b
Path(f"order{rank}.csv").write_text(one_f_one_b(world_size, 4).to_csv())
sys.argv[1:] = [f"order{rank}.csv"]
"""
#: An order with an embedding on both ranks.
EMBEDDED = """
dist.init_process_group("mycel")
order = Order.from_csv(
    "# mycel order 1\\n# feeds embed>0F 0F>1F 1B>0B 0B>embed_back\\n"
    "SHARED0[embed],0F0,0B0,SHARED0[embed_back]\\nSHARED0[embed],1F0,1B0,SHARED0[embed_back]\\n"
)
loss = nn.functional.mse_loss
"""
#: Ranks that wait for what a controller hands out, and do nothing.
SERVED = """
import threading
from mycel.parallel import Controller, serve
store, another = dist.HashStore(), one_f_one_b(2, 3)
job = lambda order: lambda step: None
for place in range(4):
    threading.Thread(target=serve, args=(store, place, {"one": job, "other": job})).start()
"""
#: A configuration, and a plan for two ranks that train it; files are put in their place whole, by every rank alike.
PLANNED = """
import json, os
from mycel.planning.cluster import load_cluster
from mycel.planning.models import load_model
from mycel.planning.plan import plan_of
from mycel.planning.search import Limits, search
from mycel.topology import parse_topology

def put(name, text):
    with open(f"{name}.{rank}", "w") as file:
        file.write(text)
    os.replace(f"{name}.{rank}", name)

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
put("config.json", json.dumps(dict(model_type="llama", vocab_size=64, max_position_embeddings=32, **sizes)))
nodes = "{name: node, count: 2, ranks: 1, uplink: {to: core, bandwidth: 1 Gbit/s, per: rank}}"
device = "{name: slow, flops: 2e9, memory: 8GiB, memory_gbps: 8}"
text = f"device: {device}\\nboxes: [{nodes}]\\nswitches: [core]\\n"
cluster = load_cluster(parse_topology(text, source="cluster.yaml"))
model = load_model("config.json")
found = search(cluster, model.shape, batch=4, seq=16, limits=Limits.from_text("pp=2"))
put("plan.json", json.dumps(plan_of(found, model=model, cluster=cluster).to_json()))
import torch
batches = [(torch.arange(64).reshape(4, 16), torch.arange(64).reshape(4, 16))] * 2
"""
#: A plan of packets, written by the example, and a group of two ranks.
PACKETS = """
import os, runpy
import torch.distributed as dist
import mycel.runtime
dist.init_process_group("mycel")
plan = runpy.run_path(EXAMPLE)["packets"](2)
with open(f"packets.{rank}", "w") as file:
    file.write(plan.to_text())
os.replace(f"packets.{rank}", "packets.plan.json")
""".replace("EXAMPLE", repr(str(Path(__file__).resolve().parents[3] / "examples" / "plans.py")))
#: What the guide to tasks and ensembles says of models and batches.
TASKS = (
    NET
    + """
from mycel.data_parallel import FAMO
class TrunkAndHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(64, 32), nn.Linear(32, 4)
    def forward(self, x):
        return self.head(self.trunk(x).relu())
criterion = nn.CrossEntropyLoss()
batches = [(torch.randn(8, 64), torch.randint(4, (8,))) for _ in range(2)]
member, (x_test, y_test) = TrunkAndHead(), batches[0]
"""
)
WIDE = (
    MIXTRAL
    + """
import torch.distributed as dist
dist.init_process_group("mycel")
tiny_config.intermediate_size = 128
model = tiny()
calibration = batch = tokens = torch.randint(3, 64, (2, 12))
batches = [batch] * 2
"""
)
BEFORE: dict[str, list[tuple[str, str]]] = {
    "docs/concepts/closed_form.md": [
        (
            "closed_form.ridge_parts(x",
            "import torch\nfrom torch import nn\nimport torch.distributed as dist\n"
            'dist.init_process_group("mycel")\n'
            + OWN_FOLDER
            + "from mycel.data_parallel import closed_form\nx, targets = torch.randn(50, 6), torch.rand(50, 2)\n"
            'new = closed_form.ridge_parts(torch.randn(9, 6), torch.rand(9, 2), activation="logistic")',
        ),
        (
            "DirectFeedback(stage",
            "stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if rank == 0 else nn.Sequential(nn.Linear(8, 3))\n"
            "optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)\n"
            "loss = nn.functional.cross_entropy if rank == 1 else None\n"
            "batch = torch.randn(8, 8) if rank == 0 else None\n"
            "target = torch.randint(3, (8,)) if rank == 1 else None",
        ),
    ],
    "docs/concepts/encrypted_sums.md": [
        (
            "SumKey.make()",
            'import torch.distributed as dist\ndist.init_process_group("mycel")' + NET + "ddp_model = model",
        )
    ],
    "docs/guides/elastic_experts.md": [
        ("elastic_experts(model)", "import torch" + WIDE),
        ("measure_latencies(", "loss_at = lambda widths: sum(1 / width for width in widths)"),
        (
            "CodedOffload(model",
            "from mycel.moe.memory import EmulatedLink\nelastic.close()\nmodel = tiny()\n"
            "mycel.moe.apply(model)\nlink = EmulatedLink(bandwidth_gbps=10)",
        ),
    ],
    "docs/guides/tasks_and_ensembles.md": [
        ("UPGrad, combine_gradients", 'import torch.distributed as dist\ndist.init_process_group("mycel")' + TASKS),
        ("famo = FAMO()", "model = DistributedDataParallel(TrunkAndHead())"),
        ("MultipleChoice(overlap=4", "optimizer = torch.optim.SGD(member.parameters(), lr=0.1)"),
    ],
    "docs/concepts/plan_model.md": [("mycel.runtime.register", PACKETS)],
    "docs/guides/planned_training.md": [("read_plan", PLANNED)],
    "README.md": [
        (
            "compress(ddp_model",
            NET
            + "ddp_model = DistributedDataParallel(nn.Linear(64, 64))"
            + WORLD
            + MIXTRAL
            + "hugging_face_model, model = model, net",
        )
    ],
    "docs/concepts/beyond_averaging.md": [
        (
            "players = [",
            NET + "generator, critic = nn.Linear(4, 4), nn.Linear(4, 4)\nall_data_of_this_rank = torch.randn(8, 4)\n"
            "def game(generator, critic, data):\n    return (generator(data) * critic(data)).mean()",
        ),
        (
            "tuned = hd_pissa(",
            "class Attention(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.q_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 64)\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.attention = Attention()\n"
            "    def forward(self, x):\n"
            "        y = self.attention.v_proj(self.attention.q_proj(x))\n"
            "        y.loss = y.square().mean()\n"
            "        return y\n"
            "model, batches = Net(), [torch.randn(4, 64) for _ in range(2)]",
        ),
    ],
    "docs/concepts/combiners.md": [("combine_gradients(ddp_model", NET + "ddp_model = model")],
    "docs/concepts/compression_fsdp.md": [
        (
            "reshard_after_forward=ranks_of_a_node",
            FSDP + "from mycel.topology.builders import two_boxes\n"
            "ranks_of_a_node, topology = 2, two_boxes(num_ranks=4)",
        ),
        ("policy = LGreCo(", NET),
    ],
    "docs/concepts/flex.md": [
        ("y = layer(x, r=0)", "import torch\ntorch.manual_seed(0)"),
        ("tuner=Tuner(", WORLD + "batches = [torch.randn(50, 256) for _ in range(3)]"),
        ("keep_exchanges", ""),
    ],
    "docs/concepts/moe_codecs.md": [('codec = Int8Codec(gradients="exact")', WORLD), ("LSHDispatcher(inner", "")],
    "docs/concepts/moe_placement.md": [
        (
            "Rebalancer(",
            WORLD + "from mycel.moe import ExpertParallel, MoE, nodes_of\n"
            "from mycel.moe.placement import PlacedDispatcher, Rebalancer\n"
            "from mycel.planning.placement import ExpertPlacement\n"
            "from mycel.runtime import tensor_group\n"
            "topology = tensor_group().communicator.topology\n"
            "batches = [torch.randn(16, 512) for _ in range(2)]\n"
            "def train_step(layer, optimizer, x):\n"
            "    layer(x).square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()",
        )
    ],
    "docs/guides/compression.md": [
        ("model = DistributedDataParallel(model)\n", "from torch import nn\nmodel = nn.Linear(64, 64)"),
        ("policy = CompressionPolicy(", NET),
        ("QSDP(weight_bits", FSDP),
        ("GradScaler(device)", NET + 'device = "cpu"'),
        ("torch.save(state", OWN_FOLDER + NET + "handle = compress(model, PowerSGD(rank=4))" + STEP),
        ("class Compress(", TRAINER),
    ],
    "docs/guides/elastic.md": [
        ("mycel.elastic.shrink_group([3])", "import mycel.elastic\ntrain_step = lambda: None"),
        ("elastic.start_alone()", HANDLES),
        ("elastic.Roster(store", ROSTER),
    ],
    "docs/guides/faults.md": [
        (
            "dist.all_reduce(tensor)",
            "import torch\nimport torch.distributed as dist\nimport mycel\ntensor = torch.ones(3)",
        )
    ],
    "docs/guides/frameworks.md": [
        (
            "accelerator = Accelerator(",
            "import torch\nfrom torch import nn\nnet = nn.Linear(8, 8)\n"
            "optimizer = torch.optim.SGD(net.parameters(), 0.1)",
        )
    ],
    "docs/guides/gpus.md": [
        ("async_op=True", "import torch\ngradients, activations, weights = (torch.randn(8, 8) for _ in range(3))")
    ],
    "docs/guides/local_updates.md": [
        ("QSR(alpha", NET),
        ("uneven=True", "updates.close()\nloader = []"),
        ("if updates.in_step", "file = f'updates_{rank}.pt'" + STEP),
        (
            "class Meet(",
            TRAINER + "from mycel.data_parallel import Periodic, diloco, local_updates\n"
            "from transformers import TrainerCallback",
        ),
    ],
    "docs/guides/metrics.md": [
        ("mycel.runtime.metrics()", "import torch\nimport torch.distributed as dist\ndist.all_reduce(torch.ones(9))"),
        (
            "SummaryWriter(f",
            TENSORBOARD + "batches = [1, 2]\ntrain = lambda batch: dist.all_reduce(torch.ones(batch))",
        ),
    ],
    "docs/guides/moe.md": [
        ('algorithm="all_to_all", degree=2', WORLD + "torch.manual_seed(0)\nx = torch.randn(10, 64)"),
        ("fully_shard(layer.experts", ""),
        (
            "clip_grad_norm(model, max_norm=1.0)",
            "from torch import nn\n"
            "experts = MoE(64, 128, 8, 2, parallel=init_device_mesh('cpu', (4,)))\n"
            "model = nn.Sequential(nn.Linear(64, 64), experts)",
        ),
        (
            "task_loss + moe_loss",
            "optimizer = torch.optim.AdamW(model.parameters())\n"
            "task_loss = model(torch.randn(10, 64)).square().mean()",
        ),
        ("experts_apart(model", "model = model.module"),
    ],
    "docs/guides/moe_hugging_face.md": [
        (
            'AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")  #',
            "import torch" + MIXTRAL + WITHOUT_DOWNLOADS,
        ),
        ("fully_shard(block.experts", "model = tiny()"),
        (
            "move_experts(block, better",
            WORLD + "from mycel.planning.placement import ExpertPlacement\n"
            "model = tiny(num_experts=128)\noptimizer = torch.optim.AdamW(model.parameters())\n"
            "better = ExpertPlacement.contiguous(128, 4, spare=2)",
        ),
        ("register_expert_parallel(", ""),
        (
            "trainer_callback(model)",
            "model = tiny()\napply(model, parallel=init_device_mesh('cpu', (4,)))\n"
            "ids = torch.randint(3, 64, (16, 12))\n"
            "rows = [{'input_ids': row, 'labels': row} for row in ids]",
        ),
        ("ExpertBias(256", DEEPSEEK + "optimizer = torch.optim.AdamW(model.parameters())"),
        ("full_state_dict(model)", ""),
    ],
    "docs/guides/optimizers.md": [
        ("rank=0.25, weight_decay", NET),
        ("for block in model.blocks", FSDP),
        (
            "clip_grad_norm_(rest",
            NET + "optimizer = Dion(groups)\nmodel(torch.randn(8, 64)).square().mean().backward()",
        ),
        ("optimizer.synchronize()", "import torch.distributed as dist"),
    ],
    "docs/guides/pipelines.md": [
        ("Order.from_text(Path(sys.argv[1])", ORDER_FILE),
        ("def embed(step", EMBEDDED),
        ("Controller(store", SERVED),
    ],
    "docs/guides/torch-backend.md": [],
}


def blocks(page: str) -> list[tuple[int, str]]:
    """Blocks of Python without a prompt: line before the first of each, and contents."""
    text = page_text(page)
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in found if not m[1].startswith(">>>")]


def page_text(page: str) -> str:
    return (Path(__file__).resolve().parents[3] / page).read_text(encoding="utf-8")


def run_blocks(page: str, names: dict[str, Any]) -> int:
    """How many there were.

    Raises:
        LookupError: something is prepared for a block that is not there.
    """
    prepared = dict(BEFORE.get(page, ()))
    found = blocks(page)
    for line, source in found:
        for text in [text for text in prepared if text in source]:
            exec(compile(prepared.pop(text), f"prepared for {text!r} of {page}", "exec"), names)
        exec(compile("\n" * line + source, page, "exec"), names)
    if prepared:
        raise LookupError(f"{page} has no block of Python with {list(prepared)}")
    return len(found)


def run_page(rank: int, world_size: int, page: str, folder: str) -> int:
    """A page on a rank; its first ``init_process_group`` makes the group that every later one means, too."""
    make_group, begun = dist.init_process_group, count()

    def init_process_group(backend: str = "mycel", **options: Any) -> None:
        if dist.is_initialized():
            return
        if "store" not in options:  # a file of its own each time: who closes one last takes it away
            store = dist.FileStore(f"{os.environ['STORE_FILE']}.{next(begun)}", world_size)
            options = {"store": store, "rank": rank, "world_size": world_size}
        make_group(backend, **options)

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.chdir(folder)
    # Of transformers' Trainer, on machines without a GPU; everything else that warns is an error.
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")
    torch.manual_seed(0)
    dist.init_process_group = init_process_group  # type: ignore[assignment]
    names: dict[str, Any] = {"__name__": "page", "rank": rank, "world_size": world_size}
    import mycel.runtime  # noqa: F401  (registers the backend)

    if not re.search(r"^dist\.init_process_group", blocks(page)[0][1], re.MULTILINE):
        init_process_group()
    return run_blocks(page, names)
