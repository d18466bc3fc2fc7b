"""DPO on Ray with a tiny model, and its cache of reference log-probs."""

from __future__ import annotations

import pytest
import torch

import rl_algorithms as rl
from rl_algorithms.dpo.reference import ReferenceLogprobs, reference_identity
from rl_algorithms.testing import check_trainer, weights_digest
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import UserError
from rl_models import TrainingPolicy
from rl_models.config import PolicyConfig

# Answers of different lengths; an even first digit of the prompt wants a short one.
ROWS = [
    {
        "prompt": f"{a}+{b}=",
        "chosen": "7" if a % 2 == 0 else "3579",
        "rejected": "3579" if a % 2 == 0 else "7",
    }
    for a in range(8)
    for b in range(4)
]
DPO = {
    "train_global_batch_size": 8,
    "train_micro_batch_size": 7,
    "max_total_sequence_length": 16,
    "reference_policy_kl_penalty": 0.1,
    "lr": 3e-3,
}


class Counted:
    """Counts the rows that are passed to a policy method."""

    def __init__(self, monkeypatch, name):
        self.rows = 0
        method = getattr(TrainingPolicy, name)

        def counting(policy, data, **options):
            self.rows += data.size
            return method(policy, data, **options)

        monkeypatch.setattr(TrainingPolicy, name, counting)


def make(model, folder, steps, pool, **settings):
    trainer = rl.DPOTrainer.from_pretrained(
        model, max_num_steps=steps, output_dir=str(folder), **{**DPO, **settings}
    )
    return rl.DPOTrainer(trainer.config, pool=pool)


def train(
    model,
    folder,
    steps,
    pool,
    resume=False,
    rows=ROWS,
    validation=ROWS[:5],
    **settings,
):
    trainer = make(model, folder, steps, pool, **settings)
    return trainer.fit(rows, val_dataset=validation, resume=resume)


# An epoch ends with a batch of 5 pairs, which two ranks cannot halve.
UNEVEN = {"drop_last": False, "rows": ROWS[:13]}


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory, pool):
    return train(tiny_model, tmp_path_factory.mktemp("plain"), 4, pool, **UNEVEN)


class TestDPO:
    def test_learns_to_prefer_held_out_answers(self, tiny_model, tmp_path, pool):
        rows = [{**row, "chosen": "7", "rejected": "35"} for row in ROWS]
        result = train(
            tiny_model,
            tmp_path / "run",
            12,
            pool,
            rows=[row for row in rows if row["prompt"][2] != "3"],
            validation=[row for row in rows if row["prompt"][2] == "3"],
            val_at_start=True,
            val_at_end=True,
        )
        accuracy = result.history.column("val:accuracy")[1]
        assert accuracy[0] == 0, "nothing is better than itself"
        assert accuracy[-1] == 1
        assert result.metrics["val:policy_accuracy"] == 1
        losses = result.history.column("val:loss")[1]
        assert losses[0] == pytest.approx(0.6931, abs=1e-4)
        assert losses[-1] < 0.6
        margin = result.metrics["val:rewards_margin_mean"]
        chosen, rejected = (
            result.metrics[f"val:rewards_{side}_mean"]
            for side in ("chosen", "rejected")
        )
        assert margin == pytest.approx(chosen - rejected, abs=1e-6)
        assert result.metrics["train:num_samples"] == 16

    def test_computes_the_reference_once(self, tiny_model, tmp_path, pool, monkeypatch):
        counted = Counted(monkeypatch, "get_logprobs")
        train(tiny_model, tmp_path / "run", 6, pool)
        # Four steps are an epoch; the held-out rows are also in the training data.
        assert counted.rows == 2 * len(ROWS)
        resumed = train(tiny_model, tmp_path / "run", 9, pool, resume=True)
        assert counted.rows == 2 * len(ROWS)
        whole = train(tiny_model, tmp_path / "whole", 9, pool)
        digest = weights_digest(whole.checkpoint_path)
        assert weights_digest(resumed.checkpoint_path) == digest

    def test_a_lost_cache_is_made_again_from_the_first_weights(
        self, tiny_model, tmp_path, pool
    ):
        train(tiny_model, tmp_path / "run", 2, pool)
        (tmp_path / "run" / "reference_logprobs.npz").write_bytes(b"damaged")
        resumed = train(tiny_model, tmp_path / "run", 4, pool, resume=True)
        whole = train(tiny_model, tmp_path / "whole", 4, pool)
        digest = weights_digest(whole.checkpoint_path)
        assert weights_digest(resumed.checkpoint_path) == digest

    def test_keeps_the_contract(self, tiny_model, tmp_path, pool):
        def fit(trainer, callbacks, resume):
            return trainer.fit(ROWS[:20], callbacks=callbacks, resume=resume)

        check_trainer(
            lambda steps, folder: make(tiny_model, folder, steps, pool), fit, tmp_path
        )

    @pytest.mark.parametrize(
        "settings",
        [
            {"precompute_reference_logprobs": False},
            {"policy.sequence_packing": {"train_mb_tokens": 40}},
            {"cluster": {"workers_per_node": 2}},
        ],
        ids=["reference per batch", "packed", "two ranks"],
    )
    def test_other_ways_give_the_same_losses(
        self, tiny_model, tmp_path, pool, plain, settings
    ):
        other = train(tiny_model, tmp_path, 4, pool, **{**UNEVEN, **settings})
        for name in ("train:loss", "train:accuracy", "train:grad_norm"):
            expected = plain.history.column(name)[1]
            assert other.history.column(name)[1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "no rows|empty"),
        ([{"prompt": "1", "chosen": "2"}], {}, "rejected_key"),
        ([{"prompt": "1", "chosen": "2", "rejected": "2"}], {}, "same tokens"),
        ([{"prompt": "1" * 30, "chosen": "2", "rejected": "3"}], {}, "on_overlong"),
        (ROWS, {"reference_policy_kl_penalty": -1}, "greater than 0"),
        (ROWS, {"stop_at_validation_metric": "val:loss"}, "belong together"),
        (ROWS, {"data": {"streaming": True}}, "precompute_reference_logprobs"),
    ],
)
def test_bad_input_is_found_before_a_model_is_loaded(
    tiny_model, tmp_path, rows, settings, message
):
    with pytest.raises(UserError, match=message):
        rl.train(
            tiny_model,
            rows,
            algorithm="dpo",
            output_dir=str(tmp_path / "run"),
            **{**DPO, "max_num_steps": 1, **settings},
        )
    assert not (tmp_path / "run").exists()


class TestReferenceLogprobs:
    def rows(self, ids, mask=None):
        tensor = torch.tensor(ids)
        return BatchedDataDict(
            {
                "input_ids": tensor,
                "input_lengths": (tensor != 0).sum(1),
                "token_mask": torch.tensor(mask or ids) != 0,
            }
        )

    def compute(self, rows):
        self.asked = rows.size
        return rows["input_ids"].sum(1)

    def test_rows_are_known_by_their_content(self, tmp_path):
        known = ReferenceLogprobs(tmp_path / "file.npz", "model")
        assert known.add([self.rows([[1, 2], [3, 4], [1, 2]])], self.compute) == 2
        wider = self.rows([[3, 4, 0], [1, 2, 0]])
        assert known.column(wider).tolist() == [7, 3]
        assert known.add([wider], self.compute) == 0
        other_mask = self.rows([[1, 2]], [[0, 1]])
        assert not known.knows([other_mask])
        assert known.add([wider, other_mask], self.compute) == 1
        assert self.asked == 1

    def test_an_interruption_keeps_what_was_computed(self, tmp_path):
        def batches():
            yield self.rows([[1, 2]])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ReferenceLogprobs(tmp_path / "file.npz", "m").add(batches(), self.compute)
        assert len(ReferenceLogprobs(tmp_path / "file.npz", "m")) == 1

    def test_the_file_is_used_by_the_same_reference_only(self, tmp_path, caplog):
        rows = self.rows([[1, 2], [3, 4]])
        ReferenceLogprobs(tmp_path / "file.npz", "model").add([rows], self.compute)
        assert ReferenceLogprobs(tmp_path / "file.npz", "model").knows([rows])
        assert not ReferenceLogprobs(tmp_path / "file.npz", "other").knows([rows])
        assert "another reference policy" in caplog.text

    @pytest.mark.parametrize("part", [0.0, 0.5])
    def test_a_file_that_was_cut_is_computed_again(self, tmp_path, part):
        file = tmp_path / "file.npz"
        ReferenceLogprobs(file, "model").add([self.rows([[1, 2]])], self.compute)
        file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
        assert len(ReferenceLogprobs(file, "model")) == 0

    def test_another_model_is_another_reference(self, tiny_model, tmp_path):
        config = PolicyConfig(model_name=str(tiny_model))
        identity = reference_identity(config)
        assert reference_identity(config) == identity
        changed = config.replace(precision="bfloat16")
        assert reference_identity(changed) != identity
        (tmp_path / "config.json").write_text("{}")
        here = config.replace(model_name=str(tmp_path))
        before = reference_identity(here)
        (tmp_path / "config.json").write_text("{ }")
        assert reference_identity(here) != before
