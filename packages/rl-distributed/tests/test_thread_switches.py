"""How often threads take turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rl_distributed.process.thread_switches import frequent_thread_switches


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


# Python keeps whole microseconds, and rounds down.
_ROUNDED = 2e-6


@pytest.mark.parametrize(("before_s", "meanwhile_s"), [(0.005, 5e-4), (1e-4, 1e-4)])
def test_threads_take_turns_more_often_until_the_end(
    before_s: float, meanwhile_s: float
) -> None:
    sys.setswitchinterval(before_s)
    with frequent_thread_switches():
        assert sys.getswitchinterval() == pytest.approx(meanwhile_s, abs=_ROUNDED)
    assert sys.getswitchinterval() == pytest.approx(before_s, abs=_ROUNDED)


def test_uses_may_end_in_any_order() -> None:
    sys.setswitchinterval(0.005)
    first, second = frequent_thread_switches(), frequent_thread_switches()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(5e-4, abs=_ROUNDED)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.005, abs=_ROUNDED)


def test_an_error_ends_it_as_well() -> None:
    sys.setswitchinterval(0.005)
    with pytest.raises(ValueError, match="in the middle"), frequent_thread_switches():
        raise ValueError("in the middle")
    assert sys.getswitchinterval() == pytest.approx(0.005, abs=_ROUNDED)
