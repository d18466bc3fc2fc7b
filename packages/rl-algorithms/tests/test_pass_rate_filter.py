"""Prompts that are always or never solved: skipped, reported, revisited."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from rl_algorithms import DataConfig, DataModule
from rl_algorithms.data.config import PassRateFilterConfig
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.mixture import MixtureOrder
from rl_algorithms.data.pass_rate_filter import DATA_ROW, PassRateFilter
from rl_algorithms.errors import ColumnError, DataError
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

EASY, HARD = 0, 1
NUM_ROWS = 6


def rows_of(num_rows=NUM_ROWS):
    return [
        {"length": 10 * (n + 1), "extra_env_info": {"level": n}}
        for n in range(num_rows)
    ]


def make(batch_size=2, num_rows=NUM_ROWS, order=None, drop_last=False, **settings):
    rows = rows_of(num_rows)
    settings = {"num_visits": 1, "revisit_epochs": 3, **settings}
    found = PassRateFilter(PassRateFilterConfig(**settings), rows)
    loader = BatchedDataLoader(
        rows,
        batch_size,
        shuffle=order is None,
        seed=3,
        order=order,
        drop_last=drop_last,
        collate_fn=lambda rows: BatchedDataDict(
            {"length": [r["length"] for r in rows]}
        ),
        pass_rates=found,
    )
    return loader, found


def answer(found, rows, is_right):
    """Sample four answers to each prompt; `is_right(row, sample)` rewards one."""
    groups = np.repeat(np.arange(len(rows)), 4)
    rewards = [float(is_right(row, sample)) for row in rows for sample in range(4)]
    counted = np.ones(len(groups), bool)
    # Answers to row n have 2n tokens, or 2n + 2.
    lengths = np.array(
        [2 * row + sample % 2 * 2 for row in rows for sample in range(4)]
    )
    found.note(rows, groups, np.array(rewards), counted, lengths)


def usual(row, sample):
    """Row 0 is always solved, row 1 never, the others half of the time."""
    return row == EASY or (row != HARD and sample % 2 == 0)


def epoch(loader, found, is_right=usual):
    seen = []
    for batch in loader:
        seen += batch[DATA_ROW]
        answer(found, batch[DATA_ROW], is_right)
    return seen


def test_what_is_always_or_never_solved_is_skipped_and_comes_back():
    loader, found = make()
    passes = [sorted(epoch(loader, found)) for _ in range(7)]
    assert passes == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5],
        [2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5],
        [2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert len(loader) == 3  # of a whole epoch
    assert loader.num_rows == NUM_ROWS


def test_the_order_is_that_without_the_filter_less_the_skipped_rows():
    loader, found = make()
    plain = BatchedDataLoader(
        list(range(NUM_ROWS)), 2, shuffle=True, seed=3, collate_fn=list
    )
    whole = [[row for batch in plain for row in batch] for _ in range(3)]
    assert epoch(loader, found) == whole[0]
    for number in (1, 2):
        kept = [row for row in whole[number] if row not in (EASY, HARD)]
        assert epoch(loader, found) == kept


def test_a_visit_that_goes_otherwise_keeps_a_prompt():
    loader, found = make()
    for _ in range(3):
        epoch(loader, found)
    later = lambda row, sample: sample == 0  # noqa: E731
    assert EASY in epoch(loader, found, later)
    assert sorted(epoch(loader, found, later)) == list(range(NUM_ROWS))


def test_only_prompts_with_enough_visits_are_skipped():
    loader, found = make(num_visits=2)
    assert len(epoch(loader, found)) == NUM_ROWS
    assert len(epoch(loader, found)) == NUM_ROWS
    assert sorted(epoch(loader, found)) == [2, 3, 4, 5]


def test_of_the_visits_the_newest_count():
    loader, found = make(num_visits=2)
    for right in (False, True, True):
        assert len(epoch(loader, found, lambda row, _, r=right: r)) == NUM_ROWS
    assert len(epoch(loader, found)) == 2  # enough to fill a step


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        ({}, {EASY, HARD}),
        ({"hard_threshold": None}, {EASY}),
        ({"easy_threshold": None}, {HARD}),
        ({"easy_threshold": 0.5}, {EASY, 2, 3, 4, 5, HARD}),
        ({"hard_threshold": 0.5}, {HARD, 2, 3, 4, 5, EASY}),
        ({"easy_threshold": 0.51, "hard_threshold": 0.49}, {EASY, HARD}),
        ({"pass_threshold": 2.0}, {HARD, EASY, 2, 3, 4, 5}),
        ({"pass_threshold": 0.0}, {HARD, EASY, 2, 3, 4, 5}),
    ],
)
def test_thresholds(settings, skipped):
    loader, found = make(batch_size=1, **settings)
    epoch(loader, found)
    left = set(epoch(loader, found))
    missing = set(range(NUM_ROWS)) - left
    if len(skipped) == NUM_ROWS:
        # A step must be filled.
        assert len(left) == 1
    else:
        assert missing == skipped


def test_failed_answers_do_not_count():
    loader, found = make()
    batch = next(iter(loader))
    rows = batch[DATA_ROW]
    rewards = np.array([1.0, 0.0, np.nan, 1.0])
    groups, counted = np.array([0, 0, 1, 1]), np.array([True, False, True, False])
    found.note(rows, groups, rewards, counted, np.array([5, 9, 7, 9]))
    # The first prompt was solved by its only answer, the second has none.
    assert found.state_dict()["records"] == [(rows[0], 0, 1, 1)]
    assert found.state_dict()["answer_lengths"] == [(rows[0], 5.0)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_can_always_be_filled(drop_last):
    """Rows with the oldest last visit are used."""
    loader, found = make(batch_size=2, drop_last=drop_last, revisit_epochs=100)
    always = lambda row, sample: True  # noqa: E731
    assert len(epoch(loader, found, always)) == NUM_ROWS
    seen = [epoch(loader, found, always) for _ in range(6)]
    assert all(len(rows) == 2 for rows in seen)
    for start in (0, 3):
        rounds = seen[start : start + 3]
        assert sorted(row for rows in rounds for row in rows) == list(range(NUM_ROWS))
    assert found.metrics["pass_rate_filter_num_revisited"] == 2.0


def test_what_is_skipped_and_its_bias_are_reported(caplog):
    loader, found = make(difficulty_key="level")
    epoch(loader, found)
    first = found.metrics
    assert first["pass_rate_filter_skipped_rate"] == 0.0
    assert "pass_rate_filter_length_too_easy" not in first
    with caplog.at_level(logging.INFO):
        epoch(loader, found)
    assert found.metrics == {
        "pass_rate_filter_num_too_easy": 1.0,
        "pass_rate_filter_num_too_hard": 1.0,
        "pass_rate_filter_num_revisited": 0.0,
        "pass_rate_filter_skipped_rate": pytest.approx(2 / 6),
        "pass_rate_filter_length_kept": 45.0,
        "pass_rate_filter_length_too_easy": 10.0,
        "pass_rate_filter_length_too_hard": 20.0,
        "pass_rate_filter_answer_length_kept": 8.0,
        "pass_rate_filter_answer_length_too_easy": 1.0,
        "pass_rate_filter_answer_length_too_hard": 3.0,
        "pass_rate_filter_difficulty_kept": 3.5,
        "pass_rate_filter_difficulty_too_easy": 0.0,
        "pass_rate_filter_difficulty_too_hard": 1.0,
    }
    assert (
        "epoch 2: 1 prompts are skipped as too easy and 1 as too hard (33.3%); "
        "mean length 45 kept / 10 too easy / 20 too hard, "
        "mean difficulty 3.5 kept / 0 too easy / 1 too hard, "
        "mean answer length 8 kept / 1 too easy / 3 too hard"
    ) in caplog.text
    epoch(loader, found)
    epoch(loader, found)
    assert found.metrics["pass_rate_filter_num_revisited"] == 2.0


@pytest.mark.parametrize("num_batches", range(1, 12))
def test_a_resumed_loader_goes_on_bitwise(num_batches):
    """After each batch, with the recorded pass rates."""

    def play(loader, found, number):
        seen = []
        while len(seen) < number:
            for batch in loader:
                answer(found, batch[DATA_ROW], usual)
                seen.append((batch[DATA_ROW], found.metrics))
                if len(seen) == number:
                    break
        return seen

    whole = play(*make(batch_size=2), 24)
    loader, found = make(batch_size=2)
    head = play(loader, found, num_batches)
    state = loader.state_dict()
    saved = json.loads(json.dumps(state))
    # Continuing does not change the saved state.
    play(loader, found, 3)
    assert json.loads(json.dumps(state)) == saved
    again, known = make(batch_size=2)
    again.load_state_dict(saved)
    assert head + play(again, known, 24 - num_batches) == whole


def test_a_mixture_keeps_its_order():
    order = MixtureOrder([4, 2], [0.5, 0.5], seed=3)
    loader, found = make(order=order)
    whole = [order.indices(number).tolist() for number in range(2)]
    assert epoch(loader, found) == whole[0]
    out = (EASY, HARD) if {EASY, HARD} <= set(whole[0]) else set(whole[0]) & {0, 1}
    assert epoch(loader, found) == [row for row in whole[1] if row not in out]


class TestRefused:
    def test_a_state_of_other_settings(self):
        loader, found = make()
        plain = BatchedDataLoader(rows_of(), 2, shuffle=True, seed=3, collate_fn=list)
        with pytest.raises(DataError, match="was off when the state was saved and is"):
            loader.load_state_dict(plain.state_dict())
        with pytest.raises(DataError, match="was on when the state was saved and is"):
            plain.load_state_dict(loader.state_dict())
        state = found.state_dict()
        del state["records"]
        with pytest.raises(DataError, match="lacks records"):
            found.load_state_dict(state)
        with pytest.raises(DataError, match="names row 9, and the data have 6 rows"):
            found.load_state_dict({**found.state_dict(), "too_easy": [9]})

    def test_places_of_an_epoch_to_come(self):
        with pytest.raises(DataError, match="batch_at cannot look ahead"):
            make()[0].batch_at(0, [0])

    @pytest.mark.parametrize("settings", [{"endless": True}, {"num_shards": 2}])
    def test_loaders_without_epochs_of_their_own(self, settings):
        found = PassRateFilter(PassRateFilterConfig(), rows_of())
        with pytest.raises(DataError, match="one epoch after the other, in one proc"):
            BatchedDataLoader(
                rows_of(), 2, pass_rates=found, drop_last=True, **settings
            )

    @pytest.mark.parametrize("level", ["3", None, True])
    def test_a_difficulty_that_is_no_number(self, level):
        rows = [*rows_of(), {"length": 1, "extra_env_info": {"level": level}}]
        with pytest.raises(
            ColumnError, match=rf"got {level!r} in row {NUM_ROWS}; name"
        ):
            PassRateFilter(PassRateFilterConfig(difficulty_key="level"), rows)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"easy_threshold": 0.5, "hard_threshold": 0.5}, "must be below easy_thr"),
            ({"easy_threshold": None, "hard_threshold": None}, "both null"),
            ({"easy_threshold": 1.5}, "easy_threshold must be at most 1: got 1.5"),
            ({"hard_threshold": -0.1}, "hard_threshold must be at least 0: got -0.1"),
            ({"num_visits": 0}, "num_visits"),
            ({"revisit_epochs": 1}, "revisit_epochs must be at least 2: got 1"),
            ({"pass_threshold": float("inf")}, "pass_threshold"),
            ({"skip_below": 0.1}, "skip_below"),
        ],
    )
    def test_impossible_settings(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            DataConfig.from_dict({"pass_rate_filter": settings})

    def test_streams(self):
        with pytest.raises(ConfigError, match="which a stream does not have"):
            DataConfig.from_dict({"pass_rate_filter": {}, "streaming": True})
        tokenizer = build_tokenizer(TokenizerBuildConfig())
        config = DataConfig(pass_rate_filter=PassRateFilterConfig())
        with pytest.raises(ConfigError, match="give rows instead of a function"):
            DataModule(
                config,
                tokenizer,
                kind="prompts",
                batch_size=1,
                train=lambda: iter([{"prompt": "1"}]),
            )
        with pytest.raises(ConfigError, match="answers are sampled: got preferences"):
            DataModule(config, tokenizer, kind="preferences", batch_size=1, train=[])
