from __future__ import annotations

from typing import Any

import click
import pytest

from rl_algorithms import Interrupted
from rl_cli import __version__
from rl_cli.main import COMMANDS, _run, cli, main
from rl_distributed import ConfigError, WorkerDiedError


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--help"], False) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run([name, "--help"], False) == 0
    assert "Examples:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--version"], False) == 0
    assert __version__ in capsys.readouterr().out


def test_unknown_command_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["trian"], False) == 2
    said = capsys.readouterr().err
    assert "no command 'trian'" in said
    assert "did you mean 'train'?" in said


def test_a_key_that_is_given_as_an_option_is_shown_as_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(["train", "quickstart", "--seed", "7"], False) == 2
    assert "seed=VALUE" in capsys.readouterr().err
    assert _run(["doctor", "--seed", "7"], False) == 2
    assert "seed=VALUE" not in capsys.readouterr().err


class _Raising:
    """Makes `rl doctor` raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        def invoke(self: Any, ctx: click.Context) -> Any:
            raise error

        monkeypatch.setattr(click.Command, "invoke", invoke)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a.b must be positive: got -1; use 1"), 2, "a.b must be positive"),
        (WorkerDiedError("rank 0 is gone"), 1, "rank 0 is gone"),
        (ZeroDivisionError("oops"), 1, "unexpected ZeroDivisionError: oops"),
        (Interrupted(2, "/x/step_4"), 130, "/x/step_4"),
        (Interrupted(15, None), 143, "nterrupted by SIGTERM"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_errors_become_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    _Raising(monkeypatch, error)
    assert _run(["doctor"], False) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_an_interruption_tells_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Interrupted(2, "/x/step_4")
    error.add_note("Continue with: rl train quickstart --resume /x")
    _Raising(monkeypatch, error)
    assert _run(["doctor"], False) == 130
    assert capsys.readouterr().err.endswith("rl train quickstart --resume /x\n")


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _Raising(monkeypatch, ZeroDivisionError("oops"))
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--debug"])
    assert leaving.value.code == 1
    assert "Traceback" in capsys.readouterr().err


def test_notes_of_an_error_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("wrong")
    error.add_note("in worker policy-0\nand a long traceback")
    _Raising(monkeypatch, error)
    assert _run(["doctor"], False) == 2
    err = capsys.readouterr().err
    assert "in worker policy-0" in err
    assert "long traceback" not in err


def test_group_knows_only_its_commands() -> None:
    context = click.Context(cli)
    assert cli.get_command(context, "nothing") is None
    assert cli.list_commands(context) == sorted(COMMANDS)


def commands_below(group: click.Group, path: tuple[str, ...] = ()) -> list[list[str]]:
    found = [list(path)]
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            found += commands_below(command, (*path, name))
        else:
            found.append([*path, name])
    return found


@pytest.mark.parametrize("arguments", commands_below(cli), ids=" ".join)
def test_every_help_fits_and_cuts_nothing_off(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _run([*arguments, "--help"], False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = lines[lines.index("Commands:") :] if "Commands:" in lines else []
    assert not [line for line in listed if line.endswith("...")]
