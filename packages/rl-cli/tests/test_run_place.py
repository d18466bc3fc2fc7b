"""Reasons to reject a run folder, checked before anything heavy is imported."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_cli.recipe_files import recipe_path
from rl_cli.run_config import load_run, run_from_dict
from rl_cli.run_folder import RunFolder
from rl_cli.run_place import find_place, given_output_dir
from rl_distributed import ConfigError
from rl_distributed.config.hidden_keys import hide_secrets

# Runs `rl` and fails if it has imported anything slow.
LIGHT = """
import sys
from rl_cli.main import _run
code = _run(sys.argv[1:], False)
heavy = {"torch", "ray", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rl(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def a_run(folder: Path, *overrides: str) -> RunFolder:
    run = load_run("quickstart", None, [f"output_dir={folder}", *overrides])
    return RunFolder.create(run.name, run.output_dir, run.source)


def test_what_is_refused_needs_no_imports(here: Path) -> None:
    with a_run(here / "old") as old:
        (old.stage("warmup") / "checkpoints" / "step_40").mkdir(parents=True)
    (here / "file").write_text("")
    cases = {
        "output_dir=/proc/none": "cannot be written: No such file or directory; name",
        f"output_dir={here}/file/x": f"cannot be written: {here}/file is a file",
        f"output_dir={here}/old": "holds a run already (newest checkpoint: step 40): "
        f"go on with it (--resume {here}/old, in Python resume=True), start again and "
        "delete it (--overwrite, in Python overwrite=True), or name another folder",
        "--overwrite": "add output_dir=FOLDER",
    }
    for override, words in cases.items():
        done = rl("train", "quickstart", override)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    done = rl("train", "quickstart", "--resume", str(here))
    assert (done.returncode, "it has no run.json" in done.stderr) == (2, True)
    done = rl("train", "sft", "--resume", str(here / "old"))
    assert (done.returncode, "is a run of 'quickstart'" in done.stderr) == (2, True)
    long = "/tmp/" + "x" * 80
    done = rl("train", "quickstart", RAY_TMPDIR="", TMPDIR=long, RAY_ADDRESS="local")
    assert (done.returncode, "set RAY_TMPDIR to a" in done.stderr) == (2, True)
    assert sorted(path.name for path in here.iterdir()) == ["file", "old"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_read_only_file_system(here: Path) -> None:
    (here / "ro").mkdir()
    script = (
        f"mount --bind {here}/ro {here}/ro && mount -o remount,ro,bind {here}/ro && "
        f"exec {sys.executable} -m rl_cli train quickstart output_dir={here}/ro/out"
    )
    can = subprocess.run(["unshare", "-rm", "true"], capture_output=True, timeout=60)
    if can.returncode:
        pytest.skip("this machine gives no namespaces")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "ro/out cannot be written: Read-only file system;" in done.stderr
    assert "name a writable one" in done.stderr


def test_a_run_that_lives_cannot_be_resumed(here: Path) -> None:
    folder = a_run(here / "run")
    with folder:
        done = rl("train", "quickstart", "--resume", str(folder.path))
        assert done.returncode == 2
        assert (
            f"is held by process {os.getpid()} on {os.uname().nodename} since 20"
            in (done.stderr)
        )
        assert "Ctrl-C or SIGTERM saves it" in done.stderr
    found = find_place("quickstart", None, [], str(folder.path))
    assert found is not None
    with found:
        assert found.path == folder.path


@pytest.mark.parametrize(
    ("data", "overrides", "found"),
    [
        ({}, [], None),
        ({"output_dir": "a"}, [], "a"),
        ({"output_dir": "a"}, ["output_dir=b", "++output_dir=c"], "c"),
        ({"output_dir": "a"}, ["~output_dir"], None),
        ({"output_dir": "a"}, ["output_dir=null"], None),
        ({}, ["data.output_dir=b"], None),
    ],
)
def test_the_folder_that_a_user_names(
    data: dict[str, str], overrides: list[str], found: str | None
) -> None:
    assert given_output_dir(data, overrides) == found


def test_an_algorithm_gets_a_new_folder_and_its_newest_run_is_found(here: Path) -> None:
    keys = ["policy.model_name=m", "data.train=rows.jsonl"]
    for number in (1, 2):
        run = load_run("dapo", None, keys)
        with RunFolder.create(run.name, run.output_dir, run.source) as folder:
            assert folder.path == here / "runs" / f"dapo-00{number}"
    assert RunFolder.find("dapo", "").path == folder.path
    # A run without progress is not the one to continue.
    first = here / "runs" / "dapo-001"
    (first / "result.json").write_text("{}")
    assert RunFolder.find("dapo", "").path == first
    # That of another recipe, whose name begins alike, is none of this one.
    other = here / "runs" / "dapo-math-001"
    other.mkdir()
    (other / "run.json").write_text('{"name": "dapo-math"}')
    (other / "result.json").write_text("{}")
    assert RunFolder.find("dapo", "").path == first
    assert RunFolder.find("dapo-math.yaml", "").path == other


def test_a_folder_is_overwritten_by_leave_only(here: Path) -> None:
    folder = here / "run"
    with a_run(folder):
        pass
    with a_run(folder, "seed=1") as second:  # it has no progress
        assert second.read("run.json")["config"]["seed"] == 1
        second.write("stages/warmup.json", {})
    with pytest.raises(ConfigError, match="--overwrite, in Python overwrite=True"):
        a_run(folder)
    run = load_run("quickstart", None, [f"output_dir={folder}", "seed=2"])
    given = [f"output_dir={folder}"]
    assert find_place("quickstart", None, given, None, overwrite=True) is None
    with RunFolder.create(run.name, run.output_dir, run.source, overwrite=True) as new:
        assert new.read("run.json")["config"]["seed"] == 2
        assert not new.has_progress()


def test_what_is_no_run_is_not_overwritten(here: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "main.tex").write_text("")
    done = rl("train", "quickstart", f"output_dir={here}/thesis", "--overwrite")
    assert (done.returncode, "is no folder of a run" in done.stderr) == (2, True)
    assert (here / "thesis" / "main.tex").exists()
    done = rl("train", "quickstart", "--overwrite", "--resume")
    assert (done.returncode, "give one of them" in done.stderr) == (2, True)


def test_a_mistake_before_the_first_step_leaves_nothing(here: Path) -> None:
    with pytest.raises(ConfigError, match="no such column"):
        fail(here / "run", ConfigError("no such column"))
    assert not (here / "run").exists()
    with pytest.raises(OSError, match="full"):
        fail(here / "run", OSError("full"))
    assert (here / "run" / "run.json").exists()
    fail(here / "run", None)


def fail(folder: Path, error: Exception | None) -> None:
    with a_run(folder):
        if error is not None:
            raise error


def test_folders_and_files_are_the_owners_only(here: Path) -> None:
    before = os.umask(0)
    try:
        with a_run(here / "made" / "run") as folder:
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            for path in folder.path.rglob("*"):
                if path.name != ".run.lock":
                    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    finally:
        os.umask(before)


# --- secrets -------------------------------------------------------------------------

SECRET = "correct-horse-battery"
KEY = "stages.grpo.env.settings.api_key"


def with_secret(here: Path) -> str:
    recipe = yaml.safe_load(Path(str(recipe_path("quickstart"))).read_text())
    recipe["stages"]["grpo"]["env"] = {
        "name": "mine",
        "settings": {"api_key": SECRET, "args": ["--token=" + SECRET, "-v"]},
    }
    (here / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return str(here / "mine.yaml")


def test_a_run_folder_keeps_no_secrets_and_asks_for_them_again(here: Path) -> None:
    name = with_secret(here)
    run = load_run(name, None, [f"output_dir={here / 'run'}"])
    with RunFolder.create(run.name, run.output_dir, run.source) as folder:
        kept = "".join(p.read_text() for p in folder.path.iterdir() if p.is_file())
    assert SECRET not in kept
    args = "stages.grpo.env.settings.args"
    assert json.loads((folder.path / "run.json").read_text())["hidden"] == [KEY, args]
    assert folder.resume_command(name) == (
        f"rl train {name} --resume {folder.path} {KEY}=VALUE {args}=VALUE"
    )
    with pytest.raises(ConfigError, match=f"give {KEY}=VALUE {args}=VALUE again"):
        find_place(name, None, [], str(folder.path))
    given = [f"{KEY}={SECRET}", f"{args}=[--token={SECRET},-v]"]
    with pytest.raises(ConfigError, match=r"drop the overrides \(seed=3\)"):
        find_place(name, None, [*given, "seed=3"], str(folder.path))
    found = find_place(name, None, given, str(folder.path))
    assert found is not None
    with found:
        again = run_from_dict(found.source(name, given), given)
    assert again.stages[-1].config == run.stages[-1].config


def test_templates_only_look_as_if_they_held_secrets() -> None:
    template = "{% set eos_token = '<end>' %}{{ eos_token }}"
    config = {"a": {"template": template, "num_tokens": 3, "pad_token": "<pad>"}}
    assert hide_secrets(config) == (config, [])
    shown, keys = hide_secrets({"a.b": [{"password": "x{y}"}], "url": "s://u:p@h"})
    assert shown == {"a.b": [{"password": "***"}], "url": "s://u:***@h"}
    assert keys == ["a\\.b.password", "url"]


def an_algorithm_run(folder: Path) -> RunFolder:
    source = {"kind": "algorithm", "name": "sft", "config": {"seed": 1}}
    return RunFolder.create("sft", str(folder), source)


def test_the_run_of_an_algorithm_is_not_nested(here: Path) -> None:
    with an_algorithm_run(here / "plain") as folder:
        assert folder.stage("sft") == folder.path
        assert folder.claim is not None
        assert not (folder.path / "stages").exists()
        assert folder.stage_result("sft") is None
        result = {
            "best_checkpoint": "step_2",
            "checkpoint": "step_2/policy/weights",
            "run_dir": str(folder.path),
            "stop_reason": "done",
            "metrics": {"train:loss": 1.0},
            "steps": 2,
        }
        folder.write("result.json", result)
        found = folder.stage_result("sft")
        assert found == {
            "metrics": {"train:loss": 1.0},
            "steps": 2,
            "run_dir": str(folder.path),
            "stop_reason": "done",
            "checkpoint": "step_2",
            "model": "step_2/policy/weights",
        }
        # A run stopped by a user continues when resumed.
        folder.write("result.json", {**result, "stopped_by": "alice"})
        assert folder.stage_result("sft") is None


def test_an_older_run_of_an_algorithm_stays_where_it_is(here: Path) -> None:
    with an_algorithm_run(here / "old") as folder:
        (folder.path / "stages").mkdir()
        assert folder.stage("sft") == folder.path / "stages" / "sft"
        assert folder.claim is None
        folder.end_stage("sft", {"steps": 3})
        assert folder.stage_result("sft") == {"steps": 3}


def test_a_recipe_has_stages(here: Path) -> None:
    with a_run(here / "recipe") as folder:
        assert folder.stage("grpo") == folder.path / "stages" / "grpo"
        assert folder.claim is None


def test_a_run_of_python_goes_on_in_python(here: Path) -> None:
    (here / "run.json").write_text('{"kind": "trainer", "name": "grpo", "config": {}}')
    with pytest.raises(ConfigError, match=r"started from Python.*resume=True"):
        RunFolder.find("grpo", str(here)).source("grpo", [])
