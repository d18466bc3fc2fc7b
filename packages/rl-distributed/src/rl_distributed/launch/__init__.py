"""Files that start a Ray cluster elsewhere: batch scripts and manifests.

Each is a pure function of a frozen configuration, so a file can be looked at, kept
under version control, and made again.
"""

from rl_distributed.launch.kuberay import KubeRayConfig, kuberay_manifest
from rl_distributed.launch.slurm import SlurmConfig, SlurmContainer, slurm_script

__all__ = [
    "KubeRayConfig",
    "SlurmConfig",
    "SlurmContainer",
    "kuberay_manifest",
    "slurm_script",
]
