"""`rl diff`: where two runs start to differ."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_cli.main import _run
from rl_cli.run_diff.difference import Rules
from rl_cli.run_diff.row_comparison import _first_row
from rl_distributed.checkpoint.manifest import write_manifest
from rl_models.checkpoint.comparison import compare_tensors
from rl_models.checkpoint.sharded import Box, Shard, write_shards, write_state

Capture = pytest.CaptureFixture[str]
Diff = Callable[..., tuple[int, dict[str, Any]]]
STATE, WEIGHTS = "policy/optimizer", "policy/weights/model.safetensors"


def answers() -> list[dict[str, Any]]:
    return [
        {"step": step, "reward": 0.5, "group": row // 2, "prompt": f"p{row}",
         "response": "abc", "versions": [[step - 1, 3]], "tokens": ["a", "b", "c"],
         "logprobs": [-0.1, -0.2, -0.3], "length": 3}
        for step in (1, 2, 3) for row in range(4)
    ]  # fmt: skip


def write_checkpoint(folder: Path, value: float, num_ranks: int = 1) -> None:
    rows = 4 // num_ranks
    for rank in range(num_ranks):
        box = Box((4, 2), (rank * rows, 0), (rows, 2))
        part = torch.full((rows, 2), value)
        shards = {"parameter/w": Shard(part, box),
                  "optimizer/w/exp_avg": Shard(torch.zeros(rows, 2), box)}  # fmt: skip
        write_shards(folder / STATE, shards, rank, num_ranks)
    write_state(folder / STATE, {"step": 10}, num_ranks)
    (folder / WEIGHTS).parent.mkdir(parents=True)
    save_file({"b": torch.ones(3), "w": torch.full((4, 2), value)}, folder / WEIGHTS)
    info = {"step": 10, "train:loss": 0.5, "timing:total_step_time": os.urandom(1)[0]}
    (folder / "training_info.json").write_text(json.dumps(info))
    write_manifest(folder)


@pytest.fixture
def runs(make_run: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that did the same at different times."""
    logs = [{"time": "1", "level": "INFO", "logger": "rl_algorithms.data.module",
             "message": "data source: num_rows 7, fingerprint 12ab"}]  # fmt: skip
    found = [make_run(name, rollouts=answers(), logs=logs) for name in ("a", "b")]
    for folder in found:
        write_checkpoint(folder / "checkpoints" / "step_10", 1.0)
    rewrite(found[1] / "metrics.jsonl", later)
    return found[0], found[1]


def later(record: dict[str, Any]) -> None:
    if "metrics" in record:
        record["time"] += 1e5
        record["metrics"]["timing:generation"] += 1.0


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def at_step(step: int, change: Callable[[dict[str, Any]], None]) -> Any:
    return lambda record: change(record) if record.get("step") == step else None


@pytest.fixture
def diff(runs: tuple[Path, Path], capsys: Capture) -> Diff:
    def compare(*options: str) -> tuple[int, dict[str, Any]]:
        code = _run(["diff", *map(str, runs), "--json", *options], False)
        return code, json.loads(capsys.readouterr().out)

    return compare


def part(found: Mapping[str, Any], name: str, place: int = -1) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [p for p in found["parts"] if p["name"] == name]
    return parts[place]


def first_of(found: Mapping[str, Any]) -> tuple[str, int, str]:
    first = found["first"]
    return first["part"], first["step"], first["what"]


def test_equal_runs_are_the_same_whatever_time_they_took(diff: Diff) -> None:
    code, found = diff()
    assert (code, found["same"], found["first"]) == (0, True, None)
    assert part(found, "metrics")["left_out"] == ["timing:* (4)"]
    verdicts = {p["name"]: p["verdict"] for p in found["parts"]}
    assert verdicts.pop("events") == "not compared"
    assert verdicts.pop("rows") == "not compared"
    assert set(verdicts.values()) == {"same"}
    assert len(verdicts) == 7


def test_a_copy_that_was_moved_is_the_same(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    def own(record: dict[str, Any]) -> None:
        if "hyperparams" in record:
            record["hyperparams"]["output_dir"] = str(runs[0])
            record["hyperparams"]["model"] = f"{runs[0]}/model"

    rewrite(runs[0] / "metrics.jsonl", own)
    moved = shutil.copytree(runs[0], tmp_path / "elsewhere" / ("copy" * 20))

    def moved_too(record: dict[str, Any]) -> None:
        if "hyperparams" in record:
            record["hyperparams"]["output_dir"] = str(moved)
            record["hyperparams"]["model"] = f"{moved}/model"

    rewrite(moved / "metrics.jsonl", moved_too)
    assert _run(["diff", str(runs[0]), str(moved)], False) == 0
    shown = capsys.readouterr().out
    assert "The runs are the same in everything compared." in shown


def test_keys_that_differ_are_named_with_both_values(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    def change(record: dict[str, Any]) -> None:
        if "hyperparams" in record:
            record["hyperparams"]["mismatch"]["limit"] = 2.0
            del record["hyperparams"]["seed"]
        if "hyperparams" in record:
            record["hyperparams"]["prompt"] = "x" * 500 + "y"

    def longer(record: dict[str, Any]) -> None:
        if "hyperparams" in record:
            record["hyperparams"]["prompt"] = "x" * 501

    rewrite(runs[0] / "metrics.jsonl", longer)
    rewrite(runs[1] / "metrics.jsonl", change)
    record = json.loads((runs[1] / "run.json").read_text())
    record["versions"]["torch"] = "2.0"
    (runs[1] / "run.json").write_text(json.dumps(record))
    code, found = diff()
    assert code == 1
    assert found["first"] is None
    keys = part(found, "configuration")["differences"]
    assert [(d["what"], d["first"], d["second"]) for d in keys[:2]] == [
        ("seed", "3", None),
        ("mismatch.limit", "1.0", "2.0"),
    ]
    assert [d["what"] for d in keys[2:]] == ["prompt"]
    (version,) = part(found, "environment")["differences"]
    assert (version["what"], version["second"]) == ("versions.torch", "2.0")
    ignored = ("seed", "mismatch", "versions.t*", "prompt")
    code, found = diff(*(x for key in ignored for x in ("--ignore", key)))
    assert (code, part(found, "configuration")["left_out"]) == (
        0,
        ["seed", "mismatch.statistic", "mismatch.limit", "prompt"],
    )


def test_the_data_differ_by_their_fingerprint(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    path = runs[1] / "logs" / "run.jsonl"
    path.write_text(path.read_text().replace("12ab", "34cd"))
    code, found = diff()
    assert code == 1
    (record,) = part(found, "data")["differences"]
    assert "12ab" in record["first"]
    assert "34cd" in record["second"]


def test_the_first_metric_that_differs_is_named_with_its_step(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    def change(record: dict[str, Any]) -> None:
        if record.get("step", 0) >= 7:
            record["metrics"]["train:loss"] += 1e-6
        if record.get("step", 0) >= 9:
            record["metrics"]["train:reward"] = 0.0

    rewrite(runs[1] / "metrics.jsonl", change)
    code, found = diff()
    assert (code, first_of(found)) == (1, ("metrics", 7, "train:loss"))
    assert found["first"]["first"] == 1 / 7
    assert part(found, "metrics")["num_different"] == 2
    code, found = diff("--tolerance", "1e-5")
    assert (code, first_of(found)) == (1, ("metrics", 9, "train:reward"))
    assert diff("--tolerance", "1e-5", "--ignore", "train:reward")[0] == 0
    assert diff("--skip", "metrics")[0] == 0


@pytest.mark.parametrize("value", ["nan", None])
def test_a_value_that_is_not_finite_or_missing_differs(
    runs: tuple[Path, Path], diff: Diff, value: str | None
) -> None:
    change = at_step(4, lambda r: r["metrics"].update({"train:loss": value}))
    rewrite(runs[1] / "metrics.jsonl", change)
    code, found = diff("--tolerance", "1e9")
    assert (code, first_of(found)) == (1, ("metrics", 4, "train:loss"))


def test_the_first_token_that_differs_is_named(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    def change(record: dict[str, Any]) -> None:
        if record["step"] >= 2 and record["prompt"] == "p3":
            record["tokens"][1], record["response"] = "x", "axc"

    rewrite(runs[1] / "rollouts" / "part-00000.jsonl", change)
    # The answers of a step precede its metrics.
    rewrite(runs[1] / "metrics.jsonl",
            at_step(2, lambda r: r["metrics"].update({"train:loss": 9})))  # fmt: skip
    code, found = diff()
    assert code == 1
    assert first_of(found) == ("answers", 2, "token 1 of training answer 3 (group 1)")
    first = found["first"]
    assert (first["first"], first["second"]) == ("b", "x")
    assert first["details"]["versions"] == [[[1, 3]], [[1, 3]]]
    assert first["details"]["seeds"] == [3, 3]


def test_steps_that_one_run_has_thinned_out_are_passed_over(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    for run, step in zip(runs, (1, 2), strict=True):
        path = run / "rollouts" / "part-00000.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if json.loads(x)["step"] != step))
    code, found = diff()
    assert (code, part(found, "answers")["compared"]) == (0, "4 answers of 1 step")


def event(kind: str, at_s: float, **fields: Any) -> dict[str, Any]:
    actions = [{"type": "Train", "step": fields["task"]}] if "task" in fields else []
    return {"event": {"type": kind, "at_s": at_s, **fields}, "actions": actions}


def test_the_first_event_that_differs_is_named(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    for place, run in enumerate(runs):
        path = run / "asynchronous" / "events_000000.jsonl"
        path.parent.mkdir()
        events = [
            {"settings": {}, "state": None},
            event("Begin", place),
            event("Scored", place, task=2),
            event("Answered", place, worker=0),
        ]
        path.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert diff()[0] == 0
    rewrite(path, lambda r: r.get("event", {}).update(worker=1)
            if r.get("event", {}).get("type") == "Answered" else None)  # fmt: skip
    code, found = diff()
    what = "event 3 of events_000000.jsonl"
    assert (code, first_of(found)) == (1, ("events", 2, what))
    assert found["first"]["first"]["worker"] == 0


def test_the_first_tensor_that_differs_is_named(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    file = runs[1] / "checkpoints" / "step_10" / WEIGHTS
    tensors = load_file(file)
    tensors["w"][3, 1] += 0.25
    # Its manifest no longer matches, which must not hide the change.
    save_file(tensors, file)
    code, found = diff()
    assert (code, first_of(found)) == (
        1,
        ("checkpoints", 10, "tensor w of policy/weights"),
    )
    details = found["first"]["details"]
    assert (details["num_elements"], details["largest_difference"]) == (1, 0.25)
    assert (details["num_tensors"], details["num_all_tensors"]) == (1, 2)
    assert diff("--tolerance", "0.3")[0] == 0


def test_training_state_and_its_values_are_compared(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    folder = runs[1] / "checkpoints" / "step_10"
    shutil.rmtree(folder)
    write_checkpoint(folder, 1.0)
    box = Box.whole((4, 2))
    shards = {"parameter/w": Shard(torch.ones(4, 2), box),
              "optimizer/w/exp_avg": Shard(torch.full((4, 2), 2.0), box)}  # fmt: skip
    write_shards(folder / STATE, shards, 0, 1)
    write_state(folder / STATE, {"step": 11}, 1)
    write_manifest(folder)
    code, found = diff()
    assert code == 1
    named = [d["what"] for d in part(found, "checkpoints")["differences"]]
    assert named == [
        "tensor optimizer/w/exp_avg (rank_00000_of_00001) of policy/optimizer",
        "state.step of policy/optimizer/state.json",
    ]


def test_states_of_other_layouts_are_compared_as_a_whole(tmp_path: Path) -> None:
    for name, value, num_ranks in (("a", 1.0, 1), ("b", 1.0, 2), ("c", 3.0, 2)):
        write_checkpoint(tmp_path / name, value, num_ranks)
    a, b, c = (tmp_path / name / STATE for name in "abc")
    assert compare_tensors(a, b).differences == ()
    (found,) = compare_tensors(a, c).differences
    assert (found.name, found.num_elements, found.largest) == ("parameter/w", 8, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_are_compared_by_their_bytes(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of two rows, so that a tensor has several.
    monkeypatch.setattr("rl_models.checkpoint.comparison._BLOCK", 6)
    values = torch.arange(15).reshape(5, 3).to(dtype)
    other = values.clone()
    other[4, 2] += 1
    other[1, 0] -= 2
    for name, tensor in (("a", values), ("b", other), ("c", values)):
        (tmp_path / name).mkdir()
        tensors = {"scalar": torch.tensor(1).to(dtype), "w": tensor}
        save_file(tensors, tmp_path / name / "model.safetensors")
    a, b, c = (tmp_path / name for name in "abc")
    assert compare_tensors(a, c).differences == ()
    (found,) = compare_tensors(a, b).differences
    assert (found.name, found.num_elements, found.largest) == ("w", 2, 2.0)
    save_file({"w": values.double(), "more": values}, c / "model.safetensors")
    named = {d.name: (d.first, d.second) for d in compare_tensors(a, c).differences}
    assert named["more"] == ("absent", "present")
    assert named["scalar"] == ("present", "absent")
    assert named["w"][1] == "F64 [5, 3]"


def test_a_nan_on_both_sides_is_the_same_and_on_one_is_not(tmp_path: Path) -> None:
    nan, one = torch.tensor([1.0, torch.nan]), torch.ones(2)
    for name, tensor in (("a", nan), ("b", nan), ("c", one)):
        (tmp_path / name).mkdir()
        save_file({"w": tensor}, tmp_path / name / "model.safetensors")
    a, b, c = (tmp_path / name for name in "abc")
    assert compare_tensors(a, b).differences == ()
    (found,) = compare_tensors(a, c, tolerance=1e9).differences
    assert (found.num_elements, found.largest) == (1, float("inf"))


def test_checkpoints_that_are_incomplete_in_both_count_as_not_compared(
    runs: tuple[Path, Path], diff: Diff
) -> None:
    places = [run / "checkpoints" / "step_10" / "manifest.json" for run in runs]
    places[0].unlink()
    code, found = diff()
    assert (code, first_of(found)[2]) == (1, "state of the checkpoint")
    places[1].unlink()
    code, found = diff()
    assert (code, part(found, "checkpoints")["verdict"]) == (0, "not compared")


def test_a_run_cut_short_differs_by_its_end_alone(
    runs: tuple[Path, Path], diff: Diff, capsys: Capture
) -> None:
    path = runs[1] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # Killed in step 12: its last line is torn, and step 11 has only one metric.
    last = {"step": 11, "time": 1.0, "metrics": {"train:reward": 11 / 20}}
    torn = lines[12][:40]
    path.write_text("".join(lines[:11]) + json.dumps(last) + "\n" + torn)
    (runs[1] / "result.json").unlink()
    code, found = diff()
    assert (code, first_of(found)) == (1, ("length", 12, "end of the run"))
    assert found["first"]["second"] == "11 steps (interrupted)"
    assert {p["name"] for p in found["parts"] if p["differences"]} == {"length"}
    assert _run(["diff", *map(str, runs)], False) == 1
    shown = capsys.readouterr().out.splitlines()
    assert any("The runs part at step 12" in line for line in shown)
    names = [str(run) for run in runs]
    assert all(len(x) <= 80 for x in shown if not any(n in x for n in names))


def test_what_is_no_pair_of_runs_is_refused(
    runs: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    assert _run(["diff", str(runs[0]), str(tmp_path)], False) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert _run(["diff", str(runs[0]), str(runs[0])], False) == 2
    assert "must be different folders" in capsys.readouterr().err
    assert _run(["diff", *map(str, runs), "--tolerance", "-1"], False) == 2
    assert "at least 0" in capsys.readouterr().err


def test_torch_is_imported_for_tensors_only(runs: tuple[Path, Path]) -> None:
    program = (
        "import sys\nfrom rl_cli.main import _run\n"
        "code = _run(['diff', *sys.argv[1:]], False)\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, runs), "--skip", "checkpoints"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    ("shape", "place", "where"),
    [
        ((2,), (1,), ", row 1"),
        ((2, 3), (1, 2), ", row 1, token 2"),
        ((2, 3, 4), (1, 2, 1), ", row 1, token 2, number 1"),
    ],
)
def test_the_place_in_a_column_of_rows(
    shape: tuple[int, ...], place: tuple[int, ...], where: str
) -> None:
    first = torch.zeros(shape)
    second = first.clone()
    second[place] = 5.0
    found = _first_row(first, second, Rules())
    assert found is not None
    assert found[:2] == (where, (0.0, 5.0))
