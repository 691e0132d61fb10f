"""The third tier: numbers in a file, of which host memory keeps those that are asked for most."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from mycel.comm.pending import Pending
from mycel.errors import UsageError
from mycel.memory.tiers import Copies, Link, on_disk

__all__ = ["DiskLink"]


class DiskLink(Link):
    """A link whose far memory is a disk, with host memory in between as a cache.

    A thread reads from the disk into host memory, and the link that it is given carries on from there. What is asked
    for is counted; counts fade, and where room is needed, what has the smallest count goes.

    Args:
        link: from host memory to near memory.
        folder: for the numbers, see ``on_disk``.
        host_bytes: of the cache. Training with far experts wants 0, because whole layers take turns there.
        fade: factor of all counts, after ``fade_every`` transfers.
        fade_every: transfers.

    Attributes:
        hits: tensors asked for that were in host memory.
        reads: those that were read from the disk.
        held_bytes: in host memory now.

    Raises:
        UsageError: a negative size, or a factor that is not between 0 and 1.

    References:
        Shen et al., "SE-MoE", 2022 (arXiv 2205.10034; hierarchical storage: SSD, CPU as cache with fading hits, GPU).
    """

    def __init__(
        self, link: Link, folder: str | Path, *, host_bytes: int = 0, fade: float = 0.5, fade_every: int = 256
    ) -> None:
        if host_bytes < 0 or not 0 < fade <= 1 or fade_every < 1:
            raise UsageError(f"DiskLink: {host_bytes} bytes of host memory, fade {fade} every {fade_every} transfers")
        self.link, self.host_bytes, self.fade, self.fade_every = link, host_bytes, fade, fade_every
        self._make = on_disk(folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mycel-disk")
        self._count: dict[int, float] = {}
        #: By place on the disk: the copy in host memory, and which writing of the disk's it is of.
        self._held: dict[int, tuple[Tensor, int]] = {}
        self._transfers = self.hits = self.reads = self.held_bytes = 0

    def far(self, tensor: Tensor) -> Tensor:
        """On the disk."""
        made = self._make(tensor, tensor.dtype)
        with torch.no_grad():
            return made.copy_(tensor)

    def fetch(self, copies: Copies) -> Pending[None]:
        """See ``Link``."""
        reading = self._thread.submit(self._carry, list(copies))
        return Pending(lambda: reading.result().wait())

    def close(self) -> None:
        """See ``Link``; the other link stays open."""
        self._thread.shutdown()

    def _carry(self, copies: Copies) -> Pending[None]:
        self._transfers += 1
        if self._transfers % self.fade_every == 0:
            self._count = {place: count * self.fade for place, count in self._count.items()}
        with torch.inference_mode():
            return self.link.fetch([(self._in_host(far), near) for far, near in copies])

    def _in_host(self, far: Tensor) -> Tensor:
        place, written = far.data_ptr(), far._version
        self._count[place] = self._count.get(place, 0.0) + 1.0
        held = self._held.get(place)
        if held is not None and held[1] == written:
            self.hits += 1
            return held[0]
        self.reads += 1
        if held is not None:
            self._drop(place)
        # A new tensor each time: the link may still read what another one had.
        host = self.link.far(torch.empty_like(far).copy_(far))
        if self._make_room(host.nbytes, self._count[place]):
            self._held[place] = host, written
            self.held_bytes += host.nbytes
        return host

    def _make_room(self, num_bytes: int, count: float) -> bool:
        """Whether there is room now; what is asked for more stays."""
        while self.held_bytes + num_bytes > self.host_bytes:
            least = min(self._held, key=lambda place: self._count[place], default=None)
            if least is None or self._count[least] > count:
                return False
            self._drop(least)
        return True

    def _drop(self, place: int) -> None:
        self.held_bytes -= self._held.pop(place)[0].nbytes
