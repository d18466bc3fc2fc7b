"""What a weight sync asks of a policy and of a generator.

`WeightSource` and `WeightSink` are all that a sync needs: weights then travel as
messages through the object store. What a side offers besides is said by the narrower
protocols, which `lacking` looks for at run time; a side inherits none of them.

| protocol | what a sync does with it |
|---|---|
| `LinkedSource`, `LinkedSink` | sends over a link: shared memory, a collective, files |
| `ReplicaProcesses` | notices replicas that are other processes than before |
| `ProbedSource`, `ProbedSink` | compares log-probs of trainer and replicas |
| `InspectableSink` | names the tensors that differ, where log-probs do |
| `RestorableSink` | brings lost replicas what they served |
| `AdapterSource`, `AdapterSink` | sends adapters alone, after their base once |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rl_distributed.batch.batched_data_dict import BatchedDataDict
    from rl_distributed.transfer import TensorLink
    from rl_models.lora_config import LoRAConfig
    from rl_models.types import SamplingParams
    from rl_models.weight_request import Pending, WeightRequest
    from rl_models.weights.config import WeightSyncConfig

__all__ = [
    "AdapterSink",
    "AdapterSource",
    "ConfiguredSink",
    "InspectableSink",
    "LinkedSink",
    "LinkedSource",
    "ProbedSink",
    "ProbedSource",
    "ReplicaProcesses",
    "RestorableSink",
    "SamplerSettings",
    "TrainerSettings",
    "VersionedSource",
    "WeightSink",
    "WeightSource",
]


class TrainerSettings(Protocol):
    """What a probe reads of a policy's config."""

    @property
    def model_name(self) -> str:
        """Model folder or hub name."""
        ...

    @property
    def hf_config_overrides(self) -> Mapping[str, Any]:
        """Fields of the model's config that are replaced."""
        ...

    @property
    def row_limit(self) -> int:
        """Longest row in tokens."""
        ...

    @property
    def logprob_temperature(self) -> float:
        """What divides the logits."""
        ...

    @property
    def precision(self) -> str:
        """Data type of the computation."""
        ...


class SamplerSettings(Protocol):
    """What a sync reads of a generator's config."""

    @property
    def precision(self) -> str:
        """Data type of the computation, and of weights on the way."""
        ...

    @property
    def max_context_length(self) -> int | None:
        """Longest row in tokens; None: the model's context."""
        ...

    @property
    def weight_sync(self) -> WeightSyncConfig | None:
        """How weights travel; None: the defaults."""
        ...


class WeightSource(Protocol):
    """A policy that can hand out its weights, such as `TrainingPolicy`."""

    def start_weight_export(
        self, request: WeightRequest, link: TensorLink | None = None
    ) -> Pending:
        """Have the weights sent over a link; without one, as messages."""
        ...


class WeightSink(Protocol):
    """A generator that weights can be brought to, such as `GenerationPolicy`."""

    @property
    def weight_version(self) -> int:
        """Version that every replica serves; 0 is the checkpoint's weights."""
        ...

    def start_weight_update(self, source: Any, request: WeightRequest) -> Pending:
        """Have every replica load a version; see `GenerationInterface`."""
        ...


class ConfiguredSink(Protocol):
    """A generator with a config, whose `weight_sync` says how weights travel."""

    @property
    def config(self) -> SamplerSettings:
        """How it samples."""
        ...


class VersionedSource(WeightSource, Protocol):
    """A policy that counts its weights, so that a generator can follow it."""

    @property
    def weight_version(self) -> int:
        """Version of the present weights."""
        ...


class _Linked(Protocol):
    """A side that can join a link."""

    @property
    def node_ids(self) -> Set[str]:
        """Nodes of Ray that the workers run on."""
        ...

    @property
    def uses_gpus(self) -> bool:
        """Whether each worker has a GPU."""
        ...

    def open_weight_link(self, link: TensorLink, deadline_s: float) -> Pending:
        """Have every worker join a link."""
        ...


class LinkedSource(_Linked, Protocol):
    """A policy that can send over a link."""

    def weight_link_address(self) -> tuple[str, int]:
        """Return the address of rank 0, and a port that is free there."""
        ...


class ReplicaProcesses(Protocol):
    """A generator that says which processes its replicas are."""

    def live_processes(self) -> Any:
        """Return one item per process, equal as long as the processes are the same."""
        ...


class LinkedSink(_Linked, ReplicaProcesses, Protocol):
    """A generator that can receive over a link."""


class ProbedSource(Protocol):
    """A policy that computes log-probs of what a generator has sampled."""

    @property
    def config(self) -> TrainerSettings:
        """Which model it is, and at which temperature it computes."""
        ...

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Log-probs under the present weights; see `PolicyInterface`."""
        ...


class ProbedSink(ConfiguredSink, Protocol):
    """A generator whose replicas can be asked one by one."""

    def generate_on_each(
        self, data: BatchedDataDict[Any], sampling: SamplingParams
    ) -> Mapping[int, BatchedDataDict[Any]]:
        """Sample the same rows on every replica; gives the results by its number."""
        ...

    def refuse(self, reason: str) -> None:
        """Sample nothing until weights have been brought."""
        ...


class InspectableSink(Protocol):
    """A generator whose replicas can tell which weights they hold."""

    def changed_weights(self, replica: int) -> list[str] | None:
        """Return the tensors that a replica holds otherwise than they were sent.

        None: its backend cannot tell.
        """
        ...


class RestorableSink(Protocol):
    """A generator that can ask for the weights that it served."""

    def restore_weights_by(self, restore: Callable[[], None]) -> None:
        """Take what brings these weights to replicas that came back."""
        ...


class AdapterSource(Protocol):
    """A policy that may hand out adapters apart from their base."""

    @property
    def sent_adapter(self) -> LoRAConfig | None:
        """The adapter that is sent apart; None: it is merged, or there is none."""
        ...

    @property
    def base_version(self) -> int:
        """Number that changes with the base."""
        ...


class AdapterSink(Protocol):
    """A generator that may take adapters apart from their base."""

    @property
    def taken_adapter(self) -> LoRAConfig | None:
        """The adapter that it was made for; None: it takes merged weights."""
        ...
