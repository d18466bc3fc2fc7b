"""The loop that samples a batch.

```
rows -> plan_prompts -> packed prefill of distinct prompts
     -> [ sample -> stop? -> step ]
          ^ finished rows leave |
          +---------------------+
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rl_models.errors import GenerationError
from rl_models.generation.huggingface.decoder import Decoder, DecodingState
from rl_models.generation.huggingface.prompts import PromptPlan, plan_prompts
from rl_models.generation.huggingface.stopping import StopStrings, StopTokens
from rl_models.generation.noise import uniform_noise
from rl_models.generation.sampling import greedy_tokens, sample_tokens
from rl_models.types import SamplingParams

__all__ = ["Continuations", "OnStep", "SamplingRequest", "sample_batch"]

IntArray = npt.NDArray[np.int64]

OnStep = Callable[[IntArray, IntArray, npt.NDArray[np.float32]], None]
"""Called after every step with the rows that go on, their newest tokens and the
log-probs of those; what it raises ends the batch."""

# Prompt tokens that go through the model together.
_PREFILL_TOKENS = 16384
# Finished rows leave once they are this share of the batch.
_LEAVE_SHARE = 1 / 16
# Steps for which noise is drawn at once.
_NOISE_STEPS = 64


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Rows to continue, and how."""

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
    """Tokens per row at most."""
    greedy: bool
    """Take the best token instead of sampling."""
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
    """What the rows of a request got."""

    tokens_T_B: torch.Tensor
    """Sampled tokens; meaningless from a row's length on."""
    logprobs_T_B: torch.Tensor
    """Their log-probabilities, float32."""
    lengths: IntArray
    """[B] number of sampled tokens."""
    truncated: npt.NDArray[np.bool_]
    """[B] whether the limit came before a stop."""


def sample_batch(
    decoder: Decoder,
    request: SamplingRequest,
    stop_tokens: StopTokens,
    stop_strings: StopStrings,
    device: torch.device,
) -> Continuations:
    """Continue all rows together.

    Raises:
        GenerationError: The model gave logits that are not numbers.
    """
    ids = request.input_ids.numpy()
    plan = plan_prompts(ids, request.lengths)
    with torch.inference_mode():
        batch = _Batch(request, plan, stop_tokens, stop_strings, device)
        lengths = plan.lengths_P[plan.prompt_B]
        state = decoder.begin(lengths, request.max_new_tokens)
        batch.run(state, _prefill(state, plan, ids, device, decoder.mixes_lengths))
    return batch.result()


def _prefill(
    state: DecodingState,
    plan: PromptPlan,
    ids: IntArray,
    device: torch.device,
    in_chunks: bool,
) -> torch.Tensor:
    """[B, V] logits of the first new token, in the order of decoding."""
    limit = _PREFILL_TOKENS if in_chunks else int(plan.lengths_P.sum())
    parts = []
    for prompts, rows in plan.chunks(limit):
        lengths = plan.lengths_P[prompts]
        source = ids[plan.row_of_prompt_P[prompts]]
        packed = source[np.arange(source.shape[1]) < lengths[:, None]]
        tokens = torch.from_numpy(packed).to(device)
        local = plan.prompt_B[rows] - prompts.start
        logits = state.prefill(tokens, lengths, rows.start, local)
        parts.append(logits.index_select(0, torch.from_numpy(local).to(device)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Batch:
    """Rows in flight. Places are rows of the running batch; `rows` names them."""

    def __init__(
        self,
        request: SamplingRequest,
        plan: PromptPlan,
        stop_tokens: StopTokens,
        stop_strings: StopStrings,
        device: torch.device,
    ) -> None:
        self.request = request
        self.device = device
        self.stop_tokens = stop_tokens
        self.stop_table = stop_strings.table(request.stop_strings)
        num_rows, steps = len(plan.order_B), request.max_new_tokens
        self.rows = plan.order_B
        self.alive = np.ones(num_rows, dtype=bool)
        self.tokens = torch.zeros(steps, num_rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(steps, num_rows, device=device)
        self.lengths = np.full(num_rows, steps, dtype=np.int64)
        self.stopped = np.zeros(num_rows, dtype=bool)
        self.num_steps = 0
        self._place_rows()

    def _place_rows(self) -> None:
        """Tensors that follow the order of the running batch."""
        self.index = torch.from_numpy(self.rows).to(self.device)
        prompt_lengths = torch.from_numpy(self.request.lengths[self.rows])
        self.prompt_lengths = prompt_lengths.to(self.device)
        self._noise = torch.empty(0)
        self._noise_start = 0

    def _noise_of(self, step: int) -> torch.Tensor:
        if step >= self._noise_start + len(self._noise):
            count = min(_NOISE_STEPS, self.request.max_new_tokens - step)
            seeds = self.request.seeds[torch.from_numpy(self.rows)]
            self._noise = uniform_noise(seeds, step, count).to(self.device)
            self._noise_start = step
        return self._noise[step - self._noise_start]

    def run(self, state: DecodingState, logits: torch.Tensor) -> None:
        """Sample until every row has ended."""
        for step in range(self.request.max_new_tokens):
            tokens = self._sample(step, logits)
            self.num_steps = step + 1
            going = np.flatnonzero(self.alive)
            self._mark_ended(step, tokens)
            self._tell(step, going, tokens)
            if not self.alive.any() or self.num_steps == self.request.max_new_tokens:
                return
            tokens = self._leave(state, tokens)
            logits = state.step(tokens, self.prompt_lengths + step)

    def _sample(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        if self.request.greedy:
            tokens, logprobs = greedy_tokens(logits)
        else:
            noise = self._noise_of(step)
            tokens, logprobs = sample_tokens(logits, noise, self.request.params)
        self.tokens[step].index_copy_(0, self.index, tokens)
        self.logprobs[step].index_copy_(0, self.index, logprobs)
        return tokens

    def _tell(self, step: int, going: IntArray, tokens: torch.Tensor) -> None:
        if self.request.on_step is not None:
            rows = self.rows[going]
            logprobs = self.logprobs[step].cpu().numpy()[rows]
            self.request.on_step(rows, tokens.cpu().numpy()[going], logprobs)

    def _mark_ended(self, step: int, tokens: torch.Tensor) -> None:
        ended = self.stop_tokens.ends(tokens) & self.alive
        if self.stop_table is not None:
            places = np.flatnonzero(self.alive & ~ended)
            ended[places] = self.stop_table.ends(
                self.rows[places],
                tokens.cpu().numpy()[places],
                self.tokens[: step + 1].cpu().numpy(),
            )
        if ended.any():
            rows = self.rows[ended]
            self.lengths[rows] = step + 1
            self.stopped[rows] = True
            self.alive &= ~ended

    def _leave(self, state: DecodingState, tokens: torch.Tensor) -> torch.Tensor:
        """Drop finished rows once there are enough of them."""
        finished = len(self.alive) - int(self.alive.sum())
        if not finished or finished < len(self.alive) * _LEAVE_SHARE:
            return tokens
        source = state.keep(self.alive)
        if source is None:
            return tokens
        self.rows = self.rows[source]
        self.alive = np.ones(len(source), dtype=bool)
        noise, start = self._noise, self._noise_start
        self._place_rows()
        index = torch.from_numpy(source).to(self.device)
        if len(noise):
            self._noise, self._noise_start = noise.index_select(1, index), start
        return tokens.index_select(0, index)

    def result(self) -> Continuations:
        """Give back what was sampled, with one check that all of it is a number."""
        tokens = self.tokens[: self.num_steps].cpu()
        logprobs = self.logprobs[: self.num_steps].cpu()
        if not bool(torch.isfinite(logprobs).all()):
            raise GenerationError(
                "The model gave logits that are not finite numbers, so no token can be "
                "drawn. Its weights are damaged, or training has diverged: lower the "
                "learning rate, or start from an earlier checkpoint."
            )
        return Continuations(tokens, logprobs, self.lengths, ~self.stopped)
