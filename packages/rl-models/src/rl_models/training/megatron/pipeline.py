"""Run the micro-batches of a global batch through the stages.

With one stage each micro-batch goes forward and backward in turn. With more stages,
Megatron-core's 1F1B schedule lets them work on different micro-batches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl_models.training.megatron.forward import hidden_states
from rl_models.training.megatron.model import MegatronModel

__all__ = ["run_micro_batches"]


def run_micro_batches(
    model: MegatronModel,
    micro_batches: Sequence[Tensor],
    finish: Callable[[int, Tensor], Tensor],
    *,
    backward: bool,
) -> None:
    """Run micro-batches forward and, if asked, backward; collective on all ranks.

    Args:
        model: The model.
        micro_batches: [b, S] token ids of each; the same on ranks of one copy.
        finish: Called on the last stage with the number of a micro-batch and its hidden
            states; returns the loss, or any number if there is no backward pass.
        backward: Whether to compute gradients.
    """
    with torch.set_grad_enabled(backward):
        if model.layout.num_stages > 1:
            _run_stages(model, micro_batches, finish, backward)
            return
        for number, input_ids in enumerate(micro_batches):
            loss = finish(number, hidden_states(model, input_ids))
            if backward:
                torch.autograd.backward(loss)


def _run_stages(
    model: MegatronModel,
    micro_batches: Sequence[Tensor],
    finish: Callable[[int, Tensor], Tensor],
    backward: bool,
) -> None:
    numbers = iter(range(len(micro_batches)))

    def step(
        _: object, __: object
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        number = next(numbers)
        # With `calculate_per_token_loss` and a count, Megatron-core leaves the loss as
        # it is; counts are summed for a hook that is not set here.
        one = torch.ones((), dtype=torch.int, device=model.layout.device)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return finish(number, hidden), one, {}

        return hidden_states(model, micro_batches[number]), loss_of

    # The schedule allocates the tensors that it receives on CUDA's current device.
    with model.layout.devices():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=[model.module],
            num_microbatches=len(micro_batches),
            # Not used: lengths differ, so stages send each other the shapes.
            seq_length=0,
            micro_batch_size=0,
            forward_only=not backward,
        )
