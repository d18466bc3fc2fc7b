"""`RolloutEngine`: prompts -> generation -> environment -> token rows.

```
batch [P prompts] -- x G --> rows [N] --> generate --> tokens, log-probs, version
                               ^                            |
                 observation tokens                       text
                               |                            v
                           (next turn) <----- environment.step --> rewards, done
```

Everything is a column of N rows; there is no loop over rows with tensor operations in
it. A row's sampling seed is `row_seeds(seed, step, prompt index, sample index, turn)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_algorithms.data.types import Tokenizer
from rl_algorithms.errors import DataError, PromptTooLongError, RolloutError
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.conversations import Conversations
from rl_algorithms.rollout.judge import Judge
from rl_algorithms.rollout.observations import ObservationEncoder
from rl_algorithms.rollout.result import Outcome, RolloutResult
from rl_algorithms.rollout.rollout_metrics import rollout_metrics
from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.metrics.values import MetricValue, as_metric
from rl_envs.interfaces import EnvironmentInterface
from rl_models.interfaces import GenerationInterface
from rl_models.types import SamplingParams

if TYPE_CHECKING:
    from rl_distributed.timing import Timer

__all__ = ["RolloutEngine"]


class RolloutEngine:
    """Plays conversations of a policy with an environment.

    Args:
        generation: The policy as a sampler.
        environment: Judges answers, and answers them where there are several turns.
        tokenizer: The policy's tokenizer.
        config: Turns, limits, and what to do about failures.
        use_chat_template: Whether prompts are formatted by the chat template; default:
            if the tokenizer has one.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        environment: EnvironmentInterface[Any],
        tokenizer: Tokenizer,
        config: RolloutConfig | None = None,
        *,
        use_chat_template: bool | None = None,
    ) -> None:
        self._generation = generation
        self._environment = environment
        self._tokenizer = tokenizer
        self.config = config if config is not None else RolloutConfig()
        self._judge = Judge(environment, self.config)
        self._observations = ObservationEncoder(tokenizer, use_chat_template)

    def run(
        self,
        batch: BatchedDataDict[Any],
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
            first_prompt_index: Index of the batch's first prompt in the step, where a
                step takes several batches.
            greedy: Take the most likely token each time.
            sampling: Overrides the generator's own sampling parameters.
            timer: Receives the spans `generation` and `environment`.

        Returns:
            Rows in the order of the prompts, all of a prompt together.

        Raises:
            PromptTooLongError: A prompt leaves no room for an answer.
            RolloutError: Too many rows failed, or an answer has the wrong shape.
        """
        self._check(batch, num_generations)
        conversations = Conversations(
            batch, num_generations, self._tokenizer, first_prompt_index
        )
        for turn in range(self.config.max_turns):
            with _span(timer, "generation"):
                output = self._generation.generate(
                    conversations.generation_input(seed, step, turn),
                    greedy=greedy,
                    sampling=sampling,
                )
            conversations.add_answers(output)
            with _span(timer, "environment"):
                verdict = self._judge.step(
                    conversations.active_logs(), conversations.active_metadata()
                )
            conversations.add_verdict(verdict)
            if turn + 1 == self.config.max_turns or not conversations.go_on(
                verdict, self._observations, self.config.max_total_sequence_length
            ):
                break
        return self._finish(conversations)

    def _check(self, batch: BatchedDataDict[Any], num_generations: int) -> None:
        missing = {"input_ids", "input_lengths", "message_log"} - set(batch)
        if missing:
            raise DataError(
                f"a rollout's batch lacks {', '.join(sorted(missing))}: collate "
                "processed prompts with rl_collate_fn (BatchedDataLoader does)"
            )
        if num_generations < 1:
            raise DataError(
                f"num_generations must be at least 1: got {num_generations}"
            )
        limit = self.config.max_total_sequence_length
        longest = int(batch["input_lengths"].max())
        if limit is not None and longest >= limit:
            row = int(batch["input_lengths"].argmax())
            name = batch["idx"][row] if "idx" in batch else row
            raise PromptTooLongError(
                f"the prompt of row {name} has {longest} tokens and "
                f"max_total_sequence_length is {limit}: no token is left for the "
                "answer; shorten it, drop long prompts (data.on_overlong=drop), or "
                "raise the limit"
            )

    def _finish(self, conversations: Conversations) -> RolloutResult:
        limit = self.config.max_total_sequence_length
        rows = conversations.finish(limit)
        self._refuse_if_mostly_failed(rows["outcome"])
        metrics: dict[str, MetricValue] = rollout_metrics(
            rewards=rows["rewards"],
            outcome=rows["outcome"],
            generation_lengths=rows["generation_lengths"],
            prompt_lengths=conversations.tokens.prompt_lengths,
            total_lengths=rows["input_lengths"],
            num_turns=conversations.num_turns,
            turn_limit_reached=conversations.unfinished
            if self.config.max_turns > 1
            else torch.zeros_like(conversations.unfinished),
            weight_version=rows["weight_version"],
        )
        for name, value in self._judge.post_process(rows).items():
            metrics[f"env/{name}"] = as_metric(value, name=name)
        return RolloutResult(
            rows=rows,
            metrics=metrics,
            message_logs=conversations.message_logs,
            num_prompt_messages=conversations.num_prompt_messages,
            answers=conversations.answers,
            extra_env_info=conversations.extra_env_info,
        )

    def _refuse_if_mostly_failed(self, outcome: Tensor) -> None:
        failed = int((outcome > Outcome.TRUNCATED).sum())
        rate = failed / max(len(outcome), 1)
        if failed and (rate > self.config.max_failed_rate or failed == len(outcome)):
            raise RolloutError(
                f"the environment failed for {failed} of {len(outcome)} rows, more "
                f"than rollout.max_failed_rate={self.config.max_failed_rate} allows"
                f"{self._judge.last_failure}"
            )


@contextlib.contextmanager
def _span(timer: Timer | None, name: str) -> Iterator[None]:
    if timer is None:
        yield
    else:
        with timer.time(name):
            yield
