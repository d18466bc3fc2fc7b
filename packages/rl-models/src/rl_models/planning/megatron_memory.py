"""Memory of one rank of the `megatron` backend, by use.

Ranks with other rows hold the same weights, in the data type of `policy.precision`. The
optimizer updates float32 weights, which are copies with bfloat16. With
`policy.megatron.distributed_optimizer` ranks share these copies and its state.
Gradients are float32 and whole, and are reduced at once when all micro-batches are
done.

Letters in comments: T tokens of a micro-batch, H hidden size, F feed-forward columns,
N positions whose log-prob is needed, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from rl_models.config import PolicyConfig
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

__all__ = ["megatron_memory"]


def megatron_memory(
    shape: ModelShape, policy: PolicyConfig, layout: Layout, work: RankWork
) -> ModelMemory:
    """Return the memory of one rank, at most; see `model_memory`."""
    parts = _Parts(shape, policy, layout)
    saved = parts.saved(work.training.num_tokens, work.num_micro_batches)
    logits = parts.logits(work.training.num_positions, whole=work.keeps_logits)
    passing_logits = parts.logits(work.passing.num_positions, whole=False)
    # The layers' backward pass begins when the logits' gradients are freed, so only the
    # larger of the two counts.
    head = max(
        logits, parts.kept_logits(work.training.num_positions) + parts.head_gradient
    )
    backward = max(0, parts.backward_work(work.training.num_tokens) - head)
    # They are reduced when activations are freed, and then the optimizer steps.
    later = max(parts.reduced, parts.step(on_gpu=work.on_gpu))
    reduced = max(0, later - saved - head - backward)
    return ModelMemory(
        weights=parts.weights(is_trained=work.is_trained),
        optimizer=parts.optimizer if work.is_trained else 0,
        gathered=0,
        gradients=parts.gradients + reduced,
        activations=saved + backward,
        logits=head,
        # As above: one comes after the other.
        passing_activations=max(
            parts.hidden_states(work.passing.num_tokens),
            parts.passing_work(work.passing.num_tokens) - passing_logits,
        ),
        passing_logits=passing_logits,
        sync=MASTER_BYTES * 2 * shape.largest_tensor,
        start=parts.weights(is_trained=work.is_trained),
        host=0,
    )


class _Parts:
    """A rank's parts of a model, held and computed with."""

    def __init__(self, shape: ModelShape, policy: PolicyConfig, layout: Layout) -> None:
        self._shape, self._policy, self._layout = shape, policy, layout
        self._compute_bytes = 2 if policy.precision == "bfloat16" else 4
        self._num_own = layout.parameters_of_rank(shape)
        self._is_shared = policy.megatron.distributed_optimizer
        self._num_updated = self._num_own
        """Numbers that this rank's optimizer updates."""
        if self._is_shared:
            # Ranks that share experts have fewer of them, but share the masters of each
            # with fewer ranks.
            apart = replace(layout, expert=1).parameters_of_rank(shape)
            self._num_updated = -(-apart // layout.data)

    def weights(self, *, is_trained: bool) -> int:
        """Return the bytes of weights that compute, and of their float32 copies."""
        computed = self._compute_bytes * self._num_own
        if self._compute_bytes == MASTER_BYTES or not is_trained:
            return computed  # masters are the weights themselves, or views of them
        return computed + MASTER_BYTES * self._num_updated

    @property
    def optimizer(self) -> int:
        """Bytes of its state."""
        copies, _ = optimizer_copies(self._policy.optimizer)
        return copies * MASTER_BYTES * self._num_updated

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return MASTER_BYTES * self._num_own

    @property
    def reduced(self) -> int:
        """Bytes beside them while ranks add them up."""
        if self._is_shared:
            # All in a row, and this rank's sums twice.
            return self.gradients + 2 * MASTER_BYTES * self._num_updated
        return self.gradients if self._layout.data > 1 else 0

    def step(self, *, on_gpu: bool) -> int:
        """Return the temporary bytes of the optimizer's step."""
        optimizer, count = self._policy.optimizer, self._num_updated
        work = optimizer_work(optimizer, count, on_gpu=on_gpu)
        # Of shared masters only this rank's gradients are left by then.
        left = MASTER_BYTES * count - self.gradients if self._is_shared else 0
        return work + left

    @property
    def head_gradient(self) -> int:
        """Bytes of a micro-batch's gradient of the head, before it is added."""
        if self._shape.head != "lm":
            return 0
        table = self._shape.embedding_parameters // self._layout.tensor
        # With bfloat16 it is made after the float32 logits are freed.
        return MASTER_BYTES * table if self._compute_bytes == MASTER_BYTES else 0

    def saved(self, num_tokens: int, num_micro_batches: int) -> int:
        """Return the bytes that the forward pass keeps for the backward pass."""
        shape, layout = self._shape, self._layout
        # A pipeline's first stage has the micro-batches of all stages in flight.
        in_flight = min(layout.pipeline, num_micro_batches)
        tokens = num_tokens * in_flight
        hidden = shape.hidden_size / layout.splits_of_hidden
        # The last norm, and the head's input.
        last = (self._norm_bytes(hidden) + hidden * self._compute_bytes) * tokens
        each = self._layer_saved()
        if self._policy.megatron.activation_checkpointing:
            each = hidden * self._compute_bytes  # what enters a layer
        layers = -(-shape.num_layers // layout.pipeline)
        return round(layers * each * tokens + last)

    def _norm_bytes(self, size: float) -> float:
        """Input, normalised and output of a norm over `size` numbers.

        With bfloat16 the first two are float32, as norms are computed in it.
        """
        return (12 if self._compute_bytes == MASTER_BYTES else 10) * size

    def _layer_saved(self) -> float:
        """Bytes of one layer per token."""
        shape, each, cut = self._shape, self._compute_bytes, self._layout.tensor
        hidden = shape.hidden_size / self._layout.splits_of_hidden
        queries, keys = shape.query_size / cut, shape.key_value_size / cut
        total = shape.norms_per_layer * self._norm_bytes(hidden)
        # The product of all three, which the values are a part of, queries and keys
        # after the rotation, and what attention gives.
        total += 3 * (queries + keys) * each
        if shape.has_qk_norms:
            # Queries are copied for their norm; with bfloat16 norms keep two in
            # float32.
            kept = each if each == MASTER_BYTES else 2 * MASTER_BYTES
            total += queries * each + (queries + keys) * kept
        return total + self._mlp_saved() * each

    def _mlp_saved(self) -> float:
        """Numbers of one layer's feed-forward part per token: at most one layer's."""
        shape, cut = self._shape, self._layout.tensor
        # Gate and up, the activation, up plus Megatron-core's offset, their product.
        dense = 5 * shape.intermediate_size / cut
        if not shape.num_expert_layers:
            return dense
        # Experts are not cut, but tensor ranks have other ones each: as many tokens
        # reach those of a rank as leave it, if they are chosen evenly. Gate and up,
        # the activation, its product with up, and with the router's weights.
        each = 5 * shape.expert_size + shape.hidden_size
        routed = shape.experts_per_token * each / cut + 3 * shape.num_experts
        share = shape.num_expert_layers / shape.num_layers
        return share * routed + (1 - share) * dense

    def backward_work(self, num_tokens: int) -> int:
        """Return the temporary bytes of one layer's backward pass."""
        work = self.layer_work(num_tokens)
        if not self._policy.megatron.activation_checkpointing:
            return work
        return work + round(self._layer_saved() * num_tokens)

    def layer_work(self, num_tokens: int) -> int:
        """Return the temporary bytes of one layer's computation."""
        return layer_work(self._shape, self._layout, num_tokens, self._compute_bytes)

    def hidden_states(self, num_tokens: int) -> int:
        """Return the bytes of the last hidden states, and of those that go on."""
        return 2 * num_tokens * self._shape.hidden_size * self._compute_bytes

    def passing_work(self, num_tokens: int) -> int:
        """Return the bytes of one layer's computation without a backward pass."""
        # Nothing of the feed-forward part is freed before its end. Beside it there are
        # its input and output, the hidden states, and their norm in float32.
        numbers = self._mlp_saved() + 4 * self._shape.hidden_size
        return round(num_tokens * numbers * self._compute_bytes)

    def logits(self, num_positions: int, *, whole: bool) -> int:
        """Return the bytes of the logits that exist at once.

        Log-probs are computed in place. With bfloat16 the logits are converted to
        float32, and so are their gradients; a temperature other than 1 makes a copy.

        Args:
            num_positions: N.
            whole: Whether every tensor rank needs those of the whole vocabulary, and a
                loss computes with them.
        """
        shape = self._shape
        if shape.head != "lm":
            return 8 * num_positions
        found = self.kept_logits(num_positions)
        if self._policy.logprob_temperature != 1.0:
            found += 4 * self._own_logits(num_positions)
        return found + (8 * num_positions * shape.vocab_size if whole else 0)

    def kept_logits(self, num_positions: int) -> int:
        """Return the bytes that are left of them for the backward pass."""
        if self._shape.head != "lm":
            return 0
        per_entry = 4 if self._compute_bytes == MASTER_BYTES else 6
        return per_entry * self._own_logits(num_positions)

    def _own_logits(self, num_positions: int) -> int:
        """Return the number of logits of this rank's part of the vocabulary."""
        return num_positions * (-(-self._shape.vocab_size // self._layout.tensor))
