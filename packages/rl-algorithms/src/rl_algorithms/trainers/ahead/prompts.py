"""`PromptSource`: the prompts of a data set by their place in the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algorithms.asynchronous.prompt_order import Prompt
from rl_algorithms.data.loader import BatchedDataLoader, Loader
from rl_algorithms.rollout import RolloutEngine
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError

__all__ = ["PromptSource"]


class PromptSource:
    """Hands prompts out one by one, in the order in which a loader has them in batches.

    Args:
        loader: The batches of training.
        num_prompts: Prompts per step.

    Raises:
        ConfigError: A step of the loader may have fewer prompts.
    """

    def __init__(self, loader: Loader, num_prompts: int) -> None:
        if not isinstance(loader, BatchedDataLoader):
            raise ConfigError(
                "asynchronous takes prompts by their place in the data: got "
                f"{type(loader).__name__}, which has none; use data that are no "
                "stream, or set asynchronous to null"
            )
        left = loader.num_rows % num_prompts
        if left and not loader.drops_last:
            raise ConfigError(
                "asynchronous needs num_prompts_per_step prompts for each step: got "
                f"{loader.num_rows} rows with {num_prompts} per step, and a last step "
                f"of {left}; set data.drop_last=true, or lower num_prompts_per_step"
            )
        self._loader = loader
        self.prompts_per_epoch = loader.num_rows - left
        self._open: dict[int, BatchedDataDict[Any]] = {}

    def get(self, prompt: Prompt, rollouts: RolloutEngine) -> BatchedDataDict[Any]:
        """Return a prompt as one row that conversations can be opened with."""
        if prompt.number not in self._open:
            batch = self._loader.batch_at(prompt.epoch, [prompt.row])
            self._open[prompt.number] = rollouts.prepare(batch)
        return self._open[prompt.number]

    def release(self, number: int) -> None:
        """Keep a prompt no longer."""
        self._open.pop(number, None)

    def position(self) -> int:
        """Return the number of the prompt that the loader stands before."""
        state: Mapping[str, Any] = self._loader.state_dict()
        # What is left of an epoch that has no full batch more is not handed out.
        place = min(int(state["position"]), self.prompts_per_epoch)
        return int(state["epoch"]) * self.prompts_per_epoch + place
