"""Versions of a policy's weights, and the numbers that generators give them."""

from __future__ import annotations

import itertools

from torch import Tensor

from rl_distributed.errors import BatchError

__all__ = ["WeightVersions"]

# Counted over all policies of the process: a policy that starts over has another base.
_BASES = itertools.count()


class WeightVersions:
    """Counts the weights of a policy, from 0 for those that it was started with."""

    def __init__(self) -> None:
        self.present = 0
        """Grows with each optimizer step and each loaded checkpoint."""
        self.base = next(_BASES)
        """Number of the base of adapters; a checkpoint may bring another base."""
        self._handed_out: dict[int, int] = {}

    def load(self) -> None:
        """Record that a checkpoint replaces the present weights."""
        self.present += 1
        self.base = next(_BASES)

    def hand_out(self, name: int) -> None:
        """Record the number that a generator gives to the present weights."""
        self._handed_out[name] = self.present

    def check_newest(self, versions: Tensor | None) -> None:
        """Refuse rows that were sampled with other weights than the present ones.

        Args:
            versions: [B] versions stated by `generate`; None: not checked.

        Raises:
            BatchError: They are of another version, or of a generator that never got
                weights of this policy.
        """
        if versions is None:
            return
        for version in sorted(set(versions.tolist())):
            # A generator counts by itself, so its number may differ from the policy's.
            own = self._handed_out.get(version)
            if own != self.present:
                got = (
                    f"version {own}"
                    if own is not None
                    else f"version {version} of a generator that does not follow it"
                )
                raise BatchError(
                    f"policy.train(batch, rewards) takes rows that the present weights "
                    f"sampled, version {self.present}: got rows of {got}; call "
                    "generator.follow(policy) once before the loop, so that its "
                    "weights are those of the policy, and train on each batch once"
                )
