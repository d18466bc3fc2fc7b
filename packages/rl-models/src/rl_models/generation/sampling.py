"""From logits to one token per row: temperature, top-k, top-p, inverse CDF, argmax."""

from __future__ import annotations

import torch

from rl_distributed.errors import ConfigError
from rl_models.types import SamplingParams

__all__ = ["check_sampling_params", "greedy_tokens", "sample_tokens", "truncate_logits"]


def check_sampling_params(params: SamplingParams) -> None:
    """Refuse values that define no distribution.

    Raises:
        ConfigError: The first field that breaks its rule.
    """
    temperature, top_p, top_k = params.temperature, params.top_p, params.top_k
    limit = params.max_new_tokens
    rules = (
        (temperature > 0, "temperature", "be > 0; use greedy=True for the argmax"),
        (0 < top_p <= 1, "top_p", "lie in (0, 1]; 1.0 switches it off"),
        (top_k is None or top_k > 0, "top_k", "be positive; None switches it off"),
        (limit is None or limit > 0, "max_new_tokens", "be positive"),
    )
    for holds, name, rule in rules:
        if not holds:
            raise ConfigError(
                f"SamplingParams.{name} must {rule}: got {getattr(params, name)!r}."
            )


def truncate_logits(
    logits_B_V: torch.Tensor, top_k: int | None, top_p: float
) -> torch.Tensor:
    """Set the logits of tokens that may not be sampled to -inf.

    Top-k keeps the k best and what ties with the last of them. Top-p then keeps the
    smallest set of best tokens whose probability (renormalised after top-k) reaches p;
    the best token always stays.
    """
    if top_k is not None and top_k < logits_B_V.shape[-1]:
        least_B_1 = logits_B_V.topk(top_k, dim=-1).values[:, -1:]
        logits_B_V = logits_B_V.masked_fill(logits_B_V < least_B_1, -torch.inf)
    if top_p < 1.0:
        # Stable, so that the choice among equal logits does not vary.
        sorted_B_V, order_B_V = logits_B_V.sort(dim=-1, descending=True, stable=True)
        probs_B_V = sorted_B_V.softmax(dim=-1, dtype=torch.float32)
        before_B_V = probs_B_V.cumsum(dim=-1) - probs_B_V
        # The mass before a token decides, so the token that reaches p stays.
        drop_B_V = before_B_V >= top_p
        drop_B_V[:, 0] = False
        drop_B_V = torch.zeros_like(drop_B_V).scatter_(1, order_B_V, drop_B_V)
        logits_B_V = logits_B_V.masked_fill(drop_B_V, -torch.inf)
    return logits_B_V


def sample_tokens(
    logits_B_V: torch.Tensor, noise_B: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits_B_V: Float32 logits.
        noise_B: Uniform noise inside (0, 1).
        params: Temperature, top-k and top-p.

    Returns:
        [B] tokens and [B] their log-probabilities under the distribution drawn from.
    """
    if params.temperature != 1.0:
        logits_B_V = logits_B_V / params.temperature
    if params.top_k is not None or params.top_p < 1.0:
        logits_B_V = truncate_logits(logits_B_V, params.top_k, params.top_p)
    logprobs_B_V = logits_B_V.log_softmax(dim=-1)
    cumulative_B_V = logprobs_B_V.exp().cumsum_(dim=-1)
    # The last entry is 1 up to rounding. The noise is at most 1 - 2^-23, so the target
    # stays below that entry, and a token without probability is never the first above.
    target_B_1 = cumulative_B_V[:, -1:] * noise_B[:, None]
    token_B_1 = torch.searchsorted(cumulative_B_V, target_B_1, right=True)
    # Needed only for logits that are NaN; callers check the log-probs for these.
    token_B_1.clamp_(max=logits_B_V.shape[-1] - 1)
    return token_B_1[:, 0], logprobs_B_V.gather(1, token_B_1)[:, 0]


def greedy_tokens(logits_B_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's most likely token, and its log-prob at temperature 1."""
    token_B = logits_B_V.argmax(dim=-1)
    logprobs_B_V = logits_B_V.log_softmax(dim=-1)
    return token_B, logprobs_B_V.gather(1, token_B[:, None])[:, 0]
