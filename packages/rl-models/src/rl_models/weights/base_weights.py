"""Send the base of adapters only when needed: once per replica, and when it changes.

| what happens                                  | what the next sync sends   |
|-----------------------------------------------|----------------------------|
| `policy.lora.sync: merged`, or no adapters    | merged weights, each time  |
| the first sync; one after a failure           | the base and the adapter   |
| a replica was started or replaced             | the base and the adapter   |
| the trainer has loaded another base           | the base and the adapter   |
| anything else                                 | the adapter alone          |
"""

from __future__ import annotations

from typing import Any, cast

from rl_distributed.errors import ConfigError
from rl_models.interfaces import lacking
from rl_models.lora_config import LoRAConfig
from rl_models.weight_request import WeightKind
from rl_models.weights.protocols import (
    AdapterSink,
    AdapterSource,
    WeightProcesses,
    WeightSink,
    WeightSource,
)

__all__ = ["BaseWeights"]


class BaseWeights:
    """Knows which replicas hold the base of a trainer's adapters.

    Args:
        policy: The side that sends.
        generation: The side that receives.

    Raises:
        ConfigError: Only one side keeps adapters apart from the base.
    """

    def __init__(self, policy: WeightSource, generation: WeightSink) -> None:
        self._policy = policy
        self._generation = generation
        # Each sync checks as well, but sides that do not fit are refused before a run
        # begins.
        self._checked()
        self._asked: Any = None
        self._brought: Any = None

    def next_kind(self) -> WeightKind:
        """Return which tensors the next sync must send.

        Raises:
            ConfigError: See the class; a policy may have loaded other settings.
        """
        if self._checked() is None:
            return "merged"
        # Remembered for `settle`: the replicas may change while the weights travel.
        self._asked = self._needed()
        # A generator that serves no weights of a trainer has loaded its model again.
        is_there = self._generation.weight_version and self._asked is not None
        return "adapter" if is_there and self._asked == self._brought else "apart"

    def whole_kind(self) -> WeightKind:
        """Return what has to be sent to replicas of which nothing is known.

        Raises:
            ConfigError: As `next_kind`.
        """
        # Whichever side loads it, the next sync asks the replicas what they have.
        self._brought = None
        return "merged" if self._checked() is None else "apart"

    def settle(self, *, is_loaded: bool) -> None:
        """Record whether the last update was loaded."""
        # After a failure some replicas may have the base and others not, so the next
        # sync sends it to all.
        self._brought = self._asked if is_loaded else None

    def _needed(self) -> Any:
        """Return which base which processes need; None if the processes are unknown."""
        # The processes are part of the answer because one that was restarted has lost
        # its base, although its rank is the same.
        if lacking(self._generation, WeightProcesses):
            return None
        processes = cast(WeightProcesses, self._generation).live_processes()
        return cast(AdapterSource, self._policy).base_version, processes

    def _checked(self) -> LoRAConfig | None:
        """Return the adapter that is sent apart; None if weights are sent merged."""
        sent, taken = _sent(self._policy), _taken(self._generation)
        if sent is None and taken is None:
            return None
        if sent is None or taken is None:
            side = "policy" if sent is None else "generator"
            raise ConfigError(
                "policy.lora.sync must be the same for the policy and the generator: "
                f"got a {side} that has no adapter apart from the base; make the "
                "generator with adapter=policy.config.sent_adapter"
            )
        # A wrong rank fails on loading; a wrong scale would silently merge to other
        # weights than the trainer's.
        if (sent.r, sent.scale) != (taken.r, taken.scale):
            raise ConfigError(
                "policy.lora must be the same for the policy and the generator: got "
                f"r {sent.r} and scale {sent.scale:g} against r {taken.r} and scale "
                f"{taken.scale:g}; make the generator with "
                "adapter=policy.config.sent_adapter"
            )
        return sent


def _sent(policy: WeightSource) -> LoRAConfig | None:
    if lacking(policy, AdapterSource):
        return None
    return cast(AdapterSource, policy).sent_adapter


def _taken(generation: WeightSink) -> LoRAConfig | None:
    if lacking(generation, AdapterSink):
        return None
    return cast(AdapterSink, generation).taken_adapter
