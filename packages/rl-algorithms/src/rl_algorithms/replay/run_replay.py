"""`replay_run`: repeats the training of a recorded run and compares it bit by bit.

```
recording -> [checkpoint] -> models -> update? -> training calls -> compare values
                                    -> weights and training state of a kept checkpoint
```
Nothing is sampled and nothing scored: only the models that were trained are started.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algorithms.registry import get_algorithm
from rl_algorithms.replay.checkpoint_comparison import (
    compare_with_checkpoint,
)
from rl_algorithms.replay.decisions import changed_decision
from rl_algorithms.replay.result import ReplayDifference, ReplayResult
from rl_algorithms.trainers.live_config import OPTIMIZERS, optimizer_settings
from rl_algorithms.trainers.recording.recorder import output_values
from rl_algorithms.trainers.recording.recording import (
    RecordedCall,
    RecordedStart,
    RecordedStep,
    Recording,
)
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.settings.config_updates import UPDATES, ConfigUpdate
from rl_algorithms.trainers.settings.keywords import changed_config
from rl_algorithms.trainers.setup.component_checks import with_row_lengths
from rl_algorithms.trainers.setup.component_start import start_components
from rl_algorithms.trainers.setup.components import Components, Needs, present
from rl_algorithms.trainers.setup.kept_workers import KeptWorkers
from rl_distributed.checkpoint import CheckpointManager
from rl_distributed.errors import ConfigError, RegistryError
from rl_distributed.metrics.sinks.jsonl import read_records
from rl_distributed.private_files import create_private_folder
from rl_distributed.runs.folder import CHECKPOINTS
from rl_models.interfaces import PolicyInterface

if TYPE_CHECKING:
    from rl_algorithms.trainers.base import BaseTrainer
    from rl_algorithms.trainers.settings.config import TrainerConfig

__all__ = ["replay_run"]

# Sections that training depends on; a section of a loss has `loss` in its name.
_SECTIONS = ("policy", "critic", "cluster", "seed")


def replay_run(
    run_dir: str | os.PathLike[str],
    *,
    trainer_class: type[BaseTrainer[Any]] | None = None,
    given: Components | None = None,
    steps: int | None = None,
    from_checkpoint: int | None = None,
    to: str | os.PathLike[str] | None = None,
    pool: KeptWorkers | None = None,
    on_step: Callable[[int, int], None] = lambda step, last: None,
) -> ReplayResult:
    """Repeat the training of a recorded run, up to the first difference.

    ```python
    result = rl_algorithms.replay_run("runs/grpo-001")
    assert result.is_same, result.difference
    ```

    Args:
        run_dir: Folder of the run, or of a stage of a run.
        trainer_class: Class of the trainer, if it is registered under no name.
        given: Models that were passed to the trainer, in the state that they had then.
        steps: Number of steps to repeat; None for all.
        from_checkpoint: Step whose checkpoint to begin with; None for the start of the
            run.
        to: Folder for the weights and the training state that the replay ends with;
            it must be empty or not exist.
        pool: Pool that keeps the worker processes for the next trainer.
        on_step: Called after each step with its number and that of the last one.

    Raises:
        ConfigError: The run has no recording, a part of it is missing or damaged, or
            it cannot be replayed as asked.
    """
    # Absolute, because the workers may have another working directory.
    folder = Path(run_dir).absolute()
    recording = Recording.read(folder)
    first = 1 if from_checkpoint is None else from_checkpoint + 1
    last = recording.last_step if steps is None else first + steps - 1
    if last < first:
        raise ConfigError(
            f"{recording.folder} has no step from {first} on: the last recorded one is "
            f"{recording.last_step}"
        )
    target = None if to is None else _checked_target(Path(to).absolute())
    start = recording.start_of(first)
    found = recording.between(first, last)
    _check_starts(recording, start, last)
    if start.given and given is None:
        raise ConfigError(
            f"{' and '.join(start.given)} of this run were given to its trainer as "
            "objects: replay it in Python with replay_run(run_dir, given=Components("
            "policy=...)), with the models in the state that they had then"
        )
    changed = changed_decision(folder / "asynchronous")
    if changed is not None:
        return ReplayResult(first, last, changed, warnings=_warnings(start))
    with ExitStack() as closing:
        replay = _Replay(
            folder,
            recording,
            trainer_class or _class_of(start),
            (first, last),
        )
        replay.begin(start, given or Components(), closing, pool)
        return replay.run(found, target, on_step)


class _Replay:
    """The models of a run, trained again.

    Args:
        folder: Folder of the run.
        recording: Its recording.
        cls: Class of the trainer.
        span: The first and the last step.
    """

    def __init__(
        self,
        folder: Path,
        recording: Recording,
        cls: type[BaseTrainer[Any]],
        span: tuple[int, int],
    ) -> None:
        self._folder, self._recording, self._cls = folder, recording, cls
        self._first, self._last = span
        self._names = ["policy", *sorted(recording.models - {"policy"})]
        self._updates = [
            ConfigUpdate.from_dict(record)
            for record in _records(folder / UPDATES)
            if record["step"] < self._last
        ]

    def begin(
        self,
        start: RecordedStart,
        given: Components,
        closing: ExitStack,
        pool: KeptWorkers | None,
    ) -> None:
        """Start the models, as they were before the first step."""
        self._start = start
        source = f"the recording of {self._folder}"
        config: TrainerConfig = self._cls.config_type().from_dict(
            dict(start.config), source=source
        )
        manager = CheckpointManager(config.checkpointing, self._folder / CHECKPOINTS)
        self._checkpoints = manager.list_checkpoints()
        checkpoint = None
        if self._first > 1:
            checkpoint = self._checkpoint_of(self._first - 1)
            info = manager.load_training_info(checkpoint) or {}
            for update in map(ConfigUpdate.from_dict, info["state"]["updates"]):
                config, _ = changed_config(config, update.changes, by=_by(update))
                self._updates = [u for u in self._updates if u.number != update.number]
        trainer = self._cls.from_config(config, given)
        trainer._note_own_names()
        trainer.config = with_row_lengths(trainer.config, given)
        self._config = trainer.config
        with SignalGuard() as signals:
            self._parts = start_components(
                trainer.config,
                given,
                Needs(critic="critic" in self._names),
                closing,
                checkpoint=checkpoint,
                environment=None,
                signals=signals,
                pool=pool,
            )
        trainer.components = self._parts
        self._losses = trainer._losses()

    def _checkpoint_of(self, step: int) -> Path:
        if step in self._checkpoints:
            return self._checkpoints[step]
        kept = ", ".join(map(str, self._checkpoints)) or "none"
        raise ConfigError(
            f"{self._folder} keeps no checkpoint of step {step}: it has {kept}; begin "
            "with one of these, or replay from the start of the run"
        )

    def run(
        self,
        steps: Iterator[RecordedStep],
        target: Path | None,
        on_step: Callable[[int, int], None],
    ) -> ReplayResult:
        """Train again, and compare, up to the first difference."""
        reached, difference, num_tensors = self._first - 1, None, 0
        within = [n for n in self._checkpoints if self._first <= n <= self._last]
        compared = max(within, default=None)
        for step in steps:
            self._update(step.step - 1)
            difference = next(self._differences(step), None)
            if difference is not None:
                break
            reached = step.step
            on_step(reached, self._last)
            if reached == compared:
                with self._saved(target if reached == self._last else None) as saved:
                    num_tensors, difference = compare_with_checkpoint(
                        reached, self._checkpoints[reached], saved, self._names
                    )
                if difference is not None:
                    break
        if target is not None and not target.exists():
            self._save(target)
        return ReplayResult(
            self._first,
            reached,
            difference,
            checkpoint=self._checkpoints[compared]
            if num_tensors and compared
            else None,
            num_tensors=num_tensors,
            saved=target,
            warnings=_warnings(self._start),
        )

    def _update(self, completed: int) -> None:
        """Apply the changes of the configuration that were made by then."""
        while self._updates and self._updates[0].step <= completed:
            update = self._updates.pop(0)
            old = self._config
            new, _ = changed_config(old, update.changes, by=_by(update))
            for name in OPTIMIZERS:
                settings, _ = optimizer_settings(old, new, name)
                part: Any = getattr(self._parts, name)
                if settings and part is not None:
                    part.change_optimizer(**settings)
            self._config = new

    def _differences(self, step: RecordedStep) -> Iterator[ReplayDifference]:
        """Repeat the calls of a step, and yield where they differ."""
        for call in step.trained:
            rows = self._recording.rows(call)
            for name in self._recording.changed_columns(call, rows):
                what = f"column {name} of the rows of the {call.model} ({call.file})"
                recorded = call.columns.get(name, {}).get("digest")
                yield ReplayDifference(step.step, what, recorded, "other bytes")
            loss = self._losses.get(call.model)
            if loss is None:
                raise ConfigError(
                    f"{self._cls.__name__} has no loss of the {call.model}, which the "
                    f"run trained in step {step.step}: have its _losses return it"
                )
            output = self._model(call.model).train(
                rows, loss, global_batch_size=call.global_batch_size
            )
            yield from _other_values(step.step, call, output_values(output))

    def _model(self, name: str) -> PolicyInterface:
        model: PolicyInterface = present(getattr(self._parts, name), name)
        return model

    # Weights ----------------------------------------------------------------------

    @contextmanager
    def _saved(self, target: Path | None) -> Iterator[Path]:
        """Save the models, for as long as they are compared or for good."""
        # Beside the checkpoints, because all ranks must see it.
        folder = target or self._folder / f".replay-{os.getpid()}"
        try:
            self._save(folder)
            yield folder
        finally:
            if target is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _save(self, folder: Path) -> None:
        try:
            create_private_folder(folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written: {error.strerror or error}; the weights "
                "of the replay are compared as files"
            ) from error
        for name in self._names:
            weights = folder / name / "weights"
            optimizer = folder / name / "optimizer"
            self._model(name).save_checkpoint(
                weights, optimizer, tokenizer_path=weights
            )


def _other_values(
    step: int, call: RecordedCall, values: Mapping[str, list[float]]
) -> Iterator[ReplayDifference]:
    """Yield the values of a call that are not those that were recorded."""
    count = max((len(v) for v in call.values.values()), default=0)
    for number in range(count):
        for name, recorded in call.values.items():
            here = values.get(name, [])
            pair = [v[number] if number < len(v) else None for v in (recorded, here)]
            # As bits: a NaN equals itself, and 0.0 differs from -0.0.
            a, b = (None if v is None else v.hex() for v in pair)
            if a != b:
                of = f"optimizer step {number + 1} of {count}"
                what = f"{name} of the {call.model}, {of}"
                yield ReplayDifference(step, what, pair[0], pair[1])


def _class_of(start: RecordedStart) -> type[BaseTrainer[Any]]:
    why = "is registered under no name"
    try:
        cls = get_algorithm(start.algorithm)
    except RegistryError:
        pass
    else:
        if f"{cls.__module__}.{cls.__qualname__}" == start.trainer:
            return cls
        why = f"is not the trainer of the algorithm {start.algorithm!r}"
    raise ConfigError(
        f"the run was trained by {start.trainer}, which {why}: replay it in Python "
        "with rl_algorithms.replay_run(run_dir, trainer_class=...)"
    )


def _check_starts(recording: Recording, start: RecordedStart, last: int) -> None:
    """Refuse steps of processes whose settings of training differ.

    Raises:
        ConfigError: See the message.
    """
    for later in recording.starts:
        if not start.step < later.step < last:
            continue
        a, b = (dict(_leaves(_training_sections(s.config))) for s in (start, later))
        keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        if keys:
            raise ConfigError(
                f"the run was resumed after step {later.step} with another "
                f"{', '.join(keys[:5])}: replay up to there with --steps, and from "
                f"there with --from-checkpoint {later.step}"
            )


def _training_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in config.items() if k in _SECTIONS or "loss" in k}
    policy = {k: v for k, v in kept["policy"].items() if k != "generation"}
    return {**kept, "policy": policy}


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping) or not tree:
        yield above, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{above}.{key}" if above else str(key))


def _checked_target(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: name a new folder")
    if folder.exists():
        folder.rmdir()
    return folder


def _warnings(start: RecordedStart) -> tuple[str, ...]:
    found = start.other_versions()
    secrets = [key for key in start.hidden if key.startswith(_SECTIONS)]
    return (
        *(
            f"the run had {name} {then}, and here is {now}: results may differ"
            for name, (then, now) in found.items()
        ),
        *(f"{key} is a secret, which was not recorded" for key in secrets),
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return read_records(path) if path.is_file() else iter(())


def _by(update: ConfigUpdate) -> str:
    return f"update {update.number} of the run"
