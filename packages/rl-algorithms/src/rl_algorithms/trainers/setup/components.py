"""`Components`: the parts that a run consists of, and `Needs` of an algorithm.

| part        | made of                     | lives in                           |
|-------------|-----------------------------|------------------------------------|
| cluster     | `cluster`                   | placement groups of Ray            |
| policy      | `policy`                    | training workers                   |
| critic      | `critic`                    | further training workers           |
| teacher     | `teacher`                   | further workers that train nothing |
| generation  | `policy.generation`         | generation workers, same bundles   |
|             |                             | unless `generation_cluster` is set |
| environment | `env`, a function, an object | workers, or the driver if given    |
| sync        | policy and generation       | the driver                         |

A given policy that samples by itself is also the generator (`own_policy`). There is no
sync then, and a reward function is called in the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rl_algorithms.data.types import Tokenizer
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.setup.own_policy import samples_itself
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_envs.interfaces import EnvironmentInterface
from rl_models.interfaces import GenerationInterface, PolicyInterface
from rl_models.training.worker_sampler import shares_weights

if TYPE_CHECKING:
    from rl_models.weights.sync import WeightSynchronizer

__all__ = ["Components", "Needs", "RequiredComponents", "present"]

PartT = TypeVar("PartT")


@dataclass(frozen=True)
class Needs:
    """The components that an algorithm uses."""

    generation: bool = False
    """Whether it samples."""
    environment: bool = False
    """Whether it scores its samples."""
    reference_policy: bool = False
    """Whether it compares with the initial weights."""
    critic: bool = False
    """Whether it trains a second model, by the section `critic`."""
    teacher: bool = False
    """Whether it queries a frozen model, by the section `teacher`."""

    def of_workers(self, config: TrainerConfig, given: Components) -> Needs:
        """Return the needs without a generator that has no workers of its own."""
        return replace(self, generation=False) if self.shares(config, given) else self

    def shares(self, config: TrainerConfig, given: Components) -> bool:
        """Return whether the workers that train the policy sample as well."""
        is_asked = self.generation and given.generation is None
        return is_asked and shares_weights(config.policy)

    def samples_with(self, given: Components) -> bool:
        """Return whether a given policy has to sample as well."""
        is_asked = self.generation and given.generation is None
        return is_asked and given.policy is not None and samples_itself(given.policy)

    def on_cluster(self, config: TrainerConfig) -> Needs:
        """Return the needs without a generator that has a cluster of its own."""
        is_apart = config.sampling_cluster is not None
        return replace(self, generation=False) if is_apart else self

    def groups_to_start(self, given: Components) -> list[str]:
        """Return the components with workers that are needed and not given."""
        parts = {
            "policy": True,
            "generation": self.generation and not self.samples_with(given),
            "critic": self.critic,
            "teacher": self.teacher,
        }
        return [n for n, needed in parts.items() if needed and not given.has(n)]


@dataclass(frozen=True)
class Components:
    """The components of a run; None for those that it lacks."""

    cluster: RayVirtualCluster | None = None
    policy: PolicyInterface | None = None
    generation: GenerationInterface | None = None
    environment: EnvironmentInterface[Any] | None = None
    tokenizer: Tokenizer | None = None
    sync: WeightSynchronizer | None = None
    critic: PolicyInterface | None = None
    teacher: PolicyInterface | None = None

    @property
    def required(self) -> RequiredComponents:
        """The same components, for steps that cannot do without."""
        return RequiredComponents(self)

    def has(self, name: str) -> bool:
        """Return whether the component of this name exists."""
        return getattr(self, name) is not None


class RequiredComponents:
    """Components that an algorithm asked for; reading a missing one is an error."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts

    @property
    def policy(self) -> PolicyInterface:
        """The model being trained."""
        return present(self._parts.policy, "policy")

    @property
    def generation(self) -> GenerationInterface:
        """The model that samples."""
        return present(self._parts.generation, "generation")

    @property
    def environment(self) -> EnvironmentInterface[Any]:
        """The environment that scores samples."""
        return present(self._parts.environment, "environment")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return present(self._parts.tokenizer, "tokenizer")

    @property
    def critic(self) -> PolicyInterface:
        """The second model being trained."""
        return present(self._parts.critic, "critic")

    @property
    def teacher(self) -> PolicyInterface:
        """The frozen model."""
        return present(self._parts.teacher, "teacher")


def present(part: PartT | None, name: str) -> PartT:
    """Return a component.

    Raises:
        AlgorithmError: It does not exist.
    """
    if part is None:
        raise AlgorithmError(
            f"components.{name} does not exist: fit starts the components; those "
            "besides policy and tokenizer only if _needs of the trainer asks for them"
        )
    return part
