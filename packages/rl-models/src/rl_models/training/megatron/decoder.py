"""Decode with the layers of Megatron-core that are in training, over our own cache.

Tokens are packed along the sequence, prompts and the newest token of each row alike, so
that sequence parallelism and rows of different lengths need no code of their own. Ranks
that hold one copy of the model run the same tokens, and get the same logits.

Letters in shapes: B rows, P prompts, T packed prompt tokens, V vocabulary, H query
heads, K key heads, D head size.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_models.generation.huggingface.decoder import GrowingState
from rl_models.generation.huggingface.kv_cache import BufferPool, KVBuffers
from rl_models.ops.packed_attention import packed_attention, packed_model_inputs
from rl_models.training.megatron.forward import packed_logits
from rl_models.training.megatron.model import MegatronModel

__all__ = ["MegatronDecoder"]

IntArray = npt.NDArray[np.int64]


class MegatronDecoder:
    """Calls the trainer's layers with our cache.

    Args:
        model: The model that is trained.
    """

    mixes_lengths = True

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._pool = BufferPool()

    def begin(
        self, lengths_B: IntArray, max_new_tokens: int, *, more_follow: bool = False
    ) -> GrowingState:
        """Start a batch."""
        # Training leaves the model in training mode.
        self._model.train(False)
        buffers = KVBuffers(
            lengths_B, max_new_tokens, self._pool, more_follow=more_follow
        )
        return _State(self._model, buffers)

    def refresh(self) -> None:
        """Do nothing: the trainer's own weights are read."""

    def release(self) -> None:
        """Free the cache's memory."""
        self._pool.clear()


class _State:
    """One batch in flight; see `DecodingState`."""

    def __init__(self, model: MegatronModel, buffers: KVBuffers) -> None:
        self._model = model
        self._buffers = buffers

    def prefill(
        self,
        tokens_T: Tensor,
        lengths_P: IntArray,
        first_row: int,
        prompt_B: IntArray,
    ) -> Tensor:
        """[P, V] logits after the last token of each prompt."""
        packed = packed_model_inputs(lengths_P, tokens_T.device)
        starts = np.cumsum(lengths_P) - lengths_P
        last_P = torch.from_numpy(starts + lengths_P - 1).to(tokens_T.device)
        attend = partial(
            self._attend_to_prompts,
            first_row,
            starts[prompt_B],
            packed["cu_seq_lens_q"],
            len(tokens_T),
        )
        positions = packed["position_ids"][0]
        return packed_logits(self._model, tokens_T, positions, last_P, attend)

    def _attend_to_prompts(
        self,
        first_row: int,
        first_token_B: IntArray,
        borders: Tensor,
        count: int,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        # Sequence parallelism pads tokens to a multiple of its ranks; padding must not
        # enter the cache, and its output is zero.
        missing = len(query) - count
        query, key, value = query[:count], key[:count], value[:count]
        self._buffers.place_prompts(
            layer, key, value, first_row, first_token_B, query.shape[1]
        )
        attended = packed_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            borders,
        )[0]
        return pad(attended, (0, 0, 0, 0, 0, missing))

    def step(self, tokens_B: Tensor, positions_B: Tensor) -> Tensor:
        """[B, V] logits after one more token per row."""
        self._buffers.begin_step()
        wanted = torch.arange(len(tokens_B), device=tokens_B.device)
        attend = partial(self._attend_to_rows, len(tokens_B))
        return packed_logits(self._model, tokens_B, positions_B, wanted, attend)

    def _attend_to_rows(
        self, count: int, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        missing = len(query) - count
        query, key, value = query[:count], key[:count], value[:count]
        self._buffers.append(layer, key, value)
        attended = self._buffers.attend(layer, query, query.shape[-1] ** -0.5)
        return pad(attended, (0, 0, 0, 0, 0, missing))

    def keep(self, alive_B: npt.NDArray[np.bool_]) -> IntArray:
        """Drop the rows that are not alive."""
        return self._buffers.keep(alive_B)

    def admit(self, lengths_N: IntArray) -> int:
        """Add rows behind the others."""
        return self._buffers.admit(lengths_N)
