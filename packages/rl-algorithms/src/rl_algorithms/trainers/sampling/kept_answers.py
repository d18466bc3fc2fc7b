"""`KeptAnswers`: a few answers of each training step as readable records.

```
RolloutResult -> best and worst of some groups -> records -> take
           advantages, trainer's log-probs from the loss ---^
```
Groups are drawn by the run's seed and the step, not by their looks. An interrupted and
resumed run keeps the same answers as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.data.types import Tokenizer
from rl_algorithms.losses.kept_rows import KEPT_ROW
from rl_algorithms.rollout.result import Outcome, RolloutResult
from rl_algorithms.seeds import permutation
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
)
from rl_envs.outcomes import second_check_of

__all__ = ["ROW_NUMBER", "KeptAnswers"]

ROW_NUMBER = "row_number"
"""Column [N] with the index of a row among all rows sampled in a step."""
_DIGITS = 4
_TEXT_KEYS = ("name", "tool_call_id")
_UNKNOWN = "\ufffd"
"""Replacement character of a text for bytes that are not a complete character."""
_LONGEST_CHARACTER = 4
"""Maximum number of tokens of one character (bytes in UTF-8)."""


class KeptAnswers:
    """Keeps some answers of the current step.

    A record has `reward`, `group` (index of the prompt in the step), `prompt`,
    `response`, `outcome`, `ending` (a `ConversationOutcome`), `length` (sampled
    tokens), `versions` (runs of `[version of the weights, number of sampled tokens]`)
    and, if known,

    - `rewards`: the parts of the reward by name,
    - `second_check`: `accepted` or `rejected`,
    - `advantage`, or `advantages` if those of the sampled tokens differ,
    - `messages`: the whole conversation, if it has more than prompt and response,
    - `expected`: the right answer,
    - `tokens` and `logprobs`: text and the sampler's log-prob of each sampled token,
    - `trainer_logprobs`: the log-prob of each sampled token by the policy before it
      learns from the answer.

    Answers that a second check rejected are kept in addition to the others.

    Args:
        tokenizer: The policy's tokenizer.
        num_kept: Number of answers per step, and of rejected ones; 0 for none.
        seed: The run's seed.
    """

    def __init__(self, tokenizer: Tokenizer, num_kept: int, seed: int) -> None:
        self._tokenizer, self._num_kept, self._seed = tokenizer, num_kept, seed
        self._records: dict[int, dict[str, Any]] = {}
        self._places: dict[int, list[int]] = {}
        self._num_rows = 0
        self._texts: dict[int, str] = {}

    def choose(self, result: RolloutResult, step: int) -> None:
        """Keep answers of a rollout; with several rollouts per step, of the first.

        Args:
            result: The rollout, whose rows get the column `row_number` for
                `note_training`.
            step: Number of steps before this one.
        """
        rows = result.rows
        if not self._num_kept:
            return
        first = self._num_rows
        rows[ROW_NUMBER] = torch.arange(first, first + rows.size)
        self._num_rows += rows.size
        if first:
            return
        chosen = _chosen(rows, self._num_kept, self._seed, step)
        rejected = _rejected(result)[: self._num_kept]
        for row in sorted({*chosen, *rejected}):
            self._records[row] = self._record(result, row)

    def note_training(self, rows: AnyRows) -> None:
        """Add the advantages of kept answers, and ask the loss for their log-probs.

        Args:
            rows: Columns `advantages` ([R] or [R, S]), `token_mask` and `row_number`,
                which is replaced by `kept_row`, if there are kept answers among the
                rows. Of a conversation with several rows, the one with its end comes
                first, and the others in the order of sampling.
        """
        if ROW_NUMBER not in rows:
            return
        self._places = {}
        kept_row = torch.full((rows.size,), -1)
        for place, number in enumerate(rows.pop(ROW_NUMBER).tolist()):
            if number in self._records:
                self._places.setdefault(number, []).append(place)
                kept_row[place] = place
        if self._places:
            rows[KEPT_ROW] = kept_row
        for number, (first, *_) in self._places.items():
            record = self._records[number]
            mask = rows["token_mask"][first] != 0
            record |= _advantages(rows["advantages"][first], mask, record)

    def note_logprobs(self, values: Mapping[int, Sequence[float]]) -> None:
        """Add the trainer's log-probs of kept answers.

        Args:
            values: As the loss returns them for the rows of `note_training`.
        """
        for number, (first, *others) in self._places.items():
            record = self._records[number]
            num_tokens = len(record["tokens"])
            # Rows besides it are copies that pad the batch, or else the earlier parts.
            if len(values.get(first, ())) == num_tokens:
                others = []
            found = [v for row in (*others, first) for v in values.get(row, ())]
            if len(found) == num_tokens:
                record["trainer_logprobs"] = [_short(value) for value in found]

    def take(self) -> list[dict[str, Any]]:
        """Return the records of the step, and begin the next one."""
        records = list(self._records.values())
        self._records, self._places, self._num_rows = {}, {}, 0
        return records

    def _record(self, result: RolloutResult, row: int) -> dict[str, Any]:
        rows, sample = result.rows, result.sample(row)
        record: dict[str, Any] = {
            "reward": _short(sample.reward),
            "group": int(rows["group_index"][row]),
            "prompt": sample.prompt,
            "response": sample.response,
            "outcome": sample.outcome.name.lower(),
            "ending": sample.ending.value,
            "length": int(rows["generation_lengths"][row]),
        }
        if parts := _reward_parts(rows, row):
            record["rewards"] = parts
        if (accepted := second_check_of(rows["metadata"][row])) is not None:
            record["second_check"] = "accepted" if accepted else "rejected"
        expected = sample.extra_env_info.get("answer")
        if isinstance(expected, str | int | float):
            record["expected"] = expected
        log, num_prompt = sample.message_log, result.num_prompt_messages[row]
        if num_prompt != 1 or len(log) != num_prompt + 1:
            record["messages"] = [_message(message) for message in log]
        return record | self._sampled(rows, row)

    def _sampled(self, rows: AnyRows, row: int) -> dict[str, Any]:
        """Return texts, log-probs and versions of the sampled tokens of a row."""
        ids: list[int] = []
        versions: list[int] = []
        logprobs: list[float] = []
        has_logprobs = "generation_logprobs" in rows
        for part in (*rows["branches"][row], None):
            names = ("input_ids", "token_versions", "generation_logprobs")
            columns = [
                rows[name][row] if part is None else getattr(part, name)
                for name in names
                if has_logprobs or name != "generation_logprobs"
            ]
            mask = rows["token_mask"][row] if part is None else part.token_mask
            found = [column[mask != 0].tolist() for column in columns]
            ids += found[0]
            versions += found[1]
            logprobs += found[2] if has_logprobs else []
        sampled: dict[str, Any] = {
            "versions": _runs(versions),
            "tokens": list(self._shown(ids)),
        }
        if has_logprobs:
            sampled["logprobs"] = [_short(value) for value in logprobs]
        return sampled

    def _shown(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield the text of each token; a split character goes to its first token."""
        place = 0
        while place < len(ids):
            text, width = self._text(ids[place]), 1
            # The token may be a part of a character, which only its neighbors complete.
            if _UNKNOWN in text:
                for size in range(2, min(_LONGEST_CHARACTER, len(ids) - place) + 1):
                    joined = self._tokenizer.decode(list(ids[place : place + size]))
                    if _UNKNOWN not in joined:
                        text, width = joined, size
                        break
            yield text
            yield from [""] * (width - 1)
            place += width

    def _text(self, token: int) -> str:
        # Decoding tokens one by one costs more than the rest of a record, and most
        # tokens have been seen before.
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]


def _chosen(rows: AnyRows, num_kept: int, seed: int, step: int) -> list[int]:
    """Return the rows with the best and the worst answers of some groups.

    Unscored answers come last, because most of them show nothing.
    """
    outcome, rewards = rows["outcome"], rows["rewards"]
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(rows["group_index"].tolist()):
        groups.setdefault(group, []).append(row)
    order = permutation(len(groups), seed=seed, epoch=step).tolist()
    shuffled = [list(groups.values())[place] for place in order]

    def key(row: int) -> tuple[bool, float, int]:
        scored = bool(outcome[row] <= int(Outcome.TRUNCATED))
        # The row last, so that equal rewards have one order.
        return (not scored, -float(rewards[row]), row)

    ranked = [sorted(group, key=key) for group in shuffled]
    chosen: list[int] = []
    while ranked and len(chosen) < num_kept:
        for group in ranked:
            chosen.append(group.pop(0))
            if group:
                scored = [r for r in group if outcome[r] <= int(Outcome.TRUNCATED)]
                group.remove(worst := (scored or group)[-1])
                chosen.append(worst)
            if len(chosen) >= num_kept:
                break
        ranked = [group for group in ranked if group]
    return sorted(chosen[:num_kept])


def _rejected(result: RolloutResult) -> list[int]:
    verdicts = map(second_check_of, result.rows["metadata"])
    return [row for row, accepted in enumerate(verdicts) if accepted is False]


def _advantages(values: Tensor, mask: Tensor, record: dict[str, Any]) -> dict[str, Any]:
    if not values.dim():
        return {"advantage": _short(float(values))}
    found = values[mask].tolist()
    if len(set(found)) == 1:
        return {"advantage": _short(found[0])}
    # A branched conversation has the advantages of its earlier parts in other rows.
    is_whole = len(found) == len(record["tokens"])
    return {"advantages": [_short(value) for value in found]} if is_whole else {}


def _reward_parts(rows: AnyRows, row: int) -> dict[str, float]:
    parts = {
        name.partition("/")[2]: float(column[row])
        for name, column in rows.items()
        if name.startswith("reward/")
    }
    return {n: _short(v) for n, v in parts.items() if not math.isnan(v)}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    shown = {"role": message["role"], "content": message["content"]}
    shown |= {k: str(message[k]) for k in _TEXT_KEYS if message.get(k) is not None}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = calls
    return shown


def _runs(versions: Sequence[int]) -> list[list[int]]:
    """Return runs of equal versions as [version, number of tokens]."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return runs


def _short(value: float) -> float:
    """Round a number to the digits that a person looks at."""
    return round(value, _DIGITS)
