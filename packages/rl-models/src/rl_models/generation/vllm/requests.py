"""Conversion of rows to vLLM's requests, and of its completions to rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_models.errors import GenerationError
from rl_models.generation.completions import Completion
from rl_models.generation.vllm.engine_args import check_temperature
from rl_models.types import SamplingParams

__all__ = ["RowRequest", "build_completion", "build_requests"]

IntArray = npt.NDArray[np.int64]

# vLLM reads -1 as "no seed", and keeps seeds in signed integers of 64 bits.
_SEEDS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One row as vLLM takes it."""

    token_ids: list[int]
    params: Any
    """`vllm.SamplingParams`."""


def build_requests(
    input_ids: torch.Tensor,
    lengths: IntArray,
    seeds: torch.Tensor,
    stop_strings: Sequence[Sequence[str]],
    params: SamplingParams,
    *,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    greedy: bool,
) -> list[RowRequest]:
    """Return the requests of all rows.

    Greedy rows report log-probs at temperature 1 without top-k and top-p, others those
    of the distribution that they were drawn from.
    """
    from vllm import SamplingParams as VllmParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    if not greedy:
        check_temperature(params.temperature, "temperature")
    common: dict[str, Any] = {
        "temperature": 0.0 if greedy else params.temperature,
        "top_p": 1.0 if greedy else params.top_p,
        "top_k": 0 if greedy else params.top_k or 0,
        "max_tokens": max_new_tokens,
        # Of the sampled token alone. Flat lists spare the garbage collector an object
        # per token.
        "logprobs": 0,
        "flat_logprobs": True,
        # Only the ids given here end a row; they include the model's own end token
        # where that shall end rows.
        "ignore_eos": True,
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": False,
        # The tokens of a row are trained on, so none that was sampled may be cut off.
        "include_stop_str_in_output": True,
        # `AsyncLLM` would otherwise return every row once per token.
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    requests = []
    rows = input_ids.tolist()
    for row, seed in enumerate(seeds.tolist()):
        stop = list(dict.fromkeys(stop_strings[row]))
        own = VllmParams(
            seed=None if greedy else seed % _SEEDS,
            stop=stop or None,
            # Needed to find stop strings, and a waste of time without any.
            detokenize=bool(stop),
            **common,
        )
        requests.append(RowRequest(rows[row][: int(lengths[row])], own))
    return requests


def build_completion(output: Any, row: int, version: int) -> Completion:
    """Check vLLM's output for a row and convert it.

    Args:
        output: `vllm.outputs.RequestOutput`, finished.
        row: Number of the row, for messages.
        version: Version of the weights for tokens of which vLLM names none.

    Raises:
        GenerationError: The row did not end by itself, or a log-prob is missing or is
            not a number.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in ("stop", "length"):
        raise GenerationError(
            f"vLLM gave up row {row} ({completion.finish_reason}) after "
            f"{len(completion.token_ids)} tokens; its log says why"
        )
    tokens = list(completion.token_ids)
    found = completion.logprobs
    starts = [] if found is None else list(found.start_indices)
    logprobs = [found.logprobs[start] for start in starts[: len(tokens)]]
    # Compared with the tokens: a log-prob of another token would train silently wrong.
    named = [found.token_ids[start] for start in starts[: len(tokens)]]
    if named != tokens or not tokens:
        raise GenerationError(
            f"vLLM gave {len(named)} log-probs for the {len(tokens)} tokens of row "
            f"{row}; each sampled token needs its own"
        )
    if not all(map(math.isfinite, logprobs)):
        raise GenerationError(
            f"The model gave logits that are not numbers in row {row}: a sampled token "
            f"has log-prob {next(x for x in logprobs if not math.isfinite(x))}. Its "
            "weights may have diverged."
        )
    versions = [version] * len(tokens)
    for span in completion.weight_versions or ():
        count = min(span.end, len(tokens)) - span.start
        versions[span.start : span.start + count] = [int(span.version)] * count
    return Completion(tokens, logprobs, versions, completion.finish_reason == "length")
