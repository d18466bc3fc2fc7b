from __future__ import annotations

import pytest

from rl_distributed.errors import ConfigError
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.options import (
    WorkerOptions,
    identity_variables,
    recursive_merge_options,
)


def test_merge_is_deep_and_changes_neither():
    default = {"a": {"b": 1, "c": [1]}, "num_cpus": 1}
    extra = {"a": {"b": 2, "d": {"e": 3}}, "num_gpus": 0}
    merged = recursive_merge_options(default, extra)
    assert merged == {
        "a": {"b": 2, "c": [1], "d": {"e": 3}},
        "num_cpus": 1,
        "num_gpus": 0,
    }
    merged["a"]["c"].append(2)
    merged["a"]["d"]["e"] = 4
    assert default["a"]["c"] == [1]
    assert extra["a"]["d"]["e"] == 3


def test_merge_renames_the_profiler_section():
    merged = recursive_merge_options(
        {"runtime_env": {}}, {"runtime_env": {"_nsight": {}}}
    )
    assert merged == {"runtime_env": {"nsight": {}}}


def test_no_runtime_environment_unless_asked_for():
    assert WorkerOptions().to_ray({}) == {}
    options = WorkerOptions(env_vars={"A": "1"}, max_concurrency=3)
    isolation = {"env_vars": {"A": "0", "C": "3"}, "py_executable": "/py"}
    assert options.to_ray({"B": "2"}, isolation) == {
        "max_concurrency": 3,
        "runtime_env": {
            "env_vars": {"A": "1", "B": "2", "C": "3"},
            "py_executable": "/py",
        },
    }
    assert isolation["env_vars"] == {"A": "0", "C": "3"}


def test_loopback_groups_keep_gloo_on_loopback():
    place = {"rank": 1, "local_rank": 0, "node_rank": 1, "world_size": 2}
    far = identity_variables(**place, master_address="10.0.0.1", master_port=1)
    near = identity_variables(**place, master_address="127.0.0.1", master_port=1)
    assert "GLOO_SOCKET_IFNAME" not in far
    assert near["GLOO_SOCKET_IFNAME"] == "lo"
    assert far["RANK"] == "1"


@pytest.mark.parametrize("path", ["Class", "a.b-c.D", "", ".D", 3])
def test_builder_wants_a_class_path(path):
    with pytest.raises(ConfigError, match="worker_class must be a path"):
        RayWorkerBuilder(path)


def test_builder_options():
    builder = RayWorkerBuilder("a.B", 1, k=2)
    other = builder.with_options(num_threads=3)
    assert builder.options.num_threads is None
    assert other.options.thread_variables()["OMP_NUM_THREADS"] == "3"
    assert (other.args, other.kwargs) == ((1,), {"k": 2})
    with pytest.raises(ConfigError, match="did you mean 'num_threads'"):
        builder.with_options(num_thread=3)
    with pytest.raises(ConfigError, match="num_threads must be a positive integer"):
        builder.with_options(num_threads=0)
    with pytest.raises(ConfigError, match="names to strings"):
        builder.with_options(env_vars={"A": 1})
