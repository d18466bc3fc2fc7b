"""Protocols between a weight sync and its two sides, a policy and a generator.

`WeightSource` and `WeightSink` are all that a sync needs: weights then travel as
messages through the object store. A side declares further abilities by fulfilling the
narrower protocols, which `lacking` looks for at run time; it inherits none of them.

| protocol | what a sync does with it |
|---|---|
| `LinkedSource`, `LinkedSink` | sends over a link: shared memory, a collective, files |
| `SharedSource` | has every rank send a share of the weights |
| `WeightProcesses` | notices workers that were replaced, or given another model |
| `ProbedSource`, `ProbedSink` | compares log-probs of trainer and replicas |
| `InspectableSink` | names the tensors that differ, where log-probs do |
| `ConfirmingSink` | notes the digest of each version |
| `RestorableSink` | sends restarted replicas the weights that they served |
| `AdapterSource`, `AdapterSink` | sends the base once, and adapters alone afterwards |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rl_distributed.batch.batched_data_dict import BatchedDataDict
    from rl_distributed.transfer import LinkSet, TensorLink
    from rl_models.lora_config import LoRAConfig
    from rl_models.types import (
        GenerationInput,
        GenerationOutput,
        InputRows,
        LogprobOutputSpec,
        SamplingParams,
    )
    from rl_models.weight_request import ConfirmedWeights, Pending, WeightRequest
    from rl_models.weights.config import WeightSyncConfig

__all__ = [
    "AdapterSink",
    "AdapterSource",
    "ConfiguredSink",
    "ConfirmingSink",
    "InspectableSink",
    "LinkedSink",
    "LinkedSource",
    "ProbedSink",
    "ProbedSource",
    "WeightProcesses",
    "RestorableSink",
    "SamplerSettings",
    "SharedSource",
    "TrainerSettings",
    "VersionedSource",
    "WeightSink",
    "WeightSource",
]


class TrainerSettings(Protocol):
    """Settings of a policy that a probe reads."""

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
        """Divisor of the logits."""
        ...

    @property
    def precision(self) -> str:
        """Data type of the computation."""
        ...


class SamplerSettings(Protocol):
    """Settings of a generator that a sync reads."""

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
        """Settings of the transfer; None: the defaults."""
        ...


class WeightSource(Protocol):
    """A policy that can hand out its weights, such as `TrainingPolicy`."""

    def start_weight_export(
        self, request: WeightRequest, link: TensorLink | LinkSet | None = None
    ) -> Pending:
        """Have the weights sent over a link; without one, as messages."""
        ...


class WeightSink(Protocol):
    """A generator that can load weights, such as `GenerationPolicy`."""

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
        """Its settings."""
        ...


class ConfirmingSink(Protocol):
    """A generator that says what its processes have confirmed."""

    @property
    def confirmed_weights(self) -> ConfirmedWeights | None:
        """The last update that all processes confirmed; None before the first one."""
        ...


class VersionedSource(WeightSource, Protocol):
    """A policy that counts its weights, so that a generator can follow it."""

    @property
    def weight_version(self) -> int:
        """Version of the present weights."""
        ...


class WeightProcesses(Protocol):
    """A side that says which processes its workers are."""

    def live_processes(self) -> Any:
        """Return one item per process.

        Items are equal as long as the processes are the same and have loaded no other
        model, which would end their links.
        """
        ...


class _Linked(WeightProcesses, Protocol):
    """A side that can join a link."""

    @property
    def node_ids(self) -> Set[str]:
        """Nodes of Ray that the workers run on."""
        ...

    @property
    def uses_gpus(self) -> bool:
        """Whether each worker has a GPU."""
        ...

    def open_weight_link(
        self, link: TensorLink | LinkSet, deadline_s: float
    ) -> Pending:
        """Have every worker join a link."""
        ...


class LinkedSource(_Linked, Protocol):
    """A policy that can send over a link."""

    def weight_link_address(self) -> tuple[str, int]:
        """Return the address of rank 0, and a port that is free there."""
        ...


class SharedSource(Protocol):
    """A policy whose ranks can send a share of the weights each.

    Requests then have `turns`, and links are a `LinkSet`, by the numbers of the ranks.
    """

    def weight_turns(self, request: WeightRequest) -> tuple[int, ...]:
        """Return for each bucket the rank that is to send it."""
        ...


class LinkedSink(_Linked, Protocol):
    """A generator that can receive over a link."""


class ProbedSource(Protocol):
    """A policy that computes log-probs of what a generator has sampled."""

    @property
    def config(self) -> TrainerSettings:
        """Its model and temperature, among others."""
        ...

    def get_logprobs(self, data: InputRows) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probs under the present weights; see `PolicyInterface`."""
        ...


class ProbedSink(ConfiguredSink, Protocol):
    """A generator whose replicas can be queried one by one."""

    def generate_on_each(
        self, data: GenerationInput, sampling: SamplingParams
    ) -> Mapping[int, GenerationOutput]:
        """Sample the same rows on every replica; return results by replica number."""
        ...

    def refuse(self, reason: str) -> None:
        """Refuse to sample until a weight update succeeds."""
        ...


class InspectableSink(Protocol):
    """A generator whose replicas can report the weights that they hold."""

    def changed_weights(self, replica: int) -> list[str] | None:
        """Return the names of tensors that differ from what a replica was sent.

        None if its backend cannot read weights back.
        """
        ...


class RestorableSink(Protocol):
    """A generator that can ask for the weights that it served to be sent again."""

    def restore_weights_by(self, restore: Callable[[], None]) -> None:
        """Register the function that sends these weights to restarted replicas."""
        ...


class AdapterSource(Protocol):
    """A policy that may hand out adapters apart from their base."""

    @property
    def sent_adapter(self) -> LoRAConfig | None:
        """The adapter that is sent apart; None: it is merged, or there is none."""
        ...

    @property
    def base_version(self) -> int:
        """Number that changes whenever the base does."""
        ...


class AdapterSink(Protocol):
    """A generator that may take adapters apart from their base."""

    @property
    def taken_adapter(self) -> LoRAConfig | None:
        """The adapter that it was made for; None: it takes merged weights."""
        ...
