"""Section `policy` of a run's configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from rl_distributed.config import Config, changeable
from rl_models.generation.config import GenerationConfig
from rl_models.lora_config import LoRAConfig
from rl_models.parallelism import ParallelismConfig
from rl_models.row_length import UNKNOWN_CONTEXT, default_row_length

__all__ = [
    "DTensorConfig",
    "DynamicBatchingConfig",
    "MegatronConfig",
    "LoRAConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "PolicyConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
    "TokenizerConfig",
]


_LONGEST = "max_total_sequence_length"


class TokenizerConfig(Config):
    """Section `policy.tokenizer`."""

    name: str | None = None
    """Folder or hub name; null: that of the model."""
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's own; null keeps that."""


class DynamicBatchingConfig(Config):
    """Section `policy.dynamic_batching`: micro-batches by tokens, padding included."""

    train_mb_tokens: int = Field(gt=0)
    """Most tokens of a training micro-batch, padding included."""
    logprob_mb_tokens: int | None = Field(None, gt=0)
    """Most tokens of a log-prob micro-batch; null: `train_mb_tokens`."""
    sequence_length_round: int = Field(8, gt=0)
    """Micro-batch widths are rounded up to a multiple of it."""


class SequencePackingConfig(Config):
    """Section `policy.sequence_packing`: micro-batches without padding."""

    train_mb_tokens: int = Field(gt=0)
    """Most tokens of a training micro-batch."""
    logprob_mb_tokens: int | None = Field(None, gt=0)
    """Most tokens of a log-prob micro-batch; null: `train_mb_tokens`."""
    algorithm: str = "modified_first_fit_decreasing"
    """Name of the packing algorithm of rl-distributed."""
    sequence_length_pad_multiple: int = Field(1, gt=0)
    """Lengths count as rounded up to a multiple of it when bins are filled."""


class OptimizerConfig(Config):
    """Section `policy.optimizer`."""

    name: str = "torch.optim.AdamW"
    """Dotted name of a class with the constructor of torch's optimizers."""
    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {
            "lr": 1e-5,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01,
        },
        json_schema_extra=changeable("lr", "weight_decay"),
    )
    """Arguments of the constructor; `lr`, which a schedule scales, is required."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if "lr" not in self.kwargs:
            raise ValueError("optimizer.kwargs must give lr: got none; add e.g. 1e-5")
        rate = self.kwargs["lr"]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 0:
            raise ValueError(f"optimizer.kwargs.lr must be a number >= 0: got {rate!r}")
        return self


class SchedulerConfig(Config):
    """Section `policy.scheduler`: the learning rate over optimizer steps."""

    name: str = "constant"
    """`constant`, `linear`, `cosine`, or the name of a class of
    `torch.optim.lr_scheduler` (the part after the last dot, or dotted)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class. `linear` and `cosine` take `total_steps` (warm-up
    included) and `min_lr_ratio`."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate grows linearly from lr / warmup_steps."""

    @model_validator(mode="after")
    def _check(self) -> SchedulerConfig:
        if self.name not in ("linear", "cosine"):
            if self.name == "constant" and self.kwargs:
                raise ValueError(
                    "scheduler.kwargs must be empty for the constant schedule: got "
                    f"{sorted(self.kwargs)}"
                )
            return self
        allowed = {"total_steps", "min_lr_ratio"}
        unknown = sorted(set(self.kwargs) - allowed)
        if unknown:
            raise ValueError(
                f"scheduler.kwargs of {self.name!r} takes total_steps and min_lr_ratio:"
                f" got {', '.join(unknown)}"
            )
        total = self.kwargs.get("total_steps")
        if not isinstance(total, int) or total <= self.warmup_steps:
            raise ValueError(
                f"scheduler.kwargs.total_steps of {self.name!r} must be an integer "
                f"above warmup_steps ({self.warmup_steps}): got {total!r}"
            )
        return self


class DTensorConfig(Config):
    """Section `policy.dtensor`: settings of the `dtensor` backend."""

    cpu_offload: bool = False
    """Keep shards of weights and optimizer state in host memory (GPU only)."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    reshard_after_forward: bool | None = None
    """Free gathered weights between forward and backward: less memory, one more
    all-gather; null: on GPUs."""
    shard_layers: bool | None = None
    """Gather the weights of each layer when it is its turn: less memory, more
    collectives; null: unless all weights take 32 MiB at most."""
    data_replicas: int = Field(1, gt=0)
    """Groups of data-parallel workers that each hold the whole model, sharded inside a
    group only (HSDP): weights are then gathered inside a group, for instance one node;
    1: sharded over all of them (FSDP)."""
    router_loss_weight: float = Field(0.0, ge=0)
    """Weight of the loss that keeps the experts of a mixture equally busy, which is
    added to that of each micro-batch by its share of the trained tokens; 0: none."""
    reduce_each_micro_batch: bool = False
    """Sum gradients over the ranks after every micro-batch, not only after the last one
    of an optimizer step: each rank holds its shard of them in between, not all, for one
    reduce-scatter per micro-batch."""
    compile: str | None = None
    """Backend of `torch.compile`, such as `inductor`, that decoder layers are compiled
    with when they are first used; null: they are not."""
    logprob_chunk_size: int | None = Field(None, ge=0)
    """Positions whose logits are there at once when log-probs are computed; others are
    computed one chunk after the other, and again in the backward pass: less memory, one
    more product with the head; 0: all at once; null: all at once while their logits
    take 1 GiB at most, else as many as take 64 MiB, on a GPU 1 GiB."""
    deadline_s: float = Field(600.0, gt=0)
    """A collective that has not ended by then is reported."""


class MegatronConfig(Config):
    """Section `policy.megatron`: settings of the `megatron` backend."""

    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    distributed_optimizer: bool = False
    """Share optimizer state and, with bfloat16, float32 weights over the ranks that
    have the same part of the model: less memory, one more all-gather per step."""
    virtual_stages: int = Field(1, gt=0)
    """Parts of the layers that each pipeline stage has, in turns with the other stages
    (interleaved 1F1B): shorter waits, more messages."""
    deadline_s: float = Field(600.0, gt=0)
    """A collective that has not ended by then is reported."""


class PolicyConfig(Config):
    """Section `policy`: the model that is trained."""

    model_name: str
    """Folder or hub name of a Hugging Face causal language model."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer, where it is not the model's own."""
    backend: str = "dtensor"
    """Name of a registered training backend."""
    head: Literal["lm", "value", "reward"] = "lm"
    """What the model gives: log-probs of tokens (`lm`), a number per token (`value`, a
    critic) or a number for a whole row (`reward`, that of its last token)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation; weights and optimizer state stay float32."""
    max_total_sequence_length: int | None = Field(None, gt=1)
    """Longest row, prompt and answer together; null: the context of the model (2048 if
    it says none), or less where a micro-batch by tokens or
    `generation.max_context_length` holds less."""
    train_global_batch_size: int | None = Field(None, gt=0)
    """Rows per optimizer step, over all ranks; null: all rows of a call of `train`."""
    train_micro_batch_size: int = Field(4, gt=0)
    """Rows per forward and backward pass on one rank (unless batched by tokens)."""
    logprob_batch_size: int = Field(8, gt=0)
    """Rows per forward pass on one rank when log-probs are computed."""
    dynamic_batching: DynamicBatchingConfig | None = None
    """Micro-batches of rows of similar length, by tokens; null: by rows."""
    sequence_packing: SequencePackingConfig | None = None
    """Micro-batches without padding, by tokens; null: by rows."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm; null: never."""
    max_skipped_steps: int = Field(5, ge=0)
    """A step whose gradient is inf or nan changes nothing and is counted in
    `skipped_steps`; more than this many in a row are an error."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    scheduler: SchedulerConfig | None = None
    """The learning rate over time; null: constant."""
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    """How many workers share the rows, each layer, the layers and the tokens."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters beside the weights, which stay; null: train all weights.
    Needs the extra `rl-models[lora]`."""
    dtensor: DTensorConfig = Field(default_factory=DTensorConfig)
    """Settings of the `dtensor` backend."""
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    """Settings of the `megatron` backend."""
    generation: GenerationConfig | None = None
    """How samples are drawn; its temperature also divides the trainer's logits."""
    num_threads: int | None = Field(1, gt=0)
    """Threads of torch per worker on a CPU; null leaves torch's own choice."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's `config.json` to replace."""
    seed: int = Field(0, ge=0)
    """Seed of each worker's random numbers (dropout)."""
    start_deadline_s: float = Field(300.0, gt=0)
    """A worker whose process has not started by then, or that has not loaded its model
    as long after that, is reported."""
    call_deadline_s: float = Field(3600.0, gt=0)
    """A call of a worker that has not ended by then is reported."""

    @model_validator(mode="before")
    @classmethod
    def _fill_row_length(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "model_name" not in data:
            return data
        if data.get("max_total_sequence_length") is not None:
            return data
        length = default_row_length(data)
        return data if length is None else {**data, _LONGEST: length}

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        if self.dynamic_batching is not None and self.sequence_packing is not None:
            raise ValueError(
                "dynamic_batching and sequence_packing exclude each other: got both; "
                "set one of them to null"
            )
        if self.max_total_sequence_length is not None:
            for section in (self.dynamic_batching, self.sequence_packing):
                _check_token_budget(section, self.max_total_sequence_length)
        if self.head != "lm" and self.generation is not None:
            raise ValueError(
                f"generation must be null with head {self.head!r}: such a model gives "
                "numbers, not tokens; leave generation out"
            )
        return self

    @property
    def sent_adapter(self) -> LoRAConfig | None:
        """The adapter that generators are sent apart from the base, if they are."""
        lora = self.lora
        return lora if lora is not None and lora.sync == "adapter" else None

    @property
    def row_limit(self) -> int:
        """Longest row, also where the model has not been asked for its context yet."""
        return self.max_total_sequence_length or UNKNOWN_CONTEXT

    @property
    def logprob_temperature(self) -> float:
        """What divides the trainer's logits, so that log-probs are the sampler's."""
        return self.generation.temperature if self.generation else 1.0


def _check_token_budget(
    section: DynamicBatchingConfig | SequencePackingConfig | None, longest: int
) -> None:
    if section is None:
        return
    needed, rounding = longest, ""
    if isinstance(section, SequencePackingConfig):
        # Packed lengths are rounded up to the end; padded ones stop at the row's width.
        multiple = section.sequence_length_pad_multiple
        needed = -(-longest // multiple) * multiple
        if needed > longest:
            rounding = f", rounded up {needed} (sequence_length_pad_multiple)"
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        budget = getattr(section, name)
        if budget is not None and budget < needed:
            raise ValueError(
                f"{name} must hold at least one row of max_total_sequence_length "
                f"({longest}) tokens{rounding}: got {budget}"
            )


def resolve_class(dotted: str, field: str) -> type[Any]:
    """Import the class that a config field names.

    Raises:
        ValueError: There is no such class.
    """
    module_name, _, name = dotted.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or "builtins"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field}: there is no class {dotted!r} ({error})") from error
    if not inspect.isclass(found):
        raise ValueError(f"{field}: {dotted!r} is not a class")
    return found
