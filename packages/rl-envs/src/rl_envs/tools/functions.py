"""`Tool`: a self-describing Python function that a model may call.

```python
def search(query: str, limit: int = 3) -> list[str]:
    '''Search the library.

Args:
        query: Words to look for.
        limit: Most results.
    '''
```

Its signature becomes a JSON schema and its docstring the description. Arguments passed
by a model are checked and converted before the function sees them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rl_envs.errors import EnvsError, ToolError

__all__ = ["Tool", "ToolArgumentError"]

_ROW = "row"
_SECTION = re.compile(r"^(\w[\w ]*):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class ToolArgumentError(EnvsError):
    """A model passed invalid arguments; the message is shown to the model."""


class Tool:
    """A function with a description for models.

    A parameter named `row` is hidden from the model and receives the data set's columns
    for the conversation.

    Args:
        fn: A function or coroutine function with annotated parameters.
        name: Name shown to the model; None: the function's own.
        description: Description shown to the model; None: the function's docstring.

    Raises:
        ToolError: It has no usable name, description or annotation.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
    ) -> None:
        if not callable(fn):
            raise ToolError(f"a tool must be callable: got {type(fn).__name__}")
        self.fn = fn
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        if not re.fullmatch(r"[A-Za-z_][\w.-]{0,63}", self.name):
            raise ToolError(
                f"a tool needs a name of letters, digits and _: got {self.name!r}; "
                "pass Tool(fn, name=...)"
            )
        summary, self._arguments = _parse_docstring(inspect.getdoc(fn) or "")
        self.description = description or summary
        if not self.description:
            raise ToolError(
                f"tool {self.name!r} has no docstring, so a model cannot know what it "
                "does: write one, or pass Tool(fn, description=...)"
            )
        self._wants_row = _ROW in inspect.signature(fn).parameters
        # Built now, so that an unusable signature fails here and not in a rollout.
        _ = self._model

    def __reduce__(self) -> tuple[Any, ...]:
        # The generated pydantic class cannot be pickled; the receiver builds its own.
        return Tool, (self.fn, self.name, self.description)

    @cached_property
    def _model(self) -> type[BaseModel]:
        """Pydantic model that checks the arguments."""
        hints = get_type_hints(
            self.fn if inspect.isroutine(self.fn) else type(self.fn).__call__,
            # Annotated types keep their pydantic limits and descriptions.
            include_extras=True,
        )
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(self.fn).parameters.values():
            name = parameter.name
            if name == _ROW:
                continue
            if parameter.kind not in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                raise ToolError(
                    f"tool {self.name!r}: {parameter} cannot be described to a model; "
                    "use named parameters only"
                )
            if name not in hints:
                raise ToolError(
                    f"tool {self.name!r}: parameter {name!r} has no annotation; write "
                    f"for example `{name}: str`"
                )
            given = parameter.default
            default = ... if given is parameter.empty else given
            about = self._arguments.get(name)
            fields[name] = (hints[name], Field(default, description=about))
        # An argument that the function lacks is the model's mistake, which it should
        # hear of.
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        try:
            return create_model(f"{self.name}_arguments", __config__=config, **fields)
        except Exception as error:
            raise ToolError(
                f"tool {self.name!r}: its parameters cannot be described: {error}; use "
                "numbers, texts, lists, mappings, Literal or pydantic models"
            ) from error

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Description in the form of an entry of a chat template's `tools`."""
        parameters = self._model.model_json_schema()
        # Titles repeat the names and cost tokens in every prompt.
        parameters.pop("title", None)
        for part in parameters.get("properties", {}).values():
            part.pop("title", None)
        parameters.setdefault("properties", {})
        parameters.pop("additionalProperties", None)
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }

    def bind(
        self, arguments: Mapping[str, Any], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check and convert the arguments passed by a model.

        Raises:
            ToolArgumentError: They are invalid.
        """
        try:
            model = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            # Without pydantic's URLs and echoes of the input, which only cost tokens.
            raise ToolArgumentError(
                "; ".join(
                    f"argument {'.'.join(map(str, part['loc'])) or '?'}: {part['msg']}"
                    for part in error.errors(include_url=False, include_input=False)
                )
            ) from None
        # Attributes, not `model_dump`: nested models stay objects, as the annotations
        # say.
        named = {name: getattr(model, name) for name in type(model).model_fields}
        return {**named, _ROW: row} if self._wants_row else named


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the entries of `Args:`."""
    section = ""
    summary: list[str] = []
    arguments: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header:
            section = header[1]
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            entry = _ARGUMENT.match(line.strip())
            indent = len(line) - len(line.lstrip())
            # A deeper line continues the entry above it, even if it contains a colon.
            if entry and indent <= 4:
                last = entry[1]
                arguments[last] = entry[2]
            elif last:
                arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return "\n".join(summary).strip(), arguments
