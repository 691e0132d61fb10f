"""Messages in flight, and how they share links: the simulator's inner loop, compiled.

References:
    D. Bertsekas, R. Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2 (max-min fair rates).
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from mycel.compiled import compiled_at_once

__all__ = ["play", "share"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@compiled_at_once
def share(
    active: Ints,
    num_active: int,
    path_start: Ints,
    path_link: Ints,
    capacity: Floats,
    weight: Floats,
    rate: Floats,
) -> None:
    """Weighted max-min rates of the active channels into ``rate``.

    Nobody's rate for its weight can grow but at the cost of a channel that has as little or less.

    A link at which all channels would go slower, for their weights, than anywhere else on their paths settles all of
    them at once: what is settled elsewhere only makes more room there. Progressive filling settles the slowest link
    of all in a round; this, all that are slowest among their neighbours, and takes a tenth of the rounds.

    Args:
        active, num_active: channels with a message in flight: that many first numbers of ``active``.
        path_start, path_link, capacity, weight: as for ``play``.
        rate: gets bytes a second of each of these channels.
    """
    left = capacity.copy()
    users = np.zeros(len(capacity))
    level = np.zeros(len(capacity))
    is_tight = np.zeros(len(capacity), dtype=np.bool_)
    unsettled = active[:num_active].copy()
    count = num_active
    while count > 0:
        users[:] = 0.0
        for k in range(count):
            c = unsettled[k]
            for p in range(path_start[c], path_start[c + 1]):
                users[path_link[p]] += weight[c]
        for link in range(len(capacity)):
            is_tight[link] = True
            if users[link] > 0.0:
                level[link] = left[link] / users[link]
        for k in range(count):
            c = unsettled[k]
            least = np.inf
            for p in range(path_start[c], path_start[c + 1]):
                least = min(least, level[path_link[p]])
            rate[c] = least
            for p in range(path_start[c], path_start[c + 1]):
                if level[path_link[p]] > least * (1.0 + 1e-9):
                    is_tight[path_link[p]] = False
        k = 0
        while k < count:
            c = unsettled[k]
            stopped = False
            for p in range(path_start[c], path_start[c + 1]):
                stopped = stopped or (is_tight[path_link[p]] and level[path_link[p]] <= rate[c] * (1.0 + 1e-9))
            if not stopped:
                k += 1
                continue
            rate[c] *= weight[c]
            for p in range(path_start[c], path_start[c + 1]):
                # What rounding takes away must not stop those that are still to be settled.
                left[path_link[p]] = max(left[path_link[p]] - rate[c], 1e-12 * capacity[path_link[p]])
            count -= 1
            unsettled[k], unsettled[count] = unsettled[count], c


@compiled_at_once
def play(
    channel: Ints,
    size: Floats,
    path_start: Ints,
    path_link: Ints,
    capacity: Floats,
    weight: Floats,
    delay: Floats,
    start_s: float,
    waits_for: Ints,
    next_start: Ints,
    next_index: Ints,
) -> tuple[Floats, int]:
    """Play messages out.

    Instructions are numbered: first the messages as they are sent, by channel and in order, then the same as they are
    received, then what costs no time.

    Args:
        channel, size: of each message; bytes.
        path_start, path_link: links of each channel's path, in compressed rows.
        capacity: bytes a second of each link.
        weight, delay: of each channel; seconds from a message's last byte to its arrival.
        start_s: when everything begins.
        waits_for: of each instruction, how many others must come before it; used up.
        next_start, next_index: instructions that wait for each one, in compressed rows.

    Returns:
        Times ``[3, messages]`` of first byte, last byte and completion, and how many instructions completed.
    """
    num_messages = len(size)
    times = np.zeros((3, num_messages))
    remaining = size.copy()
    current = np.full(len(delay), -1)  # the message that each channel is at
    active = np.empty(len(delay), dtype=np.int64)
    is_active = np.zeros(len(delay), dtype=np.bool_)
    rate = np.empty(len(delay))
    num_active = 0
    arrivals = [(0.0, 0)]
    arrivals.pop()
    ready = [i for i in range(len(waits_for)) if waits_for[i] == 0]
    now, finished, changed = start_s, 0, False
    while True:
        while len(ready) > 0 or (len(arrivals) > 0 and arrivals[0][0] <= now):
            if len(ready) == 0:
                node = heapq.heappop(arrivals)[1] + num_messages
                waits_for[node] -= 1
                if waits_for[node] == 0:
                    ready.append(node)
                continue
            node = ready.pop()
            if node < num_messages and remaining[node] > 0.0:
                c = channel[node]
                times[0, node] = now
                current[c] = node
                if not is_active[c]:
                    is_active[c] = changed = True
                    active[num_active] = c
                    num_active += 1
                continue
            finished += 1
            if node < num_messages:
                times[1, node] = now
                heapq.heappush(arrivals, (now + delay[channel[node]], node))
            elif node < 2 * num_messages:
                times[2, node - num_messages] = now
            for i in range(next_start[node], next_start[node + 1]):
                waits_for[next_index[i]] -= 1
                if waits_for[next_index[i]] == 0:
                    ready.append(next_index[i])
        # A channel that goes on with its next message leaves all rates as they are.
        i = 0
        while i < num_active:
            c = active[i]
            if current[c] >= 0:
                i += 1
            else:
                is_active[c] = False
                changed = True
                num_active -= 1
                active[i] = active[num_active]
        if num_active == 0 and len(arrivals) == 0:
            return times, finished
        if changed:
            share(active, num_active, path_start, path_link, capacity, weight, rate)
            changed = False
        then = arrivals[0][0] if len(arrivals) > 0 else np.inf
        for i in range(num_active):
            c = active[i]
            then = min(then, now + remaining[current[c]] / rate[c])
        before, now = now, then
        for i in range(num_active):
            c = active[i]
            message = current[c]
            # What ends now ends, however times are rounded.
            last = before + remaining[message] / rate[c] <= now * (1.0 + 1e-12)
            remaining[message] -= rate[c] * (now - before)
            if last or remaining[message] <= 1e-9 * size[message]:
                remaining[message] = 0.0
                current[c] = -1
                ready.append(message)
