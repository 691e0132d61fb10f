"""Whether every result that another rank needs is sent once and received once, in the same sequence on both sides.

Messages between two ranks carry no tags: the n-th that is sent is what the n-th receive gets. An order in which the
sequences differ runs, and trains on other micro-batches' activations and gradients.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from mycel.pipeline.check.places import Place, at, places_of, wrong
from mycel.pipeline.check.waits import Need, words_of
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Exchange", "check_messages"]


_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One message.

    Attributes:
        send: where it is sent.
        receive: where it is received.
        consumer: where it is needed.
    """

    send: Place
    receive: Place
    consumer: Place


def check_messages(order: Order, needs: list[Need]) -> list[Exchange]:
    """One send and one receive for each result that crosses ranks, in their places, and no others.

    Args:
        order: with communication.
        needs: which computation needs the result of which.

    Returns:
        The messages.

    Raises:
        VerificationError: a message is missing, twice, for nobody, too early, too late or out of sequence.
    """
    found = _messages(order)
    expected: dict[Action, tuple[Action, Need]] = {}
    for need in needs:
        if not need.is_message:
            continue
        send, receive = words_of(need)
        if send in expected:
            raise wrong(
                order,
                f"{at(order, need.producer)}: its result goes to two other stages, and {send} is one message; "
                "torch's actions have no words for branches, join them in a shared block",
                [need.producer],
            )
        if receive in expected:
            raise wrong(
                order,
                f"{at(order, need.consumer)}: it needs results of two other ranks, and {receive} is one message; "
                "torch's actions have no words for branches, join them in a shared block",
                [need.consumer],
            )
        expected[send] = (receive, need)
        expected[receive] = (send, need)
    for action, places in found.items():
        _check_one(order, action, places, expected)
    exchanges = []
    for action, (other, need) in expected.items():
        if action not in found:
            is_send = action.kind in _SENDS
            beside = need.producer if is_send else need.consumer
            rest = f"{other} would wait for ever" if is_send else f"what {other} sends would meet another receive"
            raise wrong(
                order,
                f"{action} is missing on rank {beside.rank}: {rest}; add it {'after' if is_send else 'before'} "
                f"{order.rows[beside.rank][beside.step]} (step {beside.step})",
                [beside],
            )
        if action.kind in _SENDS and other in found:
            exchanges.append(Exchange(send=found[action][0], receive=found[other][0], consumer=need.consumer))
    _check_sequences(order, exchanges)
    return exchanges


def _messages(order: Order) -> dict[Action, list[Place]]:
    found: dict[Action, list[Place]] = defaultdict(list)
    for place, leaf in places_of(order):
        if leaf.kind.is_message:
            found[leaf].append(place)
    return dict(found)


def _check_one(
    order: Order, action: Action, places: list[Place], expected: dict[Action, tuple[Action, Need]]
) -> None:
    place = places[0]
    if action not in expected:
        raise wrong(
            order,
            f"{at(order, place)}: nobody on another rank {'needs' if action.kind in _SENDS else 'makes'} what it "
            "says; leave it out, or correct its stage and micro-batch",
            [place],
        )
    if len(places) > 1:
        raise wrong(
            order,
            f"{at(order, places[1])}: {action} stands there a second time, after {place}; every later message "
            "of these two ranks would meet a wrong receive: leave one out",
            places,
        )
    _, need = expected[action]
    is_send = action.kind in _SENDS
    beside = need.producer if is_send else need.consumer
    if place.rank != beside.rank:
        raise wrong(
            order,
            f"{at(order, place)}: stage {action.stage} is on rank {beside.rank}; move it there, beside "
            f"{order.rows[beside.rank][beside.step]} (step {beside.step})",
            [place, beside],
        )
    if is_send and place.step < beside.step:
        raise wrong(
            order,
            f"{at(order, place)} stands before {order.rows[beside.rank][beside.step]} (step {beside.step}), "
            "whose result it sends; move it behind that",
            [place, beside],
        )
    if not is_send and place.step > beside.step:
        raise wrong(
            order,
            f"{at(order, place)} stands after {order.rows[beside.rank][beside.step]} (step {beside.step}), "
            f"which needs it; move it before that",
            [place, beside],
        )


def _check_sequences(order: Order, exchanges: list[Exchange]) -> None:
    pairs: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        pairs[exchange.send.rank, exchange.receive.rank].append(exchange)
    for (source, target), pair in sorted(pairs.items()):
        sent = sorted(pair, key=lambda exchange: exchange.send.step)
        received = sorted(pair, key=lambda exchange: exchange.receive.step)
        for number, (one, other) in enumerate(zip_longest(sent, received)):
            if one == other:
                continue
            got, wanted = order.rows[target][other.receive.step], order.rows[target][one.receive.step]
            message = order.rows[source][one.send.step]
            raise wrong(
                order,
                f"message {number} from rank {source} to rank {target} is {message} (step {one.send.step}), "
                f"but receive {number} is {got} (rank {target}, step {other.receive.step}): it would silently "
                f"get what belongs to {wanted} (step {one.receive.step}); put the receives into the sequence "
                f"of the sends, {wanted} before {got}",
                [one.send, other.receive, one.receive],
            )
