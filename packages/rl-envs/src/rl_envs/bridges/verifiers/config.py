"""Settings of the verifiers environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from rl_distributed.config import Config
from rl_envs.agents.config import AgentConfig

__all__ = ["VerifiersConfig", "VerifiersHost"]


class VerifiersHost(Config):
    """Which environment it is, and the Python that has it."""

    env: str = Field(min_length=1)
    """Name of the environment, as `verifiers.load_environment` takes it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's `load_environment`, of JSON values."""
    python: str | None = None
    """Python that has the environment's package and verifiers before 0.4; null: that of
    the extra `verifiers`, an environment of its own that is built once."""
    folder: str | None = None
    """Folder with the module of the environment, where it is not installed."""
    start_s: float = Field(300.0, gt=0.0)
    """Seconds that loading the environment, with its data, may take."""

    @field_validator("folder")
    @classmethod
    def _is_a_folder(cls, value: str | None) -> str | None:
        if value is None:
            return None
        path = Path(value).expanduser().resolve()
        if not path.is_dir():
            raise ValueError(f"must be a folder that exists: got {value!r}")
        # Absolute, because workers may run in another folder.
        return str(path)


class VerifiersConfig(VerifiersHost, AgentConfig):
    """Settings of the verifiers environment."""

    sampling: dict[str, Any] = Field(default_factory=dict)
    """Fields of each request to the model, such as `max_tokens`; empty: those of the
    run."""
