"""`Conversations`: the state of N rows during a rollout.

The state is kept in arrays of numpy: conversations that are played by themselves have a
single row each, for which operations of torch take several times as long.
Shapes: P prompts, N rows, several per prompt; M of them are active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_algorithms.data.types import LLMMessageLogType, PromptSpec, Tokenizer
from rl_algorithms.rollout.branches import Branch
from rl_algorithms.rollout.decoding import decode_answers
from rl_algorithms.rollout.judge import Verdict, outcome_of
from rl_algorithms.rollout.observations import Continuation, ObservationEncoder, Turn
from rl_algorithms.rollout.result import Outcome
from rl_algorithms.rollout.row_limits import RowLimits
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.rollout.token_rows import TokenRows
from rl_algorithms.rollout.trajectories import Trajectories, TrajectoryNotes
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.interfaces import TRUNCATED_KEY, observation_messages
from rl_envs.outcomes import (
    OUTCOME_KEY,
    ConversationOutcome,
    outcome_of as conversation_outcome_of,
)
from rl_envs.task_limits import TaskLimits
from rl_models.tokens.tokenizer import pad_token_id
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec

__all__ = ["Conversations"]

T = TypeVar("T", bound=np.generic)

# State with an entry per row, except for stop strings and limits, which may be None.
_ARRAYS = (
    "_cut_answers",
    "_env_tokens",
    "_generation_lengths",
    "_loss_multiplier",
    "_outcome",
    "_rewards",
    "_truncated",
    "_weight_version",
    "num_turns",
    "unfinished",
)
_LISTS = (
    "_answers",
    "_branches",
    "_errors",
    "_extra_env_info",
    "_metadata",
    "_num_prompt_messages",
    "_texts",
    "message_logs",
)


class Conversations:
    """The state of a rollout.

    Args:
        batch: P prompts as columns of `rl_collate_fn`.
        names: Identities of the rows to play.
        tokenizer: The policy's tokenizer.
        limits: Limits of tasks whose rows declare none.
    """

    def __init__(
        self,
        batch: BatchedDataDict[PromptSpec],
        names: RowNames,
        tokenizer: Tokenizer,
        limits: TaskLimits | None = None,
    ) -> None:
        self.names = names
        self.num_rows = len(names.prompt)
        self._tokenizer = tokenizer
        repeat = names.prompt
        self.tokens = TokenRows(
            _array(batch["input_ids"], np.int64)[repeat],
            _array(batch["input_lengths"], np.int64)[repeat],
            pad_token_id(tokenizer),
        )
        self._loss_multiplier = (
            _array(batch["loss_multiplier"], np.float32)[repeat]
            if "loss_multiplier" in batch
            else np.ones(self.num_rows, np.float32)
        )
        self._start_messages(batch, limits)
        self._active: NDArray[np.int64] | None = None
        """[M] indices of the rows that continue; None for all, which saves copies."""
        self._rewards = np.zeros(self.num_rows, np.float32)
        self._named_rewards: dict[str, NDArray[np.float32]] = {}
        self._outcome = np.zeros(self.num_rows, np.int8)
        self._truncated = np.zeros(self.num_rows, np.bool_)
        """[N] whether a limit cut the latest answer or left no room for another."""
        self._cut_answers = np.zeros(self.num_rows, np.int64)
        self._generation_lengths = np.zeros(self.num_rows, np.int64)
        self._env_tokens = np.zeros(self.num_rows, np.int64)
        self._weight_version = np.zeros(self.num_rows, np.int64)
        self._errors: list[Exception | None] = [None] * self.num_rows
        self._branches: list[tuple[Branch, ...]] = [()] * self.num_rows
        self._limited_by: dict[int, ConversationOutcome] = {}
        """Limits that ended rows, other than that on turns of all rows."""
        self._begun: set[int] = set()
        """Rows that the environment has begun, and not closed."""
        self.num_turns = np.zeros(self.num_rows, np.int64)
        self.unfinished = np.ones(self.num_rows, np.bool_)
        """[N] whether neither the environment nor a lack of room has ended the row."""

    def _start_messages(
        self, batch: BatchedDataDict[PromptSpec], limits: TaskLimits | None
    ) -> None:
        """Repeat the prompts' texts and columns for their rows, without the tokens."""
        logs = [
            [{"role": m["role"], "content": m["content"]} for m in log]
            for log in batch["message_log"]
        ]
        infos = batch.get("extra_env_info") or [{} for _ in logs]
        stops = batch.get("stop_strings")
        order = self.names.prompt.tolist()
        # A list per row, because the rows of a prompt continue differently.
        self.message_logs: list[LLMMessageLogType] = [list(logs[p]) for p in order]
        self._num_prompt_messages = [len(logs[p]) for p in order]
        self._extra_env_info: list[dict[str, Any]] = [infos[p] for p in order]
        self._answers: list[str | None] = [None] * self.num_rows
        self._texts: list[str] = [""] * self.num_rows
        # Before its first verdict, an environment gets the columns of the data as
        # metadata.
        self._metadata: list[Any] = list(self._extra_env_info)
        self._limits = RowLimits.of(infos, order, limits)
        if self._limits is not None:
            self._metadata = self._limits.told(self._metadata)
        self._stop_strings: list[list[str] | None] | None = (
            None if stops is None else [stops[p] for p in order]
        )

    def _active_list(self) -> list[int] | range:
        return range(self.num_rows) if self._active is None else self._active.tolist()

    def _active_rows(self) -> NDArray[np.int64]:
        return np.arange(self.num_rows) if self._active is None else self._active

    @property
    def num_active(self) -> int:
        """Number of rows that continue."""
        return self.num_rows if self._active is None else len(self._active)

    def generation_input(self, seeds: Tensor) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the columns that `generate` takes, for the active rows.

        Args:
            seeds: [N] seeds of this turn.
        """
        if self._limits is not None:
            self._limits.begin()
        ids, lengths = self.tokens.select(self._active)
        if self._active is not None:
            seeds = seeds[self._active]
        columns: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids),
            "input_lengths": torch.from_numpy(lengths),
            "seeds": seeds,
        }
        if self._stop_strings is not None:
            columns["stop_strings"] = [
                self._stop_strings[row] for row in self._active_list()
            ]
        return BatchedDataDict(columns)

    def add_answers(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Add the answers sampled for the active rows."""
        rows = self._active_rows()
        if self._limits is not None:
            # Before the text is read, as the reward must be that of the trained tokens.
            pad = pad_token_id(self._tokenizer)
            output = self._limits.cut(output, rows, self._generation_lengths, pad)
        lengths = _array(output["unpadded_sequence_lengths"], np.int64)
        sampled = _array(output["generation_lengths"], np.int64)
        version = _array(output["weight_version"], np.int64)
        logprobs = output.get("logprobs")
        versions = output.get("token_versions")
        self.tokens.add_sampled(
            self._active,
            _array(output["output_ids"], np.int64),
            lengths,
            None if logprobs is None else _array(logprobs, np.float32),
            version[:, None] if versions is None else _array(versions, np.int64),
        )
        cut = _array(output["truncated"], np.bool_)
        self._truncated[rows] = cut
        self._cut_answers[rows] += cut
        self._generation_lengths[rows] += sampled
        # The initial 0 is no version, so a row's first answer sets it and only later
        # ones take the minimum.
        oldest = np.minimum(self._weight_version[rows], version)
        first = self.num_turns[rows] == 0
        self._weight_version[rows] = np.where(first, version, oldest)
        self.num_turns[rows] += 1
        texts = decode_answers(
            self._tokenizer, output["output_ids"], lengths - sampled, lengths
        )
        for row, text, is_cut in zip(
            self._active_list(), texts, cut.tolist(), strict=True
        ):
            answer: dict[str, Any] = {"role": "assistant", "content": text}
            if is_cut:
                # For the environment, which decides whether the conversation continues.
                answer[TRUNCATED_KEY] = True
            self.message_logs[row].append(answer)
            self._texts[row] += text

    def split(self, names: Sequence[RowNames]) -> list[Conversations]:
        """Return each row by itself; none may have ended or got a verdict yet.

        Args:
            names: [N] identity of each row in a batch that has only its prompt.
        """
        # Slices, as an array of indices takes several times as long for a single row.
        return [
            self._with_rows(slice(row, row + 1), [row], name, tokens)
            for row, (name, tokens) in enumerate(
                zip(names, self.tokens.split(), strict=True)
            )
        ]

    def part(self, rows: Sequence[int]) -> Conversations:
        """Return a copy of some rows; none may have ended or got a verdict yet."""
        index = np.array(rows, np.int64)
        names, tokens = self.names.select(index), self.tokens.part(index)
        return self._with_rows(index, rows, names, tokens)

    def _with_rows(
        self,
        index: slice | NDArray[np.int64],
        rows: Sequence[int],
        names: RowNames,
        tokens: TokenRows,
    ) -> Conversations:
        one = Conversations.__new__(Conversations)
        # A dictionary of its own with all that rows share, such as the tokenizer.
        mine, held = one.__dict__, self.__dict__
        mine.update(held)
        for name in _ARRAYS:
            mine[name] = held[name][index]
        for name in _LISTS:
            values = held[name]
            mine[name] = [values[row] for row in rows]
        if self._stop_strings is not None:
            one._stop_strings = [self._stop_strings[row] for row in rows]
        if self._limits is not None:
            one._limits = self._limits.part(rows)
        one.names, one.tokens, one.num_rows = names, tokens, len(rows)
        one._named_rewards, one._limited_by, one._begun = {}, {}, set()
        return one

    def fail(self, error: Exception) -> None:
        """End the active rows, because sampling failed."""
        rows = self._active_rows()
        self._outcome[rows] = int(outcome_of(error))
        for row in self._active_list():
            self._errors[row] = error
        self.unfinished[rows] = False
        # An empty index and not None, which stands for all rows.
        self._active = rows[:0]

    def begin(self, seed: int, step: int, first_prompt: int) -> list[int | None] | None:
        """Return [M] seeds of conversations that begin; None: all have begun.

        Args:
            seed: The run's seed.
            step: The training step.
            first_prompt: Index of the batch's first prompt within the step.
        """
        rows = self._active_list()
        # All rows of a rollout begin in the same turn.
        if not rows or int(self.num_turns[rows[0]]) > 1:
            return None
        self._begun.update(rows)
        seeds = self.names.start_seeds(seed, step, first_prompt).tolist()
        return [seeds[row] for row in rows]

    def take_ended(self, *, all_rows: bool = False) -> list[Any]:
        """Return the metadata of rows that have ended since they were begun, once.

        Args:
            all_rows: Whether the others end now as well.
        """
        ended = self._begun if all_rows else self._begun.difference(self._active_list())
        self._begun = self._begun - ended
        return [self._metadata[row] for row in sorted(ended)]

    def active_logs(self) -> list[LLMMessageLogType]:
        """Return the conversations of the active rows."""
        if self._active is None:
            return self.message_logs
        return [self.message_logs[row] for row in self._active_list()]

    def active_metadata(self) -> list[Any]:
        """Return the environment's metadata of the active rows."""
        if self._active is None:
            return self._metadata
        return [self._metadata[row] for row in self._active_list()]

    def add_verdict(self, verdict: Verdict) -> None:
        """Add the rewards of a turn, and end the rows that the environment ended."""
        rows = self._active_rows()
        self._rewards[rows] += _array(verdict.rewards, np.float32)
        for name, value in verdict.named_rewards.items():
            # NaN: a name that comes up in a later turn does not apply to rows that
            # ended before it.
            total = self._named_rewards.setdefault(
                name, np.full(self.num_rows, np.nan, np.float32)
            )
            # A sum over turns, in which only the last one decides whether the reward
            # applies (NaN or not).
            total[rows] = np.nan_to_num(total[rows]) + _array(value, np.float32)
        self._outcome[rows] = _array(verdict.outcome, np.int8)
        self.unfinished[rows] = ~_array(verdict.terminateds, np.bool_)
        for place, row in enumerate(self._active_list()):
            self._answers[row] = verdict.answers[place]
            self._metadata[row] = verdict.metadata[place]
            self._errors[row] = verdict.errors[place]

    def go_on(
        self,
        verdict: Verdict,
        observations: ObservationEncoder,
        max_length: int | None,
        min_room: int = 1,
    ) -> None:
        """Append observations to the rows that continue, and deactivate the others.

        Rows left with less than `min_room` tokens for another answer end as truncated.
        """
        turns = self.take_observations(verdict)
        self.follow(observations.encode(turns), max_length, min_room)

    def take_observations(self, verdict: Verdict) -> list[Turn]:
        """Deactivate the rows that do not continue, and return what the others got.

        `follow` must be called next, with the encoded turns.
        """
        rows = self._active_rows()
        if self._limits is not None:
            self._end_at_limits(rows[self.unfinished[rows]], self._limits)
        places = self.unfinished[rows].nonzero()[0].tolist()
        active = rows[places]
        self._active = active
        if not places:
            return []
        # The last sampled token tells whether the policy ended its turn itself.
        last = self.tokens.input_ids[active, self.tokens.lengths[active] - 1].tolist()
        turns = []
        for row, place, token in zip(active.tolist(), places, last, strict=True):
            said = observation_messages(verdict.observations[place])
            turns.append(Turn(_as_said(self.message_logs[row]), said, token))
            self.message_logs[row].extend(dict(message) for message in said)
            self._set_stop_strings(row, verdict.next_stop_strings[place])
        return turns

    def follow(
        self, encoded: Sequence[Continuation], max_length: int | None, min_room: int = 1
    ) -> None:
        """Append encoded observations to the rows that continue.

        Args:
            encoded: [M] what follows each row that `take_observations` returned.
            max_length: Maximum length of a row.
            min_room: Number of tokens that must be left for another answer.
        """
        active = self._active_rows()
        if not len(active):
            return
        before = self.tokens.lengths[active]
        appended: list[list[int]] = [[] for _ in encoded]
        for i, (row, after) in enumerate(zip(active.tolist(), encoded, strict=True)):
            if not after.is_branch:
                appended[i] = after.tokens
            # Decided before the row is replaced: the sampled tokens are worth training
            # on even if the rewritten text has no room for another answer.
            elif max_length is not None and len(after.tokens) + min_room > max_length:
                self._end_truncated(active[i : i + 1])
            else:
                part = self.tokens.branch(row, max_length)
                self._branches[row] = (*self._branches[row], part)
                self.tokens.restart(row, after.tokens)
        self.tokens.append(active, appended)
        # A branch may be shorter than the row before it; that is no negative
        # observation.
        added = self.tokens.lengths[active] - before
        self._env_tokens[active] += added.clip(min=0)
        if max_length is not None:
            room = max_length - self.tokens.lengths[active]
            self._end_truncated(active[room < min_room])
        # Again, as rows without room have ended since.
        self._active = active[self.unfinished[active]]

    def _end_truncated(self, rows: NDArray[np.int64]) -> None:
        self._truncated[rows] = True
        self._end_limited(rows, ConversationOutcome.OUT_OF_TOKENS)

    def _end_limited(self, rows: NDArray[np.int64], limit: ConversationOutcome) -> None:
        self.unfinished[rows] = False
        for row in rows.tolist():
            self._limited_by[row] = limit

    def _end_at_limits(self, rows: NDArray[np.int64], limits: RowLimits) -> None:
        """End rows that have used up what their tasks allow."""
        for met, limit in limits.met(rows, self.num_turns, self._generation_lengths):
            self._end_limited(rows[met & self.unfinished[rows]], limit)

    def _set_stop_strings(self, row: int, stops: list[str] | None) -> None:
        if stops is None:
            return
        # The column is made when first needed: most environments never set stop
        # strings.
        if self._stop_strings is None:
            self._stop_strings = [None] * self.num_rows
        self._stop_strings[row] = stops

    def trajectories(
        self, max_length: int | None, *, is_last: bool, turn_limit: bool
    ) -> Trajectories:
        """Return the rows as played so far.

        Args:
            max_length: Maximum length; longer rows are cut and count as truncated.
            is_last: Whether no turn follows.
            turn_limit: Whether the limit of turns ended the unfinished rows.
        """
        tokens = self.tokens
        if max_length is not None:
            self._truncated |= tokens.cut(max_length)
        turn_limit_reached = self.unfinished & turn_limit
        for row, limit in self._limited_by.items():
            turn_limit_reached[row] = limit is ConversationOutcome.OUT_OF_TURNS
        # A copy: the rows may continue, and "truncated" would then be wrong for them.
        outcome = self._outcome.copy()
        limited = self._truncated | turn_limit_reached
        if self._limited_by:
            limited[list(self._limited_by)] = True
        outcome[(outcome == Outcome.OK) & limited] = int(Outcome.TRUNCATED)
        tensor = torch.from_numpy
        return Trajectories(
            input_ids=tensor(tokens.input_ids),
            input_lengths=tensor(tokens.lengths),
            token_mask=tensor(tokens.token_mask),
            sample_mask=tensor(self._loss_multiplier),
            generation_logprobs=(
                tensor(tokens.logprobs) if tokens.has_logprobs else None
            ),
            token_versions=tensor(tokens.versions),
            rewards=tensor(self._rewards),
            named_rewards={
                name: tensor(total) for name, total in self._named_rewards.items()
            },
            # Copied, because retries replace entries of the result in place.
            group_index=tensor(self.names.prompt.copy()),
            truncated=tensor(self._truncated),
            generation_lengths=tensor(self._generation_lengths),
            num_turns=tensor(self.num_turns),
            weight_version=tensor(self._weight_version),
            outcome=tensor(outcome),
            branches=self._branches,
            texts=self._texts,
            metadata=self._metadata,
            ending=self._endings(turn_limit_reached),
            notes=TrajectoryNotes(
                is_active=tensor(self.unfinished & (not is_last)),
                cut_answers=tensor(self._cut_answers),
                turn_limit_reached=tensor(turn_limit_reached),
                prompt_lengths=tensor(tokens.prompt_lengths),
                env_tokens=tensor(self._env_tokens),
                errors=self._errors,
                message_logs=self.message_logs,
                num_prompt_messages=self._num_prompt_messages,
                answers=self._answers,
                extra_env_info=self._extra_env_info,
            ),
        )

    def _endings(
        self, turn_limit_reached: NDArray[np.bool_]
    ) -> list[ConversationOutcome]:
        """Return [N] what ended the rows; failures are added to the result."""
        found = [ConversationOutcome.FINISHED] * self.num_rows
        # Lists instead of indices: most calls are for a single row, and take less time.
        for row, is_cut in enumerate(self._truncated.tolist()):
            if is_cut:
                found[row] = ConversationOutcome.OUT_OF_TOKENS
        # The environment's word comes before a cut: an answer may be right, or known
        # to be wrong, however it ended.
        said = [
            row
            for row, metadata in enumerate(self._metadata)
            if isinstance(metadata, Mapping) and OUTCOME_KEY in metadata
        ]
        for row in said:
            found[row] = conversation_outcome_of(self._metadata[row]) or found[row]
        for row, is_reached in enumerate(turn_limit_reached.tolist()):
            if is_reached:
                found[row] = ConversationOutcome.OUT_OF_TURNS
        for row, limit in self._limited_by.items():
            found[row] = limit
        return found


def _array(column: Tensor, dtype: type[T]) -> NDArray[T]:
    """Return a column as an array, which shares its memory where that is possible."""
    if column.dtype == torch.bfloat16:
        column = column.float()  # numpy has no such type
    return column.cpu().numpy().astype(dtype, copy=False)


def _as_said(log: LLMMessageLogType) -> LLMMessageLogType:
    """Return a conversation without notes, in the form that chat templates expect."""
    return [
        {key: value for key, value in message.items() if key != TRUNCATED_KEY}
        if TRUNCATED_KEY in message
        else message
        for message in log
    ]
