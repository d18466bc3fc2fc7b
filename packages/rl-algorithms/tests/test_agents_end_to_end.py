"""Runs whose environment is an agent: workers on Ray, the real client, a tiny model."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import time
from pathlib import Path

import pytest

import rl_algorithms as rl
from rl_algorithms.grpo.config import GRPOConfig
from rl_distributed.errors import ConfigError
from rl_envs import AgentEnvironment, RemoteEnvironment
from rl_envs.agents.tasks import AgentJob

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "guess_agent.py"
GRPO = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 8,
    "max_new_tokens": 2,
    "max_total_sequence_length": 32,
    "train_micro_batch_size": 64,
    "reference_policy_kl_penalty": 0.0,
    "lr": 1e-2,
}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("guess_agent", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(pool, model, folder, rows, **settings):
    fit = {k: settings.pop(k) for k in ("environment", "val_dataset") if k in settings}
    made = rl.get_algorithm(settings.pop("algorithm", "grpo")).from_pretrained(
        model, output_dir=str(folder), **settings
    )
    return type(made)(made.config, pool=pool).fit(rows, progress=False, **fit)


def test_the_example_learns_in_turns(pool, tiny_model, tmp_path, example):
    """Read from a file as in the shell: agents run in a process of their own."""
    result = train(
        pool,
        tiny_model,
        tmp_path / "run",
        example.rows(400),
        env={"name": "agent", "settings": {"file": str(EXAMPLE), "max_at_once": 16}},
        val_dataset=example.rows(10),
        val_period=20,
        max_num_steps=20,
        **GRPO,
    )
    rewards = result.history.column("train:reward")[1]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.1, rewards
    turns = result.history.column("train:avg_turns_per_sample")[1]
    assert max(turns) > 1.2  # there was a history to continue from
    assert result.history.column("val:reward")[1][-1] > first
    # Trainer and sampler agree on tokens, prompts and weights.
    errors = result.history.column("train:mismatch/logprob_diff/max")[1]
    assert len(errors) == 20
    assert max(errors) < 1e-3


def test_asynchronously_too(pool, tiny_model, tmp_path, example):
    result = train(
        pool,
        tiny_model,
        tmp_path / "run",
        example.rows(120),
        environment=AgentEnvironment(example.agent, max_at_once=16),
        val_dataset=example.rows(4),
        val_period=6,
        max_num_steps=12,
        **{
            "grpo.asynchronous": {"max_staleness": 1},
            "loss_fn.use_importance_sampling_correction": True,
        },
        **GRPO,
    )
    assert result.steps == 12
    assert max(result.history.column("train:asynchronous/staleness_max")[1]) == 1.0
    assert len(result.history.column("val:reward")[1]) == 2


def test_an_algorithm_of_one_row_per_task_refuses(
    pool, tiny_model, tmp_path, example, monkeypatch
):
    monkeypatch.setattr(GRPOConfig, "trains_branches", False)
    with pytest.raises(ConfigError, match="runs agents"):
        train(
            pool,
            tiny_model,
            tmp_path / "run",
            example.rows(8),
            environment=AgentEnvironment(example.agent),
            max_num_steps=1,
            **GRPO,
        )


def test_a_worker_that_dies_loses_its_tasks(ray_cluster, tmp_path):
    """Its successor has none of them, and reports another process."""
    path = tmp_path / "agent.py"
    path.write_text(
        "import asyncio, os, pathlib\n"
        "async def agent(task, base_url, api_key):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    await asyncio.sleep(60)\n"
    )
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    with listener, RemoteEnvironment("agent", {"file": str(path)}) as environment:
        assert environment.agent_limits.max_at_once == 64
        job = AgentJob(0, [{"role": "user", "content": "a"}], {}, url, "key")
        first = environment.poll_agents([job], [], 0.0).process
        pid = tmp_path / "pid"
        end = time.monotonic() + DEADLINE_S
        while not pid.exists() or not pid.read_text():
            assert time.monotonic() < end
            assert environment.poll_agents([], [], 0.05).process == first
        os.kill(int(pid.read_text()), signal.SIGKILL)
        again = environment.poll_agents([], [], 0.0)
        assert again.process != first
        assert again.results == []
