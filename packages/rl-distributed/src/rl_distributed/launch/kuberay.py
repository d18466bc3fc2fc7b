"""Manifests for KubeRay: a `RayCluster` that stays, or a `RayJob` that ends.

The fields are those of `ray.io/v1`. Token authentication is the operator's
(`authOptions`, KubeRay 1.5.1 and Ray 2.52 on): it makes the token, keeps it in a Secret
and hands it to every pod. With TLS each pod makes its own certificate before Ray
starts, signed by an authority that lies in a Secret.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml
from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config

__all__ = ["KubeRayConfig", "kuberay_manifest"]

# KubeRay appends suffixes to the name and therefore allows at most 47 characters.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
# What a shell can read as well; Kubernetes itself also allows dots and dashes.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AUTHORITY_FOLDER, _TLS_FOLDER = "/etc/rl/authority", "/etc/rl/tls"
_GCS_PORT, _DASHBOARD_PORT, _CLIENT_PORT = 6379, 8265, 10001


class KubeRayConfig(Config):
    """A Ray cluster on Kubernetes, and the program that runs on it."""

    name: str
    """Name of the cluster or job: lower-case letters, digits and dashes."""
    image: str
    """Container image with Python, Ray and the program."""
    ray_version: str
    """Ray's version in the image."""
    command: list[str] = Field(default_factory=list)
    """Program of a RayJob; empty: a RayCluster without one."""
    namespace: str | None = None
    """Namespace; None: that of `kubectl`."""
    num_workers: int = Field(default=1, ge=0)
    """Pods besides the head; each is one node of the Ray cluster."""
    cpus_per_worker: int = Field(default=8, ge=1)
    """CPUs of each worker pod."""
    gpus_per_worker: int = Field(default=0, ge=0)
    """GPUs of each worker pod."""
    memory_gb_per_worker: int = Field(default=32, ge=1)
    """Memory of each worker pod in GiB."""
    shared_memory_gb: int = Field(default=8, ge=1)
    """Shared memory of each pod in GiB, for Ray's object store; part of its memory."""
    head_cpus: int = Field(default=4, ge=1)
    """CPUs of the head's pod. Its node takes no workers."""
    head_memory_gb: int = Field(default=16, ge=1)
    """Memory of the head's pod in GiB."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of all pods; for secrets use `secret_env_vars`."""
    secret_env_vars: dict[str, str] = Field(default_factory=dict)
    """Variables from Secrets: `{"HF_TOKEN": "my-secret/token"}`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the machines that worker pods run on."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the Ray nodes of the workers, `rl/nvlink-domain` for instance."""
    service_account: str | None = None
    """Service account of the pods; None: the default one."""
    tls_secret: str | None = None
    """Secret with `ca.crt` and `ca.key` of the authority; None: no TLS."""
    active_deadline_s: int = Field(default=86_400, ge=60)
    """A RayJob that is not done by then is ended."""
    keep_after_end_s: int = Field(default=300, ge=0)
    """How long the cluster of a RayJob stays when it is done, for its logs."""

    @field_validator("name")
    @classmethod
    def _is_a_kubernetes_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "must begin with a letter and have at most 47 lower-case letters, "
                f"digits and dashes: got {value!r}"
            )
        return value

    @field_validator("env_vars", "secret_env_vars")
    @classmethod
    def _are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(
                    "the name of a variable must have letters, digits and underscores, "
                    f"and not begin with a digit: got {name!r}"
                )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> KubeRayConfig:
        both = sorted(self.env_vars.keys() & self.secret_env_vars.keys())
        if both:
            raise ValueError(
                f"env_vars and secret_env_vars must not share names: got {both} in both"
            )
        memory = {"head_memory_gb": self.head_memory_gb}
        if self.num_workers:
            memory["memory_gb_per_worker"] = self.memory_gb_per_worker
        for name, size in memory.items():
            if self.shared_memory_gb >= size:
                raise ValueError(
                    f"shared_memory_gb must be below {name}, of which it is a part: "
                    f"got {self.shared_memory_gb} and {size}"
                )
        return self

    @field_validator("secret_env_vars")
    @classmethod
    def _name_secret_and_key(cls, value: dict[str, str]) -> dict[str, str]:
        for name, source in value.items():
            if source.count("/") != 1:
                raise ValueError(
                    f"{name} must be 'secret/key', the Secret's name and its key: got "
                    f"{source!r}"
                )
        return value


def kuberay_manifest(config: KubeRayConfig) -> str:
    """Return the manifest, to be written to a file and given to `kubectl apply -f`.

    A `RayJob` where there is a command, else a `RayCluster`. The same configuration
    gives the same text. It holds no secret.
    """
    metadata: dict[str, Any] = {"name": config.name}
    if config.namespace is not None:
        metadata["namespace"] = config.namespace
    cluster = _cluster_spec(config)
    if config.command:
        kind, spec = (
            "RayJob",
            {
                "entrypoint": shlex.join(config.command),
                "submissionMode": "K8sJobMode",
                "activeDeadlineSeconds": config.active_deadline_s,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": config.keep_after_end_s,
                "backoffLimit": 0,
                "rayClusterSpec": cluster,
            },
        )
    else:
        kind, spec = "RayCluster", cluster
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": kind,
        "metadata": metadata,
        "spec": spec,
    }
    return yaml.safe_dump(manifest, sort_keys=False)


def _cluster_spec(config: KubeRayConfig) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "rayVersion": config.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            # No worker of a group runs beside the head's own processes.
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod(config, is_head=True),
        },
    }
    if config.num_workers:
        params = {"num-gpus": str(config.gpus_per_worker)}
        if config.labels:
            params["labels"] = ",".join(f"{k}={v}" for k, v in config.labels.items())
        spec["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": config.num_workers,
                # Worker groups have a fixed size, so there is nothing to scale.
                "minReplicas": config.num_workers,
                "maxReplicas": config.num_workers,
                "rayStartParams": params,
                "template": _pod(config, is_head=False),
            }
        ]
    return spec


def _pod(config: KubeRayConfig, *, is_head: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "containers": [_container(config, is_head)],
        "volumes": [
            {
                "name": "shared-memory",
                # Containers otherwise get 64 MB of shared memory, too
                # little for Ray's object store.
                "emptyDir": {
                    "medium": "Memory",
                    "sizeLimit": f"{config.shared_memory_gb}Gi",
                },
            }
        ],
    }
    if config.service_account is not None:
        spec["serviceAccountName"] = config.service_account
    if config.node_selector and not is_head:
        spec["nodeSelector"] = dict(config.node_selector)
    if config.tls_secret is not None:
        spec["initContainers"] = [_certificate_maker(config)]
        spec["volumes"] += [
            {"name": "authority", "secret": {"secretName": config.tls_secret}},
            # In memory, so that the private key never touches a disk.
            {"name": "tls", "emptyDir": {"medium": "Memory"}},
        ]
    return {"spec": spec}


def _container(config: KubeRayConfig, is_head: bool) -> dict[str, Any]:
    if is_head:
        amounts = {"cpu": str(config.head_cpus), "memory": f"{config.head_memory_gb}Gi"}
    else:
        amounts = {
            "cpu": str(config.cpus_per_worker),
            "memory": f"{config.memory_gb_per_worker}Gi",
        }
        if config.gpus_per_worker:
            amounts["nvidia.com/gpu"] = str(config.gpus_per_worker)
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    container: dict[str, Any] = {
        "name": "ray-head" if is_head else "ray-worker",
        "image": config.image,
        # A copy, because YAML would render the same object as an alias.
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if variables := _variables(config):
        container["env"] = variables
    if is_head:
        container["ports"] = [
            {"name": "gcs", "containerPort": _GCS_PORT},
            {"name": "dashboard", "containerPort": _DASHBOARD_PORT},
            {"name": "client", "containerPort": _CLIENT_PORT},
        ]
    if config.tls_secret is not None:
        mounts.append({"name": "tls", "mountPath": _TLS_FOLDER})
    return container


def _variables(config: KubeRayConfig) -> list[dict[str, Any]]:
    plain = dict(config.env_vars)
    if config.tls_secret is not None:
        plain |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": f"{_TLS_FOLDER}/node.crt",
            "RAY_TLS_SERVER_KEY": f"{_TLS_FOLDER}/node.key",
            "RAY_TLS_CA_CERT": f"{_TLS_FOLDER}/ca.crt",
        }
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in plain.items()
    ]
    for name, source in config.secret_env_vars.items():
        secret, key = source.split("/")
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        # By reference, because others may read the manifest.
        variables.append({"name": name, "valueFrom": reference})
    return variables


def _certificate_maker(config: KubeRayConfig) -> dict[str, Any]:
    """Signs a certificate for the pod's own address and the name of the head."""
    code = (
        "import os; from rl_distributed.security import create_certificates; "
        f"create_certificates({_TLS_FOLDER!r}, authority={_AUTHORITY_FOLDER!r}, "
        "hosts=[name for name in (os.environ['POD_IP'], os.environ.get('FQ_RAY_IP')) "
        "if name])"
    )
    field = {"fieldRef": {"fieldPath": "status.podIP"}}
    return {
        "name": "make-certificate",
        "image": config.image,
        "command": ["python", "-c", code],
        "env": [{"name": "POD_IP", "valueFrom": field}],
        "volumeMounts": [
            # Mounted only here: the program's container never sees the authority's key.
            {"name": "authority", "mountPath": _AUTHORITY_FOLDER, "readOnly": True},
            {"name": "tls", "mountPath": _TLS_FOLDER},
        ],
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
    }
