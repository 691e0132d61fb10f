"""Playing a policy and an order of transfers forward in time, and changing both at random, as compiled loops.

Whoever can begin begins: computation first, then what goes out, then what comes back. What comes back takes memory,
so it begins only where every recomputation before the block's own backward would still fit, and in forward only
where all that is to come fits even if nothing more goes out. So nothing waits for ever: the block that is next can
always be had.

Policies are numbers: 0 keep, 1 swap, 2 recompute, 3 recompute from a swapped input. Columns of ``blocks``, int64 of
shape (blocks, 8): forward, backward, saved, input, and microseconds out and in of all that is saved and of the input.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mycel.compiled import compiled_without_lock

__all__ = ["anneal", "play"]

Ints = NDArray[np.int64]


@compiled_without_lock
def play(blocks: Ints, capacity: int, policy: Ints, urgency: Ints, delay: Ints, starts: Ints, most: int) -> int:
    """When everything begins.

    Args:
        blocks: see the module.
        capacity: of near memory.
        policy: of each block.
        urgency: of what is ready to go out, the least goes first.
        delay: of each block, 1 where its transfer back begins only once its backward is next (no prefetch).
        starts: gets the starts, of shape (blocks, 5): forward, backward, recompute, out, in; -1 where there is none.
        most: microseconds after which nobody is interested.

    Returns:
        Microseconds of the iteration; -1 where a forward can never begin, or it takes longer than ``most``.
    """
    n = blocks.shape[0]
    starts[:] = -1
    is_in_far = np.zeros(n, np.int64)  # 1 once it has gone out
    ready = np.zeros(n, np.int64)  # 1 once it waits to go out
    is_back = np.zeros(n, np.int64)  # 1 once it is back
    now = 0
    held = 0
    phase = 0  # 0 forward, 1 backward
    block = 0
    doing = -1  # 0 forward, 1 backward, 2 recompute
    done = np.zeros(n, np.int64)  # 1 once recomputed
    compute_end = out_end = in_end = 1 << 62
    out_block = in_block = -1
    next_in = n - 1
    # What blocks that are still to go forward take at least, if nothing more goes out.
    ahead = 0
    for k in range(n):
        ahead += blocks[k, 2] if policy[k] < 2 else blocks[k, 3]
    while True:
        # Ends, at this moment.
        if compute_end == now:
            compute_end = 1 << 62
            if doing == 0:
                if policy[block] >= 2:
                    held -= blocks[block, 2] - blocks[block, 3]
                if policy[block] == 1 or policy[block] == 3:
                    ready[block] = 1
                if block == n - 1:
                    phase = 1
                else:
                    block += 1
            elif doing == 2:
                done[block] = 1
            else:
                held -= blocks[block, 2]
                if block == 0:
                    return now
                block -= 1
            doing = -1
        if out_end == now:
            out_end = 1 << 62
            held -= blocks[out_block, 2] if policy[out_block] == 1 else blocks[out_block, 3]
            is_in_far[out_block] = 1
            out_block = -1
        if in_end == now:
            in_end = 1 << 62
            is_back[in_block] = 1
            in_block = -1
        # Starts.
        if doing < 0:
            kind = policy[block]
            if phase == 0:
                if held + blocks[block, 2] <= capacity:
                    held += blocks[block, 2]
                    ahead -= blocks[block, 2] if kind < 2 else blocks[block, 3]
                    starts[block, 0] = now
                    compute_end = now + blocks[block, 0]
                    doing = 0
            elif (kind == 0 or kind == 2) or is_back[block] == 1:
                if kind < 2 or done[block] == 1:
                    starts[block, 1] = now
                    compute_end = now + blocks[block, 1]
                    doing = 1
                elif held + blocks[block, 2] - blocks[block, 3] <= capacity:
                    held += blocks[block, 2] - blocks[block, 3]
                    starts[block, 2] = now
                    compute_end = now + blocks[block, 0]
                    doing = 2
        if out_block < 0:
            best = 1 << 62
            for k in range(n):
                if ready[k] == 1 and urgency[k] < best:
                    best = urgency[k]
                    out_block = k
                if k > block and phase == 0:
                    break
            if out_block >= 0:
                ready[out_block] = 0
                starts[out_block, 3] = now
                out_end = now + (blocks[out_block, 4] if policy[out_block] == 1 else blocks[out_block, 6])
                if out_end == now:
                    continue
        if in_block < 0:
            while next_in >= 0 and (policy[next_in] == 0 or policy[next_in] == 2):
                next_in -= 1
            if next_in >= 0 and is_in_far[next_in] == 1:
                k = next_in
                amount = blocks[k, 2] if policy[k] == 1 else blocks[k, 3]
                allowed = held + amount <= capacity
                if allowed and delay[k] == 1:
                    allowed = phase == 1 and block == k
                if allowed and phase == 0:
                    again = 0
                    for j in range(n):
                        if policy[j] >= 2:
                            again = max(again, blocks[j, 2] - blocks[j, 3])
                    allowed = held + amount + ahead + again <= capacity
                elif allowed:
                    # Every recomputation before this block's backward must fit beside it.
                    level = held + amount
                    for j in range(block, k, -1):
                        if policy[j] >= 2 and starts[j, 2] < 0:
                            level += blocks[j, 2] - blocks[j, 3]
                            if level > capacity:
                                allowed = False
                                break
                        level -= blocks[j, 2]
                if allowed:
                    held += amount
                    in_block = k
                    starts[k, 4] = now
                    in_end = now + (blocks[k, 5] if policy[k] == 1 else blocks[k, 7])
                    next_in -= 1
                    if in_end == now:
                        continue
        after = min(compute_end, out_end, in_end)
        if after >= 1 << 61 or after > most:
            return -1
        now = after


@compiled_without_lock
def anneal(
    blocks: Ints,
    capacity: int,
    policy: Ints,
    urgency: Ints,
    seed: int,
    tries: int,
    warm: float,
    ideal: int,
) -> int:
    """Changes of policies and of the order out, kept where they are no worse, or a little worse in the beginning.

    Args:
        blocks, capacity: see the module.
        policy, urgency: where to start; get the best found.
        seed: of the random numbers; the same gives the same.
        tries: changes that are played.
        warm: part of the time above the ideal by which a change may be worse in the beginning.
        ideal: microseconds that nothing is below.

    Returns:
        Microseconds of the best.
    """
    np.random.seed(seed)
    n = blocks.shape[0]
    starts = np.zeros((n, 5), np.int64)
    delay = np.zeros(n, np.int64)
    now = play(blocks, capacity, policy, urgency, delay, starts, 1 << 60)
    if now < 0:
        return -1
    here, order = policy.copy(), urgency.copy()
    trial, trial_order = here.copy(), order.copy()
    best = now
    for turn in range(tries):
        if best <= ideal:
            break
        heat = warm * (best - ideal) * (1.0 - turn / tries) ** 2
        trial[:] = here
        trial_order[:] = order
        a = np.random.randint(n)
        what = np.random.random()
        if what < 0.5:
            trial[a] = (here[a] + 1 + np.random.randint(3)) % 4
        elif what < 0.9:
            b = np.random.randint(n) if what < 0.7 else min(n - 1, max(0, a + np.random.randint(-3, 4)))
            trial[a], trial[b] = here[b], here[a]
        else:
            trial_order[a] += np.random.randint(-3, 4)
        limit = now + int(-heat * np.log(1.0 - np.random.random()))
        time = play(blocks, capacity, trial, trial_order, delay, starts, limit)
        if time >= 0:
            now = time
            here[:] = trial
            order[:] = trial_order
            if time < best:
                best = time
                policy[:] = trial
                urgency[:] = trial_order
    return best
