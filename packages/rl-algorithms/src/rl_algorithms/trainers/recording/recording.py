"""`Recording`: what a run has recorded of its training, as `TrainingRecorder` wrote it.

```python
recording = Recording.read(run_dir)
for step in recording.between(1, recording.last_step):
    for call in step.calls:
        rows = recording.rows(call)
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open

from rl_algorithms.trainers.recording.columns import (
    describe,
    joined_columns,
    split_columns,
)
from rl_algorithms.trainers.recording.folder import RECORDING, STEPS, has_recording
from rl_algorithms.trainers.run.record import installed_versions
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.setup.components import Components
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.config.hidden_keys import hide_secrets
from rl_distributed.errors import ConfigError
from rl_distributed.metrics.sinks.jsonl import read_records

__all__ = [
    "ANSWERS",
    "RecordedCall",
    "RecordedStart",
    "RecordedStep",
    "Recording",
    "start_facts",
]

ANSWERS = "answers"
"""Model of the calls that hold answers, which nothing is trained on."""
# Runs are expected to repeat within one version only.
_COMPARED_VERSIONS = (
    "rl-distributed",
    "rl-models",
    "rl-algorithms",
    "torch",
    "transformers",
    "python",
)


class DescribedTrainer(Protocol):
    """A trainer as far as a recording describes it."""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""

    @property
    def config(self) -> TrainerConfig:
        """Configuration of the run."""

    @property
    def given(self) -> Components:
        """Components that were passed in."""


def start_facts(trainer: DescribedTrainer) -> dict[str, Any]:
    """Return what a replay needs to know of a trainer, without secrets."""
    config, hidden = hide_secrets(trainer.config.to_dict())
    cls = type(trainer)
    given = ("policy", "critic")
    return {
        "algorithm": trainer.algorithm,
        "trainer": f"{cls.__module__}.{cls.__qualname__}",
        "given": [name for name in given if trainer.given.has(name)],
        "versions": installed_versions(),
        "hidden": hidden,
        "config": config,
    }


@dataclass(frozen=True)
class RecordedStart:
    """How a process of the run began."""

    step: int
    """Number of steps that were completed before."""
    algorithm: str
    trainer: str
    """Module and name of the trainer's class."""
    given: tuple[str, ...]
    """Models that were passed to the trainer as objects."""
    versions: Mapping[str, str]
    hidden: tuple[str, ...]
    """Keys of the configuration whose values are secrets."""
    config: Mapping[str, Any]
    """Configuration, without changes made during the run and without secrets."""

    def other_versions(self) -> dict[str, tuple[str | None, str | None]]:
        """Return packages whose version was another one: recorded and installed."""
        here = installed_versions()
        pairs = {n: (self.versions.get(n), here.get(n)) for n in _COMPARED_VERSIONS}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class RecordedCall:
    """One call that trained a model, or the answers of a rollout."""

    model: str
    """Name of the component; `ANSWERS` for answers."""
    file: str
    """Name of the file with the rows."""
    columns: Mapping[str, Mapping[str, Any]]
    """`dtype`, `shape` and `digest` of each column."""
    global_batch_size: int
    """Number of rows per optimizer step."""
    values: Mapping[str, list[float]]
    """`loss`, `grad_norm` and `lr` of each optimizer step."""


@dataclass(frozen=True)
class RecordedStep:
    """One step of the run."""

    step: int
    """Its number, from 1."""
    weight_version: int
    """Number of optimizer steps of the policy after it."""
    calls: tuple[RecordedCall, ...]
    """Its calls, in their order."""

    @property
    def trained(self) -> tuple[RecordedCall, ...]:
        """Calls that trained a model."""
        return tuple(call for call in self.calls if call.model != ANSWERS)


class Recording:
    """The recording of a run, or of a stage of a run.

    Args:
        folder: Folder of the recording.
        starts: Starts of the run, in order.
        steps: Steps by number, in order.
    """

    def __init__(
        self, folder: Path, starts: list[RecordedStart], steps: dict[int, RecordedStep]
    ) -> None:
        self.folder, self.starts, self.steps = folder, starts, steps

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Read the lines of a recording; rows are read when they are needed.

        Raises:
            ConfigError: The run has none, or a line is not one of a recording.
        """
        folder = run_dir / RECORDING
        if not has_recording(run_dir):
            raise ConfigError(
                f"{run_dir} has no recording of its training ({folder / STEPS}): run "
                "it with record_training=true"
            )
        starts: list[RecordedStart] = []
        steps: dict[int, RecordedStep] = {}
        for record in read_records(folder / STEPS):
            try:
                if "start" in record:
                    starts.append(_start(record["start"]))
                else:
                    step = _step(record)
                    steps[step.step] = step
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{folder / STEPS}: a line is no step of a recording "
                    f"({type(error).__name__}: {error}); restore the file"
                ) from error
        if not starts:
            raise ConfigError(
                f"{folder / STEPS}: the line of the run's start is missing; restore "
                "the file"
            )
        return cls(folder, starts, dict(sorted(steps.items())))

    @property
    def last_step(self) -> int:
        """Number of the last recorded step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def models(self) -> set[str]:
        """Names of the components that were trained."""
        return {call.model for step in self.steps.values() for call in step.trained}

    def start_of(self, step: int) -> RecordedStart:
        """Return the start of the process that did a step.

        Raises:
            ConfigError: The recording begins later.
        """
        found = [start for start in self.starts if start.step < step]
        if not found:
            raise ConfigError(
                f"{self.folder} begins after step {self.starts[0].step}: replay from a "
                f"checkpoint of that step or a later one (--from-checkpoint "
                f"{self.starts[0].step})"
            )
        return found[-1]

    def between(self, first: int, last: int) -> Iterator[RecordedStep]:
        """Yield the steps from `first` to `last`.

        Raises:
            ConfigError: Steps are missing; raised before the first is yielded.
        """
        missing = [n for n in range(first, last + 1) if n not in self.steps]
        if missing:
            shown = ", ".join(map(str, missing[:5]))
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ConfigError(
                f"{self.folder / STEPS} lacks step {shown}{more} of {first} to {last}: "
                "replay the steps before with --steps, or those after from a "
                "checkpoint with --from-checkpoint"
            )
        files = [c.file for n in range(first, last + 1) for c in self.steps[n].trained]
        gone = [name for name in files if not (self.folder / name).is_file()]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise ConfigError(
                f"{self.folder / gone[0]}{more} is missing: restore it, replay the "
                "steps before with --steps, or those after from a checkpoint with "
                "--from-checkpoint"
            )
        return (self.steps[number] for number in range(first, last + 1))

    def rows(self, call: RecordedCall) -> BatchedDataDict[Any]:
        """Read the rows of a call.

        Raises:
            ConfigError: The file is missing or damaged.
        """
        path = self.folder / call.file
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
                lists = file.metadata() or {}
            rows = joined_columns(tensors, lists)
            # In the order of the trainer: the file sorts them.
            known = [name for name in call.columns if name in rows]
            names = dict.fromkeys([*known, *rows])
            return BatchedDataDict({name: rows[name] for name in names})
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; restore it") from error

    @staticmethod
    def changed_columns(call: RecordedCall, rows: Mapping[str, Any]) -> list[str]:
        """Return the columns that are not those that were recorded, by their digests.

        Args:
            call: The call.
            rows: What `rows` returned of it.
        """
        found = describe(*split_columns(rows))
        names = dict.fromkeys([*call.columns, *found])
        return [n for n in names if call.columns.get(n) != found.get(n)]


def _start(data: Mapping[str, Any]) -> RecordedStart:
    return RecordedStart(
        step=int(data["step"]),
        algorithm=str(data["algorithm"]),
        trainer=str(data["trainer"]),
        given=tuple(data["given"]),
        versions=dict(data["versions"]),
        hidden=tuple(data["hidden"]),
        config=dict(data["config"]),
    )


def _step(data: Mapping[str, Any]) -> RecordedStep:
    calls = tuple(
        RecordedCall(
            model=str(call["model"]),
            file=str(call["file"]),
            columns=dict(call["columns"]),
            global_batch_size=int(call.get("global_batch_size", 0)),
            values={
                name: list(call[name])
                for name in ("loss", "grad_norm", "lr")
                if name in call
            },
        )
        for call in data["calls"]
    )
    return RecordedStep(int(data["step"]), int(data["weight_version"]), calls)
