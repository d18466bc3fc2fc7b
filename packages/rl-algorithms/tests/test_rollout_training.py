"""Multi-turn conversations with tools, trained on with a real model."""

from __future__ import annotations

import pytest
from matrix_cells import cells

import rl_algorithms as rl
from rl_envs import CalculatorTasks

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>"
    "{% if m['role'] == 'assistant' and STRIP and not loop.last %}"
    "{{ m['content'].split('+')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TASKS = CalculatorTasks(6, max_number=1, operators="+").train(16)


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory):
    """A random model with few characters, so that many of its answers call the tool."""
    from rl_models.build.model import (  # noqa: PLC0415
        ModelBuildConfig,
        TokenizerBuildConfig,
        build_model,
    )

    config = ModelBuildConfig(
        # Its tokenizer has a token for unknown characters, such as the template's
        # letters; Qwen's drops them.
        architecture="llama",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        tokenizer=TokenizerBuildConfig(characters="01+[]="),
    )
    return build_model(config, tmp_path_factory.mktemp("model") / "calling")


def template(*, strips):
    return TEMPLATE.replace("STRIP", str(strips).lower())


@pytest.mark.usefixtures("ray_cluster")
def test_a_student_practises_with_tools(calling_model, tmp_path):
    result = rl.train(
        model=calling_model,
        dataset=TASKS,
        algorithm="distillation",
        teacher=str(calling_model),
        topk_logits_k=100,
        max_num_steps=1,
        num_prompts_per_step=8,
        num_generations_per_prompt=4,
        max_new_tokens=10,
        max_total_sequence_length=128,
        max_rollout_turns=3,
        train_micro_batch_size=16,
        chat_template=template(strips=True),
        on_template_rewrite="branch",
        env={"name": "calculator", "settings": {"call_format": "brackets"}},
        checkpointing={"enabled": False},
        output_dir=str(tmp_path / "run"),
    )
    metrics = result.metrics
    assert metrics["train:avg_turns_per_sample"] > 1.0
    assert metrics["train:env/tool_calls_per_sample"] > 0.1
    assert metrics["train:mean_env_tokens_per_sample"] > 1.0
    # Tool output is not trained on, and sampled tokens are once, even though the
    # template rewrites them and later rows begin with them.
    assert metrics["train:mean_branches_per_sample"] > 0.0
    assert metrics["train:num_unmasked_tokens"] == metrics["train:num_generated_tokens"]
    assert metrics["train:loss"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("algorithm", cells(["grpo", "ppo"], ["grpo"]))
def test_turns_with_tools_are_trained_on(calling_model, tmp_path, algorithm):
    result = rl.train(
        model=calling_model,
        dataset=TASKS,
        algorithm=algorithm,
        max_num_steps=2,
        num_prompts_per_step=8,
        num_generations_per_prompt=4,
        max_new_tokens=10,
        max_total_sequence_length=128,
        max_rollout_turns=3,
        train_micro_batch_size=16,
        reference_policy_kl_penalty=0.1,
        use_kl_in_reward=True,
        chat_template=template(strips=True),
        on_template_rewrite="branch",
        env={"name": "calculator", "settings": {"call_format": "brackets"}},
        checkpointing={"enabled": False},
        output_dir=str(tmp_path / "run"),
    )
    metrics = result.metrics
    assert metrics["train:avg_turns_per_sample"] > 1.0
    assert metrics["train:env/tool_calls_per_sample"] > 0.1
    assert metrics["train:mean_env_tokens_per_sample"] > 1.0
    assert metrics["train:num_retried"] == 0.0
    # The trainer's log-probs match the sampler's.
    assert metrics["train:token_mult_prob_error"] < 1 + 1e-4
    # The parts of a branched conversation are separate rows.
    assert metrics["train:num_samples"] > 32
    assert metrics["train:kl_penalty"] > 0.0
