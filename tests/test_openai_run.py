"""A GRPO run whose answers come from `rl serve`, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_algorithms as rl
from rl_distributed.testing import local_ray
from rl_models import ModelBuildConfig, build_model
from rl_models.serving import serve


@pytest.mark.slow
def test_a_run_trains_with_the_answers_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_WEIGHTS_KEY", "key")
    shape = ModelBuildConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = str(build_model(shape, tmp_path / "model"))
    settings = {"weights_key": "key", "weights_root": str(tmp_path)}
    with (
        local_ray(num_cpus=4),
        serve(model, port=0, engine="huggingface", **settings) as server,
    ):
        result = rl.train(
            model,
            [{"prompt": f"{n}+"} for n in range(8)],
            reward_fn=lambda prompt, response: float(response[:1].isdigit()),
            progress=False,
            max_num_steps=8,
            num_prompts_per_step=4,
            num_generations_per_prompt=8,
            max_new_tokens=2,
            lr=0.03,
            **{
                "policy.generation": {
                    "backend": "openai",
                    "num_replicas": 1,
                    "weight_sync": {"probe": {"period": 1}},
                    "openai": {
                        "addresses": [server.url],
                        "weights_key_variable": "RL_WEIGHTS_KEY",
                        "weights_folder": str(tmp_path / "weights"),
                    },
                }
            },
        )
        # It sent a version before each step, and the server confirmed each.
        assert server.status()["weight_version"] >= 8
    history = result.history.to_pandas()
    rewards = history["train:reward"]
    assert rewards.iloc[-2:].mean() > rewards.iloc[:2].mean() + 0.3
    assert history["train:mismatch/logprob_diff/max"].max() < 1e-4
    assert list((tmp_path / "weights").iterdir()) == []
