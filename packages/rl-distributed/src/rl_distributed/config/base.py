"""`Config`: the frozen, checked base class of every configuration."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rl_distributed.config.load import load_config
from rl_distributed.config.origins import check_depth
from rl_distributed.config.problems import (
    describe_problems,
    raise_problems,
    refuse_number_keys,
    show,
)
from rl_distributed.config.schema import SchemaNode, field_default
from rl_distributed.errors import ConfigError

__all__ = ["Config"]

# Libraries store integers in 64 bits, and counts often in 32.
_LARGEST = 2**63 - 1
_LARGEST_COUNT = 2**31 - 1
# True while a Config is being validated, so that the constructor of a nested section
# leaves its errors to the outermost one, which reports all of them with full paths.
_validating: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "rl_distributed_config_validating", default=False
)


class Config(BaseModel):
    """A frozen section of configuration.

    Subclasses declare fields with a docstring under each. An unknown key, a wrong
    type or a broken rule raises `ConfigError`, which lists every problem with its
    dotted path, where it was written, and the nearest right name. Rules over several
    fields are pydantic model validators that raise `ValueError`.

    A section that is given in part is merged over the default *of that field*, so
    setting one key of a section leaves its other defaults alone.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=True,
        ser_json_inf_nan="constants",
    )

    def __init__(self, **values: Any) -> None:
        if _validating.get():
            super().__init__(**values)
            return
        # Checked first, because validation recurses and fails on very deep data.
        check_depth(values, type(self).__name__)
        refuse_number_keys(type(self), values, None)
        token = _validating.set(True)
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = describe_problems(type(self), values, error, type(self).__name__)
        else:
            return
        finally:
            _validating.reset(token)
        raise_problems(problems, type(self).__name__)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str | None = None) -> Self:
        """Validate `data`; `source` says in errors where it came from.

        A `ConfigDocument`, which `load_config` and `apply_overrides` return, already
        knows the file and line or the override of every key.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{source or cls.__name__} must be a mapping of keys to values: "
                f"got {type(data).__name__}"
            )
        check_depth(data, source or cls.__name__)
        refuse_number_keys(cls, data, source)
        token = _validating.set(True)
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            problems = describe_problems(cls, data, error, source)
        finally:
            _validating.reset(token)
        raise_problems(problems, source or cls.__name__)

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()
    ) -> Self:
        """Load a YAML file with its parents, apply `overrides`, and validate."""
        document = load_config(path, overrides, schema=cls)
        return cls.from_dict(document, source=os.fspath(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain data (strings, numbers, lists, dicts) that `from_dict` reads back."""
        data: dict[str, Any] = self.model_dump(mode="json", serialize_as_any=True)
        return data

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed."""
        # Only the fields that were set; the others keep following their defaults.
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**fields, **changes})

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_odd_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, int) or info.field_name not in _number_fields(cls):
            return value
        # Python counts True as 1; in a configuration it is a slip.
        if isinstance(value, bool):
            raise ValueError(f"must be a number: got {str(value).lower()}")
        # Libraries fail on such integers late, and say only that they overflow.
        largest = _largest(cls, info.field_name)
        if abs(value) > largest:
            raise ValueError(
                f"must be at most {largest} in size: got {show(value)}; set a smaller "
                "number"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _merge_over_section_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        merged = dict(data)
        # pydantic would fill a partial section from the defaults of its class instead.
        for name, default in _section_defaults(cls).items():
            value = merged.get(name)
            if isinstance(value, Mapping):
                merged[name] = _over_default(default, value)
        return merged


def _largest(cls: type[Config], name: str) -> int:
    """Return what a field can hold: seeds and bytes take 64 bits, counts 32."""
    kinds = SchemaNode.of(cls.model_fields[name].annotation).types
    is_wide = name.endswith(("seed", "_bytes")) or int not in kinds
    return _LARGEST if is_wide else _LARGEST_COUNT


def _over_default(default: Config, value: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: getattr(default, name) for name in default.model_fields_set}
    for key, item in value.items():
        present = merged.get(key)
        if isinstance(present, Config) and isinstance(item, Mapping):
            merged[key] = _over_default(present, item)
        else:
            merged[key] = item
    return merged


@functools.cache
def _number_fields(cls: type[Config]) -> frozenset[str]:
    names = set()
    for name, field in cls.model_fields.items():
        kinds = SchemaNode.of(field.annotation).types
        if any(kind in (int, float) for kind in kinds) and bool not in kinds:
            names.add(name)
    return frozenset(names)


@functools.cache
def _section_defaults(cls: type[Config]) -> dict[str, Config]:
    """Fields whose default is a section that differs from its class's own defaults."""
    found: dict[str, Config] = {}
    for name, field in cls.model_fields.items():
        # If the factory is the class itself, the default equals the
        # class's own defaults.
        if isinstance(field.default_factory, type):
            continue
        default = field_default(field)
        if isinstance(default, Config) and default.model_fields_set:
            found[name] = default
    return found
