"""The loop that samples a batch.

```
rows -> plan_prompts -> packed prefill of distinct prompts
     -> [ sample -> stop? -> step ]
          ^ finished rows leave |
          | waiting rows join   |
          +---------------------+
```
Where a batch holds fewer rows than there are, the others wait, and take the places of
rows that have finished (continuous batching): a long row holds up none of them.

Weights may be replaced between two passes of the loop. Keys and values that the old
ones have computed stay in the cache, and rows go on from them with the new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from rl_models.errors import GenerationError
from rl_models.generation.huggingface.decoder import (
    Decoder,
    DecodingState,
    GrowingState,
)
from rl_models.generation.huggingface.prompts import PromptPlan, plan_prompts
from rl_models.generation.huggingface.stopping import StopStrings, StopTokens
from rl_models.generation.huggingface.weight_turns import WeightTurns
from rl_models.generation.noise import noise_streams, uniform_noise
from rl_models.generation.sampling import greedy_tokens, sample_tokens
from rl_models.types import SamplingParams

__all__ = ["Continuations", "OnStep", "SamplingRequest", "sample_batch"]

IntArray = npt.NDArray[np.int64]

OnStep = Callable[[IntArray, IntArray, npt.NDArray[np.float32]], None]
"""Called after every step with the unfinished rows, their newest tokens and the
log-probs of these; an exception ends the batch."""

# Prompt tokens that go through the model together; it limits activations and logits.
_PREFILL_TOKENS = 16384
# Finished rows leave the batch once they are this share of it, because each removal
# copies a part of the cache.
_LEAVE_SHARE = 1 / 16
# The same while others wait, whose prompts cost about a step however few they are.
_REPLACE_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Rows to continue, and the settings for it."""

    input_ids: torch.Tensor
    """[B, S] right-padded."""
    lengths: IntArray
    """[B] prompt lengths."""
    seeds: torch.Tensor
    """[B] int64 seeds of the rows' noise."""
    stop_strings: Sequence[Sequence[str] | None]
    """Stop strings of each row."""
    params: SamplingParams
    """Temperature, top-k and top-p."""
    max_new_tokens: int
    """Maximum number of new tokens per row."""
    greedy: bool
    """Take the most likely token instead of sampling."""
    on_step: OnStep | None = None
    """Watches the batch while it is sampled."""

    def rows(self, rows: IntArray) -> SamplingRequest:
        """Return the same request for some of the rows."""
        index = torch.from_numpy(rows)
        lengths = self.lengths[rows]
        return SamplingRequest(
            self.input_ids[index, : int(lengths.max())],
            lengths,
            self.seeds[index],
            [self.stop_strings[row] for row in rows],
            self.params,
            self.max_new_tokens,
            self.greedy,
            self._on_step_of(rows),
        )

    def _on_step_of(self, rows: IntArray) -> OnStep | None:
        watch = self.on_step
        if watch is None:
            return None
        return lambda part, tokens, logprobs: watch(rows[part], tokens, logprobs)


@dataclass(frozen=True, slots=True)
class Continuations:
    """The continuations of a request's rows."""

    tokens_T_B: torch.Tensor
    """Sampled tokens; undefined from a row's length on."""
    logprobs_T_B: torch.Tensor
    """Their log-probabilities, float32."""
    lengths: IntArray
    """[B] number of sampled tokens."""
    truncated: npt.NDArray[np.bool_]
    """[B] whether the limit came before a stop."""
    versions_T_B: IntArray
    """Version of the weights that sampled each token; undefined as the tokens are."""


def sample_batch(
    decoder: Decoder,
    request: SamplingRequest,
    stop_tokens: StopTokens,
    stop_strings: StopStrings,
    device: torch.device,
    max_rows: int | None = None,
    turns: WeightTurns | None = None,
) -> Continuations:
    """Continue all rows, as many at a time as the batch may hold.

    Args:
        decoder: The model.
        request: The rows, and how to continue them.
        stop_tokens: Tokens that end a row.
        stop_strings: Finds stop strings.
        device: Where the model runs.
        max_rows: Rows that are decoded at a time; None: all. Only for a decoder that
            mixes lengths.
        turns: The model's weights, which may be replaced between two steps; None: they
            stay, as version 0.

    Raises:
        GenerationError: The model gave logits that are not numbers.
    """
    ids = request.input_ids.numpy()
    plan = plan_prompts(ids, request.lengths)
    num_rows = len(plan.order_B)
    count = min(num_rows, max_rows or num_rows)
    with torch.inference_mode():
        prompts = _Prompts(plan, ids, device, in_chunks=decoder.mixes_lengths)
        batch = _Batch(
            request,
            prompts,
            stop_tokens,
            stop_strings,
            device,
            turns or WeightTurns(),
        )
        state = decoder.begin(
            plan.lengths_P[plan.prompt_B[:count]],
            request.max_new_tokens,
            more_follow=count < num_rows,
        )
        batch.run(state, count)
    return batch.result()


class _Prompts:
    """Runs the prompts of rows, equal ones once.

    Args:
        plan: Distinct prompts, and the order of the rows.
        ids: [B, S] the prompts, right-padded.
        device: Where the model runs.
        in_chunks: Whether few prompts at a time may be run.
    """

    def __init__(
        self, plan: PromptPlan, ids: IntArray, device: torch.device, *, in_chunks: bool
    ) -> None:
        self.plan, self._ids, self._device = plan, ids, device
        total = int(plan.lengths_P.sum())
        self._limit = _PREFILL_TOKENS if in_chunks else total

    def run(
        self, state: DecodingState, place: int, first: int, last: int
    ) -> torch.Tensor:
        """Run the prompts of rows `[first, last)` in the order of decoding.

        Args:
            state: The batch.
            place: Where the first of them is in it.
            first: The first row.
            last: The row after the last one.

        Returns:
            [last - first, V] logits of their first new tokens.
        """
        plan, parts = self.plan, []
        for prompts, rows in plan.chunks(self._limit, first, last):
            lengths = plan.lengths_P[prompts]
            source = self._ids[plan.row_of_prompt_P[prompts]]
            packed = source[np.arange(source.shape[1]) < lengths[:, None]]
            tokens = torch.from_numpy(packed).to(self._device)
            local = plan.prompt_B[rows] - prompts.start
            to = place + rows.start - first
            logits = state.prefill(tokens, lengths, to, local)
            index = torch.from_numpy(local).to(self._device)
            parts.append(logits.index_select(0, index))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Batch:
    """Rows in flight. Places are rows of the running batch; `rows` maps them back."""

    def __init__(
        self,
        request: SamplingRequest,
        prompts: _Prompts,
        stop_tokens: StopTokens,
        stop_strings: StopStrings,
        device: torch.device,
        turns: WeightTurns,
    ) -> None:
        self.request, self.prompts = request, prompts
        self.turns = turns
        self.device = device
        self.stop_tokens = stop_tokens
        self.stop_table = stop_strings.table(request.stop_strings)
        self.order = prompts.plan.order_B
        num_rows, self.limit = len(self.order), request.max_new_tokens
        self.num_begun = 0
        """Rows, in the order of decoding, that are in flight or have left."""
        self.rows = np.zeros(0, dtype=np.int64)
        self.alive = np.zeros(0, dtype=bool)
        self.steps = np.zeros(0, dtype=np.int64)
        """Tokens that each place has sampled."""
        # What a finished row samples until it leaves goes behind the last step.
        size = (self.limit + 1, num_rows)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(size, device=device)
        self.lengths = np.full(num_rows, self.limit, dtype=np.int64)
        self.stopped = np.zeros(num_rows, dtype=bool)
        self.versions = np.zeros((self.limit, num_rows), dtype=np.int64)
        self._version: int | None = None
        """Version that the newest tokens are sampled with."""
        self._streams = noise_streams(request.seeds)

    def run(self, state: DecodingState, count: int) -> None:
        """Sample until every row has ended, `count` of them at a time.

        Args:
            state: The batch, without its prompts.
            count: Rows that begin.
        """
        with self.turns.step() as version:
            self._note_version(version)
            tokens = self._begin(state, 0, count)
        while self.alive.any() or self._num_waiting:
            with self.turns.step() as version:
                self._note_version(version)
                tokens = self._go_on(state, tokens, count)

    def _go_on(
        self, state: DecodingState, tokens: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Let rows leave and join, and sample a token of each row in flight."""
        tokens = self._leave(state, tokens)
        free = count - len(self.rows)
        if free and self._num_waiting:
            first = self.num_begun
            lengths = self.request.lengths[self.order[first : first + free]]
            place = cast(GrowingState, state).admit(lengths)
            joined = self._begin(state, place, len(lengths))
            tokens = torch.cat([tokens, joined])
        if self.alive.any():
            logits = state.step(tokens, self.positions)
            tokens = self._sample(0, logits)
        return tokens

    def _note_version(self, version: int) -> None:
        """Record the version that samples the next token of each row."""
        if version == self._version:
            return
        # Written for all tokens to come: versions change rarely, and a write in every
        # step would cost more.
        next_B = np.zeros(len(self.order), dtype=np.int64)
        begun = self.order[: self.num_begun]
        next_B[begun] = self.lengths[begun]
        next_B[self.rows] = self.steps
        self.versions[np.arange(self.limit)[:, None] >= next_B] = version
        self._version = version

    @property
    def _num_waiting(self) -> int:
        return len(self.order) - self.num_begun

    def _begin(self, state: DecodingState, place: int, count: int) -> torch.Tensor:
        """Put the next rows behind the others; return their first tokens."""
        first, last = self.num_begun, self.num_begun + count
        self.num_begun = last
        none = np.zeros(count, dtype=np.int64)
        self.rows = np.concatenate([self.rows, self.order[first:last]])
        self.alive = np.concatenate([self.alive, none == 0])
        self.steps = np.concatenate([self.steps, none])
        self._place_rows()
        return self._sample(place, self.prompts.run(state, place, first, last))

    def _place_rows(self) -> None:
        """Tensors that follow the order of the running batch."""
        self.index = torch.from_numpy(self.rows).to(self.device)
        positions = self.request.lengths[self.rows] + self.steps - 1
        self.positions = torch.from_numpy(positions).to(self.device)

    def _sample(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        """Sample the next token of the places from `first` on."""
        if self.request.greedy:
            tokens, logprobs = greedy_tokens(logits)
        else:
            # Noise is a function of seed and step, so a row's does not depend on the
            # rows beside it or on those that have left.
            streams = self._streams[self.rows[first:]]
            noise = uniform_noise(streams, self.steps[first:]).to(self.device)
            tokens, logprobs = sample_tokens(logits, noise, self.request.params)
        steps = np.where(self.alive[first:], self.steps[first:], self.limit)
        to = torch.from_numpy(steps).to(self.device), self.index[first:]
        self.tokens.index_put_(to, tokens)
        self.logprobs.index_put_(to, logprobs)
        going = first + np.flatnonzero(self.alive[first:])
        self._mark_ended(first, tokens)
        if self.request.on_step is not None:
            told = (
                values.cpu().numpy()[going - first] for values in (tokens, logprobs)
            )
            self.request.on_step(self.rows[going], *told)
        self.steps[first:] += 1
        self.positions[first:] += 1
        return tokens

    def _mark_ended(self, first: int, tokens: torch.Tensor) -> None:
        alive = self.alive[first:]
        ended = self.stop_tokens.ends(tokens) & alive
        if self.stop_table is not None:
            places = np.flatnonzero(alive & ~ended)
            ended[places] = self.stop_table.ends(
                self.rows[first:][places],
                tokens.cpu().numpy()[places],
                self.tokens.cpu().numpy(),
                self.steps[first:][places] + 1,
            )
        if ended.any():
            rows = self.rows[first:][ended]
            self.lengths[rows] = self.steps[first:][ended] + 1
            self.stopped[rows] = True
            alive &= ~ended
        alive &= self.steps[first:] + 1 < self.limit

    def _leave(self, state: DecodingState, tokens: torch.Tensor) -> torch.Tensor:
        """Drop finished rows once there are enough of them.

        Or once one of them has had as many steps as a row may have: the cache and the
        table of positions end there.
        """
        finished = self.steps[~self.alive]
        share = _REPLACE_SHARE if self._num_waiting else _LEAVE_SHARE
        few = len(finished) < len(self.alive) * share
        if not len(finished) or (few and finished.max() < self.limit):
            return tokens
        source = state.keep(self.alive)
        if source is None:
            return tokens
        self.rows, self.steps = self.rows[source], self.steps[source]
        self.alive = np.ones(len(source), dtype=bool)
        self._place_rows()
        index = torch.from_numpy(source).to(self.device)
        return tokens.index_select(0, index)

    def result(self) -> Continuations:
        """Return the samples, after a check that all log-probs are finite."""
        num_steps = int(self.lengths.max(initial=0))
        tokens = self.tokens[:num_steps].cpu()
        logprobs = self.logprobs[:num_steps].cpu()
        # Checked once at the end: every check waits for the device.
        if not bool(torch.isfinite(logprobs).all()):
            raise GenerationError(
                "The model gave logits that are not finite numbers, so no token can be "
                "drawn. Its weights are damaged, or training has diverged: lower the "
                "learning rate, or start from an earlier checkpoint."
            )
        versions = self.versions[:num_steps]
        return Continuations(tokens, logprobs, self.lengths, ~self.stopped, versions)
