"""Keys that a configuration has and an algorithm does not read.

| key | what happens |
|---|---|
| of another algorithm, or of something that is not there | refused |
| of something that another key turns off (`enabled: false`, a weight of 0) | logged |

The second kind is not refused, so that one override can turn off what a recipe or a
preset has set in detail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_distributed.config import Config
from rl_distributed.config.problems import show
from rl_distributed.config.schema import SchemaNode

__all__ = [
    "OF_CONVERSATIONS",
    "OF_KL",
    "OF_PAIRS",
    "Idle",
    "idle_lines",
    "of_validation",
    "refuse_unread",
]

OF_PAIRS = ("data.chosen_key", "data.rejected_key")
"""Keys of data that only those read that learn from pairs of answers."""
OF_CONVERSATIONS = ("data.roles_to_train_on", "data.only_unmask_final")
"""Keys of data that only those read that imitate."""

OF_KL = (
    "loss_fn.reference_policy_kl_type",
    "loss_fn.reference_policy_kl_gradient",
    "loss_fn.kl_input_clamp_value",
    "loss_fn.kl_output_clamp_value",
    "loss_fn.use_on_policy_kl_approximation",
    "loss_fn.use_kl_in_reward",
)
"""Keys that say how a KL divergence is measured that may have no weight."""


@dataclass(frozen=True)
class Idle:
    """Keys that say how something is done, and what turns it off."""

    cause: str
    """Such as `checkpointing.enabled=false`."""
    keys: tuple[str, ...]
    """Dotted paths."""


def of_validation(config: Config) -> Idle:
    """Return the keys of validations, for a run without held-out data."""
    keys = []
    for name in type(config).model_fields:
        section = getattr(config, name)
        if isinstance(section, RunSettings):
            found = (k for k in type(section).model_fields if _is_of_validation(k))
            # That there is none every 0 steps goes without saying.
            skipped = () if section.val_period else ("val_period",)
            keys += [f"{name}.{key}" for key in found if key not in skipped]
    return Idle("there are no held-out data", tuple(keys))


def _is_of_validation(key: str) -> bool:
    return key.startswith(("val_", "max_val_")) or key == "accuracy_threshold"


def idle_lines(config: Config, idle: Iterable[Idle]) -> Iterator[str]:
    """Tell of each key that is set although what it belongs to is turned off.

    Args:
        config: The whole configuration.
        idle: What is turned off.
    """
    for part in idle:
        named = [
            f"{key}={show(value)}" for key, value, _ in _changed(config, part.keys)
        ]
        if named:
            yield f"without effect, as {part.cause}: {', '.join(named)}"


def refuse_unread(config: Config, keys: Iterable[str]) -> None:
    """Check that keys that are not read are not set.

    Args:
        config: The whole configuration.
        keys: Their dotted paths; a section stands for all its keys.

    Raises:
        ValueError: One has another value than its default.
    """
    for key, value, default in _changed(config, keys):
        raise ValueError(
            f"{key} is not read here, so it must not be set: got {show(value)}; leave "
            f"it out ({show(default)})"
        )


def _changed(config: Config, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Those keys that have another value than their default, with both."""
    schema = SchemaNode.of(type(config))
    for key in keys:
        path = tuple(key.split("."))
        value, default = _at(config, path), schema.default(path)
        if value != default:
            yield key, value, default


def _at(config: Config, path: tuple[str, ...]) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value.to_dict() if isinstance(value, Config) else value
