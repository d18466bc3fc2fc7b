"""Memory of one rank's device in each phase of a step.

```
start -> [generate -> teacher -> log-probs -> train -> sync] -> ...
```
A trainer and a generator on the same devices take turns, but keep their weights: memory
that one does not free counts in the phases of the other as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_models.planning.generator import GeneratorMemory, SyncPlan
from rl_models.planning.rank_memory import ModelMemory

__all__ = ["PARTS", "MemoryPlan", "OtherModel", "Phase", "plan_phases"]

PARTS = (
    "weights",
    "gathered weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits",
    "reference model",
    "critic",
    "teacher",
    "generator weights",
    "key-value cache",
    "weight-sync buckets",
)
"""Uses of memory, in the order of tables."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of one rank in one phase."""

    name: str
    parts: Mapping[str, int]
    """Bytes by use."""
    on_generator: bool = False
    """Whether it concerns a generator's device that the trainer does not use."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A further model of the run on the same devices."""

    name: str
    """`reference model`, `critic` or `teacher`."""
    memory: ModelMemory
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The phases of a run."""

    phases: tuple[Phase, ...]

    def peak(self, *, on_generator: bool = False) -> Phase:
        """Return the phase that needs the most memory.

        Args:
            on_generator: Whether to look at the generator's own devices.
        """
        own = [p for p in self.phases if p.on_generator == on_generator]
        return max(own, key=lambda phase: phase.total)

    def overflowing(self, device_bytes: int) -> list[Phase]:
        """Return the phases that need more than a device has."""
        return [phase for phase in self.phases if phase.total > device_bytes]


def plan_phases(
    policy: ModelMemory,
    others: Sequence[OtherModel] = (),
    *,
    generator: GeneratorMemory | None = None,
    sync: SyncPlan | None = None,
    is_colocated: bool = True,
    computes_logprobs: bool = True,
) -> MemoryPlan:
    """Return the memory of all phases.

    Args:
        policy: The model that is trained.
        others: Reference policy, critic, teacher.
        generator: The generator, if there is one.
        sync: The plan of its weight updates.
        is_colocated: Whether generator and trainer are on the same devices.
        computes_logprobs: Whether a step computes log-probs before it trains.
    """
    shares = generator is not None and is_colocated
    kept = _kept(others)
    held = {"generator": generator.held if shares and generator else 0}
    own = {"weights": policy.weights, "optimizer state": policy.optimizer}
    phases = [Phase("start", _start(policy, others))]
    if generator is not None:
        makes = {"generator weights": generator.weights}
        makes["key-value cache"] = generator.cache
        base = {**own, **kept} if is_colocated else {}
        phases.append(Phase("generate", base | makes, not is_colocated))
    waiting = _waiting(generator, held["generator"])
    for other in others:
        if other.name == "teacher":
            # It may be much larger than the policy, and no other phase has its pass.
            rest = {n: b for n, b in kept.items() if n != other.name} | own
            whole = {other.name: other.memory.passing}
            phases.append(Phase(other.name, rest | whole | waiting))
    if computes_logprobs:
        phases.append(Phase("log-probs", _passing(policy, others) | waiting))
    phases.append(Phase("train", _training(policy) | kept | waiting))
    for other in others:
        if other.is_trained:
            rest = {n: b for n, b in kept.items() if n != other.name} | own
            whole = {other.name: other.memory.training}
            phases.append(Phase(f"train {other.name}", rest | whole | waiting))
    if sync is not None:
        # The generator loads into the weights that it has, without a second copy.
        loading = (
            {"generator weights": generator.weights} if shares and generator else {}
        )
        sent = {"weight-sync buckets": sync.bucket_bytes + policy.sync}
        phases.append(Phase("sync", own | kept | waiting | loading | sent))
    return MemoryPlan(tuple(phases))


def _kept(others: Sequence[OtherModel]) -> dict[str, int]:
    return {other.name: other.memory.resident for other in others}


def _start(policy: ModelMemory, others: Sequence[OtherModel]) -> dict[str, int]:
    # The reference policy is sharded before the policy is, so only one of the two is
    # whole at a time.
    loaded = {"weights": policy.start}
    for other in others:
        first = other.name == "reference model"
        memory = other.memory
        loaded[other.name] = memory.weights if first else memory.start
    return loaded


def _waiting(generator: GeneratorMemory | None, held: int) -> dict[str, int]:
    if generator is None or not held:
        return {}
    weights = min(held, generator.weights)
    return {"generator weights": weights, "key-value cache": held - weights}


def _training(memory: ModelMemory) -> dict[str, int]:
    return {
        "weights": memory.weights,
        "gathered weights": memory.gathered,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
    }


def _passing(policy: ModelMemory, others: Sequence[OtherModel]) -> dict[str, int]:
    """Return the memory of a pass for log-probs, by the policy or a reference."""
    return {
        "weights": policy.weights,
        "gathered weights": policy.gathered,
        "optimizer state": policy.optimizer,
        "activations": policy.passing_activations,
        "logits": policy.passing_logits,
    } | _kept(others)
