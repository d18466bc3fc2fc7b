from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from rl_distributed.process.interrupts import deferred_signals


@pytest.fixture(autouse=True)
def _as_on_a_terminal() -> Iterator[None]:
    # A shell starts background processes with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_takes_effect_at_the_end() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("to the end")
        done.append("not reached")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["to the end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_does_not_wait() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done


def test_a_second_hangup_waits() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: came.append(number))
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert came == []
        assert came == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_that_the_block_sets_stay() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with deferred_signals():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_are_let_through() -> None:
    done: list[bool] = []

    def work() -> None:
        with deferred_signals():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert done == [True]
