"""`run.json` and `config.yaml`: what a run is, so that people and commands know it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from rl_algorithms.trainers.run.machine import command_line, machine_facts
from rl_distributed.config.hidden_keys import hide_secrets
from rl_distributed.private_files import write_private_text
from rl_distributed.security.audit import audit_path

__all__ = ["RUN_RECORDS", "installed_versions", "write_run_record"]

RUN_RECORDS = ("run.json", "config.yaml")
"""Names of the two files."""
_PACKAGES = (
    "rl-distributed",
    "rl-envs",
    "rl-models",
    "rl-algorithms",
    "rl-cli",
    "ray",
    "torch",
    "transformers",
    "vllm",
)


def write_run_record(folder: Path, source: Mapping[str, Any]) -> None:
    """Write what a run is into its folder, without secrets.

    Args:
        folder: The folder of the run.
        source: `kind` (`trainer`, where Python made the run), `name`, `config`, and
            what else makes the run again. The keys whose values are secrets are listed
            as `hidden`; `started`, `versions`, `command` and `machine` say how it
            began, `audit_log` is the file of its audit log, or null.

    Raises:
        AuditError: `RL_AUDIT_LOG` names a file that cannot be written.
    """
    config, hidden = hide_secrets(source["config"])
    log = audit_path()
    record = {
        **source,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "command": command_line(),
        "machine": machine_facts(),
        "audit_log": None if log is None else str(log),
        "hidden": hidden,
        "config": config,
    }
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_private_text(folder / "config.yaml", text)
    write_private_text(folder / "run.json", json.dumps(record, indent=1) + "\n")


def installed_versions() -> dict[str, str]:
    """Return the versions of what a run depends on; what is not there is left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
