"""The configuration of a stage as rows of key, value, default and origin."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rl_algorithms.registry import algorithm_settings, get_config_class
from rl_cli.report.run_reader import ReadRun, ReadStage
from rl_distributed.config import explain_config
from rl_distributed.config.problems import show
from rl_distributed.errors import UserError
from rl_distributed.redaction import REDACTED, redacted

__all__ = ["ConfigValue", "config_values", "recipe_values", "whole_values"]


@dataclass(frozen=True)
class ConfigValue:
    """One key of a configuration."""

    key: str
    """Dotted key."""
    value: str
    """Value as YAML."""
    default: str | None
    """Default as YAML; None if it has none, or the class is unknown here."""
    origin: str
    """Origin of the value: `default`, `preset`, `stage`, `common`, `set`, or `run` if
    decided by the run itself; `updated` if it changed during the run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the value as JSON values."""
        return asdict(self)


def config_values(run: ReadRun, stage: ReadStage) -> list[ConfigValue]:
    """Return the resolved configuration of a stage, with secrets redacted."""
    defaults = _defaults(stage.algorithm)
    preset = _preset(stage.algorithm)
    written = _written(run.record, stage.name)
    changed = _changed(stage)
    values = []
    for key, value in _leaves(_resolved(run, stage)):
        shown = show(redacted(value))
        default = _default(key, preset, defaults)
        if key in changed:
            origin, shown = "updated", show(redacted(changed[key]))
        elif written is not None and (found := _who_wrote(key, written)):
            origin = found
        # Compared as text, since files hold YAML's values and classes Python's.
        elif shown == default:
            origin = "preset" if _at(preset, key) is not None else "default"
        else:
            origin = "set" if written is None else "run"
        if shown == REDACTED or REDACTED in shown:
            default = None
        values.append(ConfigValue(key, shown, default, origin))
    return values


def whole_values(run: ReadRun, stage: ReadStage | None) -> list[tuple[str, str]]:
    """Return keys and values as JSON, secrets redacted, without shortening any.

    Args:
        run: The run.
        stage: Stage whose keys to return, as it began; None: those of the recipe
            outside of its stages.
    """
    tree = _recipe(run) if stage is None else _resolved(run, stage)
    pairs = _leaves(redacted(tree))
    return [(key, json.dumps(value, ensure_ascii=False)) for key, value in pairs]


def recipe_values(run: ReadRun) -> list[ConfigValue]:
    """Return the keys of a recipe outside of its stages; [] for other runs."""
    return [
        ConfigValue(key, show(redacted(value)), None, "recipe")
        for key, value in _leaves(redacted(_recipe(run)))
    ]


def _recipe(run: ReadRun) -> Mapping[str, Any]:
    config = run.record.get("config")
    if run.record.get("kind") != "recipe" or not isinstance(config, Mapping):
        return {}
    return {k: v for k, v in config.items() if k not in ("common", "stages")}


def _resolved(run: ReadRun, stage: ReadStage) -> Mapping[str, Any]:
    """Return the configuration from the metrics file, or else from the run folder."""
    if stage.metrics.config:
        return redacted(stage.metrics.config)  # type: ignore[no-any-return]
    config = run.record.get("config")
    if run.record.get("kind") == "recipe" or not isinstance(config, Mapping):
        return {}
    return redacted(config)  # type: ignore[no-any-return]


@functools.cache
def _defaults(algorithm: str | None) -> dict[str, str]:
    """Return the defaults of an algorithm's keys; {} if it is not installed here."""
    try:
        rows = explain_config(get_config_class(algorithm or ""))
    except UserError:
        return {}
    return {row.path: row.default for row in rows if row.default}


@functools.cache
def _preset(algorithm: str | None) -> Mapping[str, Any]:
    try:
        return algorithm_settings(algorithm or "", {})
    except UserError:
        return {}


def _default(
    key: str, preset: Mapping[str, Any], defaults: Mapping[str, str]
) -> str | None:
    found = _at(preset, key)
    return defaults.get(key) if found is None else show(found)


def _written(record: Mapping[str, Any], stage: str) -> dict[str, Any] | None:
    """Return a recipe's settings of a stage, by origin; None: it is not a recipe."""
    config = record.get("config")
    if record.get("kind") != "recipe" or not isinstance(config, Mapping):
        return None
    stages = config.get("stages")
    own = stages.get(stage) if isinstance(stages, Mapping) else None
    return {"stage": own or {}, "common": config.get("common") or {}}


def _who_wrote(key: str, written: Mapping[str, Any]) -> str | None:
    return next((who for who, said in written.items() if _has(said, key)), None)


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _changed(stage: ReadStage) -> dict[str, Any]:
    """Return the values of keys that changed during the stage."""
    found: dict[str, Any] = {}
    for update in stage.updates:
        changes = update.get("changes")
        # Redaction depends on the name of a key, so keep the name with the value.
        for key, value in changes.items() if isinstance(changes, Mapping) else ():
            last = str(key).rpartition(".")[2]
            found[str(key)] = redacted({last: value})[last]
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
