"""Losses of NeMo RL: dict configs, positional inputs, float metrics.

A metric is the micro-batch's share of the global batch, so that the metrics of
micro-batches can be summed. The trainers of this package reduce typed values instead:
give them the losses of `rl_algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_algorithms import losses
from rl_algorithms.compat.nemo_rl.differences import warn_difference
from rl_algorithms.compat.nemo_rl.options import as_keys, refuse_keys
from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.distillation_config import KLDirection
from rl_distributed.metrics.values import Max, Mean, MetricValue, Min, Sum

__all__ = [
    "ClippedPGLossFn",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "MseValueLossFn",
    "NLLLossFn",
    "PreferenceLossFn",
    "calculate_kl",
]

Result = tuple[Tensor, dict[str, float]]
_LOGPROBS = ("next_token_logprobs",)
_COUNTED = ("data", "global_valid_seqs", "global_valid_toks")


@dataclass(frozen=True)
class Call:
    """The arguments of a loss, by keyword or by position.

    Positional arguments are the inputs of the loss, the batch, and the numbers of
    sequences and of tokens of the global batch; or the latter three before the inputs.
    """

    data: Mapping[str, Any]
    global_valid_seqs: Tensor
    global_valid_toks: Tensor
    inputs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        loss: object,
        names: tuple[str, ...],
        positional: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Call:
        """Bind each argument to its name.

        Args:
            loss: The loss that is called.
            names: Names of its inputs, in order.
            positional: Positional arguments.
            keywords: Keyword arguments.

        Raises:
            LossInputError: There are too many or too few arguments, or one twice.
        """
        # Only the batch is a mapping, which tells the two orders apart.
        batch_first = bool(positional) and isinstance(positional[0], Mapping)
        order = (*_COUNTED, *names) if batch_first else (*names, *_COUNTED)
        given = dict(zip(order, positional, strict=False))
        missing = [n for n in _COUNTED if n not in given and n not in keywords]
        twice = [name for name in given if name in keywords]
        data = given.get("data", keywords.get("data"))
        wrong = missing or twice or len(positional) > len(order)
        if wrong or not isinstance(data, Mapping):
            arguments = ", ".join((*names, *_COUNTED))
            raise LossInputError(
                f"{type(loss).__name__} takes ({arguments}), with a "
                f"mapping as data: got {len(positional)} arguments by place and "
                f"{', '.join(keywords) or 'none'} by name"
            )
        found = {**given, **keywords}
        data, num_seqs, num_toks = (found.pop(name) for name in _COUNTED)
        return cls(data, num_seqs, num_toks, found)

    def counted(self, data: Mapping[str, Any]) -> tuple[Any, Tensor, Tensor]:
        """Return the batch and the global counts as arguments of our losses."""
        return data, self.global_valid_seqs, self.global_valid_toks


class ClippedPGLossFn(losses.ClippedPGLossFn):
    """See `rl_algorithms.ClippedPGLossFn`; metrics are floats.

    Args:
        cfg: Configuration of NeMo RL.
        use_fused_linear_logprobs: Not supported.

    Raises:
        ConfigError: A key is unknown, or requests an unsupported feature.
    """

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
        keys = as_keys(cfg)
        refuse_keys(
            keys,
            {
                "positive_example_nll_weight": (
                    0.0,
                    "set positive_nll_coef, and give the column nll_weights; it is "
                    "normalised over the global batch, not over each micro-batch",
                )
            },
            "loss_fn",
        )
        fused = {"use_fused_linear_logprobs": use_fused_linear_logprobs}
        refuse_keys(
            fused,
            {
                "use_fused_linear_logprobs": (
                    False,
                    "policy.logprob_chunk_size saves the memory of the logits",
                )
            },
            "ClippedPGLossFn",
        )
        super().__init__(keys)

    def __call__(  # type: ignore[override]
        self, *positional: Any, **keywords: Any
    ) -> Result:
        """See `rl_algorithms.ClippedPGLossFn`; arguments as in `Call`."""
        call = Call.of(self, _LOGPROBS, positional, keywords)
        loss, metrics = super().__call__(*call.counted(call.data), **call.inputs)
        self._tell(call.data, call.inputs, metrics)
        floats = _floats(metrics, call.global_valid_toks)
        for name, empty in (("min", math.inf), ("max", -math.inf)):
            floats.setdefault(f"probs_ratio_{name}", empty)
            floats.setdefault(f"probs_ratio_clamped_{name}", empty)
        floats.setdefault("kl_penalty", 0.0)
        return loss, floats

    def _tell(
        self,
        data: Mapping[str, Any],
        inputs: Mapping[str, Tensor],
        metrics: Mapping[str, MetricValue],
    ) -> None:
        config = self.config
        differ = [n for n in ("js_divergence_error", "policy_kl_error") if n in metrics]
        if config.reference_policy_kl_type != "k3" and "gen_kl_error" in metrics:
            differ.append("gen_kl_error")
        if config.truncated_importance_sampling_type == "seq-mask-tis":
            differ.append("is_oob_ratio")
        if config.sequence_level_importance_ratios:
            differ.append("sampling_importance_ratio")
        if differ:
            warn_difference(
                f"ClippedPGLossFn defines {', '.join(differ)} in another way than "
                "nemo_rl"
            )
        if config.has_kl_term and self._bounds_cut(data, inputs):
            warn_difference(
                "ClippedPGLossFn: a clamp cuts off KL estimates; their gradient "
                "through the sampling distribution stays, and is 0 in nemo_rl"
            )

    @torch.no_grad()
    def _bounds_cut(
        self, data: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> bool:
        """Return whether a KL estimate of a trained token exceeds a bound."""
        config = self.config
        if config.reference_policy_kl_gradient != "score_function":
            return False
        logprobs = inputs["next_token_logprobs"]
        trained = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1) != 0
        current = logprobs[trained]
        reference = data["reference_policy_logprobs"][:, 1:][trained].to(current.dtype)
        weights = None
        if config.use_on_policy_kl_approximation:
            sampler = data["generation_logprobs"][:, 1:][trained].to(current.dtype)
            weights = (current - sampler).exp()
        free = losses.calculate_kl(
            current, reference, config.reference_policy_kl_type, None, None, weights
        )
        moved = (reference - current).abs()
        low = config.kl_input_clamp_value or math.inf
        high = config.kl_output_clamp_value or math.inf
        return bool(((moved > low) | (free.abs() > high)).any())


class NLLLossFn(losses.NLLLossFn):
    """See `rl_algorithms.NLLLossFn`; metrics are floats."""

    def __call__(  # type: ignore[override]
        self,
        *positional: Any,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
        **keywords: Any,
    ) -> Result:
        """See `rl_algorithms.NLLLossFn`; arguments as in `Call`.

        Raises:
            LossInputError: The parts of DPO are requested.
        """
        if dpo_loss or dpo_average_log_probs:
            raise LossInputError(
                "NLLLossFn: dpo_loss is not here; DPOLossFn has sft_loss_weight and "
                "sft_average_log_probs"
            )
        call = Call.of(self, _LOGPROBS, positional, keywords)
        loss, metrics = super().__call__(*call.counted(call.data), **call.inputs)
        return loss, _floats(metrics, call.global_valid_toks)


class DPOLossFn(losses.DPOLossFn):
    """See `rl_algorithms.DPOLossFn`; `reference_policy_logprobs` is rolled by -1.

    Entry i of that column belongs to token i + 1 in NeMo RL, but to token i in
    `rl_algorithms`. A column that is recognisably not rolled is rejected.
    """

    def __init__(self, cfg: Any = None) -> None:
        super().__init__(as_keys(cfg))

    def __call__(  # type: ignore[override]
        self, *positional: Any, **keywords: Any
    ) -> Result:
        """See `rl_algorithms.DPOLossFn`; arguments as in `Call`."""
        call = Call.of(self, _LOGPROBS, positional, keywords)
        name = "reference_policy_logprobs"
        columns = {**call.data, name: _rolled_back(call.data.get(name))}
        loss, metrics = super().__call__(*call.counted(columns), **call.inputs)
        return loss, _floats(metrics, call.global_valid_seqs / 2)


class PreferenceLossFn(losses.PreferenceLossFn):
    """See `rl_algorithms.PreferenceLossFn`; takes `logits`, one reward per row."""

    def __call__(  # type: ignore[override]
        self, *positional: Any, **keywords: Any
    ) -> Result:
        """Give this micro-batch's share of the loss, and its metrics.

        Args:
            positional: As of `Call`; the input is `logits` [2 B] or [2 B, 1], the
                rewards, and the batch has `sample_mask` [2 B].
            keywords: The same by name.
        """
        call = Call.of(self, ("logits",), positional, keywords)
        logits = call.inputs.get("logits")
        if logits is None or logits.numel() != len(logits):
            got = "nothing" if logits is None else list(logits.shape)
            raise LossInputError(
                f"PreferenceLossFn takes logits of [2 B] or [2 B, 1] rewards: got {got}"
            )
        # Rows of width 1, whose only position is the last token.
        values = logits.reshape(-1, 1)
        columns = {**call.data, "value_mask": torch.ones_like(values)}
        loss, metrics = super().__call__(*call.counted(columns), values=values)
        return loss, _floats(metrics, call.global_valid_seqs / 2)


class MseValueLossFn(losses.MseValueLossFn):
    """See `rl_algorithms.MseValueLossFn`; all columns refer to the same token.

    In NeMo RL, entry i of the values belongs to entry i of the returns and of the mask;
    `rl_algorithms` compares it with their entry i + 1.
    """

    def __init__(self, cfg: Any = None) -> None:
        keys = as_keys(cfg)
        # In NeMo RL, 0 disables it as well.
        super().__init__({**keys, "cliprange": keys.get("cliprange") or None})

    def __call__(  # type: ignore[override]
        self, *positional: Any, **keywords: Any
    ) -> Result:
        """Give this micro-batch's share of the loss, and its metrics.

        Args:
            positional: As of `Call`; the input is `logits` [B, S] or [B, S, 1], the
                values, and the batch has `returns`, `token_mask`, `sample_mask`, and
                with a clip range `values`.
            keywords: The same by name.
        """
        call = Call.of(self, ("logits",), positional, keywords)
        logits = call.inputs.get("logits")
        if logits is None:
            raise LossInputError("MseValueLossFn takes logits [B, S]: got nothing")
        values = logits.squeeze(-1) if logits.dim() > 2 else logits
        # Our loss takes the value before each token, so columns shift by one.
        columns = dict(call.data)
        for name, sides in (
            ("returns", (1, 0)),
            ("token_mask", (1, 0)),
            ("values", (0, 1)),
        ):
            if name in columns:
                columns[name] = pad(columns[name], sides)
        loss, metrics = super().__call__(
            *call.counted(columns), values=pad(values, (0, 1))
        )
        floats = _floats(metrics, call.global_valid_toks)
        for ours, theirs in _VALUE_METRICS.items():
            floats[theirs] = floats.pop(ours)
        return loss, floats


_VALUE_METRICS = {
    "value_mean": "values_mean",
    "return_mean": "returns_mean",
    "value_clip_fraction": "vf_clipfrac",
}


class DistillationLossConfig(losses.DistillationLossConfig):
    """See `rl_algorithms.DistillationLossConfig`; `mixed` by default, as there."""

    kl_type: KLDirection = "mixed"


class DistillationLossFn(losses.DistillationLossFn):
    """See `rl_algorithms.DistillationLossFn`; takes log-probs instead of logits.

    The default divergence is `mixed`.
    """

    def __init__(self, cfg: Any = None) -> None:
        super().__init__({"kl_type": "mixed", **as_keys(cfg)})

    def __call__(  # type: ignore[override]
        self, *positional: Any, **keywords: Any
    ) -> Result:
        """Give this micro-batch's share of the loss, and its metrics.

        Args:
            positional: As of `Call`; the inputs are `student_topk_logprobs` and
                `teacher_topk_logprobs` [B, S-1, k], and `H_all` [B, S-1], the sum of
                p log p over all tokens, where `zero_outside_topk` needs it. The batch
                has `token_mask` [B, S] and `sample_mask` [B].
            keywords: The same by name.
        """
        names = ("student_topk_logprobs", "teacher_topk_logprobs", "H_all")
        call = Call.of(self, names, positional, keywords)
        given = call.inputs
        for name in names[:2]:
            if name not in given:
                raise LossInputError(
                    f"DistillationLossFn takes {names[0]} and {names[1]} [B, S-1, k], "
                    "log-probs of the teacher's k tokens, and no logits: got "
                    f"{', '.join(given) or 'nothing'}; torch.log_softmax(logits, "
                    "dim=-1).gather(-1, topk_indices) makes them"
                )
        student, teacher = given[names[0]], given[names[1]]
        if not self.config.zero_outside_topk:
            _tell_of_other_sums(student, teacher)
        # The last position predicts nothing, and our loss has no entry for it.
        columns = {
            **call.data,
            "topk_logits": pad(teacher, (0, 0, 0, 1)),
            "topk_log_normalizer": pad(torch.zeros_like(teacher[..., 0]), (0, 1)),
        }
        ours = {
            "student_topk_logits": student,
            # Log-probs are logits that are already normalized.
            "student_log_normalizer": torch.zeros_like(student[..., 0]),
        }
        if given.get("H_all") is not None:
            ours["student_entropy"] = -given["H_all"]
        loss, metrics = super().__call__(*call.counted(columns), **ours)
        return loss, _floats(metrics, call.global_valid_toks)


@torch.no_grad()
def _tell_of_other_sums(*logprobs: Tensor) -> None:
    """Warn if probabilities of the top k tokens do not sum to 1."""
    sums = torch.stack([values.float().exp().sum(-1) for values in logprobs])
    if bool(((sums - 1).abs() > 1e-3).any()):
        warn_difference(
            "DistillationLossFn normalises log-probs over the k tokens, whose "
            f"probabilities sum to {float(sums.min()):.3g} to {float(sums.max()):.3g} "
            "here; nemo_rl takes them as they are"
        )


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: Any = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """See `rl_algorithms.calculate_kl`, where the last argument is `weights`."""
    return losses.calculate_kl(
        logprobs,
        logprobs_reference,
        kl_type,
        input_clamp_value,
        output_clamp_value,
        importance_sampling_weights,
    )


def _floats(metrics: Mapping[str, MetricValue], count: Tensor) -> dict[str, float]:
    """Return metrics as floats; means become shares of a mean over `count`."""
    # A global batch without trained rows gives 0 and not NaN.
    whole = max(float(count), 1.0)
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mean):
            numbers[name] = value.total / whole
        elif isinstance(value, Sum | Min | Max):
            numbers[name] = float(value)
    return numbers


def _rolled_back(values: Any) -> Tensor:
    """Undo the roll by -1: return [B, S] with the log-prob of token i at entry i.

    Raises:
        LossInputError: The column is missing or not rolled.
    """
    name = "column 'reference_policy_logprobs'"
    if not isinstance(values, Tensor) or values.dim() != 2:
        got = (
            list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        )
        raise LossInputError(f"{name} must be a tensor [2 B, S]: got {got}")
    if bool((values[:, 0] == 0).all()) and bool((values[:, -1] != 0).any()):
        raise LossInputError(
            f"{name} must be rolled by -1 for the DPOLossFn of nemo_rl: entry i of "
            "token i + 1, the last one 0.0. Got 0.0 in all first entries and numbers "
            "in last ones, as rl_algorithms.DPOLossFn takes it; use that, or "
            "torch.roll(column, -1, dims=-1)"
        )
    warn_difference(
        "DPOLossFn of nemo_rl reads reference_policy_logprobs as rolled by -1; "
        "rl_algorithms.DPOLossFn does not: roll the column back when you move"
    )
    return pad(values[:, :-1], (1, 0))
