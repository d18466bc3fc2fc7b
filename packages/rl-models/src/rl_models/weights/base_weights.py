"""When the base of adapters travels: once to each replica, and again when it is new.

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
    ReplicaProcesses,
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
        ConfigError: One side has adapters apart from the base, and the other has not.
    """

    def __init__(self, policy: WeightSource, generation: WeightSink) -> None:
        self._policy = policy
        self._generation = generation
        self._checked()
        self._asked: Any = None
        self._brought: Any = None

    def next_kind(self) -> WeightKind:
        """Return what has to be sent now.

        Raises:
            ConfigError: See the class; a policy may have loaded other settings.
        """
        if self._checked() is None:
            return "merged"
        self._asked = self._needed()
        # A generator that serves no weights of a trainer has loaded its model again.
        is_there = self._generation.weight_version and self._asked is not None
        return "adapter" if is_there and self._asked == self._brought else "apart"

    def settle(self, *, is_loaded: bool) -> None:
        """Note what became of what was sent last."""
        self._brought = self._asked if is_loaded else None

    def _needed(self) -> Any:
        """Return which base is needed by which processes; None: they are not known."""
        if lacking(self._generation, ReplicaProcesses):
            return None
        processes = cast(ReplicaProcesses, self._generation).live_processes()
        return cast(AdapterSource, self._policy).base_version, processes

    def _checked(self) -> LoRAConfig | None:
        """Return the adapter that travels; None: weights travel merged."""
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
