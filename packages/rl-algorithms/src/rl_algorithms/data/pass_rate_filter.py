"""`PassRateFilter`: skip prompts that are always or never solved.

```
answers of a step -> note -> records -> kept (at the start of an epoch) -> rows, metrics
                       ^                                                     |
                       +--------------- visited again ----------------------+
```
The prompts to skip are fixed when an epoch begins, so its order is known and can be
resumed. A group whose answers are all correct, or all wrong, has zero advantages and no
gradient; but which prompts these are changes with the policy, so they are revisited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_algorithms.data.config import PassRateFilterConfig
from rl_algorithms.data.types import DatumSpec
from rl_algorithms.errors import ColumnError, DataError
from rl_distributed.logs.logging import get_logger

__all__ = ["DATA_ROW", "PassRateFilter"]

_logger = get_logger(__name__)

DATA_ROW = "data_row"
"""Column [P]: index of each prompt of a batch in the training data."""
_PARTS = ("kept", "too easy", "too hard")
_MEANS = {
    "length": (
        "pass_rate_filter_length_kept",
        "pass_rate_filter_length_too_easy",
        "pass_rate_filter_length_too_hard",
    ),
    "difficulty": (
        "pass_rate_filter_difficulty_kept",
        "pass_rate_filter_difficulty_too_easy",
        "pass_rate_filter_difficulty_too_hard",
    ),
    "answer length": (
        "pass_rate_filter_answer_length_kept",
        "pass_rate_filter_answer_length_too_easy",
        "pass_rate_filter_answer_length_too_hard",
    ),
}
"""Metrics of the mean of a feature over each of these parts of the data."""
_KEYS = frozenset({"epoch", "too_easy", "too_hard", "metrics", "records"})

Record = tuple[int, ...]
"""Row, epoch of its last visit, and for each recent visit, oldest first, the number of
correct answers and of all answers."""


class PassRateFilter:
    """Track how often each prompt was solved, and skip prompts of an epoch accordingly.

    Args:
        config: Thresholds of prompts that are too easy or too hard.
        rows: The training data.

    Raises:
        ColumnError: A row has no number in the column `difficulty_key`.
    """

    def __init__(self, config: PassRateFilterConfig, rows: Sequence[DatumSpec]) -> None:
        self._config = config
        self._features = {
            "length": np.array([row["length"] for row in rows], np.float64)
        }
        if config.difficulty_key is not None:
            key = config.difficulty_key
            values = [_number(row, index, key) for index, row in enumerate(rows)]
            self._features["difficulty"] = np.array(values, np.float64)
        # [rows] mean length of the answers of the newest visit; NaN without one.
        self._answer_lengths = np.full(len(rows), np.nan)
        self._features["answer length"] = self._answer_lengths
        self._num_rows = len(rows)
        self._records: dict[int, Record] = {}
        self._epoch = -1
        # Immutable tuples, because a saved state shares them with the continuing run.
        self._too_easy: tuple[int, ...] = ()
        self._too_hard: tuple[int, ...] = ()
        self._metrics: dict[str, float] = {}

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the prompts that the current epoch skips and keeps."""
        return dict(self._metrics)

    def note(
        self,
        data_rows: Sequence[int],
        group_index: NDArray[np.int64],
        rewards: NDArray[np.float64],
        counted: NDArray[np.bool_],
        lengths: NDArray[np.int64],
    ) -> None:
        """Record the rewards of the answers to a batch of prompts.

        Args:
            data_rows: [P] index of each prompt in the training data.
            group_index: [N] index of each answer's prompt in the batch.
            rewards: [N] before scaling and shaping.
            counted: [N] false for answers that failed.
            lengths: [N] number of sampled tokens.
        """
        counted = counted & np.isfinite(rewards)
        groups, num_prompts = group_index[counted], len(data_rows)
        passed = rewards[counted] >= self._config.pass_threshold
        answers = np.bincount(groups, minlength=num_prompts).tolist()
        right = np.bincount(groups[passed], minlength=num_prompts).tolist()
        sums = np.bincount(groups, lengths[counted], num_prompts).tolist()
        for row, num_right, num_answers, num_tokens in zip(
            data_rows, right, answers, sums, strict=True
        ):
            if num_answers:
                self._answer_lengths[row] = num_tokens / num_answers
                earlier = self._records.get(row, (row, -1))[2:]
                visits = (*earlier, num_right, num_answers)
                newest = visits[-2 * self._config.num_visits :]
                self._records[row] = (row, self._epoch, *newest)

    def kept(
        self, epoch: int, order: NDArray[np.int64], min_rows: int
    ) -> NDArray[np.int64]:
        """Return the rows of an epoch in order, without the skipped ones.

        The first call for an epoch fixes the rows that it skips.

        Args:
            epoch: Counted from 0.
            order: All rows of the epoch.
            min_rows: Minimum number of rows; if fewer are left, those skipped for the
                longest time return early.
        """
        if epoch != self._epoch:
            self._plan(epoch, order, min_rows)
        return order[~self._is_left_out()[order]]

    def _is_left_out(self) -> NDArray[np.bool_]:
        found = np.zeros(self._num_rows, np.bool_)
        found[[*self._too_easy, *self._too_hard]] = True
        return found

    def _plan(self, epoch: int, order: NDArray[np.int64], min_rows: int) -> None:
        """Fix the rows that an epoch skips."""
        present = set(order.tolist())
        too_easy: set[int] = set()
        too_hard: set[int] = set()
        num_revisited = 0
        for row, record in self._records.items():
            is_easy, is_hard = self._extreme(record)
            # An epoch of a mixture may lack some rows of a source.
            if row not in present or not (is_easy or is_hard):
                continue
            if epoch - record[1] >= self._config.revisit_epochs:
                num_revisited += 1
            else:
                (too_easy if is_easy else too_hard).add(row)
        early = self._early(order, too_easy | too_hard, min_rows)
        self._epoch = epoch
        # Sorted, so that equal states are saved as equal files.
        self._too_easy = tuple(sorted(too_easy - early))
        self._too_hard = tuple(sorted(too_hard - early))
        self._metrics = self._measure(order, num_revisited + len(early))
        if self._too_easy or self._too_hard:
            _logger.info("epoch %d: %s", epoch + 1, self._describe())

    def _extreme(self, record: Record) -> tuple[bool, bool]:
        """Return whether a prompt is too easy, and whether it is too hard."""
        visits = record[2:]
        # Too few visits to judge; each has two numbers.
        if len(visits) < 2 * self._config.num_visits:
            return False, False
        rate = sum(visits[::2]) / sum(visits[1::2])
        easy, hard = self._config.easy_threshold, self._config.hard_threshold
        return (
            easy is not None and rate >= easy,
            hard is not None and rate <= hard,
        )

    def _early(
        self, order: NDArray[np.int64], left_out: set[int], min_rows: int
    ) -> set[int]:
        """Return rows that return early, so that a step is full."""
        places = [row for row in order.tolist() if row in left_out]
        num_missing = min(min_rows, len(order)) - (len(order) - len(places))
        # The sort is stable: rows last visited in the same epoch keep their order.
        places.sort(key=lambda row: self._records[row][1])
        return set(places[: max(num_missing, 0)])

    def _measure(
        self, order: NDArray[np.int64], num_revisited: int
    ) -> dict[str, float]:
        left_out = self._is_left_out()[order]
        parts = (
            order[~left_out],
            np.array(self._too_easy, np.int64),
            np.array(self._too_hard, np.int64),
        )
        metrics = {
            "pass_rate_filter_num_too_easy": float(len(self._too_easy)),
            "pass_rate_filter_num_too_hard": float(len(self._too_hard)),
            "pass_rate_filter_num_revisited": float(num_revisited),
            "pass_rate_filter_skipped_rate": float(left_out.mean()),
        }
        for feature, values in self._features.items():
            for name, rows in zip(_MEANS[feature], parts, strict=True):
                known = values[rows][~np.isnan(values[rows])]
                if len(known):
                    metrics[name] = float(known.mean())
        return metrics

    def _describe(self) -> str:
        means = []
        for feature in self._features:
            shown = [
                f"{self._metrics[name]:.4g} {part}"
                for name, part in zip(_MEANS[feature], _PARTS, strict=True)
                if name in self._metrics
            ]
            if shown:
                means.append(f"mean {feature} {' / '.join(shown)}")
        return (
            f"{len(self._too_easy)} prompts are skipped as too easy and "
            f"{len(self._too_hard)} as too hard "
            f"({self._metrics['pass_rate_filter_skipped_rate']:.1%}); "
            f"{', '.join(means)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the records of all prompts as JSON values."""
        return {
            "epoch": self._epoch,
            "too_easy": self._too_easy,
            "too_hard": self._too_hard,
            "metrics": dict(self._metrics),
            "records": list(self._records.values()),
            "answer_lengths": [
                (row, self._answer_lengths[row].item()) for row in self._records
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state saved by `state_dict`.

        Changed thresholds take effect from the next epoch on.

        Raises:
            DataError: The state is from something else or from other data.
        """
        if missing := _KEYS - set(state):
            raise DataError(
                f"the state of pass_rate_filter lacks {', '.join(sorted(missing))}: it "
                "was not saved by PassRateFilter.state_dict()"
            )
        records = [tuple(int(n) for n in record) for record in state["records"]]
        too_easy, too_hard = (
            tuple(int(row) for row in state[name]) for name in ("too_easy", "too_hard")
        )
        rows = [*(record[0] for record in records), *too_easy, *too_hard]
        if rows and not 0 <= min(rows) <= max(rows) < self._num_rows:
            raise DataError(
                f"the state of pass_rate_filter names row {max(rows)}, and the data "
                f"have {self._num_rows} rows; use the same data, or start a new run"
            )
        width = 2 * self._config.num_visits
        self._records = {
            row: (row, epoch, *visits[-width:]) for row, epoch, *visits in records
        }
        # In place, because the features hold the same array.
        self._answer_lengths.fill(np.nan)
        # States of earlier versions lack them.
        for row, length in state.get("answer_lengths", ()):
            if row in self._records:
                self._answer_lengths[row] = length
        self._epoch, self._metrics = int(state["epoch"]), dict(state["metrics"])
        self._too_easy, self._too_hard = too_easy, too_hard


def _number(row: DatumSpec, index: int, key: str) -> float:
    value = row["extra_env_info"].get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ColumnError(
            f"data.pass_rate_filter.difficulty_key names {key!r}, which must be a "
            f"number in each training row: got {value!r} in row {index}; name another "
            "column, or leave it out (null)"
        )
    return float(value)
