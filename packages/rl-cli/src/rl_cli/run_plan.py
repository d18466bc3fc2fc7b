"""Plan of one stage of a run: memory, batches, weight syncs, layouts.

```
configuration + config.json -> shape, layout -> batches -> memory by phase -> fits?
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl_algorithms.dpo.config import DPOConfig
from rl_algorithms.grpo.config import GRPOConfig
from rl_algorithms.ppo.config import PPOConfig
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.pair_config import PairTrainerConfig
from rl_algorithms.trainers.settings.rollout_config import RolloutTrainerConfig
from rl_cli.gpus import Gpus
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.parallelism import ParallelismConfig
from rl_models.planning.generator import (
    GeneratorMemory,
    SyncPlan,
    generator_memory,
    plan_sync,
)
from rl_models.planning.layouts import Layout
from rl_models.planning.memory import model_memory
from rl_models.planning.model_shape import ModelShape
from rl_models.planning.phases import MemoryPlan, OtherModel, plan_phases
from rl_models.planning.rank_memory import MicroBatch, ModelMemory, RankWork
from rl_models.training.worker_sampler import shares_weights

__all__ = ["Batches", "Place", "StagePlan", "chosen_backend", "plan_stage"]

_ROWS_PER_PAIR = 2
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """Hardware for which a run is planned."""

    gpus: Gpus | None
    """GPUs; None: devices with unknown memory."""
    num_nodes: int
    ranks_per_node: int
    """Number of training ranks per node."""
    generator_ranks: int = 0
    """Number of ranks that only sample; 0: the generator shares the trainer's."""
    generator_ranks_per_node: int = 0
    """Number of these per node."""
    all_nodes: int = 0
    """Nodes of trainer and generator together; 0: the trainer's."""

    @property
    def num_ranks(self) -> int:
        """Number of training ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def device_bytes(self) -> int | None:
        """Memory of one device; None: unknown."""
        return None if self.gpus is None else self.gpus.usable_bytes


@dataclass(frozen=True, slots=True)
class Batches:
    """Batch sizes of one step."""

    plan: BatchPlan
    passes: int
    """Number of passes over the samples of a step."""
    rows_per_rank: int
    """Number of rows per optimizer step on one data-parallel rank."""
    num_micro_batches: int
    """Micro-batches per optimizer step on one rank; a maximum if split by tokens."""
    training: MicroBatch
    passing: MicroBatch
    row_length: int
    answer_length: int
    """Maximum number of trained tokens per row."""

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps on the samples of one step."""
        return self.plan.num_optimizer_steps * self.passes


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage."""

    name: str
    config: TrainerConfig
    shape: ModelShape
    layout: Layout
    place: Place
    batches: Batches
    memory: MemoryPlan
    generator: GeneratorMemory | None
    sync: SyncPlan | None
    host_bytes: int
    """Host memory of a node used by its ranks while loading the model."""
    others: tuple[str, ...] = field(default=())
    """Other models of the run."""

    @property
    def fits(self) -> bool | None:
        """True if every phase fits into a device; None: unknown."""
        size = self.place.device_bytes
        if size is None:
            return None
        has_cache = self.generator is None or self.generator.holds_a_row
        return has_cache and not self.memory.overflowing(size)

    def refusal(self) -> str:
        """Describe why it cannot run, or what does not fit."""
        missing = self.layout.missing
        if missing:
            return (
                f"{self.name} cannot run: {self.layout.backend} does not support "
                f"{' and '.join(missing)} in the layout {self.layout.describe()}; "
                "change policy.parallelism; rl plan lists layouts of the same ranks"
            )
        size = self.place.device_bytes or 0
        over = self.memory.overflowing(size)
        if not over:
            return (
                f"{self.name} does not fit: the generator's cache cannot hold a row of "
                f"{self.batches.row_length} tokens; raise "
                "policy.generation.vllm.gpu_memory_utilization, or lower "
                "policy.max_total_sequence_length"
            )
        worst = max(over, key=lambda phase: phase.total)
        return (
            f"{self.name} does not fit: {worst.name} needs {_in_gib(worst.total)} per "
            f"rank, but only {_in_gib(size)} of a GPU are usable"
        )


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


Shapes = Mapping[str, ModelShape]
"""Sizes by name: `policy`, and `critic` or `teacher` if the run has them."""


def plan_stage(
    name: str, config: TrainerConfig, shapes: Shapes, layout: Layout, place: Place
) -> StagePlan:
    """Plan a stage.

    Args:
        name: Name of the stage.
        config: Its configuration.
        shapes: Sizes of its models.
        layout: Layout of the policy, already checked.
        place: Hardware.

    Raises:
        ConfigError: Batch sizes are not divisible.
    """
    shape, policy = shapes["policy"], config.policy
    batches = _batches(config, config.policy, layout)
    on_gpu = place.gpus is not None or bool(config.cluster.use_gpus)

    def memory_of(
        shape: ModelShape, policy: PolicyConfig, *, is_trained: bool
    ) -> ModelMemory:
        own = _batches(config, policy, layout)
        work = RankWork(
            training=own.training,
            passing=own.passing,
            num_micro_batches=own.num_micro_batches,
            on_gpu=on_gpu,
            is_trained=is_trained,
            keeps_logits="teacher" in shapes,
        )
        return model_memory(shape, policy, layout, work)

    own = memory_of(shape, policy, is_trained=True)
    others = _others(config, shapes, memory_of)
    generator = _generator(config, shape, batches, place, on_gpu=on_gpu)
    sync = None
    if generator is not None and generator.weights and policy.generation is not None:
        sync = plan_sync(
            shape,
            policy.generation,
            num_nodes=place.all_nodes or place.num_nodes,
            adapter=policy.sent_adapter,
        )
    memory = plan_phases(
        own,
        others,
        generator=generator,
        sync=sync,
        is_colocated=place.generator_ranks == 0,
        computes_logprobs=isinstance(config, RolloutTrainerConfig | DPOConfig),
    )
    # Each rank reads its parts, unless its files have to be converted.
    loaded = own.start + sum(other.memory.start for other in others)
    shards = own.host + sum(other.memory.host for other in others)
    return StagePlan(
        name, config, shape, layout, place, batches, memory, generator, sync,
        max(loaded, shards) * place.ranks_per_node,
        tuple(other.name for other in others),
    )  # fmt: skip


def _others(
    config: TrainerConfig, shapes: Shapes, memory_of: Callable[..., ModelMemory]
) -> list[OtherModel]:
    """Return the models that the trainer creates in addition to the policy."""
    found = []
    # With LoRA, the reference is the policy with its adapters switched off.
    if _keeps_reference(config) and config.policy.lora is None:
        memory = memory_of(shapes["policy"], config.policy, is_trained=False)
        found.append(OtherModel("reference model", memory))
    for name in ("critic", "teacher"):
        section: Any = getattr(config, name, None)
        if name in shapes and isinstance(section, PolicyConfig):
            trained = name == "critic"
            memory = memory_of(shapes[name], section, is_trained=trained)
            found.append(OtherModel(name, memory, trained))
    return found


def _keeps_reference(config: TrainerConfig) -> bool:
    if config.policy.lora is not None:
        return False
    if isinstance(config, GRPOConfig | PPOConfig):
        return config.loss_fn.needs_reference_logprobs
    if isinstance(config, DPOConfig):
        return not config.dpo.precompute_reference_logprobs
    return False


def _batches(config: TrainerConfig, policy: PolicyConfig, layout: Layout) -> Batches:
    """Return the batch sizes of a step, counting data-parallel ranks as workers."""
    ranks = config.cluster.replace(num_nodes=1, workers_per_node=layout.data)
    alone = config.policy.replace(parallelism=ParallelismConfig())
    plan = config.replace(cluster=ranks, policy=alone).plan_batches()
    pairs = _ROWS_PER_PAIR if isinstance(config, PairTrainerConfig) else 1
    rows = plan.global_batch_size // layout.data * pairs
    length = config.policy.row_limit
    # A row has at least one token of prompt, which is not trained on.
    answer = length - 1
    passes = 1
    if isinstance(config, RolloutTrainerConfig) and policy.generation is not None:
        turns = config.sampling.max_rollout_turns
        answer = min(answer, policy.generation.max_new_tokens * turns)
    if isinstance(config, PPOConfig):
        passes = config.ppo.ppo_epochs
    by_tokens = policy.sequence_packing or policy.dynamic_batching
    if by_tokens is not None:
        budget = by_tokens.train_mb_tokens
        passing = by_tokens.logprob_mb_tokens or budget
        count = -(-rows * length // budget)
        return Batches(plan, passes, rows, count, MicroBatch(budget, budget),
                       MicroBatch(passing, passing), length, answer)  # fmt: skip
    trained = min(rows, -(-plan.micro_batch_size // pairs) * pairs)
    all_rows = plan.num_samples // layout.data * pairs
    passed = min(all_rows, policy.logprob_batch_size)
    return Batches(
        plan,
        passes,
        rows,
        -(-rows // trained),
        MicroBatch(trained * length, trained * answer),
        MicroBatch(passed * length, passed * answer),
        length,
        answer,
    )


def _generator(
    config: TrainerConfig,
    shape: ModelShape,
    batches: Batches,
    place: Place,
    *,
    on_gpu: bool,
) -> GeneratorMemory | None:
    generation = config.policy.generation
    if generation is None:
        return None
    generation = chosen_backend(generation, on_gpu=on_gpu)
    per_replica = 1
    if generation.backend == "vllm":
        per_replica = generation.vllm.tensor_parallel_size
    ranks = place.generator_ranks or place.num_ranks
    replicas = generation.num_replicas or max(1, ranks // per_replica)
    shares = shares_weights(config.policy)
    if shares:
        replicas = config.policy.parallelism.data_size(place.num_ranks)
    rows = batches.plan.num_samples
    if not isinstance(config, RolloutTrainerConfig):
        # Only validations sample.
        rows = batches.plan.global_batch_size
    found = generator_memory(
        shape,
        generation,
        num_rows=-(-rows // replicas),
        row_length=min(
            batches.row_length, generation.max_context_length or batches.row_length
        ),
        device_bytes=place.device_bytes,
    )
    if not shares:
        return found
    # The weights are the trainer's, and its ranks share the cache of each row.
    parts = place.num_ranks // replicas
    each = max(1, found.cache_bytes_per_token // parts)
    cache = found.cache // parts
    return replace(found, weights=0, held=0, cache=cache, cache_bytes_per_token=each)


def chosen_backend(config: GenerationConfig, *, on_gpu: bool) -> GenerationConfig:
    """Return the config with `auto` resolved as if every engine were installed."""
    if config.backend != "auto":
        return config
    name = "vllm" if on_gpu else "huggingface"
    return config.model_copy(update={"backend": name})
