"""The protocols of rl-models.

`PolicyInterface` and `GenerationInterface` are what an algorithm calls; both live in
the driver. `TrainingBackend` and `GenerationBackend` are what a worker process hosts,
one per rank; the driver never sees them. `LossFunction` is handed from one to the
other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_models.errors import UnsupportedModelError
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    InputRows,
    LogprobOutputSpec,
    LossInputType,
    LossType,
    ReferenceLogprobOutputSpec,
    SamplingParams,
    TopkOutputSpec,
    TrainingRows,
    TrainOutput,
    ValueOutputSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rl_distributed.batch.batched_data_dict import BatchedDataDict
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
    from rl_distributed.timing.timer import Timer
    from rl_distributed.transfer import Manifest
    from rl_models.weight_request import Pending, WeightRequest

__all__ = [
    "GenerationBackend",
    "GenerationInterface",
    "GenerationMemory",
    "HeldWeights",
    "LiveOptimizer",
    "LossFunction",
    "PaddedRows",
    "PolicyInterface",
    "TrainingBackend",
    "TrainingMemory",
    "lacking",
]

AnyPath = str | PathLike[str]


@runtime_checkable
class LossFunction(Protocol):
    """A loss whose micro-batch values sum to the value of the global batch.

    Each reduction divides by the *global* count, so gradients of micro-batches and of
    ranks are summed, never averaged.

    It may have the other attributes of `LossTraits`, as a loss that compares the two
    rows of a pair has `rows_per_group`.
    """

    loss_type: LossType
    input_type: LossInputType

    def __call__(
        self,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Give the micro-batch's share of the loss, and its metrics.

        Args:
            data: The micro-batch: the columns of `TrainDatumSpec`, and any others. A
                loss may say by the type of this argument which ones it reads.
            global_valid_seqs: Trained sequences in the global batch, over all ranks.
            global_valid_toks: Trained tokens in the global batch, over all ranks.
            inputs: `next_token_logprobs`, `logits` or `values`, or those of
                a distillation, by `input_type`.
        """
        ...


class PolicyInterface(ABC):
    """A model that is trained: what an algorithm may ask of it.

    A policy has `train`, and `generate` where it samples with its own weights; the two
    are enough for the algorithms that sample. Any other method that it leaves out
    raises an `UnsupportedModelError` which says what needs it.
    """

    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Sample one continuation per row with the present weights, rows in order.

        The log-probs of the sampled tokens are those that `get_logprobs` gives for
        them, at its temperature and without top-k and top-p. After `train` the new
        weights are used at once; `weight_version` states them.

        Args:
            data: Rows.
            greedy: Take the best token.
            sampling: Settings of this call; None takes those of the policy.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "generate",
            "sample with a GenerationInterface, such as GenerationPolicy, and a "
            "WeightSynchronizer, or implement it",
        )

    def get_logprobs(
        self, data: InputRows, *, timer: Timer | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probs of the tokens under the current weights, rows in input order.

        With a `token_mask` column only positions with mask 1 are computed; the others
        are 0.0. Without one, every position is.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "get_logprobs",
            "several optimizer steps per batch of samples need it, and so does a "
            "comparison with the sampler: take one step and turn that comparison off, "
            "or implement it",
        )

    def get_reference_policy_logprobs(
        self,
        data: InputRows,
        *,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return log-probs of the frozen initial weights; see `get_logprobs`.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "get_reference_policy_logprobs",
            "a penalty on the distance from the initial weights needs it, and so does "
            "DPO: set the penalty to 0, or implement it",
        )

    def get_values(
        self, data: InputRows, *, timer: Timer | None = None
    ) -> BatchedDataDict[ValueOutputSpec]:
        """Return outputs of a scalar head (`policy.head` value or reward), by row.

        Entry i of a row is the number after tokens 0 to i. With a `value_mask` column
        only positions with mask 1 are computed. Else, with a `token_mask` column, those
        before a token with mask 1: the states in which these tokens are chosen. Without
        both, all tokens of the row. The others are 0.0.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "get_values",
            "train a critic or reward model with a policy that has it, such as "
            "TrainingPolicy",
        )

    def get_topk_logits(
        self,
        data: InputRows,
        k: int,
        *,
        temperature: float | None = None,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[TopkOutputSpec]:
        """Return logits of the k most probable next tokens, rows in input order.

        With a `token_mask` column only positions before a token with mask 1 are
        computed: the states in which these tokens are chosen.

        Args:
            data: Rows.
            k: Tokens per position.
            temperature: Divides the logits; default that of the policy's generation.
            micro_batch_size: Rows per forward pass; default `logprob_batch_size`.
            timer: Receives the spans of the call.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "get_topk_logits",
            "take a teacher policy that has it, such as TrainingPolicy",
        )

    @abstractmethod
    def train(
        self,
        data: TrainingRows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> TrainOutput:
        """One optimizer step per global batch of `global_batch_size` rows.

        Args:
            data: Rows; their number is a multiple of `global_batch_size`.
            loss_fn: The loss; it is sent to the workers. `TrainingPolicy` also takes
                rewards of rows that `generate` gave.
            eval_mode: Compute the loss and its metrics only.
            global_batch_size: Rows per optimizer step; default
                `train_global_batch_size`.
            micro_batch_size: Rows per micro-batch and rank; default
                `train_micro_batch_size`.
            timer: Receives the spans of the call.
        """

    @property
    def cluster(self) -> RayVirtualCluster | None:
        """Whose bundles the model runs on; None: on none, as in this process."""
        return None

    def prepare_for_training(self) -> None:  # noqa: B027 - most have nothing to do
        """Bring weights and optimizer state to where training needs them.

        Trainers call it before a training turn if the policy shares its devices with
        the generator, and `finish_training` after it. Either may be called twice in a
        row, and `train` works without.
        """

    def finish_training(self) -> None:  # noqa: B027
        """Free what only training needs; weights can still be read."""

    def save_checkpoint(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        tokenizer_path: AnyPath | None = None,
    ) -> None:
        """Write a Hugging Face folder and, if asked, the exact training state.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "save_checkpoint",
            "train with checkpointing.enabled=false, or implement it",
        )

    def load_checkpoint(
        self, weights_path: AnyPath | None, optimizer_path: AnyPath | None = None
    ) -> None:
        """Load weights; with `optimizer_path`, the exact training state.

        Raises:
            UnsupportedModelError: This policy does not offer it; not every one must.
        """
        raise self._lacks(
            "load_checkpoint", "begin a run instead of resuming one, or implement it"
        )

    def shutdown(self) -> bool:
        """End the workers, where there are any; True if nothing went wrong."""
        return True

    def _lacks(self, method: str, remedy: str) -> UnsupportedModelError:
        """Return the error of a method that this policy leaves out."""
        return UnsupportedModelError(f"{type(self).__name__} has no {method}; {remedy}")


class GenerationInterface(ABC):
    """A model that samples: what an algorithm may ask of it."""

    @abstractmethod
    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Sample one continuation per row, rows in input order."""

    @property
    def cluster(self) -> RayVirtualCluster | None:
        """Whose bundles the model runs on; None: on none, as in this process."""
        return None

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Bring weights and caches to where generation needs them.

        Trainers call it before a generation turn, after the weights were updated, if
        the generator shares its devices with the policy, and `finish_generation` after
        the last row. Either may be called twice in a row, and `generate` works without.
        """

    @abstractmethod
    def finish_generation(self) -> None:
        """Free what only generation needs; weights can still be updated."""

    @abstractmethod
    def start_weight_update(self, source: Any, request: WeightRequest) -> Pending:
        """Has every replica load a version.

        The wait for it ends when every replica has confirmed the version and the same
        manifest, or with a `WeightSyncError` that says which refused, and why. Until it
        has succeeded, `generate` refuses.

        Args:
            source: References to the messages of `TrainingPolicy.start_weight_export`,
                passed on unopened, or a link that `open_weight_link` was given.
            request: The version, and how it travels.
        """

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version that every replica serves; 0 is the checkpoint's weights."""

    @abstractmethod
    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""


class TrainingMemory(Protocol):
    """Optional part of a `TrainingBackend`: memory to free between its turns."""

    @property
    def frees_memory(self) -> bool:
        """Whether the two methods do anything here; asked once, after `setup`."""
        ...

    def prepare_for_training(self) -> None:
        """Bring back what was put away; see `PolicyInterface`."""
        ...

    def finish_training(self) -> None:
        """Free what only training needs; see `PolicyInterface`."""
        ...


class GenerationMemory(Protocol):
    """Optional part of a `GenerationBackend`: memory to free between its turns."""

    def release_memory(self) -> None:
        """Free it; `load_weights` and `generate` take what they need again."""
        ...


class LiveOptimizer(Protocol):
    """Optional part of a `TrainingBackend`: an optimizer that can be changed."""

    def change_optimizer(self, settings: Mapping[str, float]) -> None:
        """Change settings of the optimizer; see `TrainingPolicy.change_optimizer`."""
        ...


class AdapterExport(Protocol):
    """Optional part of a `TrainingBackend`: adapters apart from their base.

    Names of the base are those of `export_weights`, and those of adapters peft's.
    """

    def adapter_specs(self, *, with_base: bool) -> Mapping[str, Tensor]:
        """Get what `export_adapters` gives, in the same order, without data."""
        ...

    def export_adapters(
        self, precision: str, *, with_base: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of adapters, and of the base if asked; see `export_weights`."""
        ...


class HeldWeights(Protocol):
    """Optional part of a `GenerationBackend`: comparing the weights that it holds."""

    def changed_weights(self, manifest: Manifest) -> list[str] | None:
        """Return the tensors that it holds otherwise than they were sent.

        Args:
            manifest: What was sent, with a checksum per tensor.

        Returns:
            Their names; None if it cannot tell.
        """
        ...


class PaddedRows(Protocol):
    """Optional part of a `GenerationBackend`: a padding token of its own."""

    @property
    def pad_token_id(self) -> int:
        """Token that its rows are filled with, known after `setup`; 0 without it."""
        ...


class TrainingBackend(Protocol):
    """Backend hosted by a training worker: one rank of model, optimizer and state."""

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        init_reference_model: bool = False,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
    ) -> None:
        """Build the model from `PolicyConfig.to_dict()`; rank from the environment.

        Joins the process group of the ranks. A process that is in one already, because
        another model was here before, stays in it: `join_process_group` does so.
        """
        ...

    def train_step(
        self,
        data: TrainingRows,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> dict[str, Any]:
        """Train on this rank's shard; `global_batch_size` counts rows of all ranks."""
        ...

    def get_logprobs(
        self,
        data: InputRows,
        *,
        micro_batch_size: int,
        reference: bool = False,
    ) -> Tensor:
        """[B, S] log-probs of this rank's shard."""
        ...

    def get_values(self, data: InputRows, *, micro_batch_size: int) -> Tensor:
        """[B, S] numbers of a scalar head for this rank's shard."""
        ...

    def get_topk_logits(
        self,
        data: InputRows,
        *,
        k: int,
        micro_batch_size: int,
        temperature: float | None = None,
    ) -> Mapping[str, Tensor]:
        """Columns of `TopkOutputSpec` for this rank's shard."""
        ...

    def save_checkpoint(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        tokenizer_path: AnyPath | None = None,
    ) -> None:
        """Write this rank's part of a checkpoint."""
        ...

    def load_checkpoint(
        self, weights_path: AnyPath | None, optimizer_path: AnyPath | None = None
    ) -> None:
        """Load this rank's part of a checkpoint."""
        ...

    def weight_specs(self) -> Mapping[str, Tensor]:
        """Get what `export_weights` gives, in the same order, without data (`meta`)."""
        ...

    def export_weights(self, precision: str) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in Hugging Face names, tied ones once, on every rank.

        Gathered one by one, so that every rank must take the iterator to its end. The
        caller casts floating-point tensors to `precision`; a backend that computes with
        rounded weights gives these.
        """
        ...

    def shutdown(self) -> None:
        """Leaves the process group."""
        ...


class GenerationBackend(Protocol):
    """Backend hosted by a generation worker: one replica."""

    def setup(self, config: Mapping[str, Any], **context: Any) -> None:
        """Build the engine from `GenerationConfig.to_dict()`."""
        ...

    def generate(
        self,
        data: GenerationInput,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Sample one continuation per row."""
        ...

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> int:
        """Load weights, and gives back the version that it now serves.

        Args:
            tensors: Verified one by one, in Hugging Face names; tied ones come once. It
                must be taken to its end, and raises there at the latest if anything is
                missing; the version is served only after that. Tensors may lie in
                memory that others read: copy them. A backend whose traits take
                adapters, and whose `setup` is given an `adapter`, gets its tensors by
                the names of peft's files: with those of the base, or alone.
            version: What the weights are called.
        """
        ...

    def shutdown(self) -> None:
        """Frees the engine."""
        ...


def lacking(side: object, protocol: type) -> list[str]:
    """Return the members of a protocol that an object does not have.

    `isinstance` would not do: from Python 3.12 on it does not see what an object passes
    on to another, as a wrapper around a policy does.
    """
    names = {
        name
        for base in protocol.__mro__
        if base not in (object, Protocol)
        for name in vars(base)
        if not name.startswith("_")
    }
    return sorted(name for name in names if not hasattr(side, name))
