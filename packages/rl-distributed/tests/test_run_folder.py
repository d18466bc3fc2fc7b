"""When a run may start in a folder, what is removed, and what never is."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest

from rl_distributed.errors import ConfigError
from rl_distributed.file_lock import FolderLock
from rl_distributed.runs.folder import (
    begin_run,
    check_run_folder,
    has_progress,
    new_run_folder,
    own_run_folder,
    refuse_contradiction,
)


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def a_run(folder: Path, *files: str) -> None:
    with begin_run(folder):
        for name in files:
            write(folder / name)


def fail(folder: Path, written: str, error: Exception | None) -> None:
    with contextlib.suppress(ConfigError, RuntimeError), begin_run(folder):
        write(folder / written)
        if error is not None:
            raise error


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".run."))


@pytest.mark.parametrize(
    ("name", "progress"),
    [
        ("checkpoints/step_4/x", "newest checkpoint: step 4"),
        ("stages/a/checkpoints/step_12/x", "newest checkpoint: step 12"),
        ("stages/a.json", "it has a result"),
        ("result.json", "it has a result"),
        ("checkpoints/tmp_step_4/x", None),
        ("checkpoints/removed_step_4/x", None),
        ("logs/run.jsonl", None),
        ("metrics.jsonl", None),
        ("model/config.json", None),
    ],
)
def test_only_progress_keeps_a_new_run_out(
    tmp_path: Path, name: str, progress: str | None
) -> None:
    folder = tmp_path / "run"
    a_run(folder, name)
    assert has_progress(folder) == (progress is not None)
    if progress is None:
        with begin_run(folder):
            assert names(folder) == []
        return
    with pytest.raises(ConfigError) as caught:
        begin_run(folder)
    assert str(caught.value) == (
        f"output_dir {str(folder)!r} holds a run already ({progress}): go on with it "
        f"(--resume {folder}, in Python resume=True), start again and delete it "
        "(--overwrite, in Python overwrite=True), or name another folder"
    )
    assert (folder / name).exists()
    with begin_run(folder, overwrite=True):
        assert names(folder) == []


def test_what_lay_there_before_any_run_stays(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    write(tmp_path / "notes" / "a.txt")
    a_run(tmp_path, "checkpoints/step_1/x", "metrics.jsonl")
    with begin_run(tmp_path, overwrite=True):
        assert names(tmp_path) == ["notes", "rows.jsonl"]
        write(tmp_path / "checkpoints" / "step_1" / "x")
    with begin_run(tmp_path, overwrite=True):
        assert names(tmp_path) == ["notes", "rows.jsonl"]


@pytest.mark.parametrize("noted", [False, True])
def test_a_full_disk_at_the_start_costs_nobodys_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    folder = tmp_path / "run"
    write(folder / "thesis.txt")
    if noted:
        a_run(folder, "metrics.jsonl")

    with monkeypatch.context() as patched:
        # Files of this process cannot grow, as on a disk whose last block the note of
        # the lock has taken.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        patched.setattr(FolderLock, "acquire", lambda *_, **__: None)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            with pytest.raises(ConfigError, match="cannot be written"):
                begin_run(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
    for _ in range(2):
        a_run(folder, "metrics.jsonl")
        assert names(folder) == ["metrics.jsonl", "thesis.txt"]


def test_where_it_is_not_known_what_lay_there_before_nothing_is_removed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    write(folder / "thesis.txt")
    write(folder / ".run.started", "")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"\.run\.started is damaged"):
            begin_run(folder, overwrite=overwrite)
    assert names(folder) == ["thesis.txt"]


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere" / "x")
    folder = tmp_path / "run"
    a_run(folder, "checkpoints/step_1/x")
    (folder / "linked").symlink_to(elsewhere.parent)
    with begin_run(folder, overwrite=True):
        assert names(folder) == []
    assert elsewhere.exists()


@pytest.mark.parametrize("name", ["thesis.tex", "checkpoints/step_1/x"])
def test_a_folder_that_is_no_runs_is_never_overwritten(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(ConfigError, match=r"is no folder of a run.*nothing in it is"):
        begin_run(tmp_path, overwrite=True)
    assert names(tmp_path) == [name.partition("/")[0]]


def test_a_file_of_somebody_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"holds config.yaml, which no run has writ"):
        begin_run(tmp_path, writes=("config.yaml",))
    a_run(tmp_path)
    with pytest.raises(ConfigError, match=r"holds config.yaml, which no run has writ"):
        begin_run(tmp_path, writes=("config.yaml",))


def test_what_the_run_reads_is_not_deleted(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    model = tmp_path / "checkpoints" / "step_1" / "policy"
    a_run(tmp_path, "checkpoints/step_1/policy/x")
    config = {"policy": {"model_name": str(model)}, "output_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"policy.model_name names .* be deleted"):
        begin_run(tmp_path, overwrite=True, config=config)
    assert model.exists()
    kept = {
        "data": {"train": [str(tmp_path / "rows.jsonl")]},
        "logger": {"log_dir": str(tmp_path / "checkpoints")},
    }
    begin_run(tmp_path, overwrite=True, config=kept).release()


def test_one_that_is_carried_out_is_left_alone(tmp_path: Path) -> None:
    with begin_run(tmp_path / "run") as claim:
        write(claim.path / "checkpoints" / "step_1" / "x")
        for overwrite in (True, False):
            (claim.path / "checkpoints").rename(claim.path / "other")
            with pytest.raises(ConfigError, match=f"very process .{os.getpid()} on"):
                begin_run(claim.path, overwrite=overwrite)
            (claim.path / "other").rename(claim.path / "checkpoints")
        with pytest.raises(ConfigError, match="another process carries this run out"):
            own_run_folder(claim.path)
    own_run_folder(claim.path).release()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (ConfigError("no such column"), False),
        (ConfigError("see {folder}/logs/worker.log"), True),
        (RuntimeError("out of memory"), True),
        (None, True),
    ],
)
def test_a_mistake_before_any_progress_leaves_nothing(
    tmp_path: Path, error: Exception | None, stays: bool
) -> None:
    folder = tmp_path / "run"
    if error is not None:
        error = type(error)(str(error).format(folder=folder))
    fail(folder, "logs/run.jsonl", error)
    assert folder.exists() == stays
    fail(folder, "checkpoints/step_1/x", ConfigError("later"))
    assert has_progress(folder)


def test_a_mistake_leaves_what_lay_there_before(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    fail(tmp_path, "logs/x", ConfigError("wrong"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_new_folders_are_counted_up(tmp_path: Path) -> None:
    made = [new_run_folder(tmp_path / "runs", "dapo").name for _ in range(2)]
    assert made == ["dapo-001", "dapo-002"]
    (tmp_path / "runs" / "dapo-017").mkdir()
    (tmp_path / "runs" / "dapo-notes").mkdir()
    assert new_run_folder(tmp_path / "runs", "dapo").name == "dapo-018"


def test_a_file_or_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file")
    with pytest.raises(ConfigError, match="is a file"):
        begin_run(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        begin_run(tmp_path / "file" / "run")


def test_overwriting_needs_a_folder_and_no_resume(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "new", overwrite=True)
    refuse_contradiction(overwrite=True, resumes=False, output_dir=tmp_path)
    refuse_contradiction(overwrite=False, resumes=True, output_dir=None)
    with pytest.raises(ConfigError, match="give one of them"):
        refuse_contradiction(overwrite=True, resumes=True, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="output_dir=FOLDER"):
        refuse_contradiction(overwrite=True, resumes=False, output_dir=None)


def test_checkpoints_elsewhere_are_progress_too(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "disk" / "kept"
    config = {"checkpointing": {"checkpoint_dir": str(elsewhere)}}
    with begin_run(folder, config=config):
        assert not has_progress(folder)
    # It blocks nothing until a checkpoint exists.
    with begin_run(folder, config=config):
        (elsewhere / "tmp_step_8").mkdir()
        (elsewhere / "step_7").mkdir()
    (elsewhere / "notes.txt").touch()
    assert has_progress(folder)
    with pytest.raises(ConfigError, match="newest checkpoint: step 7"):
        begin_run(folder, config=config)
    # Even without the key: the existing run had it.
    with pytest.raises(ConfigError, match="newest checkpoint: step 7"):
        begin_run(folder)
    with begin_run(folder, overwrite=True):
        assert names(elsewhere) == ["notes.txt"]
    assert not has_progress(folder)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_run_keeps_off_the_checkpoints_of_another_folder(
    tmp_path: Path, overwrite: bool
) -> None:
    kept = tmp_path / "kept"
    config = {"stages": {"a": {"checkpointing": {"checkpoint_dir": str(kept)}}}}
    begin_run(tmp_path / "failed", config=config).release()
    with begin_run(tmp_path / "first", config=config):
        (kept / "step_3").mkdir()
    # A folder taken over by another run no longer belongs to the failed one.
    assert not has_progress(tmp_path / "failed")
    for name in ("failed", "second"):
        with pytest.raises(ConfigError) as caught:
            begin_run(tmp_path / name, overwrite=overwrite, config=config)
        assert str(caught.value) == (
            f"checkpointing.checkpoint_dir {str(kept)!r} holds checkpoints of another "
            "run (newest: step 3), among which those of a new run would lie: go on "
            "with that run, or name another folder"
        )
    assert (kept / "step_3").is_dir()
    assert has_progress(tmp_path / "first")
