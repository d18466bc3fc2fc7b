"""Advice of `rl plan`: other layouts, and settings that make a stage fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2

from rl_cli.run_plan import Shapes, StagePlan, plan_stage
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.planning.layouts import Layout, possible_layouts

__all__ = ["Remedies", "find_remedies", "other_layouts"]

_MOST = 4
_FREE = ("policy.precision=bfloat16", "policy.generation.precision=bfloat16")
"""Settings that also make a run on GPUs faster, and so are never dropped."""
_MOST_WEIGHTS = 0.7
"""Maximum share of weights in vLLM's memory, so that the cache has enough room."""
Change = Callable[[PolicyConfig], PolicyConfig]


@dataclass(frozen=True, slots=True)
class Remedies:
    """Overrides that save memory."""

    overrides: tuple[str, ...]
    plan: StagePlan
    """Plan of the stage with these settings."""


def find_remedies(plan: StagePlan, shapes: Shapes) -> Remedies | None:
    """Return a minimal set of settings with which a stage fits.

    Args:
        plan: A plan that does not fit.
        shapes: Sizes of the stage's models.

    Returns:
        The settings; if even all of them do not suffice, all of them. None if there is
        nothing to change.
    """
    changes = dict(_changes(plan))
    chosen: list[str] = []
    best = plan
    # In order of their cost in speed.
    for text in changes:
        if best.fits:
            break
        chosen.append(text)
        # All changes from the original plan, as their effects do not simply add up.
        best = _changed(plan, shapes, [changes[name] for name in chosen])
    if not chosen:
        return None
    # A later setting may have made an earlier one unnecessary.
    # The dearest first: what costs the most speed is dropped where possible.
    for text in [name for name in reversed(chosen) if name not in _FREE]:
        fewer = [name for name in chosen if name != text]
        tried = _changed(plan, shapes, [changes[name] for name in fewer])
        if tried.fits:
            chosen, best = fewer, tried
    return Remedies(tuple(chosen), best)


def _changed(plan: StagePlan, shapes: Shapes, changes: Sequence[Change]) -> StagePlan:
    policy = plan.config.policy
    for change in changes:
        policy = change(policy)
    config = plan.config.replace(policy=policy)
    return plan_stage(plan.name, config, shapes, plan.layout, plan.place)


def _changes(plan: StagePlan) -> Iterator[tuple[str, Change]]:
    """Yield possible changes, the cheapest first."""
    policy, generation = plan.config.policy, plan.config.policy.generation
    if policy.precision == "float32":
        yield "policy.precision=bfloat16", lambda p: p.replace(precision="bfloat16")
    if generation is not None and generation.precision == "float32":
        yield (
            "policy.generation.precision=bfloat16",
            lambda p: p.replace(generation=_of(p).replace(precision="bfloat16")),
        )
    if policy.sequence_packing is None and policy.dynamic_batching is None:
        if policy.logprob_batch_size > 1:
            yield (
                "policy.logprob_batch_size=1",
                lambda p: p.replace(logprob_batch_size=1),
            )
        if policy.train_micro_batch_size > 1:
            yield (
                "policy.train_micro_batch_size=1",
                lambda p: p.replace(train_micro_batch_size=1),
            )
    if generation is not None and _can_sleep(plan):
        yield (
            "policy.generation.vllm.enable_sleep_mode=true",
            lambda p: p.replace(
                generation=_of(p).replace(
                    vllm=_of(p).vllm.replace(enable_sleep_mode=True)
                )
            ),
        )
    size = _generator_ranks(plan)
    if size > 1:
        yield (
            f"policy.generation.vllm.tensor_parallel_size={size}",
            lambda p: p.replace(
                generation=_of(p).replace(
                    vllm=_of(p).vllm.replace(tensor_parallel_size=size)
                )
            ),
        )
    by_backend = _of_megatron if plan.layout.backend == "megatron" else _of_dtensor
    yield from by_backend(plan)


def _of_dtensor(plan: StagePlan) -> Iterator[tuple[str, Change]]:
    settings = plan.config.policy.dtensor
    if not settings.activation_checkpointing:
        yield (
            "policy.dtensor.activation_checkpointing=true",
            lambda p: p.replace(
                dtensor=p.dtensor.replace(activation_checkpointing=True)
            ),
        )
    if not settings.cpu_offload and plan.layout.is_sharded:
        yield (
            "policy.dtensor.cpu_offload=true",
            lambda p: p.replace(dtensor=p.dtensor.replace(cpu_offload=True)),
        )


def _of_megatron(plan: StagePlan) -> Iterator[tuple[str, Change]]:
    settings = plan.config.policy.megatron
    if not settings.distributed_optimizer and plan.layout.data > 1:
        yield (
            "policy.megatron.distributed_optimizer=true",
            lambda p: p.replace(
                megatron=p.megatron.replace(distributed_optimizer=True)
            ),
        )
    if not settings.activation_checkpointing:
        yield (
            "policy.megatron.activation_checkpointing=true",
            lambda p: p.replace(
                megatron=p.megatron.replace(activation_checkpointing=True)
            ),
        )


def _of(policy: PolicyConfig) -> GenerationConfig:
    assert policy.generation is not None
    return policy.generation


def _generator_ranks(plan: StagePlan) -> int:
    """Return the number of ranks that should share a replica; 1: no change."""
    generation, generator = plan.config.policy.generation, plan.generator
    device, shape = plan.place.device_bytes, plan.shape
    if generation is None or generator is None or device is None:
        return 1
    given = generation.vllm.tensor_parallel_size
    if generation.backend not in ("auto", "vllm") or given > 1:
        return 1
    room = generation.vllm.gpu_memory_utilization * device * _MOST_WEIGHTS
    if generator.weights <= room:
        return 1
    # A replica stays within a node of the generator.
    ranks = plan.place.generator_ranks_per_node or plan.place.ranks_per_node
    columns = shape.expert_size or shape.intermediate_size
    possible = [
        size
        for size in range(2, ranks + 1)
        if ranks % size == 0
        # vLLM splits heads and columns evenly, and replicates key-value heads only by
        # whole factors.
        and shape.num_heads % size == 0
        and columns % size == 0
        and (
            shape.num_key_value_heads % size == 0
            or size % shape.num_key_value_heads == 0
        )
    ]
    enough = [size for size in possible if generator.weights / size <= room]
    return enough[0] if enough else max(possible, default=1)


def _can_sleep(plan: StagePlan) -> bool:
    generation = plan.config.policy.generation
    return (
        generation is not None
        and generation.backend in ("auto", "vllm")
        and plan.place.gpus is not None
        and plan.place.generator_ranks == 0
        and not generation.vllm.async_engine
        and not generation.vllm.enable_sleep_mode
    )


def other_layouts(plan: StagePlan, shapes: Shapes) -> list[StagePlan]:
    """Return the best layouts of the same ranks, including the requested one.

    Supported layouts come first, then those that fit, then those that communicate
    least.

    Args:
        plan: The stage with the requested layout.
        shapes: Sizes of its models.
    """
    found = [plan]
    place = plan.place
    for layout in possible_layouts(
        plan.shape,
        place.num_ranks,
        place.ranks_per_node,
        plan.config.policy.backend,
        has_adapters=plan.config.policy.lora is not None,
    ):
        if layout == plan.layout:
            continue
        try:
            found.append(plan_stage(plan.name, plan.config, shapes, layout, place))
        except ConfigError:
            # Its batch sizes are not divisible.
            continue
    found.sort(key=_order)
    own = [p for p in found if not p.layout.missing][:_MOST]
    later = [p for p in found if p.layout.missing and p.fits is not False][:_MOST]
    return own + later[: max(1, _MOST + 1 - len(own))]


def _order(plan: StagePlan) -> tuple[bool, bool, float, int]:
    layout = plan.layout
    return (
        bool(layout.missing),
        plan.fits is False,
        _traffic(layout),
        plan.memory.peak().total,
    )


def _traffic(layout: Layout) -> float:
    """Estimate communication: most within layers, least between stages."""
    return (
        2.0 * log2(layout.tensor)
        + 1.5 * log2(layout.pipeline)
        + 1.5 * log2(layout.context)
        + log2(layout.expert)
    )
