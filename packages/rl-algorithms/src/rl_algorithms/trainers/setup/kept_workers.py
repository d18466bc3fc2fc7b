"""Processes that one training leaves to the next."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from rl_algorithms.trainers.settings.config import EnvConfig
from rl_distributed.config import Config

__all__ = ["KeptWorkers"]


class KeptWorkers:
    """Keeps Ray and the worker processes of a training for the one after it.

    A process that has imported torch and transformers is worth seconds. The next
    trainer with the same cluster loads its own model and settings into the processes
    that are there; with another cluster, or other models, it starts new ones.

    ```python
    with KeptWorkers() as pool:
        SFTTrainer(sft_config, pool=pool).fit()
        GRPOTrainer(grpo_config, pool=pool).fit()
    ```

    Closing it ends, in this order: environment, generation, policy, cluster, and Ray if
    it was started here.
    """

    def __init__(self) -> None:
        self.closing = ExitStack()
        """Gets the calls that close what is kept."""
        self.parts: dict[str, Any] = {}
        """What is kept, by the names of `Components`; always the same dictionary."""
        self._key: tuple[Config, tuple[str, ...]] | None = None
        self._env: EnvConfig | None = None

    def __enter__(self) -> KeptWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def kept_for(self, cluster: Config, groups: tuple[str, ...]) -> dict[str, Any]:
        """Return what is kept for such a cluster, and close what is for another.

        What the next trainer is to find is put into the result.

        Args:
            cluster: The section of the configuration.
            groups: Names of the worker groups that share it.
        """
        key = (cluster, groups)
        if self._key is not None and self._key != key:
            self.release()
        self._key = key
        return self.parts

    def keeps_environment(self, env: EnvConfig | None) -> bool:
        """Tell whether the environment that is kept is the one of this section."""
        same = env is not None and env == self._env and "environment" in self.parts
        if not same and "environment" in self.parts:
            self.parts.pop("environment").shutdown()
        self._env = env
        return same

    def release(self) -> None:
        """End what is kept."""
        self.parts.clear()
        self._key = self._env = None
        self.closing.close()

    def close(self) -> None:
        """End what is kept, and Ray if it was started for it."""
        self.release()
