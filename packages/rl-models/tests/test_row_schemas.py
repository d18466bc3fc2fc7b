"""Batches are validated where they enter and leave a worker."""

from __future__ import annotations

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError
from rl_models.generation.worker import GenerationWorker
from rl_models.training.worker import TrainingWorker
from rl_models.types import GENERATION_INPUT, SEQUENCES, TRAINING_ROWS


def training_rows(**columns):
    ids = torch.ones(2, 5, dtype=torch.int64)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor([5, 4]),
            "token_mask": torch.ones(2, 5),
            "sample_mask": torch.ones(2),
            **columns,
        }
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("input_ids", torch.ones(2, 5), "input_ids.*dtype integer: got .* of float32"),
        ("token_mask", torch.ones(2, 4), "token_mask.* got 4 tokens where 'input_ids'"),
        ("input_lengths", torch.ones(2, 1).long(), "input_lengths.* give it 1 dim"),
    ],
)
def test_a_training_worker_refuses_rows(column, value, message):
    worker = TrainingWorker({})
    rows = training_rows(**{column: value})
    for call in (
        lambda: worker.train(rows, None, False, 2, 2),
        lambda: worker.get_logprobs(rows, 2),
        lambda: worker.get_values(rows, 2),
        lambda: worker.get_topk_logits(rows, 1, 2),
    ):
        with pytest.raises(BatchError, match=message):
            call()


def test_workers_refuse_rows_to_continue():
    rows = training_rows(seeds=torch.zeros(2))
    for worker in (TrainingWorker({}), GenerationWorker({}, {})):
        with pytest.raises(BatchError, match="column 'seeds' of the rows to continue"):
            worker.generate(rows, 0)


def test_a_generation_worker_refuses_what_its_backend_gives():
    class Backend:
        def generate(self, data, **settings):
            return BatchedDataDict({"output_ids": data["input_ids"]})

    worker = GenerationWorker({}, {})
    worker._backend = Backend()
    with pytest.raises(BatchError, match="lacks generation_lengths, unpadded"):
        worker.generate(training_rows())


def test_required_and_optional_columns():
    assert list(TRAINING_ROWS.required) == [
        *("input_ids", "input_lengths", "token_mask", "sample_mask")
    ]
    assert not TRAINING_ROWS.optional
    assert list(GENERATION_INPUT.optional) == ["stop_strings", "seeds"]
    assert list(SEQUENCES.required) == ["input_ids", "input_lengths"]
