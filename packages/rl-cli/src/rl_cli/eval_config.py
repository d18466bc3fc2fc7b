"""Configuration of an evaluation from the arguments of `rl eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_algorithms.evaluation import EvalConfig, find_target
from rl_algorithms.trainers.settings.keywords import build_config
from rl_distributed import ConfigError
from rl_distributed.config import apply_overrides, parse_overrides
from rl_models.checkpoint.model_folder import check_model_folder

__all__ = ["eval_config"]


def eval_config(
    model: str,
    sources: Sequence[str],
    env: str | None,
    options: Mapping[str, Any],
    overrides: Sequence[str],
) -> EvalConfig:
    """Combine the settings of the run, the options and the overrides.

    Args:
        model: Result of `trained_model.model_of_run`.
        sources: `PATH` or `NAME=PATH`, in place of the run's data.
        env: Name of an environment, in place of the run's.
        options: Keys of `EvalConfig`, with or without their path.
        overrides: `key=value`, `+key=value` or `~key`.

    Raises:
        ConfigError: A key or a value is wrong.
        ModelLoadError: There is no such model folder.
    """
    target = find_target(model)
    check_model_folder(target.model)
    base = target.settings()
    if sources:
        base["datasets"] = _datasets(sources)
    if env is not None:
        base["env"] = {"name": env}
    tree = dict(apply_overrides(base, parse_overrides(overrides), EvalConfig))
    _check_ks(options, tree)
    return build_config(EvalConfig, options, base=tree, source="the command line")


def _check_ks(options: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Check `-k` here, so that errors name options of the command line."""
    count = options.get("num_generations") or tree.get("num_generations") or 1
    most = max(options.get("ks") or [0])
    # A count of a wrong type is reported by the configuration class.
    if isinstance(count, int) and most > count:
        raise ConfigError(
            f"-k {most} needs at least {most} answers per prompt: got {count}; give -n "
            f"{most}, or a smaller -k."
        )


def _datasets(sources: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for source in sources:
        name, separator, path = source.partition("=")
        if not separator:
            name, path = Path(source).stem, source
        if not name or not path:
            raise ConfigError(f"--data {source!r} must be PATH or NAME=PATH")
        if name in found:
            raise ConfigError(
                f"--data: two datasets are called {name!r}: give them names, as in "
                f"--data other={path}"
            )
        found[name] = {"path": path}
    return found
