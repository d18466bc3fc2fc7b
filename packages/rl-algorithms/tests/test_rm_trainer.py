"""Reward models on Ray with a tiny model."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rl_algorithms as rl
from rl_algorithms.rm.config import RMConfig
from rl_algorithms.testing import check_trainer
from rl_distributed.errors import ConfigError, UserError
from rl_envs import check_reward_fn, create_env
from rl_models.tokens.tokenizer import load_tokenizer

# The better answer begins with a larger digit than the worse one.
PAIRS = [
    {
        "prompt": f"{a}?",
        "chosen": str(high) * (1 + (a + low) % 3),
        "rejected": str(low) * (1 + (a + high) % 3),
    }
    for a in range(8)
    for low in range(8)
    for high in range(low + 1, 9)
]
HELD_OUT = PAIRS[::5]
TRAIN = [pair for i, pair in enumerate(PAIRS) if i % 5]
RM = {
    "train_global_batch_size": 16,
    "train_micro_batch_size": 15,
    "max_total_sequence_length": 8,
    "lr": 3e-3,
}


@pytest.fixture(scope="module")
def pool(ray_cluster):
    """Processes of one model, shared with other tests that sample."""
    with rl.KeptWorkers() as kept:
        yield kept


def make(model, folder, steps, pool=None, **settings):
    trainer = rl.RMTrainer.from_pretrained(
        model, max_num_steps=steps, output_dir=str(folder), **{**RM, **settings}
    )
    return rl.RMTrainer(trainer.config, pool=pool)


class TestTraining:
    def test_tells_separable_pairs_apart(self, tiny_model, tmp_path, pool):
        result = make(
            tiny_model, tmp_path / "run", 60, pool, val_at_start=True, val_at_end=True
        ).fit(TRAIN, val_dataset=HELD_OUT)
        accuracy = result.history.column("val:accuracy")[1]
        assert 0.2 < accuracy[0] < 0.8
        assert accuracy[-1] >= 0.9
        metrics = result.metrics
        assert metrics["val:num_valid_samples"] == len(HELD_OUT)
        assert metrics["val:rewards_margin_mean"] == pytest.approx(
            metrics["val:rewards_chosen_mean"] - metrics["val:rewards_rejected_mean"],
            abs=1e-5,
        )
        # Plain transformers loads it, and agrees.
        model = AutoModelForSequenceClassification.from_pretrained(result.model_path)
        tokenizer = AutoTokenizer.from_pretrained(result.model_path)

        def scores(side):
            texts = [p["prompt"] + p[side] + tokenizer.eos_token for p in HELD_OUT]
            batch = tokenizer(texts, return_tensors="pt", padding=True)
            with torch.no_grad():
                return model(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).logits[:, 0]

        # So does the reward function made from it.
        score = pickle.loads(
            pickle.dumps(rl.RewardModelFn(result.model_path, batch_size=7))
        )
        prompts, answers = (
            [p[name] for p in HELD_OUT] for name in ("prompt", "chosen")
        )
        assert score(prompts, answers) == pytest.approx(
            scores("chosen").tolist(), abs=1e-4
        )
        check_reward_fn(score, {"prompt": prompts[0]})
        # And the environment that configurations name.
        world = create_env("reward_model", {"model_path": str(result.model_path)})
        logs = [
            [{"role": "user", "content": p}, {"role": "assistant", "content": a}]
            for p, a in zip(prompts, answers, strict=True)
        ]
        found = world.step(logs, [{}] * len(logs))
        # Batches are split differently, and scores are centred on zero.
        assert found.rewards.tolist() == pytest.approx(
            score(prompts, answers), abs=1e-5
        )
        assert all(found.terminateds)
        right = (scores("chosen") > scores("rejected")).float().mean().item()
        assert right == pytest.approx(accuracy[-1], abs=1e-6)

    def test_every_held_out_pair_counts_unless_told(self, tiny_model, tmp_path, pool):
        held_out = (HELD_OUT * 6)[:300]

        def counted(folder, **settings):
            trainer = make(
                tiny_model, tmp_path / folder, 1, pool, val_at_end=True, **settings
            )
            result = trainer.fit(TRAIN, val_dataset=held_out)
            return result.metrics["val:num_valid_samples"]

        assert counted("all") == 300
        assert counted("some", val_batches=2) == 2 * 32

    def test_keeps_the_contract(self, tiny_model, tmp_path, pool):
        check_trainer(
            lambda steps, folder: make(tiny_model, folder, steps, pool),
            lambda trainer, callbacks, resume: trainer.fit(
                TRAIN, callbacks=callbacks, resume=resume
            ),
            tmp_path,
        )

    def test_batching_and_workers_play_no_part(self, tiny_model, tmp_path, pool):
        # An epoch ends with a batch of 5 pairs, which two ranks cannot halve.
        rows = TRAIN[:21]

        def fit(name, pool, **settings):
            options = {"drop_last": False, **settings}
            trainer = make(tiny_model, tmp_path / name, 2, pool, **options)
            return trainer.fit(rows)

        plain = fit("plain", pool)
        others = [
            fit("packed", pool, sequence_packing={"train_mb_tokens": 32}),
            fit("dynamic", pool, dynamic_batching={"train_mb_tokens": 32}),
            fit("two", pool, cluster={"workers_per_node": 2}),
        ]
        assert plain.metrics["train:num_samples"] == 10
        for other in others:
            for key in ("train:loss", "train:accuracy", "train:rewards_margin_mean"):
                assert other.history.column(key)[1] == pytest.approx(
                    plain.history.column(key)[1], abs=1e-4
                ), key


class TestBadInput:
    def test_config(self):
        with pytest.raises(ConfigError, match=r"policy\.head must be reward"):
            RMConfig.from_dict({"policy": {"model_name": "m", "head": "lm"}})
        with pytest.raises(ConfigError, match="margin"):
            RMConfig.from_dict(
                {"policy": {"model_name": "m"}, "loss_fn": {"margin": -1}}
            )
        config = RMConfig.from_dict({"policy": {"model_name": "m"}})
        assert config.policy.head == "reward"
        assert RMConfig.from_dict(config.to_dict()) == config

    def test_a_tokenizer_that_cannot_end_an_answer(self, tiny_model):
        config = rl.DataConfig(apply_chat_template=False, add_eos=True)
        score = rl.RewardModelFn(tiny_model, config=config)
        tokenizer = load_tokenizer(tiny_model)
        tokenizer.eos_token = None
        score._loaded = None, tokenizer
        with pytest.raises(rl.DataError, match=r"add_eos is true but .* no EOS token"):
            score(["1+1="], ["2"])

    def test_no_model_for_the_environment(self, tmp_path):
        with pytest.raises(UserError, match="does not exist"):
            create_env("reward_model", {"model_path": str(tmp_path / "nowhere")})

    def test_no_model_to_score_with(self, tmp_path):
        with pytest.raises(UserError, match="does not exist"):
            rl.RewardModelFn(tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([{"prompt": "1?", "answer": "2"}], "has no pairs"),
            ([], "no rows|empty"),
            ([{"prompt": "1?", "chosen": "2", "rejected": "2"}], "same tokens"),
            ([{"prompt": "1?", "chosen": "2" * 20, "rejected": "1"}], "tokens"),
        ],
    )
    def test_rows(self, tiny_model, tmp_path, rows, message):
        with pytest.raises(UserError, match=message):
            make(tiny_model, tmp_path / "run", 1).fit(rows)
        assert not (tmp_path / "run").exists()
