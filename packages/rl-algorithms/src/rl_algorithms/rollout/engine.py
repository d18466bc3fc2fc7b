"""`RolloutEngine`: prompts -> generation -> environment -> token rows.

```
batch [P prompts] -- x G --> rows [N] --> generate --> tokens, log-probs, versions
                               ^                            |
                 observation tokens                       text
                               |                            v
                           (next turn) <----- environment.step --> rewards, done
                                                             |
   RolloutResult <-- whole groups <-- score_groups <-- retries of failed rows
```

Everything is a column of N rows; no loop over rows contains tensor operations. The
sampling seed of a row is `row_seeds(seed, step, prompt index, sample index, turn)`.
Nothing here assumes that all tokens come from one version of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl_algorithms.data.types import PROMPT_ROWS, PromptSpec, Tokenizer
from rl_algorithms.errors import DataError, PromptTooLongError
from rl_algorithms.rollout.agents.conversation import AgentConversation
from rl_algorithms.rollout.agents.player import AgentPlayer
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.conversations import Conversations
from rl_algorithms.rollout.judge import Judge
from rl_algorithms.rollout.observations import ObservationEncoder
from rl_algorithms.rollout.open_conversation import OpenConversation
from rl_algorithms.rollout.play import Play
from rl_algorithms.rollout.result import Outcome, RolloutResult
from rl_algorithms.rollout.result_builder import Finisher
from rl_algorithms.rollout.retries import ConfiguredRetry, RetryPolicy
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.rollout.trajectories import PlayedRow, Trajectories
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError, DeadlineExceededError, WorkerError
from rl_envs.agents.tasks import agent_limits_of
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.task_limits import TaskLimits
from rl_models.interfaces import GenerationInterface
from rl_models.tokens.tokenizer import pad_token_id
from rl_models.types import SamplingParams

if TYPE_CHECKING:
    from rl_distributed.timing.timer import Timer

__all__ = ["RolloutEngine"]


class RolloutEngine:
    """Plays conversations of a policy with an environment.

    Args:
        generation: The policy as a sampler.
        environment: Judges answers and, with several turns, responds to them.
        tokenizer: The policy's tokenizer.
        config: Turns, limits and handling of failures.
        use_chat_template: Whether the chat template formats prompts; by default, if the
            tokenizer has one.
        retry: Policy for retries; by default, from `config.retry`.
        on_progress: Called whenever answers or verdicts have arrived, in some thread.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environment: EnvironmentInterface[Any],
        tokenizer: Tokenizer,
        config: RolloutConfig | None = None,
        *,
        use_chat_template: bool | None = None,
        retry: RetryPolicy | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.note_progress = on_progress
        """Tells that answers or verdicts have arrived."""
        self._limits: TaskLimits = environment.task_limits
        self._generation = generation
        self._tokenizer = tokenizer
        self.config = config if config is not None else RolloutConfig()
        self._retry = retry or ConfiguredRetry(self.config.retry)
        # Judging rows one by one after a failure pays off only if the others can be
        # used: if failed rows are retried or dropped, not if one ends the run.
        tolerant = retry is not None or self.config.retry.max_attempts > 1
        self.judge = Judge(
            environment,
            isolate=tolerant or self.config.on_environment_error == "drop",
        )
        self._observations = ObservationEncoder(
            tokenizer,
            use_chat_template,
            tools=environment.tool_schemas(),
            branch=self.config.on_template_rewrite == "branch",
        )
        self.agents: AgentPlayer | None = None
        """Plays conversations that agents lead; None: the environment answers."""
        if agent_limits_of(environment) is not None:
            self.agents = AgentPlayer(
                generation,
                environment,
                tokenizer,
                self.config,
                use_chat_template,
                self.judge,
                on_progress,
            )
        self._finisher = Finisher(self.judge, self.config, pad_token_id(tokenizer))

    def run(
        self,
        batch: BatchedDataDict[PromptSpec],
        *,
        num_generations: int = 1,
        seed: int = 0,
        step: int = 0,
        first_prompt_index: int = 0,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        timer: Timer | None = None,
    ) -> RolloutResult:
        """Sample `num_generations` conversations per prompt and score them.

        Args:
            batch: Columns of `rl_collate_fn`.
            num_generations: Conversations per prompt.
            seed: The run's seed.
            step: The training step; different steps sample differently.
            first_prompt_index: Index of the batch's first prompt within the step, if
                the step takes several batches.
            greedy: Always take the most likely token.
            sampling: Overrides the generator's own sampling parameters.
            timer: Receives the spans `generation` and `environment`.

        Returns:
            Rows in the order of the prompts, those of a prompt next to each other.

        Raises:
            PromptTooLongError: A prompt leaves no room for an answer.
            RolloutError: Too many rows failed, an answer has the wrong shape, or the
                chat template rewrote earlier messages.
        """
        play = Play(seed, step, first_prompt_index, greedy, sampling, timer)
        batch, names = self._start(batch, num_generations)
        *_, played = self._play(batch, names, play)
        return self._complete(batch, names, played, play)

    def run_iter(
        self,
        batch: BatchedDataDict[PromptSpec],
        *,
        num_generations: int = 1,
        seed: int = 0,
        step: int = 0,
        first_prompt_index: int = 0,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
        timer: Timer | None = None,
    ) -> Iterator[RolloutResult]:
        """Play conversations like `run`, and yield groups as soon as they are complete.

        After each turn, all groups whose conversations have ended form one result. The
        environment post-processes one result at a time. Seeds and rows are those of
        `run`; `group_index` counts within the batch.

        Yields:
            Complete groups, each exactly once.
        """
        play = Play(seed, step, first_prompt_index, greedy, sampling, timer)
        batch, names = self._start(batch, num_generations)
        # One line per prompt: rows of a group are adjacent, see `RowNames.of_groups`.
        left = torch.arange(len(names.prompt)).view(-1, num_generations)
        for played in self._play(batch, names, play):
            whole = ~played.notes.is_active[left].any(1)
            rows, left = left[whole].flatten(), left[~whole]
            if len(rows):
                part = played.select(rows)
                yield self._complete(batch, names.select(rows.numpy()), part, play)

    # One conversation at a time -----------------------------------------------------

    def prepare(
        self, batch: BatchedDataDict[PromptSpec]
    ) -> BatchedDataDict[PromptSpec]:
        """Check prompts and add descriptions of the tools; precedes `open`.

        Args:
            batch: Columns of `rl_collate_fn`.

        Raises:
            PromptTooLongError: A prompt leaves no room for an answer.
            DataError: The columns are not those of prompts.
        """
        return self._start(batch, 1)[0]

    def open(
        self,
        prompt: BatchedDataDict[PromptSpec],
        *,
        seed: int,
        step: int,
        place: int,
        sample: int,
        attempt: int = 0,
    ) -> OpenConversation | AgentConversation:
        """Open a conversation for the caller to play turn by turn.

        Args:
            prompt: One row returned by `prepare`.
            seed: The run's seed.
            step: Training step for the seeds.
            place: Index of the prompt within that step.
            sample: Index among the prompt's conversations.
            attempt: Number of earlier attempts with other seeds.
        """
        if self.agents is not None:
            one = [np.array([number], np.int64) for number in (0, sample, attempt)]
            return self.agents.open(prompt, RowNames(*one), (seed, step, place))
        return OpenConversation(
            prompt,
            (seed, step, place, sample, attempt),
            self._tokenizer,
            self.config,
            self._observations,
            self._limits,
        )

    def finish(
        self, groups: Sequence[Sequence[PlayedRow]], num_retried: int = 0
    ) -> RolloutResult:
        """Build the result of conversations that were played one at a time.

        Args:
            groups: Rows from `OpenConversation.played`, by prompt.
            num_retried: Number of retried conversations.

        Raises:
            RolloutError: Too many rows failed.
        """
        rows = [row for group in groups for row in group]
        played = Trajectories.joined(rows, self._finisher.pads)
        sizes = torch.tensor([len(group) for group in groups])
        played.group_index = torch.arange(len(groups)).repeat_interleave(sizes)
        return self._finisher.finish(played, num_retried)

    def wants_again(self, played: PlayedRow, attempt: int, elapsed_s: float) -> bool:
        """Return whether to retry a finished conversation.

        Args:
            played: Its row.
            attempt: Number of attempts so far.
            elapsed_s: Seconds since the first attempt began.
        """
        rows = slice(played.row, played.row + 1)
        again = self._retry.rows_to_resample(
            played.batch.outcome[rows],
            played.batch.group_index[rows],
            attempt,
            elapsed_s,
        )
        return bool(len(again))

    def close(self) -> None:
        """End agents and the address that they use; other rollouts hold nothing."""
        if self.agents is not None:
            self.agents.close()

    # Starting -----------------------------------------------------------------------

    def _start(
        self, batch: BatchedDataDict[PromptSpec], num_generations: int
    ) -> tuple[BatchedDataDict[PromptSpec], RowNames]:
        """Check a batch and add descriptions of the tools to its prompts."""
        try:
            PROMPT_ROWS.check(batch)
        except BatchError as error:
            raise DataError(
                f"a rollout cannot start: {error}; collate processed prompts with "
                "rl_collate_fn (BatchedDataLoader does)"
            ) from None
        if num_generations < 1:
            raise DataError(
                f"num_generations must be at least 1: got {num_generations}"
            )
        if not batch["message_log"]:
            raise DataError(
                "a rollout needs at least one prompt: got an empty batch; skip it"
            )
        logs = [
            # Texts only: messages also carry tokens, which a template must not see.
            [{"role": m["role"], "content": m["content"]} for m in log]
            for log in batch["message_log"]
        ]
        prompts = self._observations.prompts(logs)
        if prompts is not None:
            # The caller's batch keeps the prompts of the data set.
            batch = batch.copy()
            rows = [torch.tensor(tokens) for tokens in prompts]
            batch["input_ids"] = torch.nn.utils.rnn.pad_sequence(
                rows, True, pad_token_id(self._tokenizer)
            )
            batch["input_lengths"] = torch.tensor([len(row) for row in rows])
        self._check_lengths(batch, tools=prompts is not None)
        return batch, RowNames.of_groups(len(logs), num_generations)

    def _check_lengths(
        self, batch: BatchedDataDict[PromptSpec], *, tools: bool
    ) -> None:
        limit = self.config.max_total_sequence_length
        longest = int(batch["input_lengths"].max())
        if limit is not None and longest >= limit:
            row = int(batch["input_lengths"].argmax())
            name = batch["idx"][row] if "idx" in batch else row
            told = ", including the descriptions of tools" if tools else ""
            raise PromptTooLongError(
                f"the prompt of row {name} has {longest} tokens{told} and "
                f"max_total_sequence_length is {limit}: no token is left for the "
                "answer; shorten it, drop long prompts (data.on_overlong=drop), or "
                "raise the limit"
            )

    # Playing ------------------------------------------------------------------------

    def _play(
        self, batch: BatchedDataDict[PromptSpec], names: RowNames, play: Play
    ) -> Iterator[Trajectories]:
        """Play conversations turn by turn; yield all rows after each turn.

        `notes.is_active` [N] marks the rows that continue; after the last turn, none.
        """
        if self.agents is not None:
            # Agents have no common turns, so all rows arrive at once.
            yield self.agents.play(batch, names, play)
            return
        rows = Conversations(batch, names, self._tokenizer, self._limits)
        try:
            for turn in range(self.config.max_turns):
                last = turn + 1 == self.config.max_turns
                self._play_turn(rows, play, turn, last=last)
                done = last or not rows.num_active
                self.judge.close(rows.take_ended(all_rows=done))
                yield rows.trajectories(
                    self.config.max_total_sequence_length,
                    is_last=done,
                    turn_limit=done and self.config.max_turns > 1,
                )
                if done:
                    return
        except (Exception, GeneratorExit):
            # A turn has failed, or nobody wants the rest of `run_iter`.
            self.judge.close(rows.take_ended(all_rows=True))
            raise

    def _play_turn(
        self, rows: Conversations, play: Play, turn: int, *, last: bool
    ) -> None:
        seeds = rows.names.seeds(play.seed, play.step, play.first_prompt_index, turn)
        with play.span("generation"):
            try:
                output = self._generation.generate(
                    rows.generation_input(seeds),
                    greedy=play.greedy,
                    sampling=play.sampling,
                )
            except (WorkerError, DeadlineExceededError) as error:
                # Exceptions of the generator's own code are not caught: they are bugs,
                # and no retry helps.
                self.judge.note(error, rows.num_active)
                rows.fail(error)
                return
        rows.add_answers(output)
        self.note_progress()
        with play.span("environment"):
            begins = rows.begin(play.seed, play.step, play.first_prompt_index)
            verdict = self.judge.step(
                rows.active_logs(), rows.active_metadata(), begins
            )
        rows.add_verdict(verdict)
        self.note_progress()
        if not last:
            rows.go_on(
                verdict,
                self._observations,
                self.config.max_total_sequence_length,
                self.config.min_answer_room,
            )

    # Finishing ----------------------------------------------------------------------

    def _complete(
        self,
        batch: BatchedDataDict[PromptSpec],
        names: RowNames,
        played: Trajectories,
        play: Play,
    ) -> RolloutResult:
        """Retry failed rows, score groups and build the result."""
        attempt, num_retried = 1, 0
        self._mark_stale(played)
        while True:
            rows = self._retry.rows_to_resample(
                played.outcome,
                played.group_index,
                attempt,
                time.monotonic() - play.begin_s,
            )
            # Groups are scored only once nothing is retried, because their members
            # change.
            if not len(rows):
                return self._finisher.finish(played, num_retried)
            # A row lost to the infrastructure is sampled with its own seed, as if
            # nothing had happened. A row that the environment failed on gets another
            # seed: the same answer would most likely fail again.
            again = played.outcome != Outcome.INFRASTRUCTURE_ERROR
            names = names.next_attempt(self._reseeded(rows, again).numpy())
            *_, replacement = self._play(batch, names.select(rows.numpy()), play)
            self._mark_stale(replacement)
            played = played.replaced(rows, replacement, self._finisher.pads)
            attempt, num_retried = attempt + 1, num_retried + len(rows)

    def _reseeded(self, rows: Tensor, again: Tensor) -> Tensor:
        chosen = torch.zeros(len(again), dtype=torch.bool)
        chosen[rows] = again[rows]
        return chosen

    def _mark_stale(self, played: Trajectories) -> None:
        if self.config.max_staleness is not None:
            played.mark_stale(
                self._generation.weight_version, self.config.max_staleness
            )
