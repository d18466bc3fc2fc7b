"""`OpenConversation`: a single conversation, played turn by turn at its own pace.

```
question -> (the generator) -> answer -> logs -> (the environment) -> judge --+
    ^                                                                         |
    +------------------------------- goes on ---------------------------------+
```
`RolloutEngine.run` plays a batch in lockstep. Here each conversation proceeds on its
own, and the caller batches whatever is waiting. Tokens, seeds and endings are the same.
`FirstTurns` handles those that begin in the same call of the generator as a batch: the
first answer is the only one in most runs, and row by row it costs several times more.
Those of a single turn stay together until `judge_all` has applied their verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_algorithms.data.types import LLMMessageLogType, PromptSpec, Tokenizer
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.conversations import Conversations
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.rollout.trajectories import PlayedRow
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.task_limits import LIMITS_KEY
from rl_models.tokens.tokenizer import pad_token_id
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec

if TYPE_CHECKING:
    from rl_algorithms.rollout.judge import Verdict
    from rl_algorithms.rollout.observations import (
        Continuation,
        ObservationEncoder,
        Turn,
    )
    from rl_envs.task_limits import TaskLimits

__all__ = ["FirstTurns", "OpenConversation", "judge_all"]

# Rows stay together while padding takes at most half of their columns, which live as
# long as one of the rows.
_MOST_PADDED = 2

# Columns of prompts that conversations read; others may not fit into one batch.
_COLUMNS = (
    "input_ids",
    "input_lengths",
    "loss_multiplier",
    "message_log",
    "extra_env_info",
    "stop_strings",
)


class OpenConversation:
    """A conversation and its progress.

    Args:
        prompt: One row of the columns of `rl_collate_fn`, as returned by
            `RolloutEngine.prepare`.
        place: The numbers that determine its seeds: the run's seed, the step, the index
            of the prompt in the step, the index among the prompt's answers, and the
            number of earlier attempts with other seeds.
        tokenizer: The policy's tokenizer.
        config: Turns and limits.
        observations: Encoder of the environment's messages.
        limits: Limits of a task whose row declares none.
    """

    def __init__(
        self,
        prompt: BatchedDataDict[PromptSpec],
        place: tuple[int, int, int, int, int],
        tokenizer: Tokenizer,
        config: RolloutConfig,
        observations: ObservationEncoder,
        limits: TaskLimits | None = None,
    ) -> None:
        self._seed, self._step, self._prompt, *numbers = place
        # Row 0 of `prompt`; its index in the step only enters the seeds.
        one = [np.array([number], np.int64) for number in (0, *numbers)]
        self._names = RowNames(*one)
        self._start = prompt, tokenizer, limits
        self._opened: Conversations | None = None
        self._beside: tuple[Conversations, int] | None = None
        """Its row among others, until it is needed alone."""
        self._played: PlayedRow | None = None
        self._has_begun = False
        """Whether the environment began it among others, and has not closed it."""
        self._config, self._observations = config, observations
        self._turn = 0
        self.needs_verdict = False
        """Whether the environment still has to judge the latest answer."""
        self.goes_on = True
        """Whether another answer follows."""

    @property
    def _rows(self) -> Conversations:
        """Its row alone, made when it is first needed unless by `FirstTurns`."""
        if self._beside is not None:
            others, place = self._beside
            self._opened, self._beside = others.part([place]), None
            self._opened.names = self._names
            if self._has_begun:
                self.begin()
        elif self._opened is None:
            prompt, tokenizer, limits = self._start
            self._opened = Conversations(prompt, self._names, tokenizer, limits)
        return self._opened

    @property
    def is_new(self) -> bool:
        """Whether `FirstTurns` can take it: nobody has asked for it alone."""
        return self._opened is None and self._beside is None

    def fits_beside(self, other: OpenConversation) -> bool:
        """Return whether `FirstTurns` can have both."""
        mine, its = self._start[0], other._start[0]
        return mine is its or _kind(mine) == _kind(its)

    @property
    def is_last_turn(self) -> bool:
        """Whether the latest answer was the last one allowed."""
        return self._turn >= self._config.max_turns

    def question(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the input row of `generate` for the next answer."""
        seeds = self._rows.names.seeds(self._seed, self._step, self._prompt, self._turn)
        return self._rows.generation_input(seeds)

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Add the output row of `generate`."""
        self._rows.add_answers(output)
        self._end_turn()

    def _end_turn(self) -> None:
        self._turn += 1
        self.needs_verdict = True
        self.goes_on = not self.is_last_turn

    def fail(self, error: Exception) -> None:
        """End the conversation, because sampling failed."""
        self._rows.fail(error)
        self.needs_verdict = self.goes_on = False

    @property
    def log(self) -> LLMMessageLogType:
        """Messages of the conversation so far."""
        if self._beside is not None:
            others, place = self._beside
            return others.message_logs[place]
        return self._rows.message_logs[0]

    @property
    def metadata(self) -> Any:
        """Metadata of the environment."""
        if self._beside is not None:
            others, place = self._beside
            return others.active_metadata()[place]
        return self._rows.active_metadata()[0]

    def begin(self) -> int | None:
        """Return the seed with which the environment begins; None: it has begun."""
        if self._beside is not None:
            self._has_begun = True
            place = self._seed, self._step, self._prompt
            return int(self._names.start_seeds(*place)[0])
        seeds = self._rows.begin(self._seed, self._step, self._prompt)
        return None if seeds is None else seeds[0]

    def take_ended(self) -> list[Any]:
        """Return the metadata to close, once, if the conversation goes on no more."""
        if self._opened is None:
            begun, self._has_begun = self._has_begun, False
            return [self.metadata] if begun else []
        return self._opened.take_ended(all_rows=True)

    def judge(self, verdict: Verdict) -> None:
        """Apply the verdict on the latest answer, a single row."""
        self._follow(self._observations.encode(self._take(verdict)))

    def _take(self, verdict: Verdict) -> list[Turn]:
        """Apply a verdict; return the turn for `_follow` if another answer may come."""
        self.needs_verdict = False
        self._rows.add_verdict(verdict)
        return [] if self.is_last_turn else self._rows.take_observations(verdict)

    def _follow(self, encoded: Sequence[Continuation]) -> None:
        if not self.is_last_turn:
            config = self._config
            self._rows.follow(
                encoded, config.max_total_sequence_length, config.min_answer_room
            )
            self.goes_on = bool(self._rows.num_active)

    def played(self) -> PlayedRow:
        """Return the row of a finished conversation."""
        if self._played is not None:
            return self._played
        turns = self._config.max_turns
        played = self._rows.trajectories(
            self._config.max_total_sequence_length, is_last=True, turn_limit=turns > 1
        )
        return PlayedRow(played.narrowed())

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        if self._beside is not None:
            others, place = self._beside
            return int(others.tokens.token_mask[place].sum())
        return int(self._rows.tokens.token_mask.sum())


def _kind(prompt: BatchedDataDict[PromptSpec]) -> list[bool]:
    """Return what prompts of one batch must have in common."""
    [info] = prompt.get("extra_env_info") or [{}]
    # In a batch, tasks without limits are told so, and by themselves they are told
    # nothing.
    return [LIMITS_KEY in info, *(name in prompt for name in _COLUMNS)]


class FirstTurns:
    """New conversations, asked for and answered together.

    Args:
        conversations: Of one engine and run, each of which `fits_beside` the others.
    """

    def __init__(self, conversations: Sequence[OpenConversation]) -> None:
        self._conversations = conversations
        # Most prompts have several of the conversations.
        prompts = {id(one._start[0]): one._start[0] for one in conversations}
        index = {key: place for place, key in enumerate(prompts)}
        _, tokenizer, limits = conversations[0]._start
        columns = [
            {name: prompt[name] for name in _COLUMNS if name in prompt}
            for prompt in prompts.values()
        ]
        self._rows = Conversations(
            BatchedDataDict.from_batches(
                columns, {"input_ids": pad_token_id(tokenizer)}
            ),
            self._names([index[id(one._start[0])] for one in conversations]),
            tokenizer,
            limits,
        )

    def questions(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the input rows of `generate`, one per conversation."""
        names = self._names([one._prompt for one in self._conversations])
        steps = np.array([one._step for one in self._conversations])
        seeds = torch.empty(len(steps), dtype=torch.int64)
        for step in np.unique(steps).tolist():
            rows = (steps == step).nonzero()[0]
            seed = self._conversations[0]._seed
            seeds[rows] = names.select(rows).seeds(seed, step, 0, 0)
        return self._rows.generation_input(seeds)

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Add the output rows of `generate`.

        Conversations that may have further turns go on by themselves.
        """
        self._rows.add_answers(output)
        if self._stays_together:
            for place, one in enumerate(self._conversations):
                one._beside = self._rows, place
                one._end_turn()
            return
        rows = self._rows.split([one._names for one in self._conversations])
        for one, row in zip(self._conversations, rows, strict=True):
            one._opened = row
            one._end_turn()

    @property
    def _stays_together(self) -> bool:
        config, tokens = self._conversations[0]._config, self._rows.tokens
        most = _MOST_PADDED * int(tokens.lengths.sum())
        return config.max_turns == 1 and tokens.input_ids.size <= most

    def _names(self, prompts: Sequence[int]) -> RowNames:
        return RowNames(
            np.array(prompts, np.int64),
            np.concatenate([one._names.sample for one in self._conversations]),
            np.concatenate([one._names.attempt for one in self._conversations]),
        )


def judge_all(conversations: Sequence[OpenConversation], verdict: Verdict) -> None:
    """Apply the verdict on the latest answers, with a row for each conversation.

    Conversations of one call of the generator that end with this answer get theirs
    together, and what the environment said to the others is encoded together.

    Args:
        conversations: Of one engine.
        verdict: The verdict on them, in their order.
    """
    together: dict[int, list[int]] = {}
    for place, one in enumerate(conversations):
        # Alone under a number of its own: no object has a negative identity.
        key = -1 - place if one._beside is None else id(one._beside[0])
        together.setdefault(key, []).append(place)
    alone = [places[0] for places in together.values() if len(places) == 1]
    if alone:
        _judge_each(
            [conversations[place] for place in alone], verdict.select(alone).rows()
        )
    for places in together.values():
        if len(places) > 1:
            _judge_beside(
                [conversations[place] for place in places], verdict.select(places)
            )


def _judge_each(
    conversations: Sequence[OpenConversation], verdicts: Sequence[Verdict]
) -> None:
    """Apply verdicts on conversations that have their row alone."""
    turns = [
        one._take(verdict) for one, verdict in zip(conversations, verdicts, strict=True)
    ]
    flat = [turn for found in turns for turn in found]
    encoded = iter(conversations[0]._observations.encode(flat))
    for one, found in zip(conversations, turns, strict=True):
        one._follow([next(encoded) for _ in found])


def _judge_beside(ended: Sequence[OpenConversation], verdict: Verdict) -> None:
    """Apply the verdict on the only answers of conversations in one batch."""
    beside = [one._beside for one in ended if one._beside is not None]
    rows = beside[0][0].part([place for _, place in beside])
    rows.add_verdict(verdict)
    played = rows.trajectories(
        ended[0]._config.max_total_sequence_length, is_last=True, turn_limit=False
    ).narrowed()
    for place, one in enumerate(ended):
        one._played, one._beside = PlayedRow(played, place), (rows, place)
        one.needs_verdict = False
