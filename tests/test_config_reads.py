"""No configuration key is silently ignored: each one is read in a run.

`config_reads/runs.py` runs every algorithm, the evaluation, a recipe, a server and the
output for other machines, a few steps each. `config_reads/sitecustomize.py` records in
all of their processes which keys the packages' code reads, besides validation. Keys out
of reach of such runs have tests of their effect.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_distributed.config import Config

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "config_reads"
PACKAGES = ("rl_distributed", "rl_models", "rl_envs", "rl_algorithms", "rl_cli")
DEADLINE_S = 900.0

# Read in environments without PYTHONPATH, only by checks, or on faults: the test that
# proves the effect. It must name the key.
EFFECTS = {
    "RecipeConfig.common": "packages/rl-cli/tests/test_run_config.py",
    "RewardShapingConfig.overlong_buffer_fraction": (
        "packages/rl-algorithms/tests/test_presets.py"
    ),
    "GRPOSettings.skip_reference_policy_logprobs_calculation": (
        "packages/rl-algorithms/tests/test_presets.py"
    ),
    "RolloutConfig.min_answer_room": (
        "packages/rl-algorithms/tests/test_rollout_engine.py"
    ),
    "RolloutSettings.max_failed_rate": (
        "packages/rl-algorithms/tests/test_rollout_outcomes.py"
    ),
    "RetryConfig.resample": "packages/rl-algorithms/tests/test_rollout_outcomes.py",
    "TlsFiles.authority": "packages/rl-distributed/tests/test_ray_attach.py",
    "TlsFiles.certificate": "packages/rl-distributed/tests/test_ray_attach.py",
    "TlsFiles.key": "packages/rl-distributed/tests/test_ray_attach.py",
    "ToolLimits.max_calls_per_turn": "packages/rl-envs/tests/test_tools.py",
    "ToolLimits.max_result_chars": "packages/rl-envs/tests/test_tools.py",
    "FaultToleranceConfig.stall_limit_s": (
        "packages/rl-algorithms/tests/test_watchdog.py"
    ),
    "TaskLimits.memory_mib": "packages/rl-envs/tests/test_worlds_code.py",
    **{
        f"TaskLimits.{name}": "packages/rl-algorithms/tests/test_rollout_limits.py"
        for name in ("turns", "tokens", "seconds")
    },
    **{
        f"FileEnvironmentConfig.{name}": (
            "packages/rl-envs/tests/test_environment_file.py"
        )
        for name in ("file", "name", "settings")
    },
    "FileAgentConfig.command": "packages/rl-envs/tests/test_agents.py",
    "FileAgentConfig.reward_function": "packages/rl-envs/tests/test_agents.py",
    "GymnasiumConfig.credit": "packages/rl-envs/tests/test_bridges_gymnasium.py",
    "GymnasiumConfig.solved_return": "packages/rl-envs/tests/test_bridges_gymnasium.py",
    **{
        f"TextArenaConfig.{name}": "packages/rl-envs/tests/test_bridges_textarena.py"
        for name in ("credit", "opponent", "opponent_moves", "solved_reward")
    },
    **{
        f"SelfPlayConfig.{name}": "packages/rl-envs/tests/test_textarena_self_play.py"
        for name in ("credit", "max_illegal", "max_turns", "solved_reward")
    },
    # Read as settings of the requesting client.
    **{
        f"ServedPlayer.{name}": "packages/rl-envs/tests/test_bridges_textarena.py"
        for name in (
            "api_key_variable",
            "max_requests",
            "max_tokens",
            "model",
            "num_attempts",
            "request_deadline_s",
            "temperature",
        )
    },
    **{
        f"McpConfig.{name}": "packages/rl-envs/tests/test_bridges_mcp.py"
        for name in (
            "command",
            "files",
            "is_stateful",
            "judge",
            "judge_settings",
            "max_message_kib",
            "max_result_chars",
            "max_turns",
            "scratch_mib",
            "timeout_s",
            "tools",
        )
    },
    **{
        f"OpenEnvConfig.{name}": "packages/rl-envs/tests/test_bridges_openenv.py"
        for name in (
            "action",
            "action_function",
            "credit",
            "failed_step",
            "is_repeatable",
            "max_sessions",
            "read_action",
            "solved_reward",
        )
    },
    **{
        f"OpenEnvServer.{name}": "packages/rl-envs/tests/test_bridges_openenv.py"
        for name in (
            "address",
            "call_s",
            "command",
            "connect_s",
            "max_message_mib",
            "observation_function",
            "show",
            "start_s",
        )
    },
    "VerifiersConfig.sampling": "packages/rl-envs/tests/test_bridges_verifiers.py",
    **{
        f"VerifiersHost.{name}": "packages/rl-envs/tests/test_bridges_verifiers.py"
        for name in ("args", "env", "folder", "python", "start_s")
    },
    "MegatronConfig.activation_checkpointing": (
        "packages/rl-models/tests/rl_models_sample_megatron.py"
    ),
    "MegatronConfig.deadline_s": "packages/rl-models/tests/test_megatron.py",
    "MegatronConfig.distributed_optimizer": (
        "packages/rl-models/tests/rl_models_sample_megatron.py"
    ),
    "MegatronConfig.virtual_stages": (
        "packages/rl-models/tests/rl_models_sample_megatron.py"
    ),
    "PolicyConfig.megatron": "packages/rl-models/tests/test_megatron.py",
    "VllmConfig.async_engine": "packages/rl-models/tests/test_vllm_policy.py",
    "VllmConfig.stall_limit_s": "packages/rl-models/tests/test_vllm_stall_watch.py",
    "PrometheusSinkConfig.labels": (
        "packages/rl-distributed/tests/test_metrics_sinks.py"
    ),
    "PrometheusSinkConfig.namespace": (
        "packages/rl-distributed/tests/test_metrics_sinks.py"
    ),
    # The lock lacks Trackio.
    **{
        f"TrackioSinkConfig.{name}": (
            "packages/rl-distributed/tests/test_trackio_sink.py"
        )
        for name in ("group", "name", "private", "project", "server_url", "space_id")
    },
}


def _sections(cls: type[Config]) -> Iterator[type[Config]]:
    for sub in cls.__subclasses__():
        # Excludes sections generated by trainers in other tests, and those with another
        # project's names, which are converted before they are read.
        is_own = getattr(sys.modules.get(sub.__module__), sub.__name__, None) is sub
        is_compat = ".compat." in sub.__module__
        if is_own and not is_compat and sub.__module__.startswith(PACKAGES):
            yield sub
        yield from _sections(sub)


def _keys() -> set[str]:
    """Return `module.Class.key` of every key, where it is declared."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if "onfig" in (ROOT / _source(module.name)).read_text():
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as error:
                    # Installed in an engine's environment, not the driver's.
                    if str(error.name).startswith(PACKAGES):
                        raise
    return {
        f"{cls.__module__}.{cls.__name__}.{name}"
        for cls in _sections(Config)
        for name in vars(cls).get("__annotations__", {})
        if name in cls.model_fields
    }


def _source(module: str) -> Path:
    package = module.partition(".")[0].replace("_", "-")
    path = Path("packages", package, "src", *module.split("."))
    file = path.with_suffix(".py")
    return file if (ROOT / file).exists() else path / "__init__.py"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 30)
def test_every_key_is_read_in_a_run(tmp_path: Path) -> None:
    shutil.copy(HERE / "sitecustomize.py", tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    with (tmp_path / "output").open("w+") as output:
        code = subprocess.run(
            [sys.executable, str(HERE / "runs.py")],
            cwd=run,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        ).returncode
    assert code == 0, (tmp_path / "output").read_text()[-4000:]
    keys = _keys()
    reads = set((tmp_path / "reads.txt").read_text().split())
    unread = {".".join(key.rsplit(".", 2)[1:]) for key in keys - reads}
    assert unread - set(EFFECTS) == set()
    stale = set(EFFECTS) - {".".join(key.rsplit(".", 2)[1:]) for key in keys}
    assert stale == set()


@pytest.mark.parametrize(("key", "file"), EFFECTS.items())
def test_what_no_run_reads_has_a_test_of_its_effect(key: str, file: str) -> None:
    assert key.rpartition(".")[2] in (ROOT / file).read_text()
