"""Keys that are set in a configuration but not read by the algorithm.

| key | reaction |
|---|---|
| of another algorithm, or of an absent component | error |
| of a feature that another key disables (`enabled: false`, a weight of 0) | logged |

The second kind is no error, so that a single override can disable what a recipe or a
preset configures in detail.
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
"""Data keys read only by algorithms that learn from pairs."""
OF_CONVERSATIONS = ("data.roles_to_train_on", "data.only_unmask_final")
"""Data keys read only by algorithms that imitate."""

OF_KL = (
    "loss_fn.reference_policy_kl_type",
    "loss_fn.reference_policy_kl_gradient",
    "loss_fn.kl_input_clamp_value",
    "loss_fn.kl_output_clamp_value",
    "loss_fn.use_on_policy_kl_approximation",
    "loss_fn.use_kl_in_reward",
)
"""Keys about a KL divergence, which may have no weight."""


@dataclass(frozen=True)
class Idle:
    """Keys of a disabled feature, and the setting that disables it."""

    cause: str
    """The setting, such as `checkpointing.enabled=false`."""
    keys: tuple[str, ...]
    """Dotted paths of the keys."""


def of_validation(config: Config) -> Idle:
    """Return the keys of validations, for a run without held-out data."""
    keys = []
    for name in type(config).model_fields:
        section = getattr(config, name)
        if isinstance(section, RunSettings):
            found = (k for k in type(section).model_fields if _is_of_validation(k))
            # val_period=0 asks for no validation, so it is not without effect.
            skipped = () if section.val_period else ("val_period",)
            keys += [f"{name}.{key}" for key in found if key not in skipped]
    return Idle("there are no held-out data", tuple(keys))


def _is_of_validation(key: str) -> bool:
    return key.startswith(("val_", "max_val_")) or key == "accuracy_threshold"


def idle_lines(config: Config, idle: Iterable[Idle]) -> Iterator[str]:
    """Yield a message for each disabled feature with keys that are set.

    Args:
        config: The whole configuration.
        idle: The disabled features.
    """
    for part in idle:
        named = [
            f"{key}={show(value)}" for key, value, _ in _changed(config, part.keys)
        ]
        if named:
            yield f"without effect, because {part.cause}: {', '.join(named)}"


def refuse_unread(config: Config, keys: Iterable[str]) -> None:
    """Check that unread keys are not set.

    Args:
        config: The whole configuration.
        keys: Dotted paths; a section stands for all of its keys.

    Raises:
        ValueError: A key has another value than its default.
    """
    for key, value, default in _changed(config, keys):
        raise ValueError(
            f"{key} is not read here, so it must not be set: got {show(value)}; leave "
            f"it out ({show(default)})"
        )


def _changed(config: Config, keys: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ from their default, with value and default."""
    schema = SchemaNode.of(type(config))
    for key in keys:
        path = tuple(key.split("."))
        value, default = _at(config, path), schema.default(path)
        # A key that is set to its default changes nothing, so it is no mistake.
        if value != default:
            yield key, value, default


def _at(config: Config, path: tuple[str, ...]) -> Any:
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value.to_dict() if isinstance(value, Config) else value
