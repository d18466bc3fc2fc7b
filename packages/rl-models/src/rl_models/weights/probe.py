"""Check on fixed rows that every replica computes what the trainer computes.

```
fixed prompts -> each replica samples a few tokens -> its log-probs
                                     same rows     -> the trainer's log-probs
                                                      |difference| within tolerance?
```
Digests prove that the right bytes arrived; the probe proves that the engine computes
with them. A part of an engine that still holds older weights (a packed copy of a tied
matrix, a cache of prompts) shows here. The rows are the same each time, and longer than
a block of a prefix cache where the context allows, so that a cache that outlived an
update is hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.logs.logging import get_logger
from rl_models.checkpoint.context_length import CONTEXT_KEYS, context_length
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.errors import WeightSyncError
from rl_models.interfaces import lacking
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    InputRows,
    SamplingParams,
)
from rl_models.weights.config import ProbeConfig
from rl_models.weights.protocols import (
    InspectableSink,
    ProbedSink,
    ProbedSource,
    SamplerSettings,
    TrainerSettings,
    WeightSink,
    WeightSource,
)

__all__ = ["Probe", "probe_rows"]

_logger = get_logger(__name__)

# vLLM shares prefixes by the block, which has 128 tokens on a CPU: a shorter prompt
# would never read a stale cache.
_LONGEST_PROMPT = 160
_SHOWN = 5
# Largest and mean difference of log-probs, by the number of sides that compute in
# bfloat16. One is worse than two: the other side then has none of its rounding errors.
_TOLERANCES = {0: (1e-4, 1e-4), 1: (1e-1, 2e-2), 2: (5e-2, 1e-2)}


def vocabulary_and_context(
    name: str, overrides: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Return the size of a model's vocabulary, and its longest sequence.

    Both are read from `config.json` where possible: transformers' own class takes a
    second and a half of imports, during the first step.

    Args:
        name: A model folder or hub name.
        overrides: Fields of the config to replace.
    """
    found = {**(read_model_config(name) or {}), **overrides}
    if isinstance(found.get("vocab_size"), int):
        for key in CONTEXT_KEYS:
            if isinstance(found.get(key), int) and found[key] > 0:
                return found["vocab_size"], found[key]
    config = transformers.AutoConfig.from_pretrained(name, **overrides)
    return config.get_text_config().vocab_size, context_length(config)


def probe_rows(
    vocab_size: int, longest: int, *, prompt_limit: int = _LONGEST_PROMPT
) -> GenerationInput:
    """Return four prompts of three lengths, fixed for a vocabulary and a length.

    Args:
        vocab_size: Ids are below it.
        longest: Tokens that a prompt may have.
        prompt_limit: Maximum number of prompts, whatever the context.
    """
    width = max(1, min(longest, prompt_limit))
    # A generator of its own: the run's random numbers must not depend on whether there
    # was a probe.
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, vocab_size, (4, width), generator=generator)
    # Rows that fill the batch, and rows that are padded in it.
    input_lengths = torch.tensor([width, width, max(1, width // 2), min(8, width)])
    input_ids[torch.arange(width) >= input_lengths[:, None]] = 0
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": input_lengths,
            "seeds": torch.arange(4),
        }
    )


class Probe:
    """Compares the log-probs of a trainer with those of its replicas.

    Args:
        config: Period and tolerances.
        policy: Source of the weights, such as a `TrainingPolicy`. Nothing is compared
            unless it is a `ProbedSource`.
        generation: Receiver of the weights, such as a `GenerationPolicy`; likewise a
            `ProbedSink`.
    """

    def __init__(
        self, config: ProbeConfig, policy: WeightSource, generation: WeightSink
    ) -> None:
        self._config = config
        self._policy = policy
        self._generation = generation
        self._rows: GenerationInput | None = None
        self._num_new = config.num_new_tokens
        self._has_told = False

    def is_due(self, num_syncs: int, *, is_new: bool = False) -> bool:
        """Return whether this sync is to be probed.

        Args:
            num_syncs: Number of earlier syncs.
            is_new: Whether a replica is another process than at the last probe.
        """
        period = self._config.period
        return period > 0 and (is_new or num_syncs % period == 0)

    def check(self, version: int) -> None:
        """Compare every replica with the trainer, if its backend returns log-probs.

        Raises:
            WeightSyncError: A replica differs; the message names it, and, if the
                backend can read weights back, the tensors that differ from what was
                sent. It does not generate until a sync succeeds.
        """
        for side, protocol in (
            (self._policy, ProbedSource),
            (self._generation, ProbedSink),
        ):
            missing = lacking(side, protocol)
            if missing:
                self._warn_once(f"{type(side).__name__} has no {', '.join(missing)}")
                return
        source = cast(ProbedSource, self._policy)
        sink = cast(ProbedSink, self._generation)
        if self._rows is None:
            self._rows = self._fixed_rows(source, sink)
        sampling = SamplingParams(
            # Without top-p and top-k, whose cut falls differently where two tokens are
            # almost equally likely.
            source.config.logprob_temperature,
            1.0,
            None,
            self._num_new,
        )
        # Every replica samples all rows: one faulty replica among many must show.
        outputs = sink.generate_on_each(self._rows, sampling)
        # Log-probs are optional for a backend, so this is no error of the user's.
        if any("logprobs" not in output for output in outputs.values()):
            self._warn_once("the generation backend gives no log-probs")
            return
        problems = []
        for (replica, output), logprobs in zip(
            outputs.items(),
            _trainer_logprobs(source, list(outputs.values())),
            strict=True,
        ):
            apart = _apart(output, logprobs)
            problem = self._difference(apart, source.config, sink.config)
            if problem:
                problems.append(
                    f"Generation replica {replica} does not compute with the weights "
                    f"of version {version}: {problem}; {_culprits(sink, replica)}."
                )
        if problems:
            # Before raising: a caller that catches the error must not sample either.
            sink.refuse(" ".join(problems))
            raise WeightSyncError(
                " ".join(problems) + " Nothing is generated until a sync succeeds; "
                "weight_sync.probe holds the tolerances."
            )

    def _warn_once(self, reason: str) -> None:
        # Once per run and not once per probe: nothing about it can change meanwhile.
        if not self._has_told:
            _logger.warning(
                "%s, so whether the generator computes with the weights that it was "
                "given cannot be checked",
                reason,
            )
            self._has_told = True

    def _fixed_rows(self, source: ProbedSource, sink: ProbedSink) -> GenerationInput:
        settings, sampler = source.config, sink.config
        overrides = dict(settings.hf_config_overrides)
        vocab_size, context = vocabulary_and_context(settings.model_name, overrides)
        limits = (settings.row_limit, sampler.max_context_length, context)
        longest = min(limit for limit in limits if limit is not None)
        # A model with a short context still gets a prompt and an answer.
        self._num_new = max(1, min(self._config.num_new_tokens, longest // 2))
        return probe_rows(vocab_size, longest - self._num_new)

    def _difference(
        self, apart: torch.Tensor, trainer: TrainerSettings, sampler: SamplerSettings
    ) -> str | None:
        most, mean = float(apart.max()), float(apart.mean())
        sides = (trainer.precision, sampler.precision)
        default = _TOLERANCES[sides.count("bfloat16")]
        allowed_most = self._config.max_difference or default[0]
        allowed_mean = self._config.mean_difference or default[1]
        # Written so that NaN fails: every comparison with it is false.
        if most <= allowed_most and mean <= allowed_mean:
            return None
        return (
            f"log-probs of {len(apart)} probe tokens differ from the trainer's by "
            f"{most:.3g} at most and {mean:.3g} on average (allowed are "
            f"{allowed_most:g} and {allowed_mean:g})"
        )


def _trainer_logprobs(
    source: ProbedSource, outputs: list[GenerationOutput]
) -> list[torch.Tensor]:
    """[4, S] log-probs for each replica's rows; equal rows are computed once."""
    known: dict[bytes, torch.Tensor] = {}
    results = []
    for output in outputs:
        key = output["output_ids"].numpy().tobytes()
        # The rows carry seeds, so replicas that are in order sample the same tokens; a
        # pass of the trainer costs all its ranks.
        if key not in known:
            known[key] = source.get_logprobs(_as_rows(output))["logprobs"]
        results.append(known[key])
    return results


def _apart(output: GenerationOutput, logprobs: torch.Tensor) -> torch.Tensor:
    """Return [N] float64 differences of the log-probs of the sampled tokens."""
    mask = _as_rows(output)["token_mask"] != 0
    apart: torch.Tensor = (output["logprobs"].double() - logprobs.double())[mask].abs()
    return apart


def _culprits(sink: ProbedSink, replica: int) -> str:
    names = None
    if not lacking(sink, InspectableSink):
        names = cast("InspectableSink", sink).changed_weights(replica)
    if names is None:
        return "its engine cannot read weights back, so the tensor is not known"
    if not names:
        return (
            "all tensors that it holds are those that were sent, so what is wrong "
            "is a cache, a packed copy, or the trainer's export"
        )
    more = ", ..." if len(names) > _SHOWN else ""
    return f"it holds other values of {', '.join(names[:_SHOWN])}{more}"


def _as_rows(output: GenerationOutput) -> InputRows:
    """Return the sampled rows as the trainer takes them."""
    totals = output["unpadded_sequence_lengths"]
    starts = totals - output["generation_lengths"]
    columns = torch.arange(output["output_ids"].shape[1])
    # Prompts count for nothing: generators return log-probs of sampled tokens only.
    mask = (columns >= starts[:, None]) & (columns < totals[:, None])
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": totals,
            "token_mask": mask.long(),
        }
    )
