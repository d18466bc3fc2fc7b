"""`evaluate()`: sample, score and count a model's answers to prompts.

```
datasets -> prompts -> generation x num_generations -> environment -> metrics, samples
```
An answer depends only on the seed, the index of its prompt in the dataset and its own
number, and not on batches, replicas or other datasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch

import rl_envs
import rl_models
from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.loading import load_sources
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.data.types import DatumSpec, Tokenizer
from rl_algorithms.evaluation.config import EvalConfig
from rl_algorithms.evaluation.preflight import check_evaluation
from rl_algorithms.evaluation.result import DatasetEvaluation, EvaluationResult
from rl_algorithms.evaluation.target import find_target
from rl_algorithms.rollout import RolloutConfig, RolloutEngine, RolloutResult
from rl_algorithms.trainers.sampling.unusable_rows import check_rows
from rl_algorithms.trainers.settings.keywords import build_config
from rl_algorithms.trainers.setup.reward_trial import try_reward_fn
from rl_algorithms.trainers.setup.starting import is_environment
from rl_algorithms.trainers.steps.memory_turns import generation_turn
from rl_distributed.cluster.start import init_ray, shutdown_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics import reduce_metrics, to_floats
from rl_envs.interfaces import EnvironmentInterface
from rl_envs.rewards.lists import RewardFns
from rl_models.checkpoint.model_folder import (
    check_model_folder,
    folder_context_length,
)
from rl_models.generation.choice import without_trainer
from rl_models.generation.traits import get_generation_traits
from rl_models.interfaces import GenerationInterface
from rl_models.tokens.tokenizer import load_tokenizer, pad_token_id

__all__ = ["evaluate"]

_logger = get_logger(__name__)
# No training step has this number, so an evaluation never reuses the noise of one.
_STEP = -2


def evaluate(
    model: str | Path,
    dataset: Any = None,
    reward_fn: RewardFns | None = None,
    *,
    datasets: Mapping[str, Any] | None = None,
    environment: EnvironmentInterface[Any] | None = None,
    generation: GenerationInterface | None = None,
    config: EvalConfig | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Evaluate a model.

    ```python
    result = evaluate("runs/grpo", rows, reward_fn, num_generations=8)
    result.metrics["pass@8"], result.samples[0]["response"]
    ```

    Args:
        model: A model folder or hub name, a checkpoint, or a run's folder; of a run the
            best checkpoint is taken, and columns, templates, environment and sampling
            are the run's unless they are given.
        dataset: Prompts: a list of dicts, a dataset, a file, a folder, a hub name, or
            a `Mixture`, whose parts are measured one by one.
        reward_fn: One or several functions that reward an answer; see
            `rl_envs.FunctionalRewardWrapper`.
        datasets: Several sources by name.
        environment: An environment object, which is not closed.
        generation: A `GenerationInterface` to use instead of a new one; it must hold
            the weights to measure, and is not closed.
        config: Base configuration; default: that of the run, else the defaults.
        output: A JSON file to write.
        **settings: Keys of `EvalConfig`: `num_generations=8`, `temperature=0.6`.

    Raises:
        UserError: A mistake in the input; nothing has been started then.
    """
    target = find_target(model)
    base = target.settings() if config is None else config
    run_config = build_config(EvalConfig, settings, base=base)
    scorer = _choose_scorer(reward_fn, environment)
    # Before the tokenizer is loaded, which takes seconds.
    check_evaluation(
        run_config,
        has_scorer=scorer is not None,
        has_data=dataset is not None or bool(datasets),
    )
    if output is not None:
        _check_output(Path(output).expanduser())
    if scorer is None and run_config.env is not None:
        rl_envs.env_registry.get(run_config.env.name)
    if generation is None:
        # "auto" is resolved later, when the model and the devices are known.
        if run_config.generation.backend != "auto":
            get_generation_traits(run_config.generation.backend)
        check_model_folder(target.model)
    tokenizer = load_tokenizer(target.model)
    # Before anything is started, as loading prompts finds most mistakes.
    prompts = _load_prompts(run_config, dataset, datasets, tokenizer)
    if reward_fn is not None:
        try_reward_fn(reward_fn, next(iter(prompts.values()))[0])
    with ExitStack() as closing:
        started = generation or _start_generation(run_config, target.model, closing)
        judge = _start_environment(run_config, scorer, closing)
        for name, rows in prompts.items():
            check_rows(judge, rows, name)
        engine = RolloutEngine(
            started,
            judge,
            tokenizer,
            _rollout_config(run_config, target.model),
            use_chat_template=run_config.data.apply_chat_template,
        )
        # Registered last, so that agents end before the generator that answers them.
        closing.callback(engine.close)
        turn = generation_turn([started])
        turn.prepare()
        found = {
            name: _evaluate_one(engine, name, rows, run_config, tokenizer)
            for name, rows in prompts.items()
        }
        if generation is not None:
            # It lives on, perhaps beside a model that is trained.
            turn.finish()
    result = EvaluationResult(str(model), found, run_config.to_dict())
    if output is not None:
        result.save(output)
    return result


def _check_output(output: Path) -> None:
    """Check that a result can be written, before the hours that it may take.

    Raises:
        ConfigError: It cannot.
    """
    if output.is_dir():
        raise ConfigError(
            f"output must be a file: {output} is a folder; name a file in it, such as "
            f"{output / 'result.json'}"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output: the folder {output.parent} cannot be made "
            f"({error.strerror or error}); name another file"
        ) from error


def _rollout_config(config: EvalConfig, model: str) -> RolloutConfig:
    """Return the rollout settings; a conversation out of context simply ends."""
    limits: dict[str, Any] = {}
    context = config.generation.max_context_length or folder_context_length(model)
    if config.max_rollout_turns > 1 and context is not None:
        limits["max_total_sequence_length"] = context
        # An answer with less room than the first would be cut off through no fault of
        # its own.
        limits["min_answer_room"] = config.generation.max_new_tokens
    return RolloutConfig(
        **dict(config.rollout), max_turns=config.max_rollout_turns, **limits
    )


def _choose_scorer(
    reward_fn: RewardFns | None, environment: EnvironmentInterface[Any] | None
) -> RewardFns | EnvironmentInterface[Any] | None:
    """Return the reward function or environment, or None for the section `env`."""
    if reward_fn is not None and environment is not None:
        raise ConfigError("reward_fn and environment exclude each other: give one")
    return reward_fn if reward_fn is not None else environment


def _load_prompts(
    config: EvalConfig,
    dataset: Any,
    datasets: Mapping[str, Any] | None,
    tokenizer: Tokenizer,
) -> dict[str, list[DatumSpec]]:
    """Return the processed prompts by dataset; arguments override `config`."""
    sources: list[tuple[str, Any]] = []
    if dataset is not None:
        parts = load_sources(dataset, None)
        sources += [(part.title or "dataset", part) for part in parts]
    for name, source in (datasets or {}).items():
        sources += [(name, part) for part in load_sources(source, None)]
    if not sources:
        for name, section in config.datasets.items():
            for part in load_sources(None, section):
                sources.append((f"{name}/{part.title}" if part.title else name, part))
    prompts: dict[str, list[DatumSpec]] = {}
    for name, part in sources:
        if name in prompts:
            raise ConfigError(f"two datasets are called {name!r}: give each its name")
        rows = (
            part.rows
            if config.max_samples is None
            else part.first(config.max_samples).rows
        )
        prompts[name] = list(
            process_prompts(
                rows,
                tokenizer,
                config.data,
                max_length=config.data.max_input_seq_length,
                name=name,
            )
        )
    return prompts


def _start_generation(
    config: EvalConfig, model: str, closing: ExitStack
) -> GenerationInterface:
    settings = config.cluster
    # A cluster that was already running is left running.
    if not ray.is_initialized() and init_ray(
        tls=settings.tls, pass_env=settings.pass_env
    ):
        closing.callback(shutdown_ray)
    cluster = RayVirtualCluster.from_config(config.cluster)
    closing.callback(cluster.shutdown)
    generation = rl_models.GenerationPolicy(
        cluster, without_trainer(config.generation), model_name=model
    )
    closing.callback(generation.shutdown)
    return generation


def _start_environment(
    config: EvalConfig,
    scorer: RewardFns | EnvironmentInterface[Any] | None,
    closing: ExitStack,
) -> EnvironmentInterface[Any]:
    """Return an object unchanged; host functions and named environments."""
    if is_environment(scorer):
        return scorer
    if scorer is not None:
        remote = rl_envs.RemoteEnvironment(scorer)
    else:
        assert config.env is not None
        remote = rl_envs.RemoteEnvironment(
            config.env.name,
            config.env.settings,
            num_workers=config.env.num_workers,
            num_cpus=config.env.num_cpus,
            deadline_s=config.env.deadline_s,
            env_vars=config.env.passed(),
            max_restarts=config.env.max_restarts,
            task_limits=config.env.limits,
        )
    closing.callback(remote.shutdown)
    return remote


def _evaluate_one(
    engine: RolloutEngine,
    name: str,
    rows: list[DatumSpec],
    config: EvalConfig,
    tokenizer: Tokenizer,
) -> DatasetEvaluation:
    pad = pad_token_id(tokenizer)
    samples: list[dict[str, Any]] = []
    metrics = []
    for first in range(0, len(rows), config.batch_size):
        batch = rl_collate_fn(rows[first : first + config.batch_size], pad_token_id=pad)
        result = engine.run(
            batch,
            num_generations=config.num_generations,
            seed=config.seed,
            step=_STEP,
            # The index in the dataset, so that seeds do not depend on the batch size.
            first_prompt_index=first,
            greedy=config.is_greedy,
            sampling=None if config.is_greedy else config.generation.sampling_params(),
        )
        metrics.append(result.metrics)
        samples += _samples(result, name, batch["idx"], config)
        _logger.info("%s: %d of %d prompts", name, first + batch.size, len(rows))
    if all(sample["answer"] is None for sample in samples):
        # The environment reads no answers: whole responses vote.
        samples = [{**s, "answer": s["response"].strip()} for s in samples]
    own = {
        key: value
        for key, value in to_floats(reduce_metrics(metrics)).items()
        if key.startswith(("env/", "outcome/"))
    }
    return DatasetEvaluation.of(
        name, samples, config.num_generations, config.all_ks(), own
    )


def _samples(
    result: RolloutResult, name: str, idx: list[int], config: EvalConfig
) -> list[dict[str, Any]]:
    """Return each answer as a JSON value."""
    rows = result.rows
    scored = (rows["sample_mask"] != 0).tolist()
    truncated = torch.as_tensor(rows["truncated"]).tolist()
    lengths = rows["generation_lengths"].tolist()
    found = []
    for row, is_scored in enumerate(scored):
        sample = result.sample(row)
        # None and not 0.0, which would enter the mean reward.
        reward = sample.reward if is_scored else None
        found.append(
            {
                "dataset": name,
                "idx": idx[row // config.num_generations],
                "prompt": sample.prompt,
                "response": sample.response,
                "answer": sample.answer,
                "reward": reward,
                "correct": reward is not None and reward >= config.pass_threshold,
                "truncated": bool(truncated[row]),
                "ending": sample.ending.value,
                "num_tokens": int(lengths[row]),
                "messages": [
                    {"role": m["role"], "content": m["content"]}
                    for m in sample.message_log
                ],
            }
        )
    return found
