"""One replica under torchft's Manager: its lighthouse decides who takes part, mycel's group moves the gradients.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 300 --heartbeat_timeout_ms 1000 --bind 127.0.0.1:29510
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 REPLICA=0 python examples/elastic/torchft_replica.py
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 REPLICA=1 python examples/elastic/torchft_replica.py

Kill one, and the others go on with the next step; start it again, and it gets its state from one of them. Needs
``pip install 'mycel[elastic]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
import train
from state import make_model
from torch.nn import functional

from mycel import elastic


def main() -> None:
    """Train until so many steps are committed, over whichever replicas are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    train.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    patience = timedelta(seconds=options.patience)
    replica = int(os.environ["REPLICA"])
    # The Manager wants a store of this replica's own, as torchrun would give each; here a replica is one rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model(options.length, options.width, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, foreach=False)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=elastic.torchft_process_group(patience),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,  # who comes has its state before the step, so that every step has all samples
        timeout=patience,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica{replica}",
        hostname="127.0.0.1",
    )
    samples = train.Samples(options)
    while manager.current_step() < options.steps:
        step = manager.current_step()
        manager.start_quorum()
        if manager.current_step() != step:  # its state has just been replaced
            step = manager.current_step()
        inputs, targets = samples.of_step(step)
        rank, size = manager.participating_rank(), manager.num_participants()
        mine = slice(rank, None, size)
        optimizer.zero_grad()
        total = functional.cross_entropy(model(inputs[mine]), targets[mine], reduction="sum") / len(inputs)
        total.backward()
        said = total.detach().reshape(1).clone()
        works = [
            manager.allreduce(t, reduce_op=dist.ReduceOp.SUM) for t in [*(p.grad for p in model.parameters()), said]
        ]
        for work in works:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            line = {"step": step + 1, "loss": said.item(), "size": size, "at": time.time()}
        else:
            line = {"lost": step + 1, "replica": replica, "at": time.time()}
        print(json.dumps(line), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
