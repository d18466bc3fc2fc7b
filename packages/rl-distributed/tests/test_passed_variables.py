"""Which variables of a program's environment reach its cluster's processes."""

from __future__ import annotations

import os

import pytest
from rl_distributed_scripts import run_script
from test_ray_attach import held_cluster

from rl_distributed.cluster.config import ClusterConfig
from rl_distributed.cluster.passed_variables import (
    check_pass_env,
    passed_variables,
    withheld_variables,
)
from rl_distributed.cluster.start import init_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError

CANARIES = {
    "MY_SECRET": "canary-1",
    "HF_TOKEN": "canary-2",
    "PLAIN": "canary-3",
    "WANDB_API_KEY": "canary-4",
    "RL_DATABASE_PASSWORD": "canary-5",
}
NEEDED = {
    "HF_HOME": "/cache/hf",
    "HF_TOKEN_PATH": "/cache/hf/token",
    "https_proxy": "http://user:password@proxy:3128",
    "NCCL_SOCKET_IFNAME": "eth7",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_PROC_BIND": "close",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_what_passes() -> None:
    variables = {
        **CANARIES,
        **NEEDED,
        "RAY_AUTH_TOKEN": "of the cluster",
        "RAY_TLS_SERVER_KEY": "/tls/node.key",
        "PATH": "/bin",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "x",
    }
    withheld = {*CANARIES, "SSH_AUTH_SOCK", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}
    assert set(withheld_variables(variables)) == withheld
    assert set(passed_variables(variables)) == set(variables) - withheld


def test_a_pattern_passes_no_secret_and_a_full_name_does() -> None:
    variables = {"MY_SECRET": "1", "MY_PLACE": "2", "HF_TOKEN": "3"}
    assert passed_variables(variables, ["MY_*"]) == {"MY_PLACE": "2"}
    assert passed_variables(variables, ["MY_SECRET"]) == {"MY_SECRET": "1"}
    assert passed_variables(variables, ["HF_TOKEN"]) == {"HF_TOKEN": "3"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("HF_TOKEN", "must be a list of names"),
        ([""], "must hold names of variables: got ''"),
        (["HF_TOKEN=abc"], r"gives them no values: got HF_TOKEN=\.\.\.;"),
    ],
)
def test_wrong_names(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_pass_env(names)
    assert "abc" not in str(caught.value)


def test_a_running_cluster_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="pass_env describes a new cluster"):
        init_ray(address="127.0.0.1:1", pass_env=["PLAIN"])


def test_the_configuration_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict = {}
    monkeypatch.setattr(
        "rl_distributed.cluster.virtual_cluster.init_ray",
        lambda **given: asked.update(given),
    )
    monkeypatch.setattr("rl_distributed.cluster.virtual_cluster.live_nodes", list)
    config = ClusterConfig(pass_env=["PLAIN"])
    assert RayVirtualCluster.from_config(config).use_gpus is False
    assert asked["pass_env"] == ("PLAIN",)


def canaries_in(environment: dict[str, str]) -> set[str]:
    """Return the canaries, including under another name."""
    held = " ".join(environment.values())
    return {name for name, value in CANARIES.items() if value in held}


def check_processes(found: dict, allowed: set[str]) -> None:
    kinds = {process["kind"] for process in found["processes"]}
    assert {
        "gcs_server",
        "raylet/raylet",
        "DashboardAgent",
        "RuntimeEnvAgent",
        "ray::",
    } <= kinds
    for process in found["processes"]:
        assert canaries_in(process["environment"]) <= allowed, process["kind"]
    assert canaries_in(found["worker"]) == allowed
    # The declared way, in which no process starts with the secret.
    assert found["worker"]["DECLARED_TOKEN"] == "declared-secret"
    assert found["worker"]["DECLARED"] == "plain"
    for process in found["processes"]:
        assert "declared-secret" not in process["environment"].values()


@pytest.mark.slow
def test_a_local_cluster_gets_what_it_needs_and_what_is_named() -> None:
    names = ["pass=PLAIN", "pass=WANDB_API_KEY"]
    found = run_script("print_environments.py", *names, **CANARIES, **NEEDED)
    check_processes(found, {"PLAIN", "WANDB_API_KEY"})
    assert {k: found["worker"].get(k) for k in NEEDED} == NEEDED
    assert found["worker"]["PATH"] == os.environ["PATH"]


@pytest.mark.slow
def test_a_running_cluster_gets_nothing() -> None:
    with held_cluster() as (address, folder):
        variables = {**CANARIES, "RAY_TMPDIR": folder}
        found = run_script("print_environments.py", address, **variables)
    check_processes(found, set())
