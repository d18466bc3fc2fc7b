"""Policy losses in float64, token by token, as the papers write them.

`reference(settings)` returns the formula that settings of `ClippedPGLossConfig` denote,
in the form that `check_loss` wants: what a paper puts under a stop-gradient is read
from `held`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Columns = Mapping[str, Tensor]


def reference(
    settings: Mapping[str, Any],
) -> Callable[[Columns, Columns, Columns], float]:
    """Return the loss of the whole batch, for settings merged over the defaults."""
    config = {
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "token_level_loss": True,
        "reference_policy_kl_penalty": 0.0,
        "reference_policy_kl_type": "k3",
        "reference_policy_kl_gradient": "score_function",
        **settings,
    }

    def loss(data: Columns, inputs: Columns, held: Columns) -> float:
        rows, successes = [], []
        for i in range(len(data["sample_mask"])):
            if not data["sample_mask"][i]:
                continue
            tokens = [
                {
                    "new": float(inputs["next_token_logprobs"][i, t]),
                    "held": float(held["next_token_logprobs"][i, t]),
                    "old": float(data["prev_logprobs"][i, t + 1]),
                    "sampler": float(data["generation_logprobs"][i, t + 1]),
                    "reference": float(data["reference_policy_logprobs"][i, t + 1]),
                }
                for t in range(data["token_mask"].shape[1] - 1)
                if data["token_mask"][i, t + 1]
            ]
            rows.append(row_losses(float(data["advantages"][i]), tokens, config))
            if "rewards" in data and data["rewards"][i] > 0:
                successes += [-token["new"] for token in tokens]
        if config["token_level_loss"]:  # DAPO (2503.14476), eq. 8
            flat = [value for row in rows for value in row]
            imitated = 0.0
            if config.get("positive_nll_coef") and successes:  # VAPO (2504.05118)
                mean = math.fsum(successes) / len(successes)
                imitated = config["positive_nll_coef"] * mean
            return math.fsum(flat) / len(flat) + imitated
        divisor = config.get("fixed_length_normalizer")  # Dr. GRPO (2503.20783)
        means = [math.fsum(row) / (divisor or max(len(row), 1)) for row in rows]
        return math.fsum(means) / len(rows)

    return loss


def row_losses(
    advantage: float, tokens: list[dict[str, float]], config: Any
) -> list[float]:
    """Return the losses of the tokens of one row."""
    for token in tokens:
        token["log_ratio"] = token["new"] - token["old"]
        token["held_log_ratio"] = token["held"] - token["old"]
        token["weight"] = math.exp(token["old"] - token["sampler"])
    if (
        config.get("sequence_level_importance_ratios") and tokens
    ):  # GSPO (2507.18071), eq. 5
        mean = math.fsum(token["log_ratio"] for token in tokens) / len(tokens)
        total = math.fsum(token["old"] - token["sampler"] for token in tokens)
        for token in tokens:
            token["log_ratio"], token["weight"] = mean, math.exp(total)
    if tokens:
        spread = [token["old"] - token["sampler"] for token in tokens]
        mean_weight = math.exp(math.fsum(spread) / len(tokens))
        for token in tokens:
            token["weight"] = truncated(token["weight"], mean_weight, config)
    losses = []
    for token in tokens:
        value = policy_loss(advantage, token, config)
        if config.get("use_importance_sampling_correction"):
            value *= token["weight"]
        if config["reference_policy_kl_penalty"]:
            value += config["reference_policy_kl_penalty"] * kl(token, config)
        if config.get("entropy_coef"):
            value -= config["entropy_coef"] * entropy(token)
        losses.append(value)
    return losses


def policy_loss(advantage: float, token: dict[str, float], config: Any) -> float:
    """Return the loss without importance correction and KL."""
    low, high = 1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"]
    if config.get("disable_ppo_ratio"):  # REINFORCE
        return -advantage * token["new"]
    if config.get("use_cispo"):  # 2506.13585, eq. 4
        weight = min(max(math.exp(token["held_log_ratio"]), low), high)
        return -weight * advantage * token["new"]
    if config.get("force_on_policy_ratio"):
        return -advantage * math.exp(token["new"] - token["held"])
    ratio = math.exp(token["log_ratio"])  # PPO (1707.06347), eq. 7
    value = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    dual = config.get("ratio_clip_c")  # 1912.09729, eq. 8
    return min(value, -advantage * dual) if dual and advantage < 0 else value


def truncated(weight: float, mean_weight: float, config: Any) -> float:
    """Return the truncated sampler weight: TIS, ICE-POP (2510.18855), by sequence."""
    kind = config.get("truncated_importance_sampling_type")
    if kind is None:
        return weight
    high = config["truncated_importance_sampling_ratio"]
    low = config.get("truncated_importance_sampling_ratio_min") or 0.0
    if kind == "tis":
        return min(max(weight, low), high)
    judged = weight if kind == "icepop" else mean_weight
    return weight if low <= judged <= high else 0.0


def kl(token: dict[str, float], config: Any) -> float:
    """Estimate KL(policy || reference); Schulman, Approximating KL Divergence."""
    r = token["reference"] - token["new"]
    value = {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[
        config["reference_policy_kl_type"]
    ]
    direct = config["reference_policy_kl_gradient"] == "direct"
    if config.get("use_on_policy_kl_approximation"):
        place = token["held"] if direct else token["new"]
        return value * math.exp(place - token["sampler"])
    return value if direct else value * math.exp(token["new"] - token["held"])


def entropy(token: dict[str, float]) -> float:
    """Return -w log p; gradients flow through w and log p, not through w alone."""
    weight = math.exp(token["new"] - token["old"])
    held = math.exp(token["held"] - token["old"])
    return -weight * token["new"] + weight - held
