"""A script with a controller, as a person would write one; says in JSON what came of each part that is named."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from mycel.controller import Controller, Credits, Reference, current
from mycel.errors import MycelError


def total(x: float) -> torch.Tensor:
    tensor = torch.full((4,), x + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor


def where() -> tuple[int, int, int, float]:
    here = current()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=here.group)
    return here.rank, here.size, here.global_rank, float(tensor[0])


def large(rows: int) -> dict[str, Any]:
    return {"name": "x", "parts": [torch.full((rows, 64), float(dist.get_rank())), torch.empty(0), torch.arange(3)]}


def summed(value: dict[str, Any]) -> tuple[str, list[float]]:
    return value["name"], [float(part.double().sum()) for part in value["parts"]]


def unlucky(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("no luck")
    return 1


def same(value: Any) -> Any:
    return value


def held() -> int:
    from mycel.controller import rank

    return len(rank._VALUES)


def own_end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def said(act: Any) -> str:
    try:
        act()
    except MycelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def values(cluster: Controller) -> dict[str, Any]:
    left, right = cluster.mesh[:1], cluster.mesh[1:]
    made = left.call(large, 1000)
    moved = right.put(made)
    back = left.put(right.call(same, moved))
    out = {
        "total": [one.tolist() for one in cluster.mesh.call(total, 1.0).result()],
        "where": [mesh.call(where).result() for mesh in (cluster.mesh, left, right)],
        "moved": right.call(summed, moved).result(),
        "back": left.call(summed, back).result(),
        "fetched": [len(one["parts"][0]) for one in moved.result()],
        "plain": right.call(same, right.put({"a": [1, "b"]})).result(),
        "other mesh": said(lambda: right.call(summed, made)),
        "uneven": said(lambda: cluster.mesh.put(made)),
    }
    kept: list[Reference] = [cluster.mesh.call(same, number) for number in range(10)]
    before = cluster.mesh.call(held).result()
    kept.clear()
    cluster.mesh.call(same, 0).wait()
    out["let go"] = [a - b for a, b in zip(before, cluster.mesh.call(held).result(), strict=True)]
    return out


def failures(cluster: Controller) -> dict[str, Any]:
    failed = cluster.mesh.call(unlucky, 1)
    follows = cluster.mesh.call(same, failed)
    out: dict[str, Any] = {
        "own": said(failed.result),
        "follows": said(follows.result),
        "after": cluster.mesh.call(same, 3).result(),
    }
    cluster.mesh.call(unlucky, 0)  # nobody asks for it
    calls = iter(range(1000))

    def go_on() -> None:
        for _ in calls:
            cluster.mesh.call(same, 1).wait()

    out["unasked"] = said(go_on)
    out["not sent"] = said(lambda: cluster.mesh.call(same, threading.Lock()))
    return out


def clients(cluster: Controller) -> dict[str, Any]:
    """Two clients whose programs meet in opposite orders."""
    results: dict[str, list[Any]] = {"ab": [], "ba": []}

    def client(name: str) -> None:
        for number in range(20):
            for which in name:
                results[name].append(cluster.mesh.call(total, number + ord(which)))

    threads = [threading.Thread(target=client, args=(name,)) for name in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: [float(call.result()[0][0]) for call in calls] for name, calls in results.items()}


def slots(cluster: Controller) -> dict[str, Any]:
    edge = Credits(2)
    calls = [cluster.mesh.call(same, number, takes=edge, gives=edge) for number in range(6)]
    out: dict[str, Any] = {"values": [call.result()[0] for call in calls]}
    taken = Credits(1)
    taken.take(1.0)
    out["never given"] = said(lambda: taken.take(0.2))
    return out


def killed(cluster: Controller) -> dict[str, Any]:
    begun = time.monotonic()
    cluster.mesh[1].call(own_end)
    waits = said(cluster.mesh.call(total, 0.0).result)
    return {"waits": waits, "later": said(lambda: cluster.mesh.call(total, 0.0)), "after_s": time.monotonic() - begun}


def main() -> None:
    parts = {"values": values, "failures": failures, "clients": clients, "slots": slots, "killed": killed}
    cluster = Controller(2, timeout_s=90)
    out: dict[str, Any] = {name: parts[name](cluster) for name in sys.argv[1:]}
    cluster.close()
    out["closed"] = said(lambda: cluster.mesh.call(same, 1))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
