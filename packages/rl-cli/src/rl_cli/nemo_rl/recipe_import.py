"""Conversion of a NeMo RL recipe to a run file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms.compat.nemo_rl.loggers import logger_settings
from rl_algorithms.registry import get_config_class
from rl_cli.nemo_rl import keys
from rl_cli.nemo_rl.data_section import data_section, env_section
from rl_cli.nemo_rl.policy_section import (
    cluster_sections,
    copy_keys,
    generation_section,
    policy_section,
)
from rl_cli.nemo_rl.their_recipe import LeftOut, TheirRecipe
from rl_distributed.errors import ConfigError

__all__ = ["ImportedRecipe", "import_recipe"]

_METRICS = {"val:validation-default_loss": "val:loss"}
_SAMPLED = ("grpo", "ppo", "distillation")
_PAIRS = ("dpo", "rm")
_GAE_LAMBDA = 0.95
"""Default of NeMo RL."""


@dataclass(frozen=True)
class ImportedRecipe:
    """A run file, and the keys missing from it."""

    algorithm: str
    run: dict[str, Any]
    """A recipe with one stage."""
    left_out: list[LeftOut]
    """Keys that were dropped, or have another value or meaning here."""


def import_recipe(path: Path) -> ImportedRecipe:
    """Convert a NeMo RL recipe to a recipe with one stage.

    Args:
        path: Its YAML file; `defaults` are followed.

    Raises:
        ConfigError: It is not the recipe of a supported algorithm, or the result is
            invalid.
    """
    recipe = TheirRecipe.read(path)
    algorithm = _algorithm(recipe, path)
    stage: dict[str, Any] = {"policy": policy_section(recipe)}
    if algorithm in _PAIRS:
        _count_rows(recipe, stage["policy"])
    if algorithm in _SAMPLED:
        stage["policy"]["generation"] = generation_section(recipe, stage["policy"])
    else:
        recipe.leave("policy.generation", f"{algorithm} samples nothing")
    stage["data"] = data_section(recipe, is_sampled=algorithm in _SAMPLED)
    if recipe.take("sft.only_unmask_final", False):
        stage["data"]["only_unmask_final"] = True
    if algorithm in _SAMPLED and (env := env_section(recipe)) is not None:
        stage["env"] = env
    recipe.leave("env", f"{algorithm} asks no environment")
    seed = recipe.take(f"{algorithm}.seed", 42)
    stage |= _OWN_SECTIONS[algorithm](recipe)
    backend = stage["policy"].get("generation", {}).get("backend")
    stage |= cluster_sections(recipe, backend)
    stage["checkpointing"] = _checkpointing(recipe)
    stage["logger"] = _logger(recipe)
    for key, why in keys.LEFT_OUT.items():
        for model in ("policy.", "teacher.", "value."):
            recipe.leave(key.replace("policy.", model, 1), why)
    recipe.leave_rest()
    stage = {name: section for name, section in stage.items() if section != {}}
    # Validated here, so that errors name keys of the run file.
    get_config_class(algorithm).from_dict(stage, source=f"{path}, imported")
    run = {
        "title": f"{algorithm} imported from {path.name} of NeMo RL",
        "seed": seed,
        "stages": {algorithm: {"algorithm": algorithm, **stage}},
    }
    return ImportedRecipe(algorithm, run, recipe.left_out)


def _algorithm(recipe: TheirRecipe, path: Path) -> str:
    found = [name for name in _OWN_SECTIONS if recipe.has(name)]
    if len(found) == 1:
        return found[0]
    got = ", ".join(found) or "none of them"
    raise ConfigError(
        f"{path} must have one of the sections {', '.join(_OWN_SECTIONS)}, which "
        f"determines the algorithm: got {got}"
    )


def _count_rows(recipe: TheirRecipe, policy: dict[str, Any]) -> None:
    """Convert micro-batch sizes from pairs to rows."""
    for name in ("train_micro_batch_size", "logprob_batch_size"):
        if name in policy:
            pairs, policy[name] = policy[name], 2 * policy[name]
            why = f"{policy[name]}: rows are counted here, and pairs there"
            recipe.left_out.append(LeftOut(f"policy.{name}", pairs, why))


def _grpo(recipe: TheirRecipe) -> dict[str, Any]:
    # NeMo RL samples validation answers, too.
    grpo: dict[str, Any] = {"val_greedy": False}
    copy_keys(recipe, "grpo", (*keys.GRPO, *_GRPO_ALONE), grpo)
    grpo["adv_estimator"] = _estimator(recipe)
    _rewards(recipe, "grpo", grpo)
    _asynchronous(recipe, "grpo", grpo)
    loss = _policy_loss(recipe)
    weight = "loss_fn.positive_example_nll_weight"
    if recipe.peek(weight, 0.0):
        recipe.leave(weight, "`rl train ppo` has it: loss_fn.positive_nll_coef")
    recipe.take(weight)
    return {"grpo": grpo, "loss_fn": loss}


def _asynchronous(recipe: TheirRecipe, section: str, ours: dict[str, Any]) -> None:
    """Carry over how far sampling may run ahead of training."""
    place = f"{section}.async_{section}"
    if recipe.take(f"{place}.enabled", False):
        # Both count the steps between the sampler's weights and the step.
        age = recipe.take(f"{place}.max_trajectory_age_steps", 1)
        ours["asynchronous"] = {"max_staleness": age}
        if recipe.take(f"{place}.in_flight_weight_updates", False):
            ours["asynchronous"]["weight_updates"] = "between_tokens"
        recipe.leave(place, f"{section}.asynchronous has settings of its own")
    else:
        recipe.leave(place, "switched off")


def _rewards(recipe: TheirRecipe, section: str, ours: dict[str, Any]) -> None:
    """Carry over what changes rewards between environment and advantages."""
    for name in ("reward_scaling", "reward_shaping"):
        place = f"{section}.{name}"
        if recipe.take(f"{place}.enabled", False):
            ours[name] = _shaping(recipe, place)
        else:
            recipe.leave(place, "switched off")
    for name, neutral, why in (
        ("batch_multiplier", 1, "a step samples the prompts that it trains on"),
        ("invalid_tool_call_advantage", None, "a reward function can penalise it"),
        ("malformed_thinking_advantage", None, "a reward function can penalise it"),
    ):
        if recipe.peek(f"{section}.{name}", neutral) != neutral:
            recipe.leave(f"{section}.{name}", why)
        recipe.take(f"{section}.{name}")
    if any((recipe.peek("reward_penalties") or {}).values()):
        recipe.leave("reward_penalties", "a reward function can penalise it")
    recipe.take("reward_penalties")


def _ppo(recipe: TheirRecipe) -> dict[str, Any]:
    ppo: dict[str, Any] = {"val_greedy": False}
    copy_keys(recipe, "ppo", (*keys.GRPO, "ppo_epochs", "overlong_filtering"), ppo)
    start = recipe.peek("ppo.policy_training_start_step")
    if start:
        ppo["critic_warmup_steps"] = start
        why = f"critic_warmup_steps={start} initial steps train the critic alone"
        recipe.change("ppo.policy_training_start_step", why)
    recipe.take("ppo.policy_training_start_step")
    _gae(recipe, ppo)
    _rewards(recipe, "ppo", ppo)
    if recipe.peek("ppo.use_dynamic_sampling", False):
        recipe.leave("ppo.use_dynamic_sampling", "`rl train dapo` samples so")
    for name in ("use_dynamic_sampling", "dynamic_sampling_max_gen_batches"):
        recipe.take(f"ppo.{name}")
    recipe.leave(
        "ppo.skip_reference_policy_logprobs_calculation",
        "they are calculated only where a penalty needs them",
    )
    _asynchronous(recipe, "ppo", ppo)
    loss = _policy_loss(recipe)
    weight = recipe.take("loss_fn.positive_example_nll_weight", 0.0)
    if weight:
        loss["positive_nll_coef"] = weight
    value_loss: dict[str, Any] = {}
    copy_keys(recipe, "value_loss_fn", ("scale", "cliprange"), value_loss)
    critic = policy_section(recipe, "value")
    recipe.leave("value.generation", "the critic samples nothing")
    return {"ppo": ppo, "critic": critic, "loss_fn": loss, "value_loss_fn": value_loss}


def _gae(recipe: TheirRecipe, ppo: dict[str, Any]) -> None:
    """Carry over the estimator, whose keys belong to section `ppo` here."""
    at = "ppo.adv_estimator"
    name = recipe.take(f"{at}.name", "gae")
    if name == "gae":
        own = ("gae_gamma", "gae_lambda", "gae_lambda_value", "normalize_advantages")
        copy_keys(recipe, at, own, ppo)
        policy_lambda = recipe.take(f"{at}.gae_lambda_policy")
        if policy_lambda is not None:
            # Theirs overrides gae_lambda for the policy alone.
            ppo.setdefault("gae_lambda_value", ppo.get("gae_lambda", _GAE_LAMBDA))
            ppo["gae_lambda"] = policy_lambda
        alpha = f"{at}.length_adaptive_alpha"
        recipe.leave(alpha, "lambda does not depend on the length: ppo.gae_lambda")
    else:
        # Each token gets the reward of its answer, without a critic's baseline.
        ppo |= {"gae_lambda": 1.0, "gae_gamma": 1.0}
        why = "advantages are rewards minus the critic's values (gae, lambda 1)"
        recipe.left_out.append(LeftOut(f"{at}.name", name, why))
        recipe.leave(at, f"belongs to the estimator {name}")


_GRPO_ALONE = (
    "overlong_filtering",
    "use_dynamic_sampling",
    "dynamic_sampling_max_gen_batches",
    "seq_logprob_error_threshold",
    "skip_reference_policy_logprobs_calculation",
)


def _shaping(recipe: TheirRecipe, place: str) -> dict[str, Any]:
    section = {k: v for k, v in recipe.peek(place).items() if k != "enabled"}
    section = {k: v for k, v in section.items() if v is not None}
    if section.get("stop_properly_penalty_coef") is not None:
        # NeMo RL ignores the other keys then.
        section = {k: v for k, v in section.items() if k.startswith("stop_")}
    elif "max_response_length" in section:
        recipe.change(
            f"{place}.overlong_buffer_penalty",
            "the penalty is full at max_response_length; there it grows beyond",
        )
    recipe.take(place)
    return section


def _estimator(recipe: TheirRecipe) -> dict[str, Any]:
    at = "grpo.adv_estimator"
    name = recipe.take(f"{at}.name", "grpo")
    ours: dict[str, Any] = {"name": name}
    if name == "opd":
        recipe.leave(at, "rl train distillation has one teacher; grpo takes its place")
        ours["name"] = "grpo"
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        outer = recipe.take(f"grpo.{key}", True)
        ours[key] = recipe.take(f"{at}.{key}", outer)
    for key in ("advantage_clip_low", "advantage_clip_high"):
        value = recipe.take(f"grpo.{key}")
        if value is not None:
            ours[key] = value
    baseline = recipe.take(f"{at}.minus_baseline", True)
    if name == "reinforce_plus_plus":
        # In NeMo RL the baseline is always the mean of the whole group.
        ours |= {"minus_baseline": baseline, "use_leave_one_out_baseline": False}
    if name == "gdpo":
        why = "set grpo.adv_estimator.reward_weights by the names of the rewards"
        recipe.leave(f"{at}.reward_weights", why)
    recipe.take(at)
    return ours


def _policy_loss(recipe: TheirRecipe) -> dict[str, Any]:
    loss: dict[str, Any] = {}
    copy_keys(recipe, "loss_fn", keys.LOSS["grpo"], loss)
    truncated = "truncated_importance_sampling_"
    if f"{truncated}type" not in loss:
        for name in (f"{truncated}ratio", f"{truncated}ratio_min"):
            if loss.pop(name, None) is not None:
                recipe.left_out.append(
                    LeftOut(
                        f"loss_fn.{name}",
                        recipe.peek(f"loss_fn.{name}"),
                        f"set loss_fn.{truncated}type, or it means nothing",
                    )
                )
    for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
        if recipe.peek("loss_fn") and name in recipe.peek("loss_fn"):
            # null means no clamp, unlike a missing key, which means the default.
            loss.setdefault(name, None)
    return loss


def _sft(recipe: TheirRecipe) -> dict[str, Any]:
    section: dict[str, Any] = {}
    copy_keys(recipe, "sft", keys.SUPERVISED, section)
    recipe.leave("sft.val_micro_batch_size", "policy.logprob_batch_size has that size")
    return {"sft": section}


def _dpo(recipe: TheirRecipe) -> dict[str, Any]:
    section: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    copy_keys(recipe, "dpo", keys.SUPERVISED, section)
    copy_keys(recipe, "dpo", keys.LOSS["dpo"], loss)
    recipe.leave("dpo.val_micro_batch_size", "policy.logprob_batch_size has that size")
    return {"dpo": section, "loss_fn": loss}


def _rm(recipe: TheirRecipe) -> dict[str, Any]:
    section: dict[str, Any] = {}
    copy_keys(recipe, "rm", keys.SUPERVISED, section)
    recipe.leave("rm.val_micro_batch_size", "policy.logprob_batch_size has that size")
    return {"rm": section}


def _distillation(recipe: TheirRecipe) -> dict[str, Any]:
    section: dict[str, Any] = {"val_greedy": False}
    # The default of NeMo RL.
    loss: dict[str, Any] = {"kl_type": "mixed"}
    names = (*keys.GRPO, "topk_logits_k")
    copy_keys(recipe, "distillation", names, section)
    copy_keys(recipe, "loss_fn", keys.LOSS["distillation"], loss)
    teacher = policy_section(recipe, "teacher")
    for name in ("optimizer", "scheduler", "max_grad_norm", "train_global_batch_size"):
        teacher.pop(name, None)
    recipe.leave("teacher.generation", "the teacher samples nothing")
    return {"distillation": section, "loss_fn": loss, "teacher": teacher}


_OWN_SECTIONS: dict[str, Callable[[TheirRecipe], dict[str, Any]]] = {
    "grpo": _grpo,
    "sft": _sft,
    "dpo": _dpo,
    "rm": _rm,
    "ppo": _ppo,
    "distillation": _distillation,
}


def _checkpointing(recipe: TheirRecipe) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    copy_keys(recipe, "checkpointing", keys.CHECKPOINTING, ours)
    latest = recipe.take("checkpointing.ft_keep_latest_k")
    if latest is not None:
        ours["keep_latest_k"] = latest
    metric = recipe.peek("checkpointing.metric_name")
    if metric in _METRICS:
        ours["metric_name"] = _METRICS[metric]
        recipe.change("checkpointing.metric_name", f"{_METRICS[metric]} here")
    elif metric is not None:
        ours["metric_name"] = recipe.take("checkpointing.metric_name")
    return ours


def _logger(recipe: TheirRecipe) -> dict[str, Any]:
    theirs = dict(recipe.peek("logger", {}))
    if theirs.pop("swanlab_enabled", False):
        recipe.leave("logger.swanlab_enabled", "write a MetricSink for it")
    ours = logger_settings(theirs)
    ours.pop("log_dir")
    for name in ("wandb", "tensorboard", "mlflow"):
        recipe.take(f"logger.{name}_enabled")
        if name not in ours["sinks"]:
            recipe.leave(f"logger.{name}", "switched off")
        for key in ours["sink_settings"].get(name, {}):
            recipe.take(f"logger.{name}.{key}")
    recipe.leave("logger.swanlab", "write a MetricSink for it")
    recipe.take("logger.monitor_gpus")
    if "sample_resources_every_s" in ours:
        recipe.take("logger.gpu_monitoring.collection_interval")
        recipe.leave("logger.gpu_monitoring", "samples are written at once")
    recipe.leave("logger.gpu_monitoring", "switched off")
    return {key: value for key, value in ours.items() if value != {}}
