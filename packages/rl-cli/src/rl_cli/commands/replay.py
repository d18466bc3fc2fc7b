"""`rl replay`: repeat the training of a recorded run, and compare it bit by bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_cli.console import Terminal
from rl_cli.options import Whole

if TYPE_CHECKING:
    from rl_algorithms import ReplayResult
    from rl_cli.report.run_reader import ReadRun, ReadStage


@click.command(short_help="Repeat the training of a recorded run.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--steps", type=Whole(),
              help="Number of steps to repeat; default: all.")  # fmt: skip
@click.option("--from-checkpoint", metavar="STEP", type=Whole(),
              help="Begin with the run's checkpoint of this step; default: with the "
              "start of the run.")  # fmt: skip
@click.option("--stage", help="Stage to replay, if several are recorded.")
@click.option("--to", "target", metavar="FOLDER", type=click.Path(path_type=Path),
              help="Folder for the weights and the training state of the "
              "replay.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    run: Path,
    steps: int | None,
    from_checkpoint: int | None,
    stage: str | None,
    target: Path | None,
    as_json: bool,
) -> int:
    """Repeat the training of a run that was recorded (record_training=true).

    Starts only the models that the run trained, without a generator or an
    environment, and trains them on the recorded rows. The loss, the gradient norm and
    the learning rate of each optimizer step are compared with those of the run, and
    weights and training state with its newest checkpoint; all bit by bit, up to the
    first difference. Settings that were changed during the run change again.

    The run must have ended, or be left alone meanwhile.

    Exit codes: 0 everything is the same, 1 it differs, 2 wrong input.

    \b
    Examples:
      rl replay runs/grpo-001
      rl replay runs/grpo-001 --from-checkpoint 400 --steps 20
      rl replay runs/grpo-001 --to again --json
    """
    from rl_algorithms import replay_run  # noqa: PLC0415
    from rl_cli.report.run_reader import read_run  # noqa: PLC0415

    terminal = Terminal(quiet=as_json)
    progress = _Progress(terminal)
    chosen = _recorded_stage(read_run(run), stage)
    result = replay_run(
        chosen.folder,
        steps=steps,
        from_checkpoint=from_checkpoint,
        to=target,
        on_step=progress.show,
    )
    if as_json:
        terminal.raw(json.dumps(result.to_dict()))
    else:
        for warning in result.warnings:
            terminal.note(f"Warning: {warning}")
        terminal.raw(_shown(result))
    return 0 if result.is_same else 1


class _Progress:
    """Shows at most one line a second, and that of the last step."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._shown_s = terminal, 0.0

    def show(self, step: int, last: int) -> None:
        now_s = time.monotonic()
        if step == last or now_s - self._shown_s >= 1.0:
            self._shown_s = now_s
            self._terminal.note(f"step {step} of {last}: same")


def _recorded_stage(run: ReadRun, name: str | None) -> ReadStage:
    from rl_algorithms.trainers.recording.folder import has_recording  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    found = {s.name: s for s in run.stages if has_recording(s.folder)}
    if not found:
        raise ConfigError(
            f"{run.folder} has no recording of its training: run it with "
            "record_training=true"
        )
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        rule = "must name the stage" if name is None else f"has no stage {name!r}"
        raise ConfigError(
            f"--stage {rule} to replay: {run.folder} has recorded {', '.join(found)}"
        )
    return found[name]


def _shown(result: ReplayResult) -> str:
    if result.difference is not None:
        return f"The replay differs from the run in {result.difference}"
    span = f"Steps {result.first_step} to {result.last_step}"
    if result.checkpoint is None:
        weights = "no checkpoint of these steps to compare weights with"
    else:
        weights = (
            f"weights and training state are those of {result.checkpoint} "
            f"({result.num_tensors} tensors)"
        )
    return f"{span} are the same, bit by bit; {weights}."
