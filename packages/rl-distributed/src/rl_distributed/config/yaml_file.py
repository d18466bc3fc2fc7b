"""Read one YAML file, with YAML 1.2 scalars and the line of every key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from rl_distributed.config.origins import MOST_LEVELS, ConfigDocument, KeyPath
from rl_distributed.errors import ConfigError

__all__ = ["parse_scalar", "read_yaml"]

# With more digits, Python refuses to read it; it stays a text, which no number takes.
_MOST_DIGITS = 4_000
_INT = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_BOOLS = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
_NULLS = frozenset(("null", "Null", "NULL", "~", ""))


def parse_scalar(text: str) -> Any:
    """Get the value of an unquoted scalar: null, bool, int, float, or the text itself.

    `1e-5` is a number, and `yes`, `on`, `0x10` and `12:30` are strings, as in YAML 1.2.
    """
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= _MOST_DIGITS else text
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    return text


# No configuration that people write comes near these. A few hundred bytes of aliases to
# aliases would become gigabytes, and deep nesting ends in Python's own limit.
_MOST_ALIASED = 100_000


class _TooMuchError(yaml.MarkedYAMLError):
    """The file is YAML, and becomes more than a configuration can be."""


class _Loader(yaml.SafeLoader):
    """Safe loading in which every unquoted scalar goes through `parse_scalar`.

    Raises:
        _TooMuchError: Lists and mappings are nested too deep, or aliases stand for too
            much or for what they are in.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._num_nodes = 0
        self._num_aliased = 0
        # What each node is written out, by its identity; absent while it is read.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Peeked at first, because the composed node of an alias looks like its target.
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._num_nodes
        self._level += 1
        if self._level > MOST_LEVELS:
            self._refuse(event, f"nests more than {MOST_LEVELS} levels")
        node = super().compose_node(parent, index)
        self._level -= 1
        if isinstance(event, yaml.AliasEvent):
            self._add_alias(event, node)
        else:
            self._num_nodes += 1
            self._sizes[id(node)] = self._num_nodes - before
        return node

    def _add_alias(self, event: yaml.AliasEvent, node: yaml.Node | None) -> None:
        size = self._sizes.get(id(node))
        if size is None:
            self._refuse(event, f"has the alias *{event.anchor} in what it stands for")
        self._num_nodes += size
        # Counts aliases as if written out, because the file itself can be tiny.
        self._num_aliased += size
        if self._num_aliased > _MOST_ALIASED:
            self._refuse(
                event,
                f"has aliases that stand for more than {_MOST_ALIASED:,} values",
            )

    @staticmethod
    def _refuse(event: yaml.Event, problem: str) -> NoReturn:
        mark: Any = event.start_mark
        raise _TooMuchError(None, None, problem, mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        written: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                # PyYAML would silently keep the last one.
                if key.value in written:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"key {key.value!r} is written twice "
                        f"(first in line {written[key.value]})",
                        key.start_mark,
                    )
                written[key.value] = line
        return super().construct_mapping(node, deep=deep)


_PLAIN = "tag:rl-distributed:plain"
# PyYAML implements YAML 1.1, where `on` is true and `12:30` is a number.
_Loader.yaml_implicit_resolvers = {
    "<": [("tag:yaml.org,2002:merge", re.compile("<<"))],
}
_Loader.add_implicit_resolver(_PLAIN, re.compile(""), None)


def _construct_plain(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return parse_scalar(str(loader.construct_scalar(node)))


_Loader.add_constructor(_PLAIN, _construct_plain)


def read_yaml(path: str | os.PathLike[str]) -> ConfigDocument:
    """Read the mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: The file is missing, is no YAML or no mapping, nests too deep, or
            has aliases that stand for too much.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {file} does not exist; check the path"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read configuration file {file}: {error}") from error
    try:
        node, data = _parse(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        if isinstance(error, _TooMuchError):
            raise ConfigError(
                f"{file}{line} {error.problem}; write a configuration by hand, and "
                "keep data in files of their own"
            ) from None
        raise ConfigError(f"{file}{line} is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if data is None:
        return ConfigDocument()
    if not isinstance(data, dict):
        raise ConfigError(
            f"{file} must hold a mapping of keys to values: got {type(data).__name__}"
        )
    origins = {path: f"{file}:{line}" for path, line in _lines(node)}
    return ConfigDocument(data, origins)


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _lines(node: yaml.Node | None, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield (*path, key.value), key.start_mark.line + 1
                yield from _lines(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, str(index)), value.start_mark.line + 1
            yield from _lines(value, (*path, str(index)))
