"""A generator that follows a policy: its weights are brought when they are needed."""

from __future__ import annotations

from typing import cast

from rl_distributed.errors import ConfigError
from rl_models.interfaces import lacking
from rl_models.weights.protocols import VersionedSource, WeightSink
from rl_models.weights.sync import WeightSynchronizer

__all__ = ["Following"]


class Following:
    """Brings the weights of a policy before rows are sampled, where they have changed.

    Args:
        policy: Counts its optimizer steps and loaded checkpoints in `weight_version`.
        generation: Where the weights go.

    Raises:
        ConfigError: The policy cannot hand out its weights.
    """

    def __init__(self, policy: object, generation: WeightSink) -> None:
        missing = lacking(policy, VersionedSource)
        if missing:
            raise ConfigError(
                "follow takes a policy that hands out its weights, such as "
                f"HuggingFacePolicy or TrainingPolicy: got {policy!r:.80}, which "
                f"has no {', '.join(missing)}"
            )
        self._policy = cast(VersionedSource, policy)
        self._generation = generation
        self._synchronizer = WeightSynchronizer(self._policy, generation)
        self._confirmed: tuple[int, int] | None = None
        """Versions as the policy and as the generator count them."""

    def update(self) -> None:
        """Bring the weights if the generator does not have them.

        Raises:
            WeightSyncError: See `WeightSynchronizer.sync_weights`.
        """
        own, served = self._policy.weight_version, self._generation.weight_version
        if (own, served) == self._confirmed:
            return
        # The two count alike, unless the generator has served something newer before.
        same = own > served or served == 0
        confirmed = self._synchronizer.sync_weights(version=own if same else None)
        self._confirmed = own, confirmed

    def close(self) -> None:
        """Give up what the transfers use."""
        self._synchronizer.close()
