"""`OpenConversation`: one conversation, whose turns come whenever they are done.

```
question -> (the generator) -> answer -> logs -> (the environment) -> judge --+
    ^                                                                         |
    +------------------------------- goes on ---------------------------------+
```
`RolloutEngine.run` plays a batch turn by turn. Here each conversation has a turn of its
own, and whoever plays it puts into one call whatever is waiting. Tokens, seeds and ends
are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_algorithms.data.types import LLMMessageLogType, PromptSpec, Tokenizer
from rl_algorithms.rollout.config import RolloutConfig
from rl_algorithms.rollout.conversations import Conversations
from rl_algorithms.rollout.row_names import RowNames
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec

if TYPE_CHECKING:
    from rl_algorithms.rollout.judge import Verdict
    from rl_algorithms.rollout.observations import ObservationEncoder
    from rl_algorithms.rollout.trajectories import Trajectories

__all__ = ["OpenConversation"]


class OpenConversation:
    """A conversation and how far it is.

    Args:
        prompt: One row of columns of `rl_collate_fn`, as `RolloutEngine.prepare` gives
            it back.
        place: Run's seed, step, place of the prompt in the step, place among its
            answers, and how often it was sampled with another seed before: what its
            seeds follow from.
        tokenizer: The policy's tokenizer.
        config: Turns and limits.
        observations: Encodes what the environment says.
    """

    def __init__(
        self,
        prompt: BatchedDataDict[PromptSpec],
        place: tuple[int, int, int, int, int],
        tokenizer: Tokenizer,
        config: RolloutConfig,
        observations: ObservationEncoder,
    ) -> None:
        self._seed, self._step, self._prompt, sample, attempt = place
        one = [np.array([number], np.int64) for number in (0, sample, attempt)]
        self._rows = Conversations(prompt, RowNames(*one), tokenizer)
        self._config, self._observations = config, observations
        self._turn = 0
        self.needs_verdict = False
        """Whether the environment has still to judge the newest answer."""
        self.goes_on = True
        """Whether another answer follows."""

    @property
    def is_last_turn(self) -> bool:
        """Whether the newest answer is the last that there may be."""
        return self._turn >= self._config.max_turns

    def question(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the row that `generate` takes for the next answer."""
        seeds = self._rows.names.seeds(self._seed, self._step, self._prompt, self._turn)
        return self._rows.generation_input(seeds)

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Take the row that `generate` gave back."""
        self._rows.add_answers(output)
        self._turn += 1
        self.needs_verdict = True
        self.goes_on = not self.is_last_turn

    def fail(self, error: Exception) -> None:
        """End it, as nothing could be sampled."""
        self._rows.fail(error)
        self.needs_verdict = self.goes_on = False

    @property
    def log(self) -> LLMMessageLogType:
        """What was said so far."""
        return self._rows.message_logs[0]

    @property
    def metadata(self) -> Any:
        """What the environment wants to know of it."""
        return self._rows.active_metadata()[0]

    def judge(self, verdict: Verdict) -> None:
        """Take the verdict on the newest answer, a single row."""
        self.needs_verdict = False
        self._rows.add_verdict(verdict)
        if not self.is_last_turn:
            self._rows.go_on(
                verdict,
                self._observations,
                self._config.max_total_sequence_length,
                self._config.min_answer_room,
            )
            self.goes_on = bool(self._rows.num_active)

    def played(self) -> Trajectories:
        """Return the row of a conversation that has ended, no wider than its tokens."""
        turns = self._config.max_turns
        played = self._rows.trajectories(
            self._config.max_total_sequence_length, is_last=True, turn_limit=turns > 1
        )
        return played.narrowed()

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        sampled: torch.Tensor = self._rows.tokens.token_mask
        return int(sampled.sum())
