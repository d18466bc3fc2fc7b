"""What is recorded of a run's training, without a run."""

from __future__ import annotations

import threading

import pytest
import torch

from rl_algorithms.errors import ColumnError
from rl_algorithms.trainers.recording import recorder as module
from rl_algorithms.trainers.recording.columns import split_columns
from rl_algorithms.trainers.recording.recorder import TrainingRecorder
from rl_algorithms.trainers.recording.recording import Recording


def recorded(folder):
    """Return a started recorder."""
    recorder = TrainingRecorder(folder, is_on=True)
    facts = {
        "algorithm": "grpo",
        "trainer": "x",
        "given": [],
        "versions": {},
        "hidden": [],
    }
    recorder.begin(0, {**facts, "config": {}})
    return recorder


def call(recorder, step, value, model="policy"):
    rows = {"input_ids": torch.full((2, 3), value), "names": ["a", "b"]}
    output = {"loss": torch.tensor([0.1 * step]), "grad_norm": torch.tensor([0.5])}
    recorder.add_call(step, model, recorder.copied(rows), 2, output)
    rows["input_ids"].zero_()


class TestRecorder:
    def test_writes_rows_as_they_were_at_the_call(self, tmp_path):
        recorder = recorded(tmp_path)
        for step in (1, 2):
            call(recorder, step, step)
            call(recorder, step, 10 * step, model="critic")
            recorder.end_step(step, step)
        recorder.close()
        recording = Recording.read(tmp_path)
        assert recording.models == {"policy", "critic"}
        step = recording.steps[2]
        assert [c.model for c in step.calls] == ["policy", "critic"]
        rows = recording.rows(step.calls[1])
        assert list(rows) == ["input_ids", "names"]
        assert rows["input_ids"].tolist() == [[20] * 3] * 2
        assert rows["names"] == ["a", "b"]
        assert recording.changed_columns(step.calls[1], rows) == []
        rows["names"] = ["a", "c"]
        assert recording.changed_columns(step.calls[1], rows) == ["names"]
        # As numbers in the run's own precision.
        loss = float(torch.tensor(0.2))
        assert step.calls[0].values == {"loss": [loss], "grad_norm": [0.5]}

    def test_cuts_off_repeated_steps(self, tmp_path):
        recorder = recorded(tmp_path)
        for step in (1, 2, 3):
            call(recorder, step, step)
            recorder.end_step(step, step)
        call(recorder, 4, 4)  # a step that did not complete
        recorder.resume_at(2)
        names = {path.name for path in (tmp_path / "recording").iterdir()}
        assert names == {
            "steps.jsonl",
            "step_000001-0-policy.safetensors",
            "step_000002-0-policy.safetensors",
        }
        call(recorder, 3, 30)
        recorder.end_step(3, 3)
        recorder.close()
        recording = Recording.read(tmp_path)
        assert list(recording.steps) == [1, 2, 3]
        rows = recording.rows(recording.steps[3].calls[0])
        assert rows["input_ids"].unique().tolist() == [30]
        # A run that no longer records removes the steps that it repeats.
        TrainingRecorder(tmp_path, is_on=False).begin(1, {})
        assert list(Recording.read(tmp_path).steps) == [1]

    def test_a_write_error_ends_the_recording_but_not_the_run(self, tmp_path, caplog):
        recorder = recorded(tmp_path)
        call(recorder, 1, 1)
        recorder.end_step(1, 1)
        recorder.flush()
        (tmp_path / "recording" / "step_000002-0-policy.safetensors").mkdir()
        call(recorder, 2, 2)
        recorder.end_step(2, 2)
        recorder.flush()
        assert not recorder.is_on
        assert "the recording of training rows ends here" in caplog.text
        call(recorder, 3, 3)
        recorder.end_step(3, 3)
        recorder.close()
        assert list(Recording.read(tmp_path).steps) == [1]

    def test_memory_is_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "_MAX_WAITING_BYTES", 100)
        may_write, began = threading.Event(), threading.Event()
        write = module.write_bytes_durably

        def slow(path, data):
            began.set()
            assert may_write.wait(60)
            write(path, data)

        recorder = recorded(tmp_path)
        recorder.flush()
        monkeypatch.setattr(module, "write_bytes_durably", slow)
        call(recorder, 1, 1)  # 48 bytes
        assert began.wait(60)
        call(recorder, 1, 2)
        third = threading.Thread(target=call, args=(recorder, 1, 3))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        may_write.set()
        third.join(60)
        assert not third.is_alive()
        recorder.end_step(1, 1)
        recorder.close()
        assert len(Recording.read(tmp_path).steps[1].calls) == 3


@pytest.mark.parametrize("values", [[object(), 1], [(1, 2), (3,)], [{1: 2}, {}]])
def test_a_column_that_json_cannot_hold_is_refused(values):
    with pytest.raises(ColumnError, match="column 'notes' of the training rows"):
        split_columns({"notes": values})
