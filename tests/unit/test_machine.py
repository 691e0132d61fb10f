"""Translated functions against the same functions as Python runs them, and what cannot be translated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.machine import callees
from mycel.machine.words import array_at, table_at
from mycel.standalone import Standalone, inlined, standalone

MOST = 3


def divide(x: int, y: int) -> int:
    if y == 0:
        return 0
    return (x // y) * 1000 + x % y


def bits(x: int, y: int) -> int:
    return (x & y) + (x | y) * 3 + (x ^ y) * 5 + (x >> 3) + ((y & 15) << 2) + ~x - -y


def truths(x: int, y: int) -> int:
    both = x > 0 and y > 0
    one = x > 0 or y > 10 or x == y
    odd = (x & 1 == 1) | (y & 1 == 1)
    same = not both
    same &= x != 7
    return both + 2 * one + 4 * odd + 8 * same + (16 if x in (1, 2, MOST) else 32) + 64 * (y not in (0, 1))


def loops(x: int, y: int) -> int:
    total, i = 0, 0
    for i in range(x & 7):
        if i == 2:
            continue
        if i == 6:
            break
        total += i
    for k in range(10, y & 7, -3):
        for i in range(k, k + 3):
            total += i * k
    while True:
        total += 1
        if total % 5 == 0:
            break
    while total < 100:
        total += 40
    return total * 100 + i


def swap(x: int, y: int) -> int:
    x, y = y, x
    x -= min(y, 4, x) + max(x, y)
    x *= 3
    x //= 2
    if x > y:
        y = x
    elif x < -5:
        return -1
    else:
        pass
    return x + 7 * y


def _helper(x: int, by: int = 5) -> int:
    if x > by:
        return x - by
    return by


def calls(x: int, y: int) -> int:
    return helper(x) + helper(by=y, x=3) * 2 + helper(helper(x, y), y)


helper: Any = _helper
FUNCTIONS: list[Callable[[int, int], int]] = [divide, bits, truths, loops, swap, calls]
TRANSLATED = {function: Standalone(function) for function in FUNCTIONS}
SMALL = st.integers(-(1 << 40), 1 << 40) | st.integers(-20, 20)


@pytest.fixture(scope="module", autouse=True)
def helper_is_inlined() -> None:
    """What translated code calls is marked; Python calls the same function as it is written."""
    global helper
    helper = inlined(_helper)
    for function in FUNCTIONS:
        assert TRANSLATED[function].address
    helper = _helper


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@given(x=SMALL, y=SMALL)
@settings(deadline=None, max_examples=150)
def test_translated_functions_compute_what_python_does(function: Callable[[int, int], int], x: int, y: int) -> None:
    assert TRANSLATED[function](x, y) == function(x, y)


def test_numbers_wrap_round_and_division_by_zero_gives_zero() -> None:
    @standalone
    def both(x: int, y: int) -> int:
        return (x + 1) ^ (x // y) ^ (x % y)

    assert both((1 << 63) - 1, 0) == -(1 << 63)


def test_arrays_and_tables_share_memory_and_slices_end_where_arrays_do() -> None:
    @standalone
    def work(address: int, length: int) -> int:
        array = array_at(address, np.int64, length)
        part = array[2:100]
        part[0] += 5
        table = table_at(address, length // 2, 2)
        row = table[1]
        row[1] = row[1] * 10
        table[0, 1] -= 1
        return len(part) * 100 + len(array[3:2]) * 10 + len(array[4:])

    data = np.arange(6, dtype=np.int64)
    assert work(data.ctypes.data, 6) == 402
    assert data.tolist() == [0, 0, 7, 30, 4, 5]


@pytest.mark.parametrize("element", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.float32])
def test_numbers_of_every_width_are_read_and_written(element: Any) -> None:
    @inlined
    def copy_over(to: int, source: int, length: int, kind: Any) -> None:
        a, b = array_at(to, kind, length), array_at(source, kind, length)
        for i in range(length):
            a[i] = b[i] + b[i]

    @standalone
    def twice(to: int, source: int, length: int) -> None:
        copy_over(to, source, length, element)

    twice.symbol += element.__name__  # type: ignore[attr-defined]  # each has code of its own
    given, made = np.arange(-50, 200).astype(element), np.zeros(250, dtype=element)
    twice(made.ctypes.data, given.ctypes.data, 250)
    assert (made == given + given).all()


def kept(function: Callable[..., Any], line: int) -> str:
    return f"test_machine.py:{function.__code__.co_firstlineno + line}: "


def test_what_cannot_be_translated_is_named_with_its_line() -> None:
    def text(x: int) -> int:
        y = x
        return len("abc" * y)

    def unknown(x: int) -> int:
        return x + not_there(x)  # type: ignore[name-defined,no-any-return]  # noqa: F821

    def mixed(x: int) -> int:
        a = array_at(x, np.uint32, 1)
        return a[0] + x  # type: ignore[no-any-return]

    def changes(x: int) -> int:
        y: Any
        y = x > 1
        y = x
        return y

    def negative(x: int) -> int:
        return array_at(x, np.int64, 1)[-1]  # type: ignore[no-any-return]

    def owns(x: int) -> int:
        made = [x]
        return made[0]

    for function, line, what in (
        (text, 2, "no number|cannot be translated"),
        (unknown, 1, "not_there is not known"),
        (mixed, 2, "uint32 and int64 do not go together"),
        (negative, 1, "count from the front"),
        (owns, 1, r"\[x\] cannot be translated"),
        (changes, 1, "AnnAssign cannot be translated"),
    ):
        with pytest.raises(TypeError, match=what) as raised:
            Standalone(function)._compile()
        assert kept(function, line) in str(raised.value)


def test_circles_are_refused() -> None:
    with pytest.raises(TypeError, match="in a circle"):
        Standalone(_endless.function)._compile()  # type: ignore[attr-defined]


@inlined
def _endless(x: int) -> int:
    return _endless(x)


def test_words_are_for_compiled_code_only() -> None:
    with pytest.raises(TypeError, match="array_at is for compiled code"):
        array_at(0, np.int64, 1)


LIMIT = 10


@standalone
def limited(x: int) -> int:
    return x + LIMIT


def test_code_depends_on_constants_too(monkeypatch: pytest.MonkeyPatch) -> None:
    function = limited.function  # type: ignore[attr-defined]
    before = list(callees.ingredients(function))
    monkeypatch.setitem(globals(), "LIMIT", 11)
    after = list(callees.ingredients(function))
    assert before[:-1] == after[:-1] and before[-1] != after[-1]
