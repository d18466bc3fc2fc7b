"""When waits time out."""

from __future__ import annotations

from rl_algorithms.asynchronous.deadlines import Deadlines, Wait
from rl_algorithms.asynchronous.workers import TRAINER, Worker

GENERATOR = Worker("generator", 1)
STEP, FIRST, SECOND = (
    Wait("step", TRAINER),
    Wait("answer", GENERATOR, 4),
    Wait("answer", GENERATOR, 5),
)


def filled():
    deadlines = Deadlines()
    for wait, end_s in ((STEP, 9.0), (SECOND, 5.0), (FIRST, 5.0)):
        deadlines.set(wait, end_s)
    return deadlines


def test_passed_waits_come_once_in_the_order_of_time_and_of_their_begin():
    deadlines = filled()
    assert deadlines.next_s() == 5.0
    assert deadlines.take_passed(4.9) == []
    assert deadlines.take_passed(9.0) == [SECOND, FIRST, STEP]
    assert deadlines.next_s() is None


def test_waits_end_by_themselves_with_their_worker_and_can_be_prolonged():
    deadlines = filled()
    deadlines.clear(FIRST)
    deadlines.clear(FIRST)
    deadlines.set(SECOND, 6.0)
    assert deadlines.take_passed(5.5) == []
    deadlines.clear_worker(GENERATOR)
    assert SECOND not in deadlines
    assert STEP in deadlines
