"""Short runs that together read every configuration key; see `test_config_reads`.

`python runs.py` in an empty folder, with the folder of `sitecustomize` on `PYTHONPATH`.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

import rl_algorithms as rl
from rl_cli.main import main as rl_command
from rl_distributed import BatchedDataDict, LoggerFacade
from rl_distributed.access.key_file import KeyFile
from rl_distributed.cluster.resources import ResourceConfig, ResourceManager
from rl_distributed.metrics import LoggerConfig
from rl_distributed.testing import local_ray
from rl_envs import create_env, total_reward
from rl_envs.environment_pool import EnvironmentPool
from rl_envs.registry import create_task_source
from rl_models import GenerationConfig, ModelBuildConfig, build_model
from rl_models.generation.openai import OpenAIGenerationBackend
from rl_models.generation.traits import get_generation_traits
from rl_models.generation.vllm.engine_args import engine_args, engine_variables
from rl_models.policy.hosting import hosting_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
from judge_server import judge_server
from small_run import recipe, write_recipe

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES, PROGRAMS = TESTS.parent / "examples", TESTS / "documents" / "programs"
PAIRS = [{"prompt": f"{n} ", "chosen": "yes", "rejected": "no"} for n in range(8)]
ANSWERS = [{"prompt": f"{n} ", "response": "yes"} for n in range(8)]
PROMPTS = [{"prompt": f"{n}+"} for n in range(8)]
SORTING = {"world": "sorting", "settings": {"num_digits": 2}}
SHORT = {"max_num_steps": 2, "progress": False}
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SAMPLED = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 2,
    "max_new_tokens": 4,
}


def sevens(prompt: str, response: str) -> float:
    """Reward answers that contain a seven."""
    return float("7" in response)


def signed(prompt: str, response: str) -> float:
    """Reward or punish by the first character."""
    return 1.0 if response[:1].isdigit() else -1.0


def even(prompt: str, response: str) -> float:
    """Reward an even first character: two answers to a prompt often differ in it."""
    return float(ord(response[:1] or " ") % 2 == 0)


def train_on_rows(model: str) -> None:
    """Train on given rows: SFT in two layouts and streamed, DPO, a reward model."""
    rows = {"train_global_batch_size": 4, **SHORT}
    KeyFile("keys.json").create("reader", "viewer")
    rl.train(
        model,
        ANSWERS,
        algorithm="sft",
        **{
            **rows,
            "policy.scheduler": {"name": "cosine", "kwargs": {"total_steps": 10}},
            "policy.sequence_packing.train_mb_tokens": 128,
            "policy.lora.r": 4,
            "cluster.workers_per_node": 2,
            "cluster.use_gpus": False,
            "logger.sinks": ["console", "jsonl", "tensorboard"],
            "control.keys_file": "keys.json",
        },
    )
    Path("answers.jsonl").write_text("".join(json.dumps(a) + "\n" for a in ANSWERS))
    rl.train(
        model,
        algorithm="sft",
        **{
            **rows,
            "data.train.path": "answers.jsonl",
            "data.streaming": True,
            "data.streaming_shuffle_rows": 4,
            "policy.dynamic_batching.train_mb_tokens": 128,
        },
    )
    rl.train(model, PAIRS, algorithm="dpo", **rows)
    judge = rl.train(model, PAIRS, algorithm="rm", **rows).model_path
    Path("scored.jsonl").write_text('{"prompt": "1+1"}\n')
    scored = {
        "datasets": {"held-out": {"path": "scored.jsonl"}},
        "env": {"name": "reward_model", "settings": {"model_path": str(judge)}},
        "generation": {"max_new_tokens": 4},
    }
    rl.evaluate(model, config=scored)
    runpy.run_path(str(EXAMPLES / "focal.py"), run_name="focal")
    rl.train(model, ANSWERS, algorithm="focal", **SHORT)
    sys.argv = ["my_algorithm.py", model]
    runpy.run_path(str(PROGRAMS / "my_algorithm.py"), run_name="__main__")


def train_on_answers(model: str) -> None:
    """Train on sampled answers: GRPO and its variants, PPO, distillation."""
    Path("reward.py").write_text(
        "def reward(prompt, response):\n    return float('7' in response)\n"
    )
    rl.train(
        model,
        **{
            **SAMPLED,
            **SHORT,
            "data.train.mixture": [
                {"tasks": {**SORTING, "part": "train", "num_rows": 8}, "weight": 1.0}
            ],
            "data.validation.tasks": {**SORTING, "part": "held_out", "num_rows": 4},
            "env.name": "sorting",
            "env.settings": {"credit": "positions"},
            "grpo.val_period": 1,
            "early_stop": {"patience": 5, "metric": "val:accuracy"},
            "policy.generation.weight_sync": {"transport": "file", "folder": "weights"},
        },
    )
    rl.train(
        model,
        PROMPTS,
        reward_fn=[sevens, signed],
        **{
            **SAMPLED,
            **SHORT,
            "grpo.adv_estimator.name": "gdpo",
            "grpo.adv_estimator.reward_weights": {"reward/sevens": 2.0},
            "loss_fn.use_importance_sampling_correction": True,
            "loss_fn.truncated_importance_sampling_type": "icepop",
            "loss_fn.truncated_importance_sampling_ratio": 5.0,
            "loss_fn.truncated_importance_sampling_ratio_min": 0.5,
            "mismatch": {"limit": 1e-12, "statistic": "max"},
            "grpo.asynchronous": {"max_staleness": 1, "event_log": True},
            "policy.lora": {"r": 2, "sync": "adapter"},
            "policy.dynamic_batching.train_mb_tokens": 128,
        },
    )
    rl.train(
        model,
        PROMPTS,
        reward_fn=even,
        **{
            **SAMPLED,
            **SHORT,
            "grpo.use_dynamic_sampling": True,
            "grpo.dynamic_sampling_max_gen_batches": 20,
            "grpo.adv_estimator.name": "reinforce_plus_plus",
            "policy.sequence_packing.train_mb_tokens": 128,
            "grpo.reward_scaling": {"source_min": -1.0},
            "grpo.reward_shaping.max_response_length": 4,
            "grpo.reward_shaping.overlong_buffer_length": 2,
        },
    )
    rl.train(
        model,
        PROMPTS[:4],
        signed,
        algorithm="ppo",
        **{
            **SAMPLED,
            **SHORT,
            "loss_fn.positive_nll_coef": 0.1,
            # Any share of correct answers out of two is beyond one of the thresholds.
            "data.pass_rate_filter": {"num_visits": 1, "hard_threshold": 0.5},
        },
    )
    agents = EXAMPLES / "guess_agent.py"
    rl.train(
        model,
        [{"prompt": f"{n} ", "answer": "7"} for n in range(4)],
        **{
            **SAMPLED,
            "max_num_steps": 1,
            "progress": False,
            "env.name": "agent",
            "env.settings": {"file": str(agents)},
        },
    )
    rl.train(
        model,
        PROMPTS,
        algorithm="distillation",
        **{**SAMPLED, **SHORT, "teacher.model_name": model},
    )


def evaluate(model: str) -> None:
    """Evaluate on named data with environments of rl-envs."""
    tasks = {**SORTING, "part": "held_out", "num_rows": 4}
    Path("rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    for environment, source in (
        ({"name": "sorting"}, {"tasks": tasks}),
        ({"name": "reward", "settings": {"file": "reward.py"}}, {"path": "rows.jsonl"}),
    ):
        config = {
            "datasets": {"held-out": source},
            "env": environment,
            "generation": {"max_new_tokens": 4},
        }
        rl.evaluate(model, config=config)
    rl.evaluate(model, PROMPTS, reward_fn=sevens, max_new_tokens=4)
    with judge_server(lambda question: "Score: 5") as judge:
        settings = {"address": judge.address, "model": "judge"}
        config = {
            "datasets": {"held-out": {"path": "rows.jsonl"}},
            "env": {"name": "judge", "settings": settings},
            "generation": {"max_new_tokens": 4},
        }
        rl.evaluate(model, config=config)


def _answered(response: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": response}]


def judge_one_by_one() -> None:
    """Judge answers in all worlds, by several rewards, and in an environment pool."""
    # Separately, as an evaluation starts workers for each of them.
    for world in ("arithmetic", "countdown", "mastermind", "nim", "sliding_puzzle"):
        environment = create_env(world)
        [row] = create_task_source(world, {}).held_out(1)
        environment.step([_answered("?")], [row])
        environment.shutdown()
    for world, settings in {
        "gymnasium": {"env_id": "FrozenLake-v1"},
        "reasoning_gym": {},
    }.items():
        environment = create_env(world)
        [row] = create_task_source(world, settings).held_out(1)
        environment.step([_answered("?")], [row])
        environment.shutdown()
    with judge_server(lambda question: "[4]") as opponent:
        server = {"address": opponent.address, "model": "opponent"}
        environment = create_env("textarena", {"opponent": "model", "server": server})
        [row] = create_task_source("textarena", {"game": "TicTacToe-v0"}).held_out(1)
        environment.step([_answered("0")], [row])
        environment.shutdown()
    for name, row in {
        "calculator": {"answer": "2"},
        "math": {"answer": "2"},
        "retrieval": {"answer": "2"},
        "code": {"test_list": ["assert f(1) == 2"]},
        "code_interpreter": {"answer": "2"},
    }.items():
        environment = create_env(name)
        environment.step([_answered("2")], [row])
        environment.shutdown()
    parts = []
    for world in ("format", "json_schema", "length", "regex"):
        environment = create_env(world)
        [row] = create_task_source(world, {}).held_out(1)
        found = environment.step([_answered(row["answer"])], [row])
        assert float(total_reward(found.rewards)[0]) == 1.0
        environment.shutdown()
        parts.append({"name": world, "weight": 0.5})
    create_env("multi_reward", {"parts": parts}).shutdown()
    create_env("math_format").step([_answered(r"\boxed{2}")], [{}])
    columns = {"answer": "sum"}
    watched = {"name": "arithmetic"}
    watched = {"environment": watched, "check": {**watched, "columns": columns}}
    environment = create_env("second_check", watched)
    [verdict] = environment.step([_answered("3")], [{"answer": 3, "sum": 3}]).metadata
    assert verdict["second_check"] == "accepted"
    log = _answered("3")
    with EnvironmentPool({"sum": "arithmetic"}) as pool:
        found = pool.submit("sum", log, {"answer": 3}).result(120)
        assert float(total_reward(found.rewards)[0]) == 1.0


def by_the_command() -> None:
    """Run a recipe, check an environment, and print scripts for other machines."""
    write_recipe(Path(), recipe())
    Path("tls.yaml").write_text("tls: {authority: a, certificate: b, key: c}\n")
    command = "command=[rl,train,small.yaml]"
    container = "container={image: rl.sqsh, tool: pyxis}"
    for arguments in (
        ["train", "small.yaml", "output_dir=recipe"],
        ["recipes", "--json"],
        ["envs", "check", "countdown"],
        ["cluster", "slurm", "num_nodes=2", command, container, "tls=true"],
        ["cluster", "kuberay", "name=a", "image=rl:1", "ray_version=2.60.0", command],
    ):
        try:
            rl_command(arguments)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"rl {' '.join(arguments)} failed") from end


def serve(model: str) -> None:
    """Serve the model, and use the server."""
    command = [sys.executable, "-m", "rl_cli", "serve", model, "--port", "0", "--json"]
    with subprocess.Popen(
        [*command, "--weights-root", "."],
        env={**os.environ, "RL_WEIGHTS_KEY": "key"},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            use(urlsplit(json.loads(server.stdout.readline())["url"]).netloc, model)
        finally:
            # Not SIGINT, which shells make background processes ignore.
            server.terminate()


def use(address: str, model: str) -> None:
    """Request an answer, reload the server's weights, and sample through it."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    for path, body in {
        "/v1/completions": {"model": "model", "prompt": "1+", "max_tokens": 2},
        "/rl/weights": {"path": str(Path(model).resolve())},
    }.items():
        request = Request(f"http://{address}{path}", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=120) as answer:
            assert answer.status == 200
    ask(f"http://{address}", model)


def ask(address: str, model: str) -> None:
    """Sample from a server like the generation backend `openai`."""
    os.environ["RL_WEIGHTS_KEY"] = "key"
    config = GenerationConfig.from_dict(
        {
            "backend": "openai",
            "max_new_tokens": 2,
            "num_replicas": 1,
            "openai": {"addresses": [address], "api_key_variable": "RL_WEIGHTS_KEY"},
        }
    )
    hosting_of(get_generation_traits("openai"), config, on_gpu=False)
    backend = OpenAIGenerationBackend()
    backend.setup(config.to_dict(), model_name=model)
    ids = torch.tensor([[5, 6]])
    rows = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([2]))
    assert backend.generate(rows)["generation_lengths"].item() >= 1
    backend.shutdown()


def describe(model: str) -> None:
    """Build what needs another machine to run: clusters, sinks, engine arguments."""
    config = GenerationConfig(max_new_tokens=4, backend="vllm")
    for on_gpu in (False, True):
        engine_args(config, model_name=model, on_gpu=on_gpu)
        engine_variables(config, on_gpu=on_gpu)
    groups = {"groups": {"policy": {"workers_per_node": 1}}}
    with ResourceManager(ResourceConfig.from_dict(groups)) as resources:
        resources.cluster_for("policy")
    sinks = {
        "sinks": ["wandb", "mlflow", "prometheus"],
        "sink_settings": {
            "wandb": {"mode": "offline"},
            "prometheus": {"port": 0, "labels": {"run": "a"}},
        },
    }
    with LoggerFacade(LoggerConfig.from_dict(sinks), Path("logs")) as logger:
        logger.log_metrics({"a": 1.0}, 1)
    texts = {"kind": "byte_bpe", "training_texts": ["low lower"], "vocab_size": 280}
    words = {"kind": "vocabulary", "vocabulary": ["yes", "no"]}
    for name, tokenizer in {"bytes": texts, "words": words}.items():
        shape = {**SHAPE, "architecture": "llama", "tokenizer": tokenizer}
        build_model(ModelBuildConfig.from_dict(shape), name)


def main() -> None:
    """Run everything."""
    model = str(build_model(ModelBuildConfig.from_dict(SHAPE), "model"))
    with local_ray(num_cpus=6):
        train_on_rows(model)
        train_on_answers(model)
        evaluate(model)
        judge_one_by_one()
        by_the_command()
        describe(model)
    serve(model)


if __name__ == "__main__":
    main()
