"""`rl cluster`: generate files that start a Ray cluster elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from rl_cli.console import Terminal

if TYPE_CHECKING:
    from rl_distributed.config import Config

    _Config = TypeVar("_Config", bound=Config)

OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
CONFIG = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with the settings.",
)


@click.group()
def cluster() -> None:
    """Generate files that start a Ray cluster elsewhere, and a program on it.

    \b
    Examples:
      rl cluster slurm num_nodes=4 'command=[rl,train,quickstart]' > job.sh
      rl cluster kuberay --config demo.yaml > manifest.yaml
    """


@cluster.command(short_help="Print a batch script for Slurm.")
@OVERRIDES
@CONFIG
def slurm(overrides: tuple[str, ...], path: Path | None) -> None:
    """Print a batch script for Slurm, with the keys of SlurmConfig.

    \b
    Examples:
      rl cluster slurm num_nodes=4 'command=[rl,train,quickstart]' > job.sh
      rl cluster slurm --config job.yaml tls=true > job.sh
    """
    from rl_distributed.launch import SlurmConfig, slurm_script  # noqa: PLC0415

    config = _settings(SlurmConfig, path, overrides)
    Terminal().raw(slurm_script(config).rstrip())


@cluster.command(short_help="Print a manifest for KubeRay.")
@OVERRIDES
@CONFIG
def kuberay(overrides: tuple[str, ...], path: Path | None) -> None:
    """Print a manifest for KubeRay, with the keys of KubeRayConfig.

    \b
    Examples:
      rl cluster kuberay name=demo image=my/image:1 ray_version=2.60.0 > demo.yaml
      rl cluster kuberay --config demo.yaml num_workers=8 > manifest.yaml
    """
    from rl_distributed.launch import KubeRayConfig, kuberay_manifest  # noqa: PLC0415

    config = _settings(KubeRayConfig, path, overrides)
    Terminal().raw(kuberay_manifest(config).rstrip())


def _settings(
    kind: type[_Config], path: Path | None, overrides: tuple[str, ...]
) -> _Config:
    from rl_distributed.config import apply_overrides, parse_overrides  # noqa: PLC0415

    if path is not None:
        return kind.from_yaml(path, overrides)
    document = apply_overrides({}, parse_overrides(overrides), schema=kind)
    return kind.from_dict(document, source="the command line")
