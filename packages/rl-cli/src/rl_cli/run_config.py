"""Configuration of a run: a recipe with stages or one algorithm, with overrides.

```
recipe YAML (package data or a file) ─┐
ALGORITHM [--config FILE] ────────────┼─> overrides ─> Run: stages, each with its
key=value ... ────────────────────────┘                algorithm's own config
```
`common` provides defaults for the configuration of every stage. Everything is validated
here, before any model is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from rl_algorithms.presets import find_preset, preset_names
from rl_algorithms.registry import (
    algorithm_names,
    algorithm_settings,
    get_config_class,
    suggest_algorithm,
)
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.setup.preflight import check_start
from rl_cli.missing_keys import fill_required, how_to_set
from rl_cli.recipe_files import AboutConfig, recipe_names, recipe_path
from rl_cli.run_place import given_output_dir
from rl_distributed import Config, ConfigError, load_config
from rl_distributed.config import (
    ConfigDocument,
    Override,
    apply_overrides,
    merge_configs,
    parse_overrides,
)
from rl_distributed.errors import UserError
from rl_distributed.suggestion import did_you_mean
from rl_models.build.config import ModelBuildConfig
from rl_models.row_length import context_of_folder, fitting

__all__ = [
    "RecipeConfig",
    "ReportConfig",
    "Run",
    "Stage",
    "check_run",
    "load_run",
    "recipe_names",
    "run_from_dict",
]


class ReportConfig(Config):
    """Report at the end of a recipe."""

    num_samples: int = Field(4, ge=0)
    """Number of held-out prompts shown with answers from before and after training."""
    plot: bool = True
    """Plot of the learning curve, in `curve.png` of the run folder."""


class RecipeConfig(Config):
    """A recipe: a model and the stages that train it in sequence."""

    title: str
    """One-line description of the recipe."""
    about: AboutConfig = Field(default_factory=AboutConfig)
    """Requirements, listed by `rl recipes` and used by `rl plan`."""
    seed: int = Field(0, ge=0)
    """Seed of the model's initial weights and of every stage."""
    output_dir: str | None = None
    """Run folder. null: a new folder `runs/<recipe>-NNN` in the current one."""
    model: ModelBuildConfig | None = None
    """Model with random weights, built for the first stage. null: the first stage names
    its model in `policy.model_name`."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Default keys of every stage's configuration."""
    stages: dict[str, dict[str, Any]]
    """Configuration of each stage by name, in order, with `algorithm` beside its keys.
    Each stage starts from the weights kept by the one before it."""
    report: ReportConfig = Field(default_factory=ReportConfig)
    """Report at the end."""


@dataclass(frozen=True)
class Stage:
    """One training within a run."""

    name: str
    algorithm: str
    config: TrainerConfig


@dataclass(frozen=True)
class Run:
    """A validated run."""

    name: str
    """Name of the recipe or of the algorithm."""
    title: str
    seed: int
    output_dir: str | None
    model: ModelBuildConfig | None
    stages: tuple[Stage, ...]
    report: ReportConfig
    about: AboutConfig
    """Requirements of the recipe."""
    source: dict[str, Any]
    """Input from which `run_from_dict` recreates the run."""


def load_run(
    name: str,
    config: Path | None,
    overrides: Sequence[str],
    *,
    complete: bool = True,
) -> Run:
    """Find a recipe or an algorithm, apply overrides and validate everything.

    Args:
        name: Name of a recipe, algorithm or preset, or path of a recipe file.
        config: A YAML file for an algorithm (not for a recipe).
        overrides: `key=value`, `+key=value` or `~key`.
        complete: Reject an algorithm with missing required keys; False: set them to
            `UNSET`.

    Raises:
        ConfigError: The name, the file, a key or a value is wrong.
    """
    path = recipe_path(name)
    if path is not None:
        if config is not None:
            raise ConfigError(
                f"--config is for algorithms, and {name!r} is a recipe: copy the "
                f"recipe (`rl config show {name} --source > my.yaml`), change it, and "
                f"run `rl train my.yaml`."
            )
        found = load_config(path)
        if found.get("stages") is None:
            raise ConfigError(
                f"{path} is not a recipe, as it has no stages: add them (`rl config "
                "show quickstart --source` shows how), or give the settings of one "
                f"algorithm with its name: rl train ALGORITHM --config {path}"
            )
        recipe = _override_recipe(found, overrides)
        return _from_recipe(Path(name).stem, recipe, source=str(path.name))
    known = algorithm_names()
    if name not in known and find_preset(name) is None:
        raise ConfigError(
            f"{name!r} is neither a recipe nor an algorithm"
            f"{suggest_algorithm(name, recipe_names()) or '.'} Recipes: "
            f"{', '.join(recipe_names())}. Algorithms: {', '.join(known)}. Presets: "
            f"{', '.join(preset_names())}. Give your own recipe by its path, ending in "
            f".yaml."
        )
    data = load_config(config) if config is not None else {}
    output_dir = given_output_dir(data, overrides)
    data = algorithm_settings(name, data)
    data = apply_overrides(data, parse_overrides(overrides), get_config_class(name))
    source = str(config or "the command line")
    return _from_algorithm(name, data, output_dir, source=source, complete=complete)


def check_run(run: Run) -> None:
    """Check every stage before the first one starts.

    Raises:
        UserError: A stage cannot start: no data, no reward, a size, no such backend ...
    """
    for stage in run.stages:
        try:
            check_start(stage.config)
        except UserError as error:
            if len(run.stages) > 1:
                error.add_note(f"in stage {stage.name}")
            raise


def run_from_dict(source: Mapping[str, Any], overrides: Sequence[str] = ()) -> Run:
    """Recreate a run from `Run.source`, as stored in a run folder.

    Args:
        source: The stored settings.
        overrides: Values that were not stored, such as secrets.
    """
    name, data, place = source["name"], dict(source["config"]), "the run folder"
    if source["kind"] == "recipe":
        return _from_recipe(name, _override_recipe(data, overrides), source=place)
    if overrides:
        schema = get_config_class(name)
        data = dict(apply_overrides(data, parse_overrides(overrides), schema))
    return _from_algorithm(name, data, source.get("output_dir"), source=place)


def _override_recipe(
    recipe: dict[str, Any], overrides: Sequence[str]
) -> ConfigDocument:
    """Apply overrides, checking those of a stage against its algorithm's config."""
    own: list[Override] = []
    of_stage: dict[str, list[Override]] = {}
    if not isinstance(recipe["stages"], Mapping):
        RecipeConfig.from_dict(recipe)  # it has no stages to look into, and raises
    for override in parse_overrides(overrides):
        first, *below = override.path
        if first == "stages" and len(below) > 1 and below[1] != "algorithm":
            _check_stage(below[0], override.text, recipe["stages"])
            # Only the path changes; messages quote the override as written.
            inside = replace(override, path=override.path[2:])
            of_stage.setdefault(below[0], []).append(inside)
            continue
        if first == "common" and below and override.action == "set":
            # Which keys are valid is decided by the stages, when they are merged.
            override = replace(override, action="force")
        own.append(override)
    _suggest_stage(own, recipe)
    data = apply_overrides(recipe, own, RecipeConfig)
    for name, changes in of_stage.items():
        if data["stages"].get(name) is None:
            if recipe["stages"][name] is None:
                RecipeConfig.from_dict(recipe)  # an empty stage, and not a removed one
            raise ConfigError(f"stages.{name} is removed by one override and set by "
                              f"another; drop one of the two.")  # fmt: skip
        settings = data.section(("stages", name))
        # The key `algorithm` is the recipe's; the algorithm's own class would refuse
        # it.
        named = {key: settings.pop(key) for key in ("algorithm",) if key in settings}
        schema = get_config_class(named.get("algorithm", name))
        changed = apply_overrides(settings, changes, schema)
        changed.update(named)
        data.put_section(("stages", name), changed)
    return data


def _check_stage(name: str, override: str, stages: Mapping[str, Any]) -> None:
    if name not in stages:
        raise ConfigError(
            f"override {override!r}: there is no stage {name!r}"
            f"{did_you_mean(name, stages) or '.'} The recipe has {', '.join(stages)}."
        )


def _suggest_stage(overrides: Sequence[Override], recipe: Mapping[str, Any]) -> None:
    """Raise a helpful error for `grpo.x=1` in place of `stages.grpo.grpo.x=1`."""
    for override in overrides:
        section, key, text = override.path[0], ".".join(override.path), override.text
        if section in RecipeConfig.model_fields:
            continue
        for name, stage in recipe["stages"].items():
            if not isinstance(stage, Mapping):
                continue  # told when the recipe is checked
            schema = get_config_class(stage.get("algorithm", name))
            if section in schema.model_fields:
                raise ConfigError(
                    f"Unknown key {key!r} in override {text!r}: this recipe has "
                    f"stages, so write stages.{name}.{key}=... (for one stage) or "
                    f"common.{key}=... (for all)."
                )


def _from_recipe(name: str, data: Mapping[str, Any], source: str) -> Run:
    recipe = RecipeConfig.from_dict(data, source=source)
    if not recipe.stages:
        raise ConfigError(f"{source}: stages must hold at least one stage: got none.")
    stages: list[Stage] = []
    context = recipe.model.max_position_embeddings if recipe.model else None
    document = ConfigDocument(data)
    common = document.section(("common",))
    for index, key in enumerate(recipe.stages):
        stage = document.section(("stages", key))
        merged: dict[str, Any] = merge_configs(common, stage)
        algorithm = merged.pop("algorithm", key)
        if not isinstance(algorithm, str):
            raise ConfigError(f"{source}: stages.{key}.algorithm must be a name: got "
                              f"{algorithm!r}.")  # fmt: skip
        merged = algorithm_settings(algorithm, merged)
        merged.setdefault("seed", recipe.seed)
        if index > 0 or recipe.model is not None:
            _set_model(merged, key, source, context)
        schema = get_config_class(algorithm)
        config = schema.from_dict(merged, source=f"{source}: stages.{key}")
        stages.append(Stage(key, algorithm, config))
        if index == 0 and recipe.model is None:
            context = context_of_folder(config.policy.to_dict())
    saved = {"kind": "recipe", "name": name, "config": recipe.to_dict()}
    return Run(name, recipe.title, recipe.seed, recipe.output_dir, recipe.model,
               tuple(stages), recipe.report, recipe.about, saved)  # fmt: skip


def _set_model(
    merged: dict[str, Any], stage: str, source: str, context: int | None
) -> None:
    """Set the model of a stage to the one that the run hands on.

    Args:
        merged: Configuration of the stage.
        stage: Name of the stage.
        source: Origin of the configuration, for messages.
        context: Maximum row length of the model, if known.
    """
    policy = merged.setdefault("policy", {})
    if not isinstance(policy, dict):
        return  # told when the stage is checked
    if policy.get("model_name"):
        raise ConfigError(
            f"{source}: stages.{stage}.policy.model_name must not be set: the stage "
            f"trains the model of the run; remove it."
        )
    # A placeholder for validation: the folder exists only once the earlier stage has
    # ended.
    policy["model_name"] = "(handed on)"
    if context is not None and policy.get("max_total_sequence_length") is None:
        policy["max_total_sequence_length"] = fitting(context, policy)


def _from_algorithm(
    name: str,
    data: Mapping[str, Any],
    output_dir: str | None,
    source: str,
    *,
    complete: bool = True,
) -> Run:
    schema = get_config_class(name)
    filled, missing = fill_required(schema, data)
    config = schema.from_dict(filled, source=source)
    if missing and complete:
        raise ConfigError(
            f"{name} needs {' and '.join(missing)}: add {how_to_set(missing)}"
        )
    # The user's output_dir, not a generated one: a rerun must get a new folder.
    saved = {"kind": "algorithm", "name": name, "output_dir": output_dir,
             "config": config.to_dict()}  # fmt: skip
    return Run(name, f"{name} on {config.policy.model_name}", config.seed,
               output_dir, None, (Stage(name, name, config),), ReportConfig(),
               AboutConfig(), saved)  # fmt: skip
