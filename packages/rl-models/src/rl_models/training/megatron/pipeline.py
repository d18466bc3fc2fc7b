"""Run the micro-batches of a global batch through the stages.

With one stage each micro-batch goes forward and backward in turn. With more stages,
Megatron-core's 1F1B schedule lets them work on different micro-batches at once. Stages
with several parts of the layers each are interleaved. That takes micro-batches of one
shape, so they are padded to the largest, and a multiple of the stages of them: ones
without a loss are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl_models.training.megatron.architecture import HiddenStates
from rl_models.training.megatron.forward import hidden_states
from rl_models.training.megatron.model import MegatronModel

__all__ = ["run_micro_batches"]

Inputs = Mapping[str, Any]


def run_micro_batches(
    model: MegatronModel,
    micro_batches: Sequence[Inputs],
    finish: Callable[[int, Tensor], Tensor],
    *,
    backward: bool,
) -> None:
    """Run micro-batches forward and, if asked, backward; collective on all ranks.

    Args:
        model: The model.
        micro_batches: Inputs of each, as of `hidden_states`; the same on ranks of one
            copy.
        finish: Called on the last stage with the number of a micro-batch and its hidden
            states; returns the loss, or any number if there is no backward pass.
        backward: Whether to compute gradients.
    """
    with torch.set_grad_enabled(backward):
        if model.layout.num_stages > 1:
            _run_stages(model, micro_batches, finish, backward)
            return
        for number, inputs in enumerate(micro_batches):
            loss = finish(number, hidden_states(model, inputs))
            if backward:
                torch.autograd.backward(loss)


def _run_stages(
    model: MegatronModel,
    micro_batches: Sequence[Inputs],
    finish: Callable[[int, Tensor], Tensor],
    backward: bool,
) -> None:
    layout = model.layout
    real = total = len(micro_batches)
    rows = [inputs["input_ids"].shape[0] for inputs in micro_batches]
    given = list(micro_batches)
    is_interleaved = layout.num_chunks > 1
    if is_interleaved:
        given = _alike(model, micro_batches)
        total += -real % layout.num_stages

    def step(
        numbers: Iterator[int], chunk: HiddenStates
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        number = next(numbers)
        # With `calculate_per_token_loss` and a count, Megatron-core leaves the loss as
        # it is; counts are summed for a hook that is not set here.
        one = torch.ones((), dtype=torch.int, device=layout.device)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if number >= real:
                return hidden.float().sum() * 0.0, one, {}
            return finish(number, hidden[:, : rows[number]]), one, {}

        return hidden_states(model, given[min(number, real - 1)], chunk), loss_of

    # Each part of the layers takes all micro-batches in their order.
    numbers = [iter(range(total)) for _ in model.chunks]
    # The schedule allocates the tensors that it receives on CUDA's current device.
    with layout.devices():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=numbers if is_interleaved else numbers[0],
            model=model.chunks,
            num_microbatches=total,
            # Of interleaved stages; others have different lengths, and send each other
            # the shapes.
            seq_length=given[0]["input_ids"].shape[1],
            micro_batch_size=given[0]["input_ids"].shape[0],
            forward_only=not backward,
        )


def _alike(model: MegatronModel, micro_batches: Sequence[Inputs]) -> list[Inputs]:
    """Pad token ids on the right and below, where nothing real depends on them."""
    ids = [inputs["input_ids"] for inputs in micro_batches]
    rows = max(one.shape[0] for one in ids)
    width = max(one.shape[1] for one in ids)
    if model.layout.parallelism.sequence:
        width += -width % model.layout.tensor_size
    padding = [(0, width - one.shape[1], 0, rows - one.shape[0]) for one in ids]
    return [
        {"input_ids": torch.nn.functional.pad(one, missing)}
        for one, missing in zip(ids, padding, strict=True)
    ]
