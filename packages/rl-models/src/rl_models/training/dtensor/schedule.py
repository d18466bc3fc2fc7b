"""The order in which the micro-batches of a step go forward and backward."""

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
        count: Number of micro-batches.
        forward: Computes a micro-batch by its number.
        backward: Whether to compute gradients.
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
    """Run a stage: alternately one micro-batch forward and one backward (1F1B).

    It begins with as many forward passes as there are stages after it, so that it never
    holds the activations of more micro-batches than that plus one.
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
                    raise  # the other stages fail at the same point
                # A loss function fails on the last stage only. The other stages wait
                # for its gradients, so finish the step and raise on all of them.
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
        # Some exceptions cannot be pickled, or not be made again from their arguments.
        return RuntimeError(f"the last stage failed: {type(error).__name__}: {error}")
    return error
