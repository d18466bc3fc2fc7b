from __future__ import annotations

import itertools
import stat
from pathlib import Path

import pytest

from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles, rollout_parts

SMALL = 1 << 13


def fill(files: RolloutFiles, steps: range, text: str = "x" * 100) -> None:
    for step in steps:
        files.add(step, [{"response": text}, {"response": text}])


def steps_of(files: RolloutFiles) -> list[int]:
    return [record["step"] for record in files.read()]


def test_parts_follow_each_other(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, 1 << 30)
    fill(files, range(1, 4))
    assert [path.name for path in rollout_parts(tmp_path)] == ["part-00000.jsonl"]
    assert steps_of(files) == [1, 1, 2, 2, 3, 3]
    (path,) = rollout_parts(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().startswith(b'{"step":1,')


def test_the_disk_is_bounded_and_all_of_the_run_is_shown(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, SMALL)
    fill(files, range(1, 1001))
    size = sum(path.stat().st_size for path in rollout_parts(tmp_path))
    assert size <= SMALL + 1000  # the last write may exceed the size of a part
    found = sorted(set(steps_of(files)))
    assert (found[0], found[-1]) == (1, 1000)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert max(gaps) < 500


def test_every_cut_of_a_file_can_be_gone_on_with(tmp_path: Path) -> None:
    fill(RolloutFiles(tmp_path, SMALL), range(1, 4), "x")
    (path,) = rollout_parts(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        files = RolloutFiles(tmp_path, SMALL)
        before = steps_of(files)
        files.add(9, [{"response": "y"}])
        assert steps_of(files) == [*before, 9]


@pytest.mark.parametrize("step", [0, 1, 77, 200])
def test_later_steps_are_cut_off(tmp_path: Path, step: int) -> None:
    files = RolloutFiles(tmp_path, 1 << 16)
    fill(files, range(1, 201))
    before = steps_of(files)
    RolloutFiles(tmp_path, 1 << 16).resume_at(step)
    assert steps_of(files) == [found for found in before if found <= step]
    fill(files, range(step + 1, step + 2))
    assert steps_of(files)[-2:] == [step + 1] * 2


def test_nothing_is_made_where_nothing_is_kept(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, SMALL)
    files.add(1, [])
    files.resume_at(0)
    assert list(tmp_path.iterdir()) == []
