"""`KeptWorkers`: worker processes that one training leaves to the next."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from rl_algorithms.trainers.settings.config import EnvConfig
from rl_distributed.config import Config

__all__ = ["KeptWorkers"]


class KeptWorkers:
    """Keeps Ray and the worker processes of a training for the one after it.

    A process that has already imported torch and transformers saves seconds. The next
    trainer with the same cluster loads its own model and settings into the existing
    processes; with another cluster or other models, it starts new ones.

    ```python
    with KeptWorkers() as pool:
        SFTTrainer(sft_config, pool=pool).fit()
        GRPOTrainer(grpo_config, pool=pool).fit()
    ```

    Closing shuts down environment, generation, policy, cluster, and Ray if it was
    started here, in this order.
    """

    def __init__(self) -> None:
        self.closing = ExitStack()
        """Exit stack that closes the kept components."""
        self.parts: dict[str, Any] = {}
        """Kept components, by the names in `Components`; always the same dictionary."""
        self._key: tuple[Config, Config | None, tuple[str, ...]] | None = None
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

    def kept_for(
        self,
        cluster: Config,
        groups: tuple[str, ...],
        sampling_cluster: Config | None = None,
    ) -> dict[str, Any]:
        """Return the components kept for such a cluster; close those for another.

        The caller adds components for the next trainer to the returned dictionary.

        Args:
            cluster: Section `cluster` of the configuration.
            groups: Names of the worker groups.
            sampling_cluster: Section of the generator's own cluster, if it has one.
        """
        key = (cluster, sampling_cluster, groups)
        if self._key is not None and self._key != key:
            self.release()
        self._key = key
        return self.parts

    def keeps_environment(self, env: EnvConfig | None) -> bool:
        """Return whether the kept environment has this section; close it otherwise."""
        same = env is not None and env == self._env and "environment" in self.parts
        if not same and "environment" in self.parts:
            self.parts.pop("environment").shutdown()
        self._env = env
        return same

    def release(self) -> None:
        """Shut down the kept components."""
        # Cleared in place: the caller of `kept_for` holds the same dictionary.
        self.parts.clear()
        self._key = self._env = None
        self.closing.close()

    def close(self) -> None:
        """Shut down the kept components, and Ray if it was started here."""
        self.release()
