from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import ray

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    ConfigError,
    WorkerDiedError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_distributed.redaction import is_secret_variable
from rl_distributed.secret_variables import (
    scrubbed,
    shown_variables,
)
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup, WorkerOptions
from rl_distributed.workers.host import WorkerIdentity
from rl_distributed.workers.worker_class import LaunchOverrides

COUNTER = "rl_distributed_sample_workers.Counter"
SECRET = "correct-horse-battery"
VARIABLES = {"SERVICE_API_KEY": SECRET, "PLAIN": "seen"}


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([1], max_colocated_worker_groups=2, name="secrets") as c:
        yield c


def make_group(cluster, where, variables):
    builder = RayWorkerBuilder(COUNTER)
    if where == "builder":
        builder = builder.with_options(env_vars=variables)
        variables = None
    return RayWorkerGroup(cluster, builder, name_prefix="secrets", env_vars=variables)


def call(group, method, **arguments):
    reference = group.run_single_worker_single_data(method, 0, **arguments)
    (result,) = group.get_all_worker_results([reference], deadline_s=60)
    return result


@pytest.mark.parametrize("where", ["group", "builder"])
def test_worker_has_the_secret_and_nobody_else(cluster, caplog, where):
    # Generated at run time, so that it is in no other test's log.
    secret = os.urandom(12).hex()
    variables = {"SERVICE_API_KEY": secret, "PLAIN": "seen"}
    with make_group(cluster, where, variables) as group:
        assert call(group, "env", names=list(variables)) == variables
        with pytest.raises(WorkerMethodError, match=r"log in with \*\*\*") as raised:
            call(group, "fail_with", name="SERVICE_API_KEY")
        with pytest.raises(WorkerDiedError, match=r"the key is \*\*\*") as died:
            call(group, "say", text=f"the key is {secret}")
        for error in (raised.value, died.value):
            assert secret not in str(error)
            assert secret not in repr(error.failure)
        shown = repr((group, group.health(), group._launcher._builder.options))
    assert secret not in shown + caplog.text
    assert logs_with(secret) == []
    printed = Path(died.value.failure.log_path).with_suffix(".out").read_text()
    assert "out: the key is ***" in printed
    assert "bytes: the key is ***" in printed


def logs_with(text):
    """Return the files in the Ray session folder that contain a text."""
    session = ray._private.worker._global_node.get_session_dir_path()
    command = ["grep", "-rlI", text, os.path.join(session, "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def test_caller_environment_stays_with_the_caller(cluster, monkeypatch):
    monkeypatch.setenv("CALLERS_TOKEN", SECRET)
    with RayWorkerGroup(
        cluster, RayWorkerBuilder("rl_distributed_sample_workers.Sample")
    ) as group:
        assert SECRET not in call(group, "all_env").values()


def test_constructor_that_tells_its_key(cluster):
    class Telling:
        def __init__(self):
            raise ValueError(f"wrong key {os.environ['SERVICE_API_KEY']}")

    with pytest.raises(WorkerStartError, match=r"wrong key \*\*\*") as caught:
        RayWorkerGroup(cluster, RayWorkerBuilder(Telling), env_vars=VARIABLES)
    assert SECRET not in str(caught.value)


def test_wrong_type_of_a_secret_is_told_without_its_value(cluster):
    with pytest.raises(ConfigError, match=r"'API_KEY': \*\*\* \(int\)"):
        RayWorkerGroup(cluster, RayWorkerBuilder(COUNTER), env_vars={"API_KEY": 123456})
    with pytest.raises(ConfigError, match=r"'API_KEY': \*\*\* \(int\)"):
        WorkerOptions(env_vars={"API_KEY": 123456})


@pytest.mark.parametrize(
    "shown",
    [
        WorkerOptions(env_vars=VARIABLES),
        WorkerOptions(env_vars=VARIABLES).to_ray({}),
        WorkerIdentity("g", 0, "127.0.0.1", VARIABLES),
        LaunchOverrides({}, VARIABLES, {"password": SECRET}),
    ],
)
def test_objects_do_not_show_secrets(shown):
    assert SECRET not in repr(shown)
    assert "seen" in repr(shown)


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret_access_key", "DB_PASSWORD"])
def test_names_of_secrets(name):
    assert is_secret_variable(name)
    assert shown_variables({name: "v"}) == {name: "***"}


@pytest.mark.parametrize(
    "name",
    ["OMP_NUM_THREADS", "MONKEY", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "PWD"],
)
def test_other_names(name):
    assert not is_secret_variable(name)
    assert shown_variables({name: "v"}) == {name: "v"}


def test_a_key_of_several_lines_is_hidden_line_by_line():
    key = "-----BEGIN KEY-----\nMIIEabcdef\n-----END KEY-----"
    assert scrubbed(key, {"SSH_KEY": key}) == "***"
    assert scrubbed("first MIIEabcdef then", {"SSH_KEY": key}) == "first *** then"


def test_short_values_do_not_blot_out_text():
    variables = {"A_KEY": "is", "B_KEY": "longer-secret", "C_KEY": "longer-secret-2"}
    text = "this is longer-secret-2 and longer-secret"
    assert scrubbed(text, variables) == "this is *** and ***"
