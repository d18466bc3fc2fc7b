"""What a policy or a generator may declare, and what holds where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models.declared import Declared

__all__ = ["GeneratorTraits", "PolicyTraits"]


@dataclass(frozen=True)
class PolicyTraits(Declared):
    """The optional attributes of a `PolicyInterface`, by the same names."""

    cluster: RayVirtualCluster | None = None
    """Whose bundles the model runs on; None: on none, as in this process."""
    num_ranks: int | None = None
    """Number of workers that train the model."""
    has_reference: bool = True
    """Whether it can compare with its initial weights."""


@dataclass(frozen=True)
class GeneratorTraits(Declared):
    """The optional attributes of a `GenerationInterface`, by the same names."""

    cluster: RayVirtualCluster | None = None
    """As `PolicyTraits.cluster`."""
    holds_model: bool = True
    """Whether it holds the model in the memory of its devices."""
    calls_at_once: int = 1
    """Number of concurrent calls of `generate` that keep it busy."""
    updates_in_flight: bool = False
    """Whether weights may be loaded while `generate` runs."""
