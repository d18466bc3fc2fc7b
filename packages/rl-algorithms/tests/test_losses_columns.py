"""Columns of losses: what a type checker knows, and what an error says."""

from __future__ import annotations

import subprocess
import sys
from types import MappingProxyType
from typing import Annotated, NotRequired

import pytest
import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses import (
    ClippedPGLossFn,
    DistillationLossFn,
    DPOLossFn,
    MseValueLossFn,
    NLLLossFn,
    PreferenceLossFn,
)
from rl_algorithms.losses.columns import LossColumns, TokenMasks
from rl_distributed.batch.batched_data_dict import BatchedDataDict

ONES, LOGPROBS = torch.ones(2, 4), {"next_token_logprobs": torch.zeros(2, 3)}
MASKS = {"token_mask": ONES, "sample_mask": torch.ones(2)}
VALUES = {"values": torch.zeros(2, 4)}
DISTILLED = {
    "student_topk_logits": torch.zeros(2, 3, 5),
    "student_log_normalizer": torch.zeros(2, 3),
}
PG = {"reference_policy_kl_penalty": 0.1, "positive_nll_coef": 0.1}
CASES = {
    "nll": (NLLLossFn(), MASKS, LOGPROBS),
    "dpo": (DPOLossFn(), {**MASKS, "reference_policy_logprobs": ONES}, LOGPROBS),
    "preference": (
        PreferenceLossFn(),
        {"value_mask": ONES, "sample_mask": torch.ones(2)},
        VALUES,
    ),
    "value": (
        MseValueLossFn({"cliprange": 0.5}),
        {**MASKS, "returns": ONES, "values": ONES},
        VALUES,
    ),
    "distillation": (
        DistillationLossFn(),
        {
            **MASKS,
            "topk_logits": torch.zeros(2, 4, 5),
            "topk_log_normalizer": torch.full((2, 4), 2.0),
        },
        DISTILLED,
    ),
    "policy": (
        ClippedPGLossFn(PG),
        {
            **MASKS,
            "advantages": torch.ones(2),
            "reference_policy_logprobs": -ONES,
            "nll_weights": torch.ones(2),
        },
        LOGPROBS,
    ),
}
MISSING = [(name, column) for name, case in CASES.items() for column in case[1]]


def compute(loss_fn, data, inputs):
    return loss_fn(data, torch.tensor(2.0), torch.tensor(6.0), **inputs)[0]


@pytest.mark.parametrize(("name", "column"), MISSING)
def test_a_missing_column_is_named_with_loss_rule_and_remedy(name, column):
    loss_fn, data, inputs = CASES[name]
    rest = {key: value for key, value in data.items() if key != column}
    with pytest.raises(LossInputError) as caught:
        compute(loss_fn, BatchedDataDict(rest), inputs)
    said = str(caught.value)
    assert said.startswith(
        f"column {column!r} of the batch is missing: {type(loss_fn).__name__}"
    )
    assert said.endswith(f"; the batch has {', '.join(sorted(rest))}")
    rule, remedy, _ = said.split(" needs it as ")[1].split("; ")
    assert rule.startswith("[")
    assert remedy.startswith(("set it ", "take it ", "compute it "))


def test_a_column_that_a_setting_needs_is_told_with_the_setting():
    loss_fn, data, inputs = CASES["policy"]
    for column, setting in (
        ("reference_policy_logprobs", "reference_policy_kl_penalty"),
        ("nll_weights", "positive_nll_coef"),
    ):
        rest = {key: value for key, value in data.items() if key != column}
        found = f"ClippedPGLossFn with {setting} needs it as .*set {setting} to 0; the"
        with pytest.raises(LossInputError, match=found):
            compute(loss_fn, rest, inputs)


def test_a_list_is_no_tensor():
    message = "'token_mask' of the batch is no tensor: NLLLossFn needs it as"
    with pytest.raises(LossInputError, match=message):
        compute(NLLLossFn(), {**MASKS, "token_mask": [1, 1]}, LOGPROBS)


@pytest.mark.parametrize("name", CASES)
def test_any_mapping_with_more_columns_gives_the_same_bits(name):
    loss_fn, data, inputs = CASES[name]
    more = {**data, "text": ["a", "b"]}
    wanted = compute(loss_fn, BatchedDataDict(data), inputs)
    assert torch.equal(compute(loss_fn, MappingProxyType(more), inputs), wanted)
    assert torch.equal(compute(loss_fn, more, inputs), wanted)


class Bonus(TokenMasks):
    bonus: Annotated[Tensor, "[B]; compute it"]
    extra: NotRequired[Annotated[Tensor, "[B]; draw it"]]


def test_the_columns_of_a_loss_of_ones_own():
    columns = LossColumns(Bonus, "own_loss")
    data = {**MASKS, "bonus": torch.ones(2)}
    assert columns.read(data) is data
    with pytest.raises(LossInputError, match=r"'extra'.*own_loss with x needs it as"):
        columns.need(None, "extra", data, " with x")
    with pytest.raises(LossInputError, match=r"own_loss needs it as \[B\]; compute"):
        columns.read(MASKS)


PROGRAM = """
from collections.abc import Mapping
from typing import Any
from torch import Tensor
from rl_algorithms.losses import DPOLossFn, NLLLossFn
from rl_algorithms.losses.dpo import DPOLossDataDict
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models import LossFunction
from rl_models.types import LossInputType, LossType, TrainingRows

class Own:
    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor,
        global_valid_toks: Tensor, **inputs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Any]]: ...

losses: list[LossFunction] = [Own(), NLLLossFn(), DPOLossFn()]

def use(rows: TrainingRows, pairs: BatchedDataDict[DPOLossDataDict], n: Tensor) -> None:
    NLLLossFn()(rows, n, n)
    NLLLossFn()({"token_mask": n, "sample_mask": n}, n, n)
    DPOLossFn()(pairs, n, n)
    DPOLossFn()(rows, n, n)
    pairs.columns["reference_logprobs"]
"""


def test_mypy_knows_the_columns_of_a_loss(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict"),
            *("--disable-error-code", "empty-body", "--cache-dir", tmp_path, program),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = [line.split(": ", 1)[1] for line in done.stdout.splitlines()[:-1]]
    assert said == [
        'error: Argument 1 to "__call__" of "DPOLossFn" has incompatible type '
        '"BatchedDataDict[TrainDatumSpec]"; expected "BatchedDataDict[DPOLossDataDict]'
        ' | DPOLossDataDict"  [arg-type]',
        'error: TypedDict "DPOLossDataDict" has no key "reference_logprobs"  '
        "[typeddict-item]",
        'note: Did you mean "reference_policy_logprobs"?',
    ], done.stdout
