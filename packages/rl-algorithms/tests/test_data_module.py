from __future__ import annotations

import json
import re

import pytest

from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.module import DataModule
from rl_algorithms.distillation.config import DistillationSettings
from rl_algorithms.errors import EmptyDatasetError, PromptTooLongError
from rl_algorithms.grpo.config import GRPOSettings
from rl_algorithms.ppo.config import PPOSettings
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

ROWS = [{"prompt": f"{i}:", "answer": str(i)} for i in range(10)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TokenizerBuildConfig())


def make(tokenizer, config=None, **settings):
    arguments = {"kind": "prompts", "batch_size": 3, "train": ROWS, **settings}
    return DataModule(config or DataConfig(), tokenizer, **arguments)


def test_prompts_of_objects(tokenizer):
    module = make(tokenizer, validation=ROWS[:4], val_batch_size=3, max_val_rows=2)
    batches = list(module.train_loader)
    assert [batch.size for batch in batches] == [3, 3, 3]
    held_out = module.validation_loader()
    assert held_out is not None
    assert [batch["idx"] for batch in held_out] == [[0, 1]]
    assert module.counts() == {
        "num_train_rows": 10,
        "num_train_overlong": 0,
        "num_validation_rows": 2,
        "num_validation_overlong": 0,
        "num_train_contaminated": 2,
    }


@pytest.mark.parametrize("settings", [GRPOSettings, PPOSettings, DistillationSettings])
def test_samples_to_every_held_out_prompt_unless_told(settings):
    assert settings().max_val_samples is None


def test_demonstrations_of_files(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    config = DataConfig.from_dict({"train": str(path), "drop_last": False})
    module = make(
        tokenizer,
        config,
        train=None,
        kind="demonstrations",
        make_sequence_length_divisible_by=8,
    )
    batch = next(iter(module.train_loader))
    assert batch["token_mask"].shape == (3, 8)
    assert len(module.train_loader) == 4
    assert module.validation_loader() is None


def test_rows_that_do_not_fill_a_step_make_a_smaller_one(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    few = len(ROWS) + 1
    module = make(tokenizer, DataConfig(), train=str(path), batch_size=few)
    assert [batch.size for batch in module.train_loader] == [len(ROWS)]
    # With several steps, the smaller last one is dropped.
    module = make(tokenizer, DataConfig(), train=str(path), batch_size=len(ROWS) - 1)
    assert [batch.size for batch in module.train_loader] == [len(ROWS) - 1]
    with pytest.raises(EmptyDatasetError, match="10 rows but a batch takes 11"):
        make(tokenizer, DataConfig(drop_last=True), train=ROWS, batch_size=few)


@pytest.mark.parametrize(("size", "count"), [(3, 3), (0.2, 2)])
def test_rows_set_aside_are_not_trained_on(tokenizer, size, count):
    module = make(tokenizer, DataConfig(split_validation_size=size))
    assert module.validation_dataset is not None

    def prompts(dataset):
        return {datum["extra_env_info"]["prompt"] for datum in dataset}

    held_out, trained = (
        prompts(module.validation_dataset),
        prompts(module.train_dataset),
    )
    assert len(held_out) == count
    assert not held_out & trained
    assert len(held_out | trained) == 10


def test_resuming(tokenizer):
    first = make(tokenizer, endless=True)
    batches = iter(first.train_loader)
    for _ in range(4):
        next(batches)
    second = make(tokenizer, endless=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch, _ in zip(second.train_loader, range(5), strict=False):
        assert batch["idx"] == next(batches)["idx"]


def test_bad_input(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        make(tokenizer, train=None)
    with pytest.raises(EmptyDatasetError, match="is empty"):
        make(tokenizer, train=[])
    with pytest.raises(EmptyDatasetError, match="sets 10 of the 10 rows"):
        make(tokenizer, DataConfig(split_validation_size=10))
    with pytest.raises(PromptTooLongError, match="longer than 1 tokens"):
        make(tokenizer, DataConfig(max_input_seq_length=1), max_length=50)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("prompts", "num_prompts_per_step"),
        ("demonstrations", "train_global_batch_size"),
        ("preferences", "train_global_batch_size"),
    ],
)
def test_a_step_of_more_rows_than_there_are_is_warned_of(tokenizer, caplog, kind, key):
    rows = [{"prompt": f"{i}:", "answer": "1", **PAIR} for i in range(5)]
    make(tokenizer, kind=kind, batch_size=64, train=rows)
    (warning,) = said(caplog)
    assert re.search(
        rf"has 5 rows, fewer than a step takes \(64\).*lower {key}", warning
    )
    caplog.clear()
    make(tokenizer, kind=kind, batch_size=5, train=rows)
    assert said(caplog) == []


@pytest.mark.parametrize("kind", ["prompts", "demonstrations", "preferences"])
def test_prompts_of_unknown_tokens_are_warned_of_once(tokenizer, caplog, kind):
    unknown = [{"prompt": "жж", "answer": "1", **PAIR} for _ in range(3)]
    known = [{"prompt": "1ж", "answer": "1", **PAIR} for _ in range(2)]
    held_out = [{**row, "prompt": "ж"} for row in unknown]
    make(tokenizer, kind=kind, batch_size=2, train=unknown, validation=held_out)
    (warning,) = said(caplog)
    assert "all 3 prompts of dataset" in warning
    assert "which the model cannot tell apart (row 0 is the first)" in warning
    assert "policy.tokenizer.name" in warning
    caplog.clear()
    make(tokenizer, kind=kind, batch_size=2, train=known + unknown)
    assert "3 of the 5 prompts" in said(caplog)[0]
    assert "row 2 is the first" in said(caplog)[0]
    caplog.clear()
    make(tokenizer, kind=kind, batch_size=2, train=known)
    assert said(caplog) == []


PAIR = {"chosen": "1", "rejected": "2"}


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
