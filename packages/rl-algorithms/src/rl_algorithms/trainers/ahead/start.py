"""Creation of a trainer's `AheadSampler`, and checks for runs that cannot have one."""

from __future__ import annotations

from typing import Any, Protocol

from rl_algorithms.rollout import RolloutEngine
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.sampler import AheadSampler
from rl_algorithms.trainers.ahead.saved import SavedAhead
from rl_algorithms.trainers.ahead.scoring import calls_of
from rl_algorithms.trainers.ahead.shape import RunShape
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.settings.asynchronous_config import (
    AheadConfig,
    AsynchronousConfig,
)
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_algorithms.trainers.setup.own_policy import samples_itself
from rl_algorithms.trainers.setup.preflight import check_updates_in_flight
from rl_algorithms.trainers.step_tools import StepTools
from rl_algorithms.trainers.steps.memory_turns import share_devices
from rl_distributed.errors import ConfigError
from rl_models.generation.traits import get_generation_traits
from rl_models.model_traits import GeneratorTraits
from rl_models.tokens.tokenizer import pad_token_id

__all__ = ["check_ahead", "check_started", "start_ahead"]

_TURNS = (
    "asynchronous samples while the policy is trained, and here both take turns on the "
    "memory of the same GPUs: give the generator a cluster of its own (section "
    "generation_cluster; for one that is handed in, GenerationPolicy(other_cluster, "
    "...)), or set asynchronous to null"
)


class SamplingTrainer(Protocol):
    """A trainer whose answers are sampled ahead."""

    state: TrainerState
    components: Components

    @property
    def config(self) -> AheadConfig:
        """Configuration of the run."""

    @property
    def run_dir(self) -> Any:
        """Folder of the run."""

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Maximum number of epochs and of steps."""


def check_ahead(config: AheadConfig, given: Components, needs: Needs) -> None:
    """Reject, before anything is started, a run that cannot sample while it trains.

    Raises:
        ConfigError: The policy is its own generator, or the generator cannot take
            weights when `weight_updates` says.
    """
    asynchronous = config.asynchronous
    if asynchronous is None:
        return
    own = given.generation is None and (
        needs.shares(config, given)
        or (given.policy is not None and samples_itself(given.policy))
    )
    if own:
        raise ConfigError(
            "asynchronous samples while the policy is trained, and here the workers "
            "that train sample as well: set policy.generation.backend to one with "
            "workers of its own (huggingface, vllm), or asynchronous to null"
        )
    if _takes_turns(config, given):
        raise ConfigError(_TURNS)
    if not asynchronous.updates_in_flight:
        return
    if given.generation is None:
        check_updates_in_flight(config)
    elif not GeneratorTraits.of(given.generation).updates_in_flight:
        raise ConfigError(
            "asynchronous.weight_updates=between_tokens needs a generator that loads "
            "weights while it samples, and the given one does not say that it does: "
            "make it with GenerationPolicy(..., updates_in_flight=True), or set "
            "weight_updates to between_answers"
        )


def _takes_turns(config: AheadConfig, given: Components) -> bool:
    """Return whether the configuration has both models on the same GPUs."""
    apart = config.sampling_cluster is not None
    if apart or given.policy is not None or given.generation is not None:
        return False
    generation = config.policy.generation
    # What `auto` stands for holds the model.
    holds = (
        generation is None
        or generation.backend == "auto"
        or get_generation_traits(generation.backend).holds_model
    )
    return holds and bool(config.cluster.use_gpus)


def check_started(components: Components) -> None:
    """Reject components that cannot work at the same time.

    Raises:
        ConfigError: Policy and generator take turns on the memory of the same GPUs.
    """
    policy, generation = components.required.policy, components.required.generation
    if components.sync is None:
        raise ConfigError(
            "asynchronous sends weights from the policy to a generator, and here they "
            "are one object: give a generator of its own, or set asynchronous to null"
        )
    cluster = generation.cluster
    if cluster is not None and cluster.use_gpus and share_devices(policy, generation):
        raise ConfigError(_TURNS)


def start_ahead(
    trainer: SamplingTrainer,
    asynchronous: AsynchronousConfig,
    prompts: PromptSource,
    rollouts: RolloutEngine,
    tools: StepTools,
    saved: SavedAhead | None,
) -> AheadSampler:
    """Begin to sample ahead of a trainer; its generator must have the weights.

    Args:
        trainer: The trainer.
        asynchronous: Settings of sampling ahead.
        prompts: Source of the prompts.
        rollouts: Engine that plays conversations.
        tools: Tools of the step, which check for signals.
        saved: What the checkpoint to resume holds of it; None without one.
    """
    config, parts = trainer.config, trainer.components
    sampling = config.sampling
    assert parts.sync is not None  # `check_started`
    if config.record_training:
        # In which order answers came is a part of the recording.
        asynchronous = asynchronous.replace(event_log=True)
    shape = RunShape(
        num_prompts=sampling.num_prompts_per_step,
        num_generations=sampling.num_generations_per_prompt,
        max_num_steps=trainer.state.total_steps,
        max_num_epochs=trainer.limits[0],
        first_step=trainer.state.step,
        # Weights may move between two requests of an agent, as between two turns.
        max_turns=sampling.max_rollout_turns if rollouts.agents is None else 2,
        max_attempts=config.rollout.retry.max_attempts,
        seed=config.seed,
        updates_in_flight=asynchronous.updates_in_flight,
        max_trainer_restarts=config.fault_tolerance.max_restarts,
    )
    return AheadSampler(
        asynchronous,
        shape,
        prompts,
        rollouts,
        parts.required.generation,
        parts.sync,
        calls_at_once=calls_of(parts.required.environment),
        pad_token_id=pad_token_id(parts.required.tokenizer),
        check=tools.check,
        saved=saved,
        log_folder=trainer.run_dir / "asynchronous",
    )
