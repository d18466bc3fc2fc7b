"""A generator that follows a policy: weights are synced when they are next needed."""

from __future__ import annotations

from typing import cast

from rl_distributed.errors import ConfigError
from rl_models.interfaces import lacking
from rl_models.weights.protocols import VersionedSource, WeightSink
from rl_models.weights.sync import WeightSynchronizer

__all__ = ["Following"]


class Following:
    """Syncs the weights of a policy before sampling, if they have changed.

    Args:
        policy: Counts its optimizer steps and loaded checkpoints in `weight_version`.
        generation: Receives the weights.

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
        """Version numbers of the policy and of the generator after the last sync."""

    def update(self) -> None:
        """Bring the weights if the generator does not have them.

        Raises:
            WeightSyncError: See `WeightSynchronizer.sync_weights`.
        """
        own, served = self._policy.weight_version, self._generation.weight_version
        # The generator's number counts as well: it goes back to 0 when its processes
        # have loaded the checkpoint again, while the policy's stays the same.
        if (own, served) == self._confirmed:
            return
        # Both then share one number, unless the generator has served a higher one, as
        # versions may only rise.
        same = own > served or served == 0
        confirmed = self._synchronizer.sync_weights(version=own if same else None)
        self._confirmed = own, confirmed

    def close(self) -> None:
        """Give up what the transfers use."""
        self._synchronizer.close()
