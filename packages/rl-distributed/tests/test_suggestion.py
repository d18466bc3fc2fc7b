"""The closest correct name for keys and files."""

from pathlib import Path

import pytest

from rl_distributed.suggestion import did_you_mean, did_you_mean_file


def test_the_nearest_name_is_suggested() -> None:
    assert did_you_mean("seeed", ["seed", "steps"]) == "; did you mean 'seed'?"
    assert did_you_mean("max-steps", ["max_steps"]) == "; did you mean 'max_steps'?"
    assert did_you_mean("banana", ["seed"]) == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("rewrd.py", "reward.py"),
        ("run.yml", "run.yaml"),
        ("rowz.jsonl", "rows.jsonl"),
        # Of two suffixes, the one that was typed.
        ("row.json", "rows.json"),
        # A suffix alone makes no file close.
        ("gone.py", None),
        ("gone/reward.py", None),
    ],
)
def test_the_nearest_file_is_suggested(
    given: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reward.py", "run.yaml", "rows.jsonl", "rows.json", "a.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    said = "" if meant is None else f"; did you mean {meant!r}?"
    assert did_you_mean_file(given) == said
    below = "" if meant is None else f"; did you mean {str(tmp_path / meant)!r}?"
    assert did_you_mean_file(tmp_path / given) == below
