"""Choice of the environment and tasks of a command of `rl envs`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.config import (
    Config,
    Override,
    apply_overrides,
    load_config,
    parse_overrides,
)
from rl_distributed.errors import ConfigError
from rl_distributed.suggestion import did_you_mean_file
from rl_envs.errors import TaskError
from rl_envs.python_file import PythonFileError, load_from_file
from rl_envs.registry import (
    EnvironmentSpec,
    create_task_source,
    env_registry,
    task_registry,
)
from rl_envs.tasks import TaskSource
from rl_envs.testing.responses import prompt_messages

__all__ = ["EnvironmentChoice", "GivenTasks", "choose_environment"]

_TASKS = "tasks"
_DEFAULT_FUNCTION = "reward"


@dataclass(frozen=True)
class GivenTasks:
    """Tasks, as a policy and its environment get them in training."""

    rows: list[dict[str, Any]]
    """Columns of each task, for the environment."""
    prompts: Sequence[Sequence[Mapping[str, Any]]]
    """Initial conversation of each task."""


@dataclass(frozen=True)
class EnvironmentChoice:
    """An environment with its settings and the source of its tasks."""

    name: str
    """Name as given."""
    spec: EnvironmentSpec
    settings: Mapping[str, Any]
    """Settings of the environment."""
    make_source: Callable[[int], TaskSource] | None
    """Function that creates the task source from a seed; None: there is none."""
    data: str | None
    """File with rows."""
    prompt_column: str | None = None
    """Column of the prompts; None: the first one with a usual name."""

    def held_out(
        self, num_tasks: int | None, seed: int, *, unique: bool = False
    ) -> GivenTasks:
        """Return rows of the file, or tasks that are never trained on.

        Args:
            num_tasks: Maximum number; None: all rows of a file.
            seed: Seed of the task source.
            unique: Exclude duplicate prompts.

        Raises:
            ConfigError: There is neither a file nor a task source.
            DataError: The file cannot be read, or has no prompts.
            TaskError: The task source cannot generate them.
        """
        if self.data is not None:
            return _tasks_of(self.data, num_tasks, self.prompt_column)
        if self.make_source is None:
            raise ConfigError(
                f"{self.name} has no tasks: there is no task source of that name; "
                "give rows with --data FILE, or a task source with --world"
            )
        source = self.make_source(seed)
        rows = source.held_out(1 if num_tasks is None else num_tasks, unique=unique)
        prompts = [prompt_messages(row, index) for index, row in enumerate(rows)]
        return GivenTasks(rows, prompts)


def choose_environment(
    name: str,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    world: str | None = None,
    data: str | None = None,
    prompt_column: str | None = None,
) -> EnvironmentChoice:
    """Find an environment and check its settings.

    Args:
        name: A registered name, or `FILE.py:NAME`: an environment class or reward
            function in a Python file; without `:NAME`, the function `reward`.
        config: YAML file with settings; those of the task source are under `tasks`.
        overrides: `key=value`; keys of the task source start with `tasks.`.
        world: Task source: a registered name, or `FILE.py:CLASS`; None: the
            environment's name.
        data: File with rows.
        prompt_column: Column of the file with the prompts.

    Raises:
        UserError: There is no such environment, or a setting is invalid.
    """
    if data is not None and world is not None:
        raise ConfigError("--data and --world are mutually exclusive: give one")
    if prompt_column is not None and data is None:
        raise ConfigError("--prompt names a column of --data FILE: give the file")
    base = {} if config is None else dict(load_config(config))
    of_tasks = base.pop(_TASKS, None) or {}
    if not isinstance(of_tasks, Mapping):
        raise ConfigError(f"{config}: tasks must be a mapping: got {of_tasks!r:.60}")
    found: Any = _from_file(name, "environment") if _is_file(name) else name
    factory = env_registry.get(found) if isinstance(found, str) else found
    own, tasks = _split(parse_overrides(overrides))
    schema: type[Config] | None = getattr(factory, "config_class", None)
    # Without a class nothing says which keys exist, so overrides may add any.
    settings = dict(apply_overrides(base, own if schema else _forced(own), schema))
    task_settings = dict(apply_overrides(of_tasks, _forced(tasks)))
    source = _source_of(name, world, task_settings)
    if source is None and task_settings:
        raise ConfigError(
            f"tasks.{next(iter(task_settings))} has no effect: {name} has no task "
            "source; name one with --world"
        )
    spec = EnvironmentSpec.of(found, settings)
    return EnvironmentChoice(name, spec, settings, source, data, prompt_column)


def _is_file(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def _from_file(name: str, kind: str) -> Any:
    file, _, attribute = name.partition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        near = did_you_mean_file(file) or "; correct the path"
        raise ConfigError(f"there is no file {file}{near}")
    try:
        return load_from_file(
            path,
            attribute or _DEFAULT_FUNCTION,
            kind=kind,
            thing="class or function",
        )
    except PythonFileError as error:
        remedy = f"; name one as {file}:NAME" if error.is_name else ""
        raise ConfigError(f"{error}{remedy}") from error.__cause__


def _split(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Return the overrides of the environment, and those of the task source."""
    own = [each for each in overrides if each.path[0] != _TASKS]
    tasks = [
        dataclasses.replace(each, path=each.path[1:])
        for each in overrides
        if each.path[0] == _TASKS and len(each.path) > 1
    ]
    if len(own) + len(tasks) < len(overrides):
        raise ConfigError("tasks is a section: write tasks.KEY=VALUE")
    return own, tasks


def _forced(overrides: Sequence[Override]) -> list[Override]:
    """Let overrides add keys, since there is no class that defines them."""
    return [
        dataclasses.replace(each, action="force") if each.action == "set" else each
        for each in overrides
    ]


def _source_of(
    name: str, world: str | None, settings: Mapping[str, Any]
) -> Callable[[int], TaskSource] | None:
    # Two values for one seed: it would be unclear which of them counts.
    if "seed" in settings:
        raise ConfigError("tasks.seed is set by --seed: got both; drop tasks.seed")
    chosen = world or name
    if _is_file(chosen):
        if world is None:
            return None
        factory = _from_file(world, "task")
        return lambda seed: _made(world, factory, {**settings, "seed": seed})
    if chosen not in task_registry:
        if world is None:
            return None
        # A world that was named must exist; one derived from the environment's name
        # need not.
        task_registry.check(world)
    return lambda seed: _noted(
        lambda: create_task_source(chosen, {**settings, "seed": seed})
    )


def _made(world: str, factory: Any, settings: Mapping[str, Any]) -> TaskSource:
    try:
        source = _noted(lambda: factory(**settings))
    except TypeError as error:
        raise ConfigError(
            f"the task source {world} rejects {sorted(settings)}: {error}"
        ) from error
    if not isinstance(source, TaskSource):
        raise ConfigError(
            f"the task source {world} must be a TaskSource: got {type(source).__name__}"
        )
    return source


def _noted(make: Callable[[], TaskSource]) -> TaskSource:
    """Create a task source, adding a note on its settings to errors."""
    try:
        return make()
    except (TaskError, ConfigError) as error:
        error.add_note("Settings of tasks are given as tasks.KEY=VALUE.")
        raise


def _tasks_of(data: str, num_rows: int | None, prompt_column: str | None) -> GivenTasks:
    """Read rows as training does, which knows prompts by several names."""
    # Only needed to read rows; importing rl_algorithms takes a while.
    from rl_algorithms.data.config import DataConfig  # noqa: PLC0415
    from rl_algorithms.data.loading import load_sources  # noqa: PLC0415
    from rl_algorithms.data.prompt_rows import read_prompts  # noqa: PLC0415
    from rl_algorithms.errors import ColumnError  # noqa: PLC0415

    (source,) = load_sources(data, None)
    rows = list(itertools.islice(source.rows, num_rows))
    if not rows:
        raise ConfigError(f"--data {data}: there are no rows")
    try:
        read = read_prompts(rows, DataConfig(input_key=prompt_column), source.name)
    except ColumnError as error:
        error.add_note("Here the column of the prompts is given by --prompt COLUMN.")
        raise
    return GivenTasks([row.columns for row in read], [row.messages for row in read])
