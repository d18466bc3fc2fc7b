"""`rl init`: create a run file from five questions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rl_cli.console import Terminal
from rl_cli.gpus import GpusType
from rl_cli.options import Whole
from rl_cli.starter_files import (
    BUILT,
    CPU,
    EXAMPLE,
    OWN_ENVIRONMENTS,
    TASKS,
    Answers,
    starter_files,
)

_MOST_STEPS = 10**9
_DEFAULTS: dict[str, Any] = {
    "model": BUILT,
    "data": EXAMPLE,
    "task": "reward",
    "machine": CPU,
    "budget": 100,
}


class _Machine(GpusType):
    """`cpu`, or a text that `GpusType` accepts; kept as text."""

    name = "machine"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Check the text; anything else is a usage error."""
        if value != CPU:
            super().convert(value, param, ctx)
        return value


_QUESTIONS: dict[str, tuple[str, click.ParamType[Any]]] = {
    "model": (
        f"Which model? A folder, a name on the hub, or {BUILT!r} for a tiny one built "
        "here",
        click.STRING,
    ),
    "data": (
        "Which data? A file, a folder, a name on the hub, a format such as gsm8k, or "
        f"{EXAMPLE!r} for rows made here",
        click.STRING,
    ),
    "task": (
        "Which task? "
        + "; ".join(f"{name}: {meaning}" for name, meaning in TASKS.items()),
        click.Choice(list(TASKS)),
    ),
    "machine": ("Which machine? cpu, or GPUs such as 1x24GB or 8x80GB", _Machine()),
    "budget": ("How many steps?", Whole(1, _MOST_STEPS)),
}


def _question(name: str) -> Callable[[Any], Any]:
    text, kind = _QUESTIONS[name]
    metavar = None if name == "task" else "STEPS" if name == "budget" else name.upper()
    return click.option(f"--{name}", type=kind, metavar=metavar, help=text)


@click.command(short_help="Create a run file and a reward or environment.")
@click.argument("folder", default=".", type=click.Path(path_type=Path, file_okay=False))
@_question("model")
@_question("data")
@_question("task")
@_question("machine")
@_question("budget")
@click.option("--yes", is_flag=True, help="Ask nothing; use defaults for the rest.")
def init(folder: Path, *, yes: bool, **given: Any) -> None:
    """Ask five questions, and write a run file.

    A reward function or an environment of your own is written beside it, with tests
    that pass.

    The files are written to FOLDER, by default the current one, without overwriting
    any. Each question is also an option. The result is checked like by
    `rl config validate`.

    \b
    Examples:
      rl init my-run
      rl init my-run --yes
      rl init sums --data gsm8k --task math --machine 1x24GB
    """
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    answers = _answers(given, yes=yes)
    files = starter_files(answers, folder)
    # Checked for all before the first is written, so that nothing is left half done.
    present = [name for name in files if (folder / name).exists()]
    if present:
        other = "my-run" if folder == Path() else shlex.quote(f"{folder}-2")
        raise ConfigError(
            f"{folder / present[0]} already exists and is not overwritten: give "
            f"another folder, as in rl init {other}, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    terminal = Terminal()
    for name in files:
        terminal.raw(f"wrote {folder / name}")
    _check(folder)
    here = folder.resolve() == Path.cwd()
    go = "" if here else f"cd {shlex.quote(str(folder))} && "
    terminal.raw(f"It is valid. Train it: {go}rl train run.yaml")


def _answers(given: dict[str, Any], *, yes: bool) -> Answers:
    """Ask the questions whose options were not given.

    Raises:
        ConfigError: There is no terminal to ask in, or an answer is invalid.
    """
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    missing = [name for name in _QUESTIONS if given[name] is None]
    if missing and not yes and not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to ask in: add "
            f"{', '.join(f'--{name}' for name in missing)}, or --yes for the defaults"
        )
    for name in missing:
        given[name] = _DEFAULTS[name] if yes else _ask(name)
    data_format, answer_column = _look_at(given["data"], given["task"])
    if given["task"] in {"math", *OWN_ENVIRONMENTS} and answer_column is None:
        raise ConfigError(
            f"--task {given['task']} needs rows with an answer: {given['data']!r} has "
            "none; give other --data, or --task reward"
        )
    return Answers(
        given["model"], given["data"], given["task"], given["machine"],
        given["budget"], data_format, answer_column,
    )  # fmt: skip


def _ask(name: str) -> Any:
    text, kind = _QUESTIONS[name]
    return click.prompt(text, default=_DEFAULTS[name], type=kind, err=True)


def _look_at(data: str, task: str) -> tuple[str | None, str | None]:
    """Return the data format named by `data`, and the column of answers, if needed.

    Raises:
        DataError: The data do not exist or cannot be read.
    """
    from rl_algorithms.data.formats import data_formats  # noqa: PLC0415
    from rl_algorithms.data.preflight import answers_of  # noqa: PLC0415

    if data == EXAMPLE:
        return None, "answer"
    # A file of the user's comes before a format of the same name.
    if data in data_formats and not Path(data).exists():
        return data, data_formats.get(data).answer_column
    looked_at = {"math", "reward", *OWN_ENVIRONMENTS}
    return None, answers_of(data) if task in looked_at else None


def _check(folder: Path) -> None:
    """Check the run in its folder, as paths in the file are relative to it.

    Raises:
        UserError: A key or column is wrong; the files are kept.
    """
    from contextlib import chdir  # noqa: PLC0415

    from rl_cli.run_config import check_run, load_run  # noqa: PLC0415
    from rl_distributed.errors import UserError  # noqa: PLC0415

    try:
        with chdir(folder):
            check_run(load_run("run.yaml", None, []))
    except UserError as error:
        error.add_note(
            f"the files are written; correct {folder / 'run.yaml'}, and check it with "
            "rl config validate run.yaml in that folder"
        )
        raise
