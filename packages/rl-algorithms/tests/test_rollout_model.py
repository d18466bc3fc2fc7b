"""Multi-turn conversations with tools, sampled by a real model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_algorithms as rl
from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.rollout import unfold_branches
from rl_envs import CalculatorConfig, CalculatorEnvironment, CalculatorTasks

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
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        tokenizer=TokenizerBuildConfig(characters="01+[]="),
    )
    return build_model(config, tmp_path_factory.mktemp("model") / "calling")


def template(*, strips):
    return TEMPLATE.replace("STRIP", str(strips).lower())


@pytest.mark.parametrize("strips", [False, True])
def test_rows_hold_the_context_that_tokens_were_sampled_in(calling_model, strips):
    """A forward pass over each row reproduces the sampler's log-probs."""
    from rl_models.generation.huggingface import (  # noqa: PLC0415
        HuggingFaceGenerationBackend,
    )

    generator = HuggingFaceGenerationBackend()
    generator.setup({"max_new_tokens": 10}, model_name=str(calling_model))
    tokenizer = AutoTokenizer.from_pretrained(calling_model)
    tokenizer.chat_template = template(strips=strips)
    engine = rl.RolloutEngine(
        generator,
        CalculatorEnvironment(CalculatorConfig(call_format="brackets")),
        tokenizer,
        rl.RolloutConfig(
            max_turns=3,
            max_total_sequence_length=128,
            on_template_rewrite="branch" if strips else "error",
        ),
    )
    data = process_prompts(TASKS, tokenizer)[:]
    batch = rl_collate_fn(data, pad_token_id=tokenizer.pad_token_id)
    result = engine.run(batch, num_generations=4)
    assert float(result.metrics["avg_turns_per_sample"]) > 1.1
    assert float(result.metrics["env/tool_calls_per_sample"]) > 0.1
    assert (float(result.metrics["mean_branches_per_sample"]) > 0) == strips

    rows = unfold_branches(result.rows)
    assert (rows.size > 64) == strips
    assert int(rows["token_mask"].sum()) == int(result.rows["generation_lengths"].sum())
    model = AutoModelForCausalLM.from_pretrained(calling_model)
    ids = rows["input_ids"]
    with torch.no_grad():
        logits = model(ids, torch.arange(ids.shape[1]) < rows["input_lengths"][:, None])
    found = logits.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    sampled = rows["token_mask"][:, 1:].bool()
    expected = rows["generation_logprobs"][:, 1:]
    assert torch.allclose(found[sampled], expected[sampled], atol=1e-4)
    assert rows["token_versions"][rows["token_mask"].bool()].unique().tolist() == [0]
