"""Tools of an MCP server as tools of an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_distributed.errors import ConfigError
from rl_envs.tools.functions import Tool, ToolArgumentError

__all__ = ["McpTool"]

_MOST_PROBLEMS = 4


class McpTool(Tool):
    """A tool whose arguments are described by a JSON schema of a server.

    Args:
        described: The tool, as the protocol has it.
        call: Function of its name, its arguments and the row.

    Raises:
        ConfigError: Its schema is invalid.
        ToolError: A model cannot call a tool of this name.
    """

    def __init__(
        self, described: Any, call: Callable[[str, dict[str, Any], Any], Any]
    ) -> None:
        import jsonschema  # noqa: PLC0415 - comes with the package mcp
        from referencing import Registry  # noqa: PLC0415
        from referencing.exceptions import Unresolvable  # noqa: PLC0415

        self._given = dict(described.input_schema)
        try:
            # Now: an invalid schema would otherwise raise in the middle of a rollout.
            jsonschema.Draft202012Validator.check_schema(self._given)
        except jsonschema.SchemaError as error:
            raise ConfigError(
                f"tool {described.name!r} of the MCP server has an invalid schema: "
                f"{error.message}"
            ) from error
        # An empty registry: the default one downloads what the server's schema names.
        self._validator = jsonschema.Draft202012Validator(
            self._given, registry=Registry()
        )
        self._unresolvable = Unresolvable

        def run(arguments: dict[str, Any], row: Any) -> Any:
            return call(described.name, arguments, row)

        super().__init__(
            run,
            described.name,
            described.description or described.title or f"Call {described.name}.",
        )

    @property
    def schema(self) -> dict[str, Any]:
        """Description in the form of an entry of a chat template's `tools`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"properties": {}, **self._given},
            },
        }

    def bind(
        self, arguments: Mapping[str, Any], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check the arguments passed by a model.

        Raises:
            ToolArgumentError: They do not fit the schema.
        """
        try:
            problems = [
                f"argument {error.json_path.removeprefix('$.')}: {error.message}"
                for error in self._validator.iter_errors(dict(arguments))
            ]
        except self._unresolvable as error:
            # Known only now: a schema is not read as a whole before.
            problems = [f"the tool's schema lacks what it refers to: {error}"[:200]]
        if problems:
            # A schema may have very many problems with one call, and each costs tokens.
            raise ToolArgumentError("; ".join(problems[:_MOST_PROBLEMS]))
        return {"arguments": dict(arguments), "row": row}
