from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st

from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.checkpoint.retention import metric_of, rank, steps_to_keep
from rl_distributed.errors import CheckpointError, ConfigError, DeadlineExceededError


def manager_in(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(
        CheckpointingConfig(checkpoint_dir=str(folder), **settings)
    )


def save(manager: CheckpointManager, step: int, **info: Any) -> Path:
    with manager.writing(step, {"step": step, **info}, {"seed": 1}) as path:
        weights = path / "policy" / "weights"
        weights.mkdir(parents=True)
        (weights / "model.bin").write_bytes(f"weights of {step}".encode())
    return manager.checkpoint_dir / f"step_{step}"


def steps_in(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name != ".writer.lock"]


# Writing and finding


def test_a_checkpoint_holds_what_was_written(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    info = {"step": 3, "val:accuracy": torch.tensor(0.5), "nested": {"a": [1, None]}}
    path = manager.init_tmp_checkpoint(3, info, {"policy": {"lr": 1e-5}})
    assert path == tmp_path / "tmp_step_3"
    assert manager.get_latest_checkpoint_path() is None
    (path / "data.bin").write_bytes(b"x" * 1000)
    final = manager.finalize_checkpoint(path)
    assert final == tmp_path / "step_3"
    assert steps_in(tmp_path) == ["step_3"]
    assert manager.get_latest_checkpoint_path() == final
    assert manager.load_training_info(final) == {**info, "val:accuracy": 0.5}
    assert yaml.safe_load((final / "config.yaml").read_text())["policy"]["lr"] == 1e-5
    manifest = json.loads((final / "manifest.json").read_text())
    assert set(manifest["files"]) == {"training_info.json", "config.yaml", "data.bin"}
    assert manifest["files"]["data.bin"]["size_bytes"] == 1000


def test_secrets_of_the_configuration_do_not_reach_a_checkpoint(
    tmp_path: Path,
) -> None:
    manager = manager_in(tmp_path)
    config = {"env_vars": {"HF_TOKEN": "hf_abc", "OMP_NUM_THREADS": "1"}, "seed": 3}
    with manager.writing(1, {}, config):
        pass
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all("hf_abc" not in path.read_text() for path in files)
    kept = yaml.safe_load((tmp_path / "step_1" / "config.yaml").read_text())
    assert kept == {"env_vars": {"HF_TOKEN": "***", "OMP_NUM_THREADS": "1"}, "seed": 3}
    assert config["env_vars"] == {"HF_TOKEN": "hf_abc", "OMP_NUM_THREADS": "1"}


def test_latest_is_by_number_not_by_name_or_time(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    for step in (2, 10, 9):
        save(manager, step)
    assert manager_in(tmp_path).get_latest_checkpoint_path() == tmp_path / "step_10"
    assert list(manager.list_checkpoints()) == [2, 9, 10]


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    save(manager, 1, run=1)
    save(manager, 1, run=2)
    assert steps_in(tmp_path) == ["step_1"]
    assert manager.load_training_info() == {"step": 1, "run": 2}


def test_resume_paths(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    assert manager.get_resume_paths(None) == (None, None)
    assert manager.load_training_info() is None
    path = save(manager, 1)
    assert manager.get_resume_paths(path) == (path / "policy" / "weights", None)
    (path / "policy" / "optimizer").mkdir()
    assert manager.get_resume_paths(path)[1] == path / "policy" / "optimizer"
    critic = path / "critic"
    (critic / "weights").mkdir(parents=True)
    assert manager.get_resume_paths(path, "critic") == (critic / "weights", None)
    (critic / "optimizer").mkdir()
    assert manager.get_resume_paths(path, "critic")[1] == critic / "optimizer"
    with pytest.raises(CheckpointError, match=r"no weights of 'value'.*policy"):
        manager.get_resume_paths(path, "value")


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    old = save(manager, 1)

    def be_interrupted() -> None:
        with manager.writing(2, {}) as path:
            (path / "part").write_bytes(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert steps_in(tmp_path) == ["step_1"]
    assert manager.get_latest_checkpoint_path() == old


def test_leftovers_of_a_killed_process_go_with_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    manager = manager_in(tmp_path)
    save(manager, 1)
    for name in ("tmp_step_2", "removed_step_0", "old_step_1", "notes", "step_x"):
        (tmp_path / name).mkdir()
    assert manager_in(tmp_path).get_latest_checkpoint_path() == tmp_path / "step_1"
    assert "tmp_step_2" in steps_in(tmp_path)  # looking changes nothing
    save(manager_in(tmp_path), 3)
    assert steps_in(tmp_path) == ["notes", "step_1", "step_3", "step_x"]


def test_a_step_that_was_not_renamed_yet_is_none(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    save(manager, 1)
    # All its files and its manifest exist, but it was not renamed.
    shutil.copytree(tmp_path / "step_1", tmp_path / "tmp_step_2")
    reader = manager_in(tmp_path)
    assert reader.get_latest_checkpoint_path() == tmp_path / "step_1"
    assert list(reader.list_checkpoints()) == [1]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(
    tmp_path: Path,
) -> None:
    save(manager_in(tmp_path), 5, run=1)
    (tmp_path / "step_5").rename(tmp_path / "old_step_5")
    manager = manager_in(tmp_path)
    assert manager.get_latest_checkpoint_path() == tmp_path / "old_step_5"
    assert manager.load_training_info() == {"step": 5, "run": 1}
    save(manager, 6)
    assert steps_in(tmp_path) == ["step_5", "step_6"]


def test_two_checkpoints_may_be_open_at_once(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    first = manager.init_tmp_checkpoint(1, {})
    second = manager.init_tmp_checkpoint(2, {})
    manager.finalize_checkpoint(second)
    manager.finalize_checkpoint(first)
    assert steps_in(tmp_path) == ["step_1", "step_2"]


# Damage


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "has changed": lambda root: _flip(root / "policy" / "weights" / "model.bin"),
    "model.bin has 3 bytes, expected 12": lambda root: (
        root / "policy" / "weights" / "model.bin"
    ).write_bytes(b"abc"),
    "model.bin is missing": lambda root: (
        root / "policy" / "weights" / "model.bin"
    ).unlink(),
    r"no manifest\.json": lambda root: (root / "manifest.json").unlink(),
    r"manifest\.json is damaged": lambda root: (root / "manifest.json").write_text("{"),
    "manifest names a file outside": lambda root: (root / "manifest.json").write_text(
        json.dumps({"version": 1, "files": {"../x": {"size_bytes": 1, "sha256": ""}}})
    ),
    "format 99": lambda root: (root / "manifest.json").write_text(
        json.dumps({"version": 99, "files": {}})
    ),
    "damaged at 'x'": lambda root: (root / "manifest.json").write_text(
        json.dumps({"version": 1, "files": {"x": {"size_bytes": "1"}}})
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damage_is_named_and_the_newest_whole_one_is_taken(
    message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_in(tmp_path)
    save(manager, 1)
    save(manager, 2)
    DAMAGES[message](tmp_path / "step_2")
    reader = manager_in(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        reader.verify(tmp_path / "step_2")
    assert str(tmp_path / "step_2") in str(caught.value)
    assert reader.get_latest_checkpoint_path() == tmp_path / "step_1"
    assert reader.get_best_checkpoint_path() == tmp_path / "step_1"
    assert "step_2" in caplog.text
    assert (tmp_path / "step_2").exists()


def test_a_damaged_checkpoint_never_pushes_out_a_whole_one(tmp_path: Path) -> None:
    manager = manager_in(tmp_path, keep_top_k=1)
    save(manager, 1)
    save(manager, 2)
    (tmp_path / "step_2" / "training_info.json").unlink()
    save(manager, 3)
    (tmp_path / "step_3" / "training_info.json").unlink()
    manager.remove_old_checkpoints()
    assert steps_in(tmp_path) == ["step_2", "step_3"]
    save(manager, 2)  # written again
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_2"


@pytest.mark.parametrize("exists", [False, True])
def test_links_are_refused(tmp_path: Path, exists: bool) -> None:
    manager = manager_in(tmp_path / "checkpoints")
    if exists:
        (tmp_path / "elsewhere").write_bytes(b"1")
    with (
        pytest.raises(CheckpointError, match=r"a link, weights\.bin"),
        manager.writing(1, {}) as path,
    ):
        (path / "weights.bin").symlink_to(tmp_path / "elsewhere")
    assert steps_in(tmp_path / "checkpoints") == []


def test_misuse_is_named(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"training_info\['s'\] cannot be saved"):
        manager.init_tmp_checkpoint(1, {"s": {1, 2}})
    with pytest.raises(CheckpointError, match="must not be negative"):
        manager.init_tmp_checkpoint(-1, {})
    with pytest.raises(CheckpointError, match="not made by init_tmp_checkpoint"):
        manager.finalize_checkpoint(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="is gone"):
        manager.finalize_checkpoint(tmp_path / "tmp_step_1")
    with pytest.raises(CheckpointError, match="does not exist"):
        manager.verify(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="does not exist"):
        manager.load_training_info(tmp_path / "step_1")
    with pytest.raises(ConfigError, match="checkpoint_dir must name a folder"):
        CheckpointManager(CheckpointingConfig())
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        CheckpointingConfig(checkpoint_must_save_by="3h")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*; check that"):
        manager_in(tmp_path / "file").init_tmp_checkpoint(1, {})


# Ranking and pruning


def test_the_best_and_the_newest_stay(tmp_path: Path) -> None:
    manager = manager_in(tmp_path, metric_name="val:acc", keep_top_k=2)
    for step, accuracy in enumerate([0.1, 0.9, 0.5, 0.9, 0.2], start=1):
        save(manager, step, **{"val:acc": accuracy})
    assert steps_in(tmp_path) == ["step_2", "step_4", "step_5"]
    assert manager.get_best_checkpoint_path() == tmp_path / "step_4"
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_5"
    assert manager.remove_old_checkpoints(exclude_latest=False) == [tmp_path / "step_5"]


def test_lower_can_be_better_and_a_missing_metric_ranks_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_in(tmp_path, metric_name="loss", higher_is_better=False)
    save(manager, 1, loss=0.5)
    save(manager, 2, loss=0.7)
    with caplog.at_level(logging.WARNING):
        save(manager, 3, loss=None)
        assert not caplog.text, "it was not measured, and that is no mistake"
        save(manager, 3)
        assert "step 3 lacks its ranking metric 'loss'" in caplog.text
        caplog.clear()
        save(manager, 4, loss=math.nan)
        assert manager.get_best_checkpoint_path() == tmp_path / "step_1"
        assert not caplog.text, "it is said once"
        fresh = manager_in(tmp_path, metric_name="unknown")
        assert fresh.get_best_checkpoint_path() == tmp_path / "step_4"
        assert "no checkpoint in" in caplog.text


@pytest.mark.parametrize("value", [math.nan, None, True, "0.5"])
def test_what_is_no_number_ranks_nothing(value: Any) -> None:
    assert metric_of({"loss": value}, "loss") is None
    assert metric_of({"loss": 1}, "loss") == 1.0


metrics_by_step = st.dictionaries(
    st.integers(0, 50), st.none() | st.floats(-1, 1), min_size=1
)


@settings(max_examples=50, deadline=None)
@given(metrics_by_step, st.booleans())
def test_ranking_is_by_metric_then_newest(
    metrics: dict[int, float | None], higher: bool
) -> None:
    order = rank(metrics, higher_is_better=higher)
    assert sorted(order) == sorted(metrics)
    for a, b in itertools.pairwise(order):
        first, second = metrics[a], metrics[b]
        if first is None:
            assert second is None
        elif second is not None:
            assert first >= second if higher else first <= second
        if first == second:
            assert a > b


@settings(max_examples=50, deadline=None)
@given(metrics_by_step, st.integers(1, 4), st.integers(1, 3))
def test_the_best_and_the_newest_are_always_kept(
    metrics: dict[int, float | None], top: int, latest: int
) -> None:
    kept = steps_to_keep(
        metrics, keep_top_k=top, keep_latest_k=latest, higher_is_better=True
    )
    assert rank(metrics, higher_is_better=True)[0] in kept
    assert max(metrics) in kept
    assert len(kept) <= top + latest
    newest = steps_to_keep(
        metrics, keep_top_k=None, keep_latest_k=latest, higher_is_better=True
    )
    assert newest == set(sorted(metrics)[-latest:])
    one_newest = steps_to_keep(
        metrics, keep_top_k=top, keep_latest_k=None, higher_is_better=True
    )
    assert one_newest == {
        *rank(metrics, higher_is_better=True)[:top],
        max(metrics),
    }
    everything = steps_to_keep(
        metrics, keep_top_k=None, keep_latest_k=None, higher_is_better=True
    )
    assert everything == set(metrics)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [1, 2, 3, 4]),
        ({"keep_latest_k": 2}, [3, 4]),
        ({"keep_top_k": 1}, [2, 4]),
        ({"keep_top_k": 1, "keep_latest_k": 2}, [2, 3, 4]),
    ],
)
def test_what_stays_by_the_settings(
    tmp_path: Path, settings: dict[str, int], kept: list[int]
) -> None:
    manager = manager_in(tmp_path, metric_name="acc", **settings)
    for step, accuracy in enumerate([0.1, 0.9, 0.5, 0.2], start=1):
        save(manager, step, acc=accuracy)
    assert list(manager.list_checkpoints()) == kept
    # Without a limit on best checkpoints, nothing is removed for not being among them.
    if "keep_top_k" not in settings:
        assert manager.remove_old_checkpoints(exclude_latest=False) == []


def test_only_whole_steps_are_listed_and_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_in(tmp_path)
    for step in (0, 6, 8):
        save(manager, step)
    (tmp_path / "step_007").mkdir()
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_٣").mkdir()  # a digit, but not an ASCII one
    (tmp_path / "step_10").write_text("a file")
    (tmp_path / "step_8" / "manifest.json").unlink()
    assert manager.list_checkpoints() == {
        0: tmp_path / "step_0",
        6: tmp_path / "step_6",
    }
    assert "step_8 is incomplete: it has no manifest.json" in caplog.text
    assert manager.get_latest_checkpoint_path() == tmp_path / "step_6"
    for name in ("step_8", "step_9", "step_007"):
        with pytest.raises(CheckpointError, match=f"{name} is incomplete"):
            manager.load_training_info(tmp_path / name)
    (tmp_path / "step_6" / "policy" / "weights" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"model\.bin is missing"):
        manager.load_training_info(tmp_path / "step_6")
    # An empty folder with another name is not a leftover.
    save(manager, 7)
    assert "step_007" in steps_in(tmp_path)


# In the background


def test_finalization_in_the_background(tmp_path: Path) -> None:
    release = threading.Event()
    with manager_in(tmp_path) as manager:
        first = manager.init_tmp_checkpoint(1, {})
        manager.begin_finalization(first, lambda: release.wait(30))
        assert manager.has_pending_finalization
        assert manager.get_latest_checkpoint_path() is None
        second = manager.init_tmp_checkpoint(2, {})  # does not touch the pending one
        with pytest.raises(DeadlineExceededError, match="pending checkpoint"):
            manager.finalize_pending(deadline_s=0.01)
        release.set()
        assert manager.finalize_pending() == tmp_path / "step_1"
        assert manager.finalize_pending() is None
        manager.begin_finalization(second)
    assert steps_in(tmp_path) == ["step_1", "step_2"]
    assert not manager.has_pending_finalization


def test_a_failure_in_the_background_is_raised_once(tmp_path: Path) -> None:
    manager = manager_in(tmp_path)
    path = manager.init_tmp_checkpoint(1, {})

    def fail() -> None:
        raise OSError(28, os.strerror(28))

    manager.begin_finalization(path, fail)
    with pytest.raises(CheckpointError, match="the disk or quota is full"):
        manager.finalize_pending()
    assert steps_in(tmp_path) == []
    manager.shutdown()


def test_the_error_of_a_block_outlives_that_of_a_pending_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(failure: BaseException | None) -> None:
        with manager_in(tmp_path) as manager:
            path = manager.init_tmp_checkpoint(1, {})

            def fail() -> None:
                raise OSError(28, os.strerror(28))

            manager.begin_finalization(path, fail)
            if failure is not None:
                raise failure

    for failure in (ZeroDivisionError("step 3 diverged"), KeyboardInterrupt()):
        caplog.clear()
        with pytest.raises(type(failure)) as caught:
            train(failure)
        assert caught.value is failure
        assert "the disk or quota is full" in caplog.text
        (note,) = caught.value.__notes__
        assert "the disk or quota is full" in note
    with pytest.raises(CheckpointError, match="the disk or quota is full"):
        train(None)
    # However it ended, the next one may write.
    save(manager_in(tmp_path), 2)
