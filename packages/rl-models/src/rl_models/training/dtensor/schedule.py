"""In which order the micro-batches of a step go forward and back."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from rl_models.training.dtensor.model import RankModel
from rl_models.training.dtensor.pipeline_parallel import PipelineStage

__all__ = ["run_micro_batches"]

Forward = Callable[[int], Tensor | None]
"""Computes a micro-batch; returns its loss, or None on stages without the head."""


def run_micro_batches(
    model: RankModel, count: int, forward: Forward, *, backward: bool
) -> None:
    """Run micro-batches through the model, or through this rank's stage of it.

    Args:
        model: The model.
        count: How many there are.
        forward: Computes each by its number.
        backward: Whether gradients are wanted.
    """
    if model.pipeline is not None:
        _run_stage(model, model.pipeline, count, forward, backward)
        return
    for number in range(count):
        loss = forward(number)
        if backward and loss is not None:
            model.sync_gradients(number == count - 1)
            torch.autograd.backward(loss)


def _run_stage(
    model: RankModel,
    stage: PipelineStage,
    count: int,
    forward: Forward,
    backward: bool,
) -> None:
    """Run a stage: in turn one micro-batch forward and one back (1F1B).

    It begins with as many forward passes as there are stages behind it, so that it
    never holds activations of more micro-batches than that and one.
    """
    ahead = stage.num_stages - 1 - stage.stage if backward else 0
    in_flight: deque[tuple[Tensor | None, Tensor | None, Tensor | None]] = deque()
    failure: Exception | None = None
    for number in range(count + ahead):
        if number < count:
            loss = None
            try:
                loss = forward(number)
            except Exception as error:
                if not (stage.is_last and stage.has_entered):
                    raise  # other stages fail at the same place
                # The others have computed their part and wait for gradients.
                failure = failure or error
            in_flight.append((*stage.take_ends(), loss))
        if number >= ahead:
            ends = in_flight.popleft()
            if backward:
                model.sync_gradients(number - ahead == count - 1)
                stage.backward(*ends)
    stage.finish_sends()
    told = stage.from_last(None if failure is None else _sendable(failure))
    if failure is not None:
        raise failure
    if told is not None:
        raise told


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"the last stage failed: {type(error).__name__}: {error}")
    return error
