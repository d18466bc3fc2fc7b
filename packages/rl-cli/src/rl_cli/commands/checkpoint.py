"""`rl checkpoint`: inspect checkpoints and convert them to model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_cli.console import Terminal, table

if TYPE_CHECKING:
    from rl_models.checkpoint.conversion import StateSummary

MIB = 1 << 20
FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """Inspect the training state of a checkpoint, or convert it to a model folder.

    FOLDER is a checkpoint (step_N), its policy/optimizer, or a run, which stands for
    its newest checkpoint. States of the backends dtensor and megatron are supported, in
    any layout.

    \b
    Examples:
      rl checkpoint inspect runs/a/checkpoints/step_100
      rl checkpoint convert runs/a/checkpoints/step_100 model
    """


@checkpoint.command(short_help="Show the contents of a checkpoint.")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(folder: Path, as_json: bool) -> int:
    """Show the format, ranks, parameters, optimizer state and gaps of a checkpoint.

    Only indices are read, not the weights. Exits with 1 if a part is missing or
    damaged.

    \b
    Examples:
      rl checkpoint inspect runs/a/checkpoints/step_100
      rl checkpoint inspect step_100/policy/optimizer --json
    """
    from rl_models.checkpoint.conversion import inspect_state  # noqa: PLC0415

    state = _state_of(folder)
    found = inspect_state(state)
    step, damage = _step_of(state), _damage_of(state)
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps({**_to_dict(found, state, step), "damage": damage}))
    else:
        adapters = "yes" if found.has_adapters else "no"
        rows = [
            ("format", found.format),
            ("step", "unknown" if step is None else str(step)),
            ("written by", f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}"),
            ("parameters", f"{len(found.shapes)} of {found.num_parameters:,} numbers"),
            ("adapters", adapters),
            ("optimizer state", ", ".join(found.slots) or "none"),
            ("size", f"{found.num_bytes / MIB:.1f} MiB"),
            ("gaps", ", ".join(found.gaps) or "none"),
            ("other files", damage or "complete, by their sizes"),
        ]
        terminal.result(table(str(state), ["what", "value"], rows))
    return 1 if found.gaps or damage else 0


@checkpoint.command(short_help="Write a model folder from a checkpoint.")
@FOLDER
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Model folder with the configuration, and the base model of adapters; "
    "default: the checkpoint's policy/weights, if the state has no adapters.",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    help="Folder with the adapter_config.json of the state's adapters; default: the "
    "checkpoint's policy/weights/adapter.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    help="Data type of the weights; default: float32, as in training.",
)
def convert(
    folder: Path, output: Path, model: Path | None, adapter: Path | None, precision: str
) -> None:
    """Convert the training state in FOLDER to a Hugging Face folder OUTPUT.

    Only one weight is in memory at a time. Adapters are merged into --model.

    \b
    Examples:
      rl checkpoint convert runs/a/checkpoints/step_100 model
      rl checkpoint convert step_100 model --precision bfloat16
      rl checkpoint convert step_100 merged --model path/to/base
    """
    from rl_distributed.errors import ConfigError  # noqa: PLC0415
    from rl_models.checkpoint.conversion import (  # noqa: PLC0415
        convert_state,
        inspect_state,
    )

    state = _state_of(folder)
    if model is None:
        model = state.parent / "weights"
        if inspect_state(state).has_adapters:
            raise ConfigError(
                f"the training state {state} holds adapters, which must be merged into "
                "the base model that they were trained on; give it with --model"
            )
    convert_state(state, model, output, precision=precision, adapter=adapter)
    Terminal().raw(str(output))


def _state_of(folder: Path) -> Path:
    """Return the training state of a checkpoint, or of the newest one of a run."""
    from rl_distributed.checkpoint import (  # noqa: PLC0415
        CheckpointingConfig,
        CheckpointManager,
    )
    from rl_distributed.errors import ConfigError  # noqa: PLC0415
    from rl_distributed.runs.folder import CHECKPOINTS  # noqa: PLC0415

    stages = sorted(path for path in folder.glob("stages/*") if path.is_dir())
    if stages:
        raise ConfigError(
            f"FOLDER must be one checkpoint or one run: {folder} is the run of a "
            f"recipe with several stages; give one of {', '.join(map(str, stages))}"
        )
    if (folder / CHECKPOINTS).is_dir():
        manager = CheckpointManager(CheckpointingConfig(), folder / CHECKPOINTS)
        folder = manager.get_latest_checkpoint_path() or folder
    # The state itself, or the checkpoint around it.
    for state in (folder, folder / "policy" / "optimizer"):
        if (state / "state.json").is_file():
            return state
    raise ConfigError(
        f"FOLDER must be a checkpoint with a training state: {folder} has neither "
        "state.json nor policy/optimizer/state.json; give a step_N folder of a run"
    )


def _damage_of(state: Path) -> str:
    """Name a missing or truncated file of the checkpoint; empty: there is none."""
    from rl_distributed.checkpoint import verify  # noqa: PLC0415
    from rl_distributed.errors import CheckpointError  # noqa: PLC0415

    root = state.absolute().parent.parent
    if not (root / "manifest.json").is_file():
        return ""
    try:
        # Sizes only: digests would read all weights.
        verify(root, digests=False)
    except CheckpointError as error:
        return str(error).rpartition(": ")[2]
    return ""


def _step_of(state: Path) -> int | None:
    name = state.absolute().parent.parent.name
    number = name.removeprefix("step_")
    return int(number) if name.startswith("step_") and number.isdigit() else None


def _to_dict(found: StateSummary, state: Path, step: int | None) -> dict[str, object]:
    return {
        "folder": str(state),
        "format": found.format,
        "step": step,
        "num_ranks": found.num_ranks,
        "num_parameters": found.num_parameters,
        "num_bytes": found.num_bytes,
        "has_adapters": found.has_adapters,
        "optimizer": list(found.slots),
        "shapes": {name: list(shape) for name, shape in found.shapes.items()},
        "gaps": list(found.gaps),
    }
