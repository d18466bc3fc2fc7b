"""Which groups a step takes, and which answer is sampled next."""

from __future__ import annotations

import random

import pytest

from rl_algorithms.asynchronous.buffer import GroupBuffer
from rl_algorithms.asynchronous.groups import AnswerPhase, Group
from rl_algorithms.asynchronous.prompt_order import PromptOrder
from rl_algorithms.asynchronous.staleness import StalenessRule


def group(number, version=None, *, is_finished=False):
    made = Group.of(PromptOrder(10, None).prompt(number), 2)
    for answer in made.answers:
        answer.oldest_version = version
        if version is not None:
            answer.phase = AnswerPhase.SAMPLING
        if is_finished:
            answer.phase = AnswerPhase.SCORED
    return made


def buffer_of(*groups, staleness=1, per_step=2):
    buffer = GroupBuffer(StalenessRule(staleness, per_step))
    for one in groups:
        buffer.add(one)
    return buffer


def numbers(groups):
    return None if groups is None else [one.number for one in groups]


def test_a_step_takes_the_oldest_in_the_order_of_the_data():
    buffer = buffer_of(
        group(0, 2, is_finished=True),
        group(1, 1, is_finished=True),
        group(2, 1, is_finished=True),
    )
    assert numbers(buffer.take(2, is_last=False)) == [1, 2]
    assert numbers(buffer) == [0]


def test_a_step_waits_until_it_is_full():
    buffer = buffer_of(group(0, 0, is_finished=True), group(1, 0))
    assert buffer.take(0, is_last=False) is None
    assert buffer.take(0, is_last=True) is None, "one is still sampled"
    buffer.remove(next(one for one in buffer if one.number == 1))
    assert numbers(buffer.take(0, is_last=True)) == [0]
    assert buffer.take(0, is_last=True) is None, "there is nothing left"


def test_a_step_waits_for_what_would_be_too_old_without_it():
    slow = group(0, 0)
    buffer = buffer_of(
        slow, group(1, 1, is_finished=True), group(2, 1, is_finished=True)
    )
    assert buffer.take(1, is_last=False) is None
    for answer in slow.answers:
        answer.phase = AnswerPhase.SCORED
    assert numbers(buffer.take(1, is_last=False)) == [0, 1]


def test_a_step_waits_where_later_steps_could_not_take_all_that_is_left():
    # Four groups that can wait until step 2; steps 1 and 2 take two each.
    waiting = [group(number, 1) for number in range(4)]
    ahead = [group(number, 2, is_finished=True) for number in (4, 5)]
    assert buffer_of(*waiting, *ahead).take(1, is_last=False) is None


@pytest.mark.parametrize(
    ("count", "next_step", "newest", "may"),
    [(3, 0, 0, True), (4, 0, 0, False), (1, 1, 0, True), (2, 1, 0, False)],
)
def test_groups_are_admitted_as_long_as_they_can_be_trained_on_in_time(
    count, next_step, newest, may
):
    buffer = buffer_of(*(group(number, newest) for number in range(count)))
    assert buffer.may_admit(next_step, newest) is may


def test_answers_are_sampled_in_the_order_of_the_data():
    begun, fresh = group(1, 0), group(0)
    begun.answers[1].phase = AnswerPhase.UNSENT
    buffer = buffer_of(fresh, begun)
    assert buffer.first_unsent(0, 0) is fresh
    # Step 2 is too late for weights 0: only answers already started continue.
    assert buffer.first_unsent(2, 0) is begun
    assert begun.answers_in(AnswerPhase.UNSENT) == [begun.answers[1]]
    assert buffer_of(group(0, 0)).first_unsent(0, 0) is None


def test_indexes_are_those_of_a_search_whatever_changes():
    chance = random.Random(3)
    rule = StalenessRule(2, 2)
    buffer, admitted = GroupBuffer(rule), 0
    for _ in range(2_000):
        kept = list(buffer)
        if len(kept) < 8 and chance.random() < 0.3:
            buffer.add(group(admitted, chance.choice([None, 1, 2])))
            admitted += 1
        elif kept and chance.random() < 0.2:
            buffer.remove(chance.choice(kept))
        elif kept:
            answer = chance.choice(chance.choice(kept).answers)
            answer.phase = chance.choice(list(AnswerPhase))
            answer.oldest_version = chance.choice([None, 1, 2, 3])
        kept = list(buffer)
        step, newest = chance.randint(1, 4), chance.randint(1, 3)
        begun = [g.oldest_version for g in kept if g.oldest_version is not None]
        new = [newest] * (len(kept) - len(begun) + 1)
        assert buffer.may_admit(step, newest) is rule.fits([*begun, *new], step)
        fits = rule.fits([*begun, newest], step)
        unsent = [
            one.number
            for one in kept
            if one.has(AnswerPhase.UNSENT) and (fits or one.oldest_version is not None)
        ]
        found = buffer.first_unsent(step, newest)
        assert (found and found.number) == min(unsent, default=None)


def test_only_what_no_order_can_save_is_too_old():
    buffer = buffer_of(
        group(0, 0, is_finished=True),
        *(group(number, 2, is_finished=True) for number in range(1, 6)),
        group(6),
    )
    # Steps 2 and 3 take two groups of version 2 each.
    assert numbers(buffer.too_old(2)) == [0, 5]
    assert buffer_of(*(group(n, 2) for n in range(4))).too_old(2) == []
