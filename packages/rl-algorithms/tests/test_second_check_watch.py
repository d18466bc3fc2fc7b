"""A high rejection rate of second checks is detected and reported once."""

from __future__ import annotations

from rl_algorithms.trainers.sampling.second_check_watch import SecondCheckWatch

ACCEPTED, REJECTED = {"second_check": "accepted"}, {"second_check": "rejected"}


def said(steps: list[list[object]], limit: float = 0.1) -> list[str | None]:
    watch = SecondCheckWatch(limit)
    found = []
    for step in steps:
        watch.note(step[:1])
        watch.note(step[1:])
        found.append(watch.end_step())
    return found


def test_it_warns_once_above_the_limit() -> None:
    fine = [*[ACCEPTED] * 9, REJECTED, {}, None]
    assert said([fine] * 12) == [None] * 12
    found = said([fine, [*fine, REJECTED], fine, [REJECTED] * 9])
    assert [bool(text) for text in found] == [False, True, False, False]
    assert str(found[1]).startswith(
        "the reward may be hacked: the second check rejected 3 of 21 high-scoring "
        "answers of the last 2 steps, more than rollout.max_rejected_rate=0.1 allows"
    )


def test_few_answers_and_old_ones_do_not_count() -> None:
    assert said([[REJECTED] * 19]) == [None]
    assert said([[REJECTED] * 10, *[[{}]] * 9, [ACCEPTED] * 19]) == [None] * 11
    assert said([[REJECTED] * 20] * 2, limit=1.0) == [None, None]
