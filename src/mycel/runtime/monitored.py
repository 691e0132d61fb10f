"""``monitored_barrier``: a barrier after which rank 0 knows who did not come, and the group goes on.

A rank that comes tells rank 0, and rank 0 answers when all have come, or when its time is over. Whoever gives up
first says so, so that a barrier that failed leaves nothing behind that the next one could take for its own.
"""

from __future__ import annotations

import time
from itertools import count

from mycel.errors import CollectiveTimeoutError
from mycel.runtime.p2p_endpoint import Endpoint

__all__ = ["pass_barrier"]

#: A rank whose own time is over still hears what rank 0, whose time began later, or ends a little later, has found.
_ANSWER_S = 2.0
_visits = count(1)


def pass_barrier(endpoint: Endpoint, timeout_s: float, *, wait_all_ranks: bool) -> None:
    """Wait for every rank.

    Args:
        endpoint: of the group's messages.
        timeout_s: how long rank 0 waits for the others.
        wait_all_ranks: name all ranks that are missing rather than the first.

    Raises:
        CollectiveTimeoutError: a rank did not come in time; on rank 0, and on ranks that it could tell, it is named.
        CommunicationError: the group has failed.
    """
    if endpoint.rank == 0:
        _receive_all(endpoint, timeout_s, wait_all_ranks=wait_all_ranks)
    else:
        _report(endpoint, timeout_s)


def _receive_all(endpoint: Endpoint, timeout_s: float, *, wait_all_ranks: bool) -> None:
    """Rank 0's part."""
    if timeout_s <= 0:
        raise CollectiveTimeoutError("Rank 0 timed out in monitoredBarrier: it was given no time")
    began = time.monotonic()
    here: dict[int, int] = {}
    others = range(1, endpoint.size)

    def hear() -> bool:
        for peer in others:
            for note in endpoint.notes_from(peer):
                if note.get("here"):
                    here[peer] = int(note["visit"])
                elif here.get(peer) == note.get("visit"):
                    del here[peer]
        return all(peer in here or endpoint.is_lost(peer) for peer in others)

    endpoint.wait_until(hear, timeout_s)
    missing = [peer for peer in others if peer not in here]
    error = ""
    if missing:
        named = missing if wait_all_ranks else missing[:1]
        who = f"Ranks {', '.join(map(str, named))}" if len(named) > 1 else f"Rank {named[0]}"
        gone = ", ".join(str(peer) for peer in named if endpoint.is_lost(peer))
        why = f"rank {gone} left or died" if gone else "stopped, late, or never called it"
        waited_ms = (time.monotonic() - began) * 1000
        error = f"{who} failed to pass monitoredBarrier in {waited_ms:.0f} ms: {why}"
    for peer, visit in here.items():
        endpoint.note(peer, {"visit": visit, "error": error}, timeout_s)
    if error:
        raise CollectiveTimeoutError(f"[Rank 0]: {error}")


def _report(endpoint: Endpoint, timeout_s: float) -> None:
    """Any other rank's part."""
    visit = next(_visits)
    answers: list[str] = []

    def hear() -> bool:
        answers.extend(str(note.get("error")) for note in endpoint.notes_from(0) if note.get("visit") == visit)
        return bool(answers) or endpoint.is_lost(0)

    endpoint.note(0, {"here": True, "visit": visit}, timeout_s)
    if not endpoint.wait_until(hear, timeout_s + _ANSWER_S):
        endpoint.note(0, {"here": False, "visit": visit}, timeout_s)
        answers.append(f"rank 0 has not answered within {timeout_s + _ANSWER_S:g} s")
    if not answers:
        answers.append("rank 0 left or died")
    if answers[0]:
        raise CollectiveTimeoutError(
            f"Rank {endpoint.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0: {answers[0]}"
        )
