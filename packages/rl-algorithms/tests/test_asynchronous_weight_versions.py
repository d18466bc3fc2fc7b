"""Which weights a generator has confirmed."""

from __future__ import annotations

import pytest

from rl_algorithms.asynchronous.weight_versions import WeightVersions
from rl_algorithms.asynchronous.workers import Worker
from rl_algorithms.errors import ScheduleError

FIRST, SECOND = Worker("generator", 0), Worker("generator", 1)


def published(updates="between_answers", version=3):
    versions = WeightVersions(updates)
    versions.publish(0, version)
    return versions


def confirmed(updates="between_answers", version=3):
    versions = published(updates, version)
    versions.send(FIRST, version)
    assert versions.confirm(FIRST, 0, version)
    return versions


def test_a_version_is_served_once_it_is_confirmed():
    versions = published()
    assert versions.due(FIRST, 0) == 3
    assert not versions.may_sample(FIRST)
    versions.send(FIRST, 3)
    assert versions.due(FIRST, 0) is None
    assert not versions.may_sample(FIRST)
    assert versions.confirm(FIRST, 0, 3)
    assert versions.may_sample(FIRST)
    assert not versions.may_sample(SECOND)


def test_a_confirmation_that_nobody_waits_for_changes_nothing():
    versions = published()
    assert not versions.confirm(FIRST, 0, 3), "it was not sent"
    versions.send(FIRST, 3)
    assert not versions.confirm(FIRST, 0, 2), "another version"
    assert not versions.confirm(FIRST, 1, 3), "another trainer"
    assert not versions.may_sample(FIRST)


def test_newer_weights_end_sampling_with_the_old_ones():
    versions = confirmed()
    versions.publish(0, 4)
    assert not versions.may_sample(FIRST)
    assert versions.due(FIRST, 0) == 4


@pytest.mark.parametrize(
    ("updates", "due"), [("between_answers", None), ("between_tokens", 4)]
)
def test_answers_under_way_hold_an_update_up_or_do_not(updates, due):
    versions = confirmed(updates)
    versions.publish(0, 4)
    assert versions.due(FIRST, 1) == due


def test_a_generator_that_was_started_again_has_confirmed_nothing():
    versions = confirmed()
    versions.forget(FIRST)
    assert not versions.may_sample(FIRST)
    assert versions.due(FIRST, 0) == 3


def test_versions_of_one_trainer_rise():
    versions = confirmed()
    with pytest.raises(ScheduleError, match="must rise: got 3 after 3"):
        versions.publish(0, 3)


def test_weights_of_a_trainer_that_went_back_are_worth_nothing():
    versions = confirmed()
    versions.publish(1, 3)
    assert not versions.may_sample(FIRST), "they are of another trainer"
    assert versions.due(FIRST, 0) == 3


@pytest.mark.parametrize(
    ("updates", "oldest", "newest", "is_explained"),
    [
        ("between_answers", 3, 3, True),
        ("between_answers", 2, 3, False),
        ("between_answers", 3, 4, False),
        ("between_tokens", 3, 4, True),
        ("between_tokens", 3, 5, False),
        ("between_tokens", 2, 4, False),
        ("between_tokens", 4, 3, False),
    ],
)
def test_versions_of_an_answer_are_those_that_it_can_have(
    updates, oldest, newest, is_explained
):
    versions = confirmed(updates)
    if updates == "between_tokens":
        versions.publish(0, 4)
        # The weights may arrive before their confirmation.
        versions.send(FIRST, 4)
    assert versions.explains(FIRST, oldest, newest, 3) is is_explained
