"""JSON that satisfies a schema."""

from __future__ import annotations

from rl_envs.worlds.json_schema.environment import (
    JsonSchemaConfig,
    JsonSchemaEnvironment,
)
from rl_envs.worlds.json_schema.tasks import JsonSchemaTasks

__all__ = ["JsonSchemaConfig", "JsonSchemaEnvironment", "JsonSchemaTasks"]
