"""The commands of the pages: each has a rule, and the fast ones are run here.

`nox -s commands` runs all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from itertools import groupby
from pathlib import Path

import pytest
from tools.page_commands import kit
from tools.page_commands.helpers import HELPERS
from tools.page_commands.pages import ROOT, PageCommand, page_commands
from tools.page_commands.rules import RULES, rule_of

from rl_cli.main import _run

COMMANDS = page_commands()
RECORDED = ROOT / "docs" / "recordings" / "runs"
QUICK = [
    (page, list(found))
    for page, found in groupby(
        (one for one in COMMANDS if rule_of(one).is_quick), lambda one: one.page
    )
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.title)
def test_a_command_has_one_rule(command: PageCommand) -> None:
    assert rule_of(command)


def test_no_rule_is_stale() -> None:
    used = {rule_of(command).pattern for command in COMMANDS}
    assert [rule.pattern for rule in RULES if rule.pattern not in used] == []
    for page, (pattern, _) in HELPERS.items():
        lines = [one.line for one in COMMANDS if one.page == page]
        assert any(re.search(pattern, line) for line in lines), page
    assert {*kit.MADE_BY_PAGE, *HELPERS} <= {one.page for one in COMMANDS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit, with recorded runs instead of its own."""
    folder = tmp_path_factory.mktemp("kit")
    kit.write_kit(folder)
    first, second = sorted(RECORDED.iterdir())
    for name in kit.RUNS:
        shutil.copytree(second if name.endswith("2") else first, folder / name)
    return folder


@pytest.mark.parametrize(("page", "commands"), QUICK, ids=[page for page, _ in QUICK])
def test_quick_commands_run(
    page: str,
    commands: list[PageCommand],
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit.give(made, tmp_path, page, commands)
    if any(re.search(r"rl (runs|report|diff)", one.line) for one in commands):
        # From pages that first train runs of their own.
        for number in (1, 2):
            for name in ("quickstart", "run"):
                target = tmp_path / commands[-1].folder / "runs" / f"{name}-00{number}"
                if not target.exists():
                    shutil.copytree(RECORDED / f"quickstart-00{number}", target)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RL_ENV_ROOT", str(tmp_path / "environments"))
    monkeypatch.delenv("RL_KEYS_FILE", raising=False)
    for command in commands:
        monkeypatch.chdir(tmp_path / command.folder)
        line, _, target_file = command.line.partition(" > ")
        with (
            open(target_file or os.devnull, "w") as output,
            contextlib.redirect_stdout(output),
        ):
            code = _run(shlex.split(line)[1:], False)
        assert code == rule_of(command).exit_code, command.line
