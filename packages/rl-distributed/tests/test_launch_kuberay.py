from __future__ import annotations

import shlex

import pytest
import yaml

from rl_distributed.errors import ConfigError
from rl_distributed.launch import KubeRayConfig, kuberay_manifest

BASE = KubeRayConfig(name="demo", image="repo/image:1", ray_version="2.60.0")
JOB = BASE.replace(
    command=["python", "train.py", "two words"],
    namespace="team",
    num_workers=2,
    gpus_per_worker=8,
    env_vars={"A": "b"},
    secret_env_vars={"HF_TOKEN": "hub/token"},
    node_selector={"pool": "gpu"},
    labels={"rl/nvlink-domain": "rack-1"},
    service_account="runner",
    tls_secret="authority",
)
# Fields of ray.io/v1 in KubeRay's resource definitions.
CLUSTER_FIELDS = {
    "authOptions",
    "autoscalerOptions",
    "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "headServiceAnnotations",
    "managedBy",
    "rayVersion",
    "suspend",
    "workerGroupSpecs",
}
HEAD_FIELDS = {
    "enableIngress",
    "headService",
    "labels",
    "rayStartParams",
    "resources",
    "serviceType",
    "template",
}
WORKER_FIELDS = {
    "groupName",
    "idleTimeoutSeconds",
    "labels",
    "maxReplicas",
    "minReplicas",
    "numOfHosts",
    "rayStartParams",
    "replicas",
    "resources",
    "scaleStrategy",
    "suspend",
    "template",
}
JOB_FIELDS = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "clusterSelector",
    "deletionStrategy",
    "entrypoint",
    "entrypointNumCpus",
    "entrypointNumGpus",
    "entrypointResources",
    "jobId",
    "managedBy",
    "metadata",
    "preRunningDeadlineSeconds",
    "rayClusterSpec",
    "runtimeEnvYAML",
    "shutdownAfterJobFinishes",
    "submissionMode",
    "submitterConfig",
    "submitterPodTemplate",
    "suspend",
    "ttlSecondsAfterFinished",
}
POD_FIELDS = {
    "containers",
    "initContainers",
    "nodeSelector",
    "serviceAccountName",
    "volumes",
}
CONTAINER_FIELDS = {
    "command",
    "env",
    "image",
    "name",
    "ports",
    "resources",
    "securityContext",
    "volumeMounts",
}


def manifest(config):
    (found,) = yaml.safe_load_all(kuberay_manifest(config))
    assert found["apiVersion"] == "ray.io/v1"
    return found


def check_cluster(spec):
    assert set(spec) <= CLUSTER_FIELDS
    assert set(spec["headGroupSpec"]) <= HEAD_FIELDS
    groups = [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]
    for group in groups:
        # Ray's start parameters are strings, whatever they mean.
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert set(pod) <= POD_FIELDS
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"] + pod.get("initContainers", []):
            assert set(container) <= CONTAINER_FIELDS
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert all(
                isinstance(e.get("value", ""), str) for e in container.get("env", [])
            )
    return groups


def test_a_cluster_that_stays():
    found = manifest(BASE)
    assert found["kind"] == "RayCluster"
    assert found["metadata"] == {"name": "demo"}
    head, worker = check_cluster(found["spec"])
    assert found["spec"]["rayVersion"] == "2.60.0"
    assert set(worker) <= WORKER_FIELDS
    assert worker["replicas"] == worker["minReplicas"] == worker["maxReplicas"] == 1
    assert head["rayStartParams"]["num-cpus"] == "0"
    ports = head["template"]["spec"]["containers"][0]["ports"]
    assert {p["name"]: p["containerPort"] for p in ports} == {
        "gcs": 6379,
        "dashboard": 8265,
        "client": 10001,
    }


def test_a_job_that_ends():
    found = manifest(JOB)
    assert found["kind"] == "RayJob"
    assert found["metadata"] == {"name": "demo", "namespace": "team"}
    spec = found["spec"]
    assert set(spec) <= JOB_FIELDS
    assert shlex.split(spec["entrypoint"]) == ["python", "train.py", "two words"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["activeDeadlineSeconds"] == 86_400
    _, worker = check_cluster(spec["rayClusterSpec"])
    assert worker["replicas"] == 2
    assert worker["rayStartParams"]["labels"] == "rl/nvlink-domain=rack-1"
    pod = worker["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["serviceAccountName"] == "runner"
    amounts = pod["containers"][0]["resources"]
    assert amounts["limits"] == amounts["requests"]
    assert amounts["limits"]["nvidia.com/gpu"] == "8"


def test_the_token_is_the_operators_and_no_secret_is_in_the_file():
    assert manifest(JOB)["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    (worker,) = manifest(JOB)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    env = worker["template"]["spec"]["containers"][0]["env"]
    (token,) = [entry for entry in env if entry["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


def test_with_tls_each_pod_makes_its_certificate():
    for group in check_cluster(manifest(JOB)["spec"]["rayClusterSpec"]):
        pod = group["template"]["spec"]
        (maker,) = pod["initContainers"]
        python, option, code = maker["command"]
        assert (python, option) == ("python", "-c")
        compile(code, "init container", "exec")
        secrets = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
        assert secrets == ["authority"]
        # The CA key is not where the program runs.
        mounts = {m["name"] for m in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared-memory", "tls"}
        variables = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
        assert variables["RAY_USE_TLS"] == "1"
        assert variables["RAY_TLS_SERVER_KEY"] == "/etc/rl/tls/node.key"
    for group in check_cluster(manifest(BASE)["spec"]):
        assert "initContainers" not in group["template"]["spec"]


def test_a_head_alone():
    alone = BASE.replace(num_workers=0, shared_memory_gb=40, head_memory_gb=64)
    assert "workerGroupSpecs" not in manifest(alone)["spec"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "My_Job"}, "lower-case letters"),
        ({"name": "x" * 48}, "at most 47"),
        ({"secret_env_vars": {"A": "b"}}, "must be 'secret/key'"),
        ({"env_vars": {"MY VAR": "1"}}, "letters, digits and underscores.*'MY VAR'"),
        ({"secret_env_vars": {"1A": "a/b"}}, "not begin with a digit"),
        (
            {"env_vars": {"A": "1"}, "secret_env_vars": {"A": "a/b"}},
            r"must not share names: got \['A'\]",
        ),
        ({"shared_memory_gb": 16}, "below head_memory_gb.*got 16 and 16"),
        (
            {"shared_memory_gb": 40, "head_memory_gb": 64},
            "below memory_gb_per_worker.*got 40 and 32",
        ),
        ({"gpus_per_worker": -1}, "gpus_per_worker"),
        ({"imag": "x"}, "image"),
    ],
)
def test_wrong_settings(values, words):
    with pytest.raises(ConfigError, match=words):
        KubeRayConfig(**{"name": "a", "image": "i", "ray_version": "2", **values})
