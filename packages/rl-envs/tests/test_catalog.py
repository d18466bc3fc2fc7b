"""The list of environments, with plugins of other packages in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import dataclasses, json
from rl_envs.catalog import list_environments
print(json.dumps([dataclasses.asdict(each) for each in list_environments()]))
"""
PLUGIN = '''
from rl_envs import EnvironmentInterface
class Good(EnvironmentInterface):
    """Judges well.

    With a second paragraph.
    """
    many_turns = True
    def step(self, message_log_batch, metadata): ...
class Silent(EnvironmentInterface):
    def step(self, message_log_batch, metadata): ...
'''
ENTRY_POINTS = """
[rl.environments]
good = plugin_envs:Good
needy = plugin_envs:Good [fast]
silent = plugin_envs:Silent
absent = plugin_envs:Nothing
gone = plugin_gone:Thing
raises = plugin_raises:Thing
sorting = plugin_envs:Good
[rl.tasks]
good = plugin_raises:Tasks
"""
METADATA = """Metadata-Version: 2.1
Name: plugin-envs
Version: 1.0
Provides-Extra: fast
Requires-Dist: no-such-package-anywhere>=1; extra == "fast"
Requires-Dist: numpy
"""


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plugin_envs.py").write_text(PLUGIN)
    (folder / "plugin_raises.py").write_text("raise ValueError('no licence')\n")
    info = folder / "plugin_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_what_there_is_to_know(listed: dict[str, dict[str, Any]]) -> None:
    countdown = listed["countdown"]
    assert countdown["package"] == "rl-envs"
    assert countdown["makes_tasks"] is True
    assert countdown["turns"] == "one"
    assert countdown["extra"] == countdown["problem"] == ""
    assert countdown["description"].startswith("Evaluates the expression")
    assert listed["calculator"]["turns"] == "many"
    assert listed["math"]["extra"] == "rl-envs[math]"
    assert listed["code_interpreter"]["extra"] == "rl-envs[math]"
    assert [n for n, row in listed.items() if row["runs_programs"]] == [
        "code",
        "code_interpreter",
    ]


def test_plugins_are_listed_and_broken_ones_do_no_harm(
    listed: dict[str, dict[str, Any]],
) -> None:
    needy = listed["needy"]
    assert needy["package"] == "plugin-envs"
    assert needy["description"] == "Judges well."
    assert needy["turns"] == "many"
    assert (needy["extra"], needy["extra_installed"]) == ("plugin-envs[fast]", False)
    assert listed["silent"]["description"] == listed["silent"]["turns"] == ""
    problems = {name: row["problem"] for name, row in listed.items() if row["problem"]}
    assert set(problems) == {"absent", "gone", "good", "raises", "sorting"}
    assert "plugin_envs:Nothing does not exist" in problems["absent"]
    assert "plugin_gone" in problems["gone"]
    # The environment itself can be imported; its task source cannot.
    assert problems["good"] == problems["raises"] == "ValueError: no licence"
    assert "provided more than once" in problems["sorting"]
