"""Memory of one rank of the `dtensor` backend, by use.

Weights and optimizer state are float32 shards. Weights for the computation are gathered
layer by layer (FSDP), in the data type of `policy.precision`; a single rank converts
them under autocast instead. Gradients stay whole between the micro-batches of an
optimizer step, because they are reduced in the last one only. With `policy.lora` only
adapters and a scalar head have gradients and optimizer state.

Letters in comments: T tokens of a micro-batch, H hidden size, F feed-forward columns,
N positions whose log-prob is needed, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from rl_models.config import PolicyConfig
from rl_models.logit_chunks import logit_chunk_size
from rl_models.planning.adapter_shape import AdapterShape
from rl_models.planning.layouts import Layout
from rl_models.planning.model_shape import ModelShape
from rl_models.planning.rank_memory import (
    MASTER_BYTES,
    ModelMemory,
    RankWork,
    layer_work,
    optimizer_copies,
    optimizer_work,
)

__all__ = ["dtensor_memory"]

_SMALL_BYTES = 32 * 1024**2
"""Weights up to this size are gathered at once, see `policy.dtensor.shard_layers`."""


def dtensor_memory(
    shape: ModelShape, policy: PolicyConfig, layout: Layout, work: RankWork
) -> ModelMemory:
    """Return the memory of one rank, at most; see `model_memory`."""
    parts = _Parts(shape, policy, layout, work.on_gpu)
    if work.keeps_logits:
        parts.logit_chunk_size = 0
    held, trained = MASTER_BYTES * parts.shard, MASTER_BYTES * parts.trained_shard
    copies = optimizer_copies(policy.optimizer)[0] if work.is_trained else 0
    offloads = policy.dtensor.cpu_offload and work.on_gpu and layout.is_sharded
    saved = parts.saved(work.training.num_tokens)
    logits = parts.logits(work.training.num_positions, training=True)
    # The layers' backward pass begins when the logits' gradients are freed, so only the
    # larger of the two counts.
    extra = max(0, parts.backward_work(work.training.num_tokens) - logits)
    gradients = parts.gradients(work.num_micro_batches, keeps_shard=not offloads)
    # When the optimizer steps, only the shards of the gradients are left.
    freed = parts.gathered + saved + extra + logits + gradients - trained
    step = optimizer_work(policy.optimizer, parts.trained_shard, on_gpu=work.on_gpu)
    return ModelMemory(
        weights=0 if offloads else held,
        optimizer=0 if offloads else copies * trained,
        gathered=parts.gathered,
        gradients=gradients + (0 if offloads else max(0, step - freed)),
        activations=saved + extra,
        logits=logits,
        passing_activations=2 * parts.layer_work(work.passing.num_tokens),
        passing_logits=parts.logits(work.passing.num_positions, training=False),
        sync=shape.largest_tensor * MASTER_BYTES * 2,
        start=held,
        host=held + (copies + 1) * trained if offloads else 0,
    )


class _Parts:
    """A rank's parts of a model, held and computed with."""

    def __init__(
        self, shape: ModelShape, policy: PolicyConfig, layout: Layout, on_gpu: bool
    ) -> None:
        self._shape, self._policy, self._layout = shape, policy, layout
        self._on_gpu = on_gpu
        self.logit_chunk_size = policy.dtensor.logprob_chunk_size
        self._compute_bytes = 2 if policy.precision == "bfloat16" else 4
        self.whole = layout.parameters_of_rank(shape)
        """Parameters of this rank before data-parallel ranks share them."""
        # Ranks that share experts have fewer of them, but shard each over fewer ranks,
        # so shards are those without expert parallelism.
        apart = replace(layout, expert=1).parameters_of_rank(shape)
        self._adapters = AdapterShape(shape, policy.lora) if policy.lora else None
        self.trained = self.whole
        """Number of these that have gradients."""
        trained = apart
        if self._adapters is not None:
            added = self._adapters.parameters_of_rank(layout)
            self.whole += added
            apart += added
            # A scalar head is new, and learns as well.
            head = shape.head_parameters if shape.head != "lm" else 0
            head += self._adapters.modules_of_rank(layout)
            self.trained = trained = added + head
        self.shard = -(-apart // layout.shards)
        self.trained_shard = -(-trained // layout.shards)

    @property
    def _autocasts(self) -> bool:
        return self._compute_bytes == 2 and not self._layout.is_sharded

    @property
    def _layers(self) -> int:
        return -(-self._shape.num_layers // self._layout.pipeline)

    @property
    def _ends(self) -> int:
        """Parameters outside the layers, which are gathered together."""
        shape = self._shape
        ends = shape.embedding_parameters + shape.head_parameters
        # A vocabulary that ranks do not divide is whole on each of them.
        return ends // self._layout.vocabulary_parts(shape) + shape.hidden_size

    @property
    def _layer(self) -> int:
        return self._layout.layer_parameters_of_rank(self._shape)

    @property
    def _by_layers(self) -> bool:
        asked = self._policy.dtensor.shard_layers
        small = MASTER_BYTES * self.whole <= _SMALL_BYTES
        return not small if asked is None else asked

    @property
    def gathered(self) -> int:
        """Bytes of the weights in use by the computation, beside the shards."""
        if self._autocasts:
            # Each product keeps its converted weight for the backward pass. The
            # embedding is a look-up and no product, unless the head is tied to it.
            table = (
                0 if self._shape.ties_embeddings else self._shape.embedding_parameters
            )
            table //= self._layout.vocabulary_parts(self._shape)
            converted = self.whole - table
            if self._policy.dtensor.activation_checkpointing:
                converted = self._ends - table + self._layer
            return self._compute_bytes * converted
        if not self._layout.is_sharded:
            return 0
        reshards = self._policy.dtensor.reshard_after_forward
        reshards = self._on_gpu if reshards is None else reshards
        if not (reshards and self._by_layers):
            return self._compute_bytes * self.whole
        # FSDP gathers the next layer while one is computed.
        return self._compute_bytes * min(self.whole, self._ends + 2 * self._layer)

    def gradients(self, num_micro_batches: int, *, keeps_shard: bool) -> int:
        """Bytes of gradients at their peak."""
        whole = MASTER_BYTES * self.trained
        if not self._layout.is_sharded:
            return whole
        # A piece that is reduced exists twice: as computed, and in float32 for sending.
        piece = max(self._ends, self._layer) if self._by_layers else self.whole
        piece = min(piece, self.trained)
        reducing = piece * (self._compute_bytes + MASTER_BYTES)
        shards = MASTER_BYTES * self.trained_shard if keeps_shard else 0
        if num_micro_batches > 1 and not self._policy.dtensor.reduce_each_micro_batch:
            return max(whole, shards) + MASTER_BYTES * piece
        return shards + reducing

    def saved(self, num_tokens: int) -> int:
        """Return the bytes that the forward pass keeps for the backward pass."""
        tokens = -(-num_tokens // self._layout.context)
        # A pipeline's first stage has the micro-batches of all stages in flight.
        tokens *= self._layout.pipeline
        hidden = self._shape.hidden_size / self._layout.splits_of_hidden
        last = self._norm_bytes(hidden) * tokens
        adapters = self._adapters
        is_lm = self._shape.head == "lm"
        if adapters is not None and is_lm and not adapters.trains_head:
            # The head's input is kept for the gradient of the head alone, which is
            # frozen here.
            last -= self._compute_bytes * hidden * tokens
        each = self._layer_saved()
        if self._policy.dtensor.activation_checkpointing:
            each = hidden * self._compute_bytes  # what enters a layer
        return round(self._layers * each * tokens + last)

    def _norm_bytes(self, size: float) -> float:
        """Input, normalised and output of a norm over `size` numbers."""
        if self._compute_bytes == 4:
            kept, normalised = 12, 4
        else:
            # Norms are computed in float32; under autocast, so is what flows between.
            kept, normalised = 8, 4 if self._autocasts else 2
        # Normalised numbers are kept for the gradient of the norm's weight alone.
        return (kept - normalised if self._adapters is not None else kept) * size

    def _layer_saved(self) -> float:
        """Bytes of one layer per token."""
        shape, each, cut = self._shape, self._compute_bytes, self._layout.tensor
        hidden = shape.hidden_size / self._layout.splits_of_hidden
        heads = (shape.query_size + shape.key_value_size) / cut
        total = shape.norms_per_layer * self._norm_bytes(hidden)
        total += 2 * heads * each  # queries, keys, values, and what attention gives
        if shape.has_qk_norms:
            normalised = 0 if self._adapters is None else each
            total += heads * ((8 if each == 4 else 6) - normalised)
        if self._autocasts:
            total += 5 * hidden * each  # each product converts its input for itself
        if self._adapters is not None:
            total += self._adapters.saved_per_token * each
        return total + self._mlp_saved() * each

    def _mlp_saved(self) -> float:
        """Numbers of one layer's feed-forward part per token: at most one layer's."""
        shape, cut = self._shape, self._layout.tensor
        dense = 4 * shape.intermediate_size / cut
        if not shape.num_expert_layers:
            return dense
        each = (4 * shape.expert_size + 2 * shape.hidden_size) / cut
        routed = shape.experts_per_token * each + 3 * shape.num_experts
        share = shape.num_expert_layers / shape.num_layers
        return share * routed + (1 - share) * dense

    def backward_work(self, num_tokens: int) -> int:
        """Return the temporary bytes of one layer's backward pass."""
        work = self.layer_work(num_tokens)
        if not self._policy.dtensor.activation_checkpointing:
            return work
        tokens = -(-num_tokens // self._layout.context)
        return work + round(self._layer_saved() * tokens)

    def layer_work(self, num_tokens: int) -> int:
        """Return the temporary bytes of one layer's computation."""
        return layer_work(self._shape, self._layout, num_tokens, self._compute_bytes)

    def logits(self, num_positions: int, *, training: bool) -> int:
        """Return the bytes of the logits that exist at once.

        In float32 there are the logits, divided by the temperature if that is not 1,
        and their exponentials or gradients. Logits in bfloat16 are converted, and so
        are their gradients.
        """
        count = num_positions // self._layout.context
        if self._shape.head != "lm":
            return 8 * count
        vocabulary = self._shape.vocab_size // self._layout.vocabulary_parts(
            self._shape
        )
        chunk = logit_chunk_size(
            self.logit_chunk_size, count, vocabulary, on_gpu=self._on_gpu
        )
        copies = 2 if self._policy.logprob_temperature == 1.0 else 3
        per_entry = 4 * copies if self._compute_bytes == 4 else 10 + 2 * training
        return per_entry * min(count, chunk or count) * vocabulary
