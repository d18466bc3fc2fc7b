"""Documented programs about trainers: from ready components, and by `train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_cells import cells

import rl_algorithms as rl
from rl_distributed import BatchedDataDict, RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models import HuggingFacePolicy

Run = Callable[..., dict[str, Any]]
PAIRS = [{"prompt": f"{n} ", "chosen": "yes", "rejected": "no"} for n in range(8)]
ANSWERS = [{"prompt": f"{n} ", "response": "yes"} for n in range(8)]


@pytest.fixture(scope="module")
def cluster(_ray: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def policy(cluster: RayVirtualCluster, model: str) -> Iterator[HuggingFacePolicy]:
    policy = HuggingFacePolicy(
        model, cluster, optimizer={"kwargs": {"lr": 1e-2}}, max_total_sequence_length=16
    )
    yield policy
    policy.shutdown()


def _rows() -> BatchedDataDict[Any]:
    ids = torch.arange(4, 12)[None]
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([8])})


def _logprobs(policy: HuggingFacePolicy) -> Any:
    return policy.get_logprobs(_rows())["logprobs"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("trainer_class", "rows"), [(rl.DPOTrainer, PAIRS), (rl.SFTTrainer, ANSWERS)]
)
def test_a_ready_policy_is_trained_and_left_open(
    policy: HuggingFacePolicy,
    cluster: RayVirtualCluster,
    trainer_class: Any,
    rows: Any,
) -> None:
    before = _logprobs(policy)
    trainer = trainer_class(policy, cluster, train_global_batch_size=4)
    result = trainer.train(rows, progress=False)
    assert trainer.components.policy is policy
    assert trainer.config.policy.model_name == policy.config.model_name
    assert trainer.config.policy.max_total_sequence_length == 16
    assert result.steps == 2
    _, losses = result.history.column("train:loss")
    assert losses[1] < losses[0]
    assert not torch.equal(_logprobs(policy), before)  # its own weights, still there


def test_grpo_samples_on_the_cluster_with_the_policy_s_weights(
    policy: HuggingFacePolicy, cluster: RayVirtualCluster
) -> None:
    trainer = rl.GRPOTrainer(
        policy=policy,
        cluster=cluster,
        reference_policy_kl_penalty=0,
        num_prompts_per_step=2,
        num_generations_per_prompt=4,
        max_num_steps=2,
    )
    result = trainer.train(
        [{"prompt": "1 "}] * 4,
        reward_fn=lambda prompt, response: float(len(response)),
        progress=False,
    )
    assert trainer.components.cluster is cluster
    assert trainer.components.policy is policy
    assert result.steps == 2
    # Sampled tokens have the policy's log-probs, so its weights have arrived.
    assert result.metrics["train:token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
    assert _logprobs(policy).shape == (1, 8)


def test_ppo_trains_the_policy_and_starts_a_critic(
    policy: HuggingFacePolicy, cluster: RayVirtualCluster
) -> None:
    before = _logprobs(policy)
    settings = {
        "num_prompts_per_step": 4,
        "max_new_tokens": 4,
        "reference_policy_kl_penalty": 0,
        "max_num_steps": 2,
        "critic.optimizer.kwargs.lr": 1e-3,
    }

    def train(trainer: rl.PPOTrainer) -> rl.TrainResult:
        return trainer.train(
            [{"prompt": "1 "}] * 8,
            reward_fn=lambda prompt, response: float(len(response)),
            progress=False,
        )

    with pytest.raises(
        ConfigError, match=r"generation and critic .* 1 more group .*_groups=3, or"
    ):
        train(rl.PPOTrainer(policy, cluster, **settings))
    assert not Path("runs").exists()
    with RayVirtualCluster([1], use_gpus=False) as further:
        trainer = rl.PPOTrainer(policy, further, **settings)
        result = train(trainer)
    assert trainer.components.policy is policy
    critic = trainer.config.critic
    assert critic.model_name == policy.config.model_name
    assert critic.max_total_sequence_length == 16
    assert critic.optimizer.kwargs["lr"] == 1e-3
    assert result.steps == 2
    assert result.metrics["train:critic/loss"] > 0
    assert result.metrics["train:token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
    assert not torch.equal(_logprobs(policy), before)
    left = result.run_dir / "checkpoints/step_2"
    assert {path.name for path in left.iterdir()} >= {"policy", "critic"}


@pytest.mark.parametrize("on_policy", cells([True, False], [True]))
def test_a_policy_is_distilled_from_a_teacher(
    policy: HuggingFacePolicy, model: str, on_policy: bool
) -> None:
    before = _logprobs(policy)
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        trainer = rl.DistillationTrainer(
            policy,
            cluster,
            teacher=model,
            num_prompts_per_step=4,
            on_policy=on_policy,
            topk_logits_k=8,
            max_num_steps=2,
            **({"max_new_tokens": 4} if on_policy else {}),
        )
        result = trainer.train(ANSWERS, progress=False)
    assert trainer.components.policy is policy
    assert trainer.config.teacher.max_total_sequence_length == 16
    assert (trainer.components.generation is not None) == on_policy
    assert result.steps == 2
    # The policy has moved away from its initial weights, which the teacher has.
    assert result.metrics["train:loss"] > 0
    assert not torch.equal(_logprobs(policy), before)


def test_a_reward_model_takes_a_policy_with_its_head(
    cluster: RayVirtualCluster, model: str, policy: HuggingFacePolicy
) -> None:
    with pytest.raises(ConfigError, match=r"policy\.head must be reward"):
        rl.RMTrainer(policy, cluster)
    scorer = HuggingFacePolicy(model, RayVirtualCluster([1], False), head="reward")
    try:
        result = rl.RMTrainer(scorer, cluster).train(PAIRS, progress=False)
        assert result.steps == 1
        assert scorer.get_values(_rows())["values"].shape == (1, 8)
    finally:
        scorer.shutdown()


def test_a_trainer_of_a_policy_and_a_cluster(run_program: Run, model: str) -> None:
    names = run_program("dpo_trainer", model)
    policy, trainer = names["policy"], names["trainer"]
    try:
        assert trainer.components.policy is policy
        assert trainer.components.cluster is names["cluster"]
        assert (trainer.state.step, trainer.state.consumed_samples) == (1, 64)
        before, after = Path(model), trainer.run_dir / "checkpoints/step_1"
        assert _weights(before) != _weights(after / "policy/weights")
        assert policy.get_logprobs(_rows())["logprobs"].shape == (1, 8)
    finally:
        policy.shutdown()


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def _write_data(folder: str) -> None:
    Path(folder).mkdir(parents=True)
    rows = [json.dumps({"prompt": f"{n} "}) for n in range(32)]
    Path(folder, "train.jsonl").write_text("\n".join(rows))


def test_five_lines(run_program: Run, model: str) -> None:
    _write_data("nvidia/OpenMathInstruct-2")
    result = run_program("five_lines", model)["result"]
    assert result.steps == 1
    assert result.metrics["train:reward"] == 0.0
    assert (result.model_path / "model.safetensors").exists()


def test_a_trainer_from_pretrained(run_program: Run, model: str) -> None:
    _write_data("my-dataset")
    trainer = run_program("from_pretrained", model)["trainer"]
    assert (trainer.plan.num_prompts, trainer.state.step) == (32, 1)
    assert trainer.history[-1]["train:loss"] == trainer.state.metrics["train:loss"]


def test_callbacks_get_numbers(
    run_program: Run, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run_program("callbacks", model)["trainer"]
    losses = {record["step"]: record["train:loss"] for record in trainer.history}
    assert capsys.readouterr().out.splitlines() == [
        f"Step 100: loss={losses[100]:.4f}",
        f"Epoch 1: {losses[100]}",
        f"Step 200: loss={losses[200]:.4f}",
        f"Epoch 2: {losses[200]}",
    ]


def test_wrong_use_of_a_ready_policy(
    policy: HuggingFacePolicy, cluster: RayVirtualCluster, model: str
) -> None:
    with pytest.raises(ConfigError, match="needs a policy or a configuration: got nei"):
        rl.DPOTrainer()
    with pytest.raises(ConfigError, match=r"got str; .*DPOTrainer\.from_pretrained"):
        rl.DPOTrainer(model, cluster)
    with pytest.raises(ConfigError, match="got RayVirtualCluster; for"):
        rl.DPOTrainer(cluster, policy)
    with pytest.raises(ConfigError, match="got the class HuggingFacePolicy"):
        rl.DPOTrainer(HuggingFacePolicy, cluster)
    with pytest.raises(
        ConfigError, match="got a HuggingFacePolicy first, and a policy"
    ):
        rl.DPOTrainer(policy, cluster, policy=policy)
    with pytest.raises(ConfigError, match=r"policy\.optimizer cannot be set for a pol"):
        rl.DPOTrainer(policy, cluster, lr=1e-3)
    with pytest.raises(ConfigError, match=r"generation\.temperature cannot be set"):
        rl.GRPOTrainer(policy, cluster, temperature=0.5)
    with pytest.raises(ConfigError, match="did you mean 'max_num_steps'"):
        rl.DPOTrainer(policy, cluster, max_num_stepz=3)
    with pytest.raises(ConfigError, match=r"data\.train is not set and no dataset"):
        rl.DPOTrainer(policy, cluster).train(progress=False)
    with pytest.raises(ConfigError, match="make it with init_reference_model=True"):
        rl.GRPOTrainer(policy, cluster).train(
            [{"prompt": "1"}], reward_fn=lambda prompt, response: 0.0, progress=False
        )
