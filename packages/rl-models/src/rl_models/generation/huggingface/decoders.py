"""Decoders that call the forward method of a model of transformers.

`ModuleDecoder` is for models whose attention layers take packed rows, and
`OwnCacheDecoder` for the rest. It decodes rows of equal length together, without
padding (a recurrent state must not see it), prefills a shared prompt once per row and
keeps finished rows until the last one ends: correct, but slow.

Letters in shapes: B rows, P prompts, T packed prompt tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_models.errors import UnsupportedModelError
from rl_models.generation.huggingface.cached_attention import (
    CACHED_ATTENTION_NAME,
    DecodingCache,
    decoding_from,
)
from rl_models.generation.huggingface.decoder import (
    Decoder,
    DecodingState,
    GrowingState,
)
from rl_models.generation.huggingface.kv_cache import BufferPool, KVBuffers
from rl_models.ops.causal_lm import packing_obstacle
from rl_models.ops.packed_attention import packed_model_inputs

__all__ = [
    "ModuleDecoder",
    "OwnCacheDecoder",
    "build_decoder",
]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def build_decoder(model: Any) -> Decoder:
    """Return the fastest decoder that calls the model's own forward method.

    Args:
        model: A causal language model of transformers in eval mode.
    """
    if model.config._attn_implementation != CACHED_ATTENTION_NAME:
        if packing_obstacle(model) is not None:
            return OwnCacheDecoder(model)
        model.set_attn_implementation(CACHED_ATTENTION_NAME)
    return ModuleDecoder(model)


def first_tokens(lengths_P: IntArray) -> IntArray:
    """Return [P] the index of the first token of each packed prompt."""
    return np.cumsum(lengths_P) - lengths_P


class ModuleDecoder:
    """Calls the model's own forward method with our cache and attention."""

    mixes_lengths = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.pool = BufferPool()

    def begin(
        self, lengths_B: IntArray, max_new_tokens: int, *, more_follow: bool = False
    ) -> GrowingState:
        """Start a batch."""
        buffers = KVBuffers(
            lengths_B, max_new_tokens, self.pool, more_follow=more_follow
        )
        return _ModuleState(self.model, buffers)

    def refresh(self) -> None:
        """Do nothing: the model itself is run."""

    def release(self) -> None:
        """Free the cache's memory."""
        self.pool.clear()


class _ModuleState:
    def __init__(self, model: Any, buffers: KVBuffers) -> None:
        self.model = model
        self.buffers = buffers
        self.cache = DecodingCache(buffers)
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def prefill(
        self,
        tokens_T: torch.Tensor,
        lengths_P: IntArray,
        first_row: int,
        prompt_B: IntArray,
    ) -> torch.Tensor:
        """See `DecodingState.prefill`."""
        starts = first_tokens(lengths_P)
        heads = int(self.model.config.num_attention_heads)
        self.cache.begin_prompts(first_row, starts[prompt_B], heads)
        last = torch.from_numpy(starts + lengths_P - 1).to(tokens_T.device)
        output = self.model(
            input_ids=tokens_T[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=last,
            **packed_model_inputs(lengths_P, tokens_T.device),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def step(self, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """See `DecodingState.step`."""
        self.cache.begin_step()
        with decoding_from(self.buffers):
            output = self.model(
                input_ids=tokens_B[:, None],
                position_ids=positions_B[:, None],
                # A placeholder, so that the model builds no mask; the real one is in
                # the buffers.
                attention_mask=self._mask,
                past_key_values=self.cache,
                use_cache=True,
            )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def keep(self, alive_B: BoolArray) -> IntArray | None:
        """See `DecodingState.keep`."""
        return self.buffers.keep(alive_B)

    def admit(self, lengths_N: IntArray) -> int:
        """See `GrowingState.admit`."""
        return self.buffers.admit(lengths_N)


class OwnCacheDecoder:
    """Any causal model, with its own cache."""

    mixes_lengths = False

    def __init__(self, model: Any) -> None:
        self.model = model

    def begin(
        self, lengths_B: IntArray, max_new_tokens: int, *, more_follow: bool = False
    ) -> DecodingState:
        """Start a batch of rows of one length, to which none are added."""
        return _OwnCacheState(self.model, int(lengths_B[0]))

    def refresh(self) -> None:
        """Do nothing: the model itself is run."""

    def release(self) -> None:
        """Do nothing: no memory is kept."""


class _OwnCacheState:
    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.length = length
        self.cache: Any = None

    def prefill(
        self,
        tokens_T: torch.Tensor,
        lengths_P: IntArray,
        first_row: int,
        prompt_B: IntArray,
    ) -> torch.Tensor:
        """See `DecodingState.prefill`; every row is run, its prompt shared or not."""
        rows = torch.from_numpy(prompt_B).to(tokens_T.device)
        prompts = tokens_T.view(len(lengths_P), self.length)
        logits = self._forward(prompts.index_select(0, rows))
        # The caller expects logits by prompt, and those of its rows are equal.
        first = torch.from_numpy(np.searchsorted(prompt_B, np.arange(len(lengths_P))))
        return logits.index_select(0, first.to(logits.device))

    def step(self, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """See `DecodingState.step`."""
        return self._forward(tokens_B[:, None])

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=input_ids, past_key_values=self.cache, use_cache=True
        )
        self.cache = getattr(output, "past_key_values", None)
        if self.cache is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returns no past_key_values, so it cannot "
                "be sampled from token by token; choose another generation backend."
            )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def keep(self, alive_B: BoolArray) -> IntArray | None:
        """Return None: rows cannot leave a cache whose layout is unknown."""
        return None
