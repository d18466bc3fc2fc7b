"""`PromptSource`: the prompts of a data set by their position in the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rl_algorithms.asynchronous.prompt_order import Prompt
from rl_algorithms.data.loader import BatchedDataLoader, Loader
from rl_algorithms.data.types import PromptRows
from rl_algorithms.rollout import RolloutEngine
from rl_distributed.errors import ConfigError

__all__ = ["PromptSource"]


class PromptSource:
    """Hands out single prompts in the order in which a loader batches them.

    Args:
        loader: Loader of the training batches.
        num_prompts: Number of prompts per step.

    Raises:
        ConfigError: The loader has no positions, or a step may have fewer prompts.
    """

    def __init__(self, loader: Loader, num_prompts: int) -> None:
        if not isinstance(loader, BatchedDataLoader):
            raise ConfigError(
                "asynchronous takes prompts by their position in the data: got "
                f"{type(loader).__name__}, which has none; use data that are not "
                "streamed, or set asynchronous to null"
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
        self._open: dict[int, PromptRows] = {}

    def get(self, prompt: Prompt, rollouts: RolloutEngine) -> PromptRows:
        """Return a prompt as a single row from which conversations can be opened."""
        # Kept until the group ends: its answers are opened one by one, and tokenizing
        # the prompt for each would repeat the work.
        if prompt.number not in self._open:
            batch = self._loader.batch_at(prompt.epoch, [prompt.row])
            self._open[prompt.number] = rollouts.prepare(batch)
        return self._open[prompt.number]

    def release(self, number: int) -> None:
        """Forget the row of a prompt."""
        self._open.pop(number, None)

    def release_all_but(self, numbers: Collection[int]) -> None:
        """Forget the rows of all other prompts."""
        for number in [known for known in self._open if known not in numbers]:
            del self._open[number]

    def position(self) -> int:
        """Return the number of the next prompt of the loader."""
        state: Mapping[str, Any] = self._loader.state_dict()
        # The rest of an epoch that fills no batch is never handed out.
        place = min(int(state["position"]), self.prompts_per_epoch)
        return int(state["epoch"]) * self.prompts_per_epoch + place
