"""`TrainingRecorder`: writes what each step trains on, so that it can be replayed.

```
recording/steps.jsonl                        a line per start of the run and per step
          step_000012-0-answers.safetensors  order, versions and rewards of answers
          step_000012-1-policy.safetensors   rows of one training call
```

| part   | consumes | produces           | waits for            | unblocked by |
|--------|----------|--------------------|----------------------|--------------|
| step   | rows     | copies, in a queue | room in the queue    | a deadline   |
| writer | copies   | files, then a line | copies               | `close`      |
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from rl_algorithms.trainers.recording.columns import describe, split_columns
from rl_algorithms.trainers.recording.folder import RECORDING, STEPS
from rl_distributed.checkpoint.storage import write_bytes_durably
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics.sinks.jsonl import json_line, read_records
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["TrainingRecorder", "output_values"]

_logger = get_logger(__name__)

_FILE = re.compile(r"step_(\d+)-.*\.safetensors")
# Rows of a step that wait to be written; a step with more waits for itself alone.
_MAX_WAITING_BYTES = 256 << 20
_DEADLINE_S = 600.0
_OF_ANSWERS = (
    "group_index",
    "weight_version",
    "outcome",
    "rewards",
    "generation_lengths",
)


class TrainingRecorder:
    """Writes the rows of every training call, and a line per step.

    Rows are copied by the caller and written by a thread. A write error ends the
    recording with a warning, but not the run.

    Args:
        run_dir: The run folder.
        is_on: Whether to record; otherwise only an old recording is cut off.
    """

    def __init__(self, run_dir: Path, *, is_on: bool) -> None:
        self.folder = run_dir / RECORDING
        self.is_on = is_on
        self._calls: list[dict[str, Any]] = []
        self._num_files = 0
        self._changed = threading.Condition()
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closed = False
        self._thread: threading.Thread | None = None

    # In the thread of the steps ---------------------------------------------------

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write how a process begins; later steps of an earlier one are removed.

        Args:
            step: Number of completed steps.
            facts: What a replay needs to know of the trainer.
        """
        self.resume_at(step)
        if self.is_on:
            self._put(0, lambda: self._append({"start": {"step": step, **facts}}))

    def note_answers(self, step: int, rows: Mapping[str, Any]) -> None:
        """Record in which order answers came, and of which versions and rewards.

        Args:
            step: Number of the step, from 1.
            rows: Columns of `RolloutResult.rows`.
        """
        if self.is_on:
            kept = {name: rows[name] for name in _OF_ANSWERS if name in rows}
            self._add(step, "answers", *self.copied(kept), {})

    def copied(
        self, rows: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return copies of the columns: a trainer may change its own at any time.

        Raises:
            ColumnError: A column cannot be recorded.
        """
        tensors, lists = split_columns(rows)
        copies = {
            name: value.detach().to("cpu", copy=True).contiguous()
            for name, value in tensors.items()
        }
        return copies, lists

    def add_call(
        self,
        step: int,
        model: str,
        copies: tuple[dict[str, Tensor], dict[str, str]],
        global_batch_size: int,
        output: Mapping[str, Any],
    ) -> None:
        """Record a training call that has returned.

        Args:
            step: Number of the step, from 1.
            model: Name of the component that was trained.
            copies: What `copied` returned of the rows before the call.
            global_batch_size: Number of rows per optimizer step.
            output: Result of `PolicyInterface.train`.
        """
        facts = {"global_batch_size": global_batch_size, **output_values(output)}
        self._add(step, model, *copies, facts)

    def _add(
        self,
        step: int,
        model: str,
        tensors: dict[str, Tensor],
        lists: dict[str, str],
        facts: Mapping[str, Any],
    ) -> None:
        path = self.folder / f"step_{step:06d}-{self._num_files}-{model}.safetensors"
        self._num_files += 1
        call: dict[str, Any] = {"model": model, "file": path.name, **facts}
        self._calls.append(call)

        def write() -> None:
            # The writer comes to the line of the step later, when this is filled in.
            call["columns"] = describe(tensors, lists)
            write_bytes_durably(path, save(tensors, lists))

        self._put(sum(t.nbytes for t in tensors.values()), write)

    def end_step(self, step: int, weight_version: int) -> None:
        """Write the line of a completed step.

        Args:
            step: Its number, from 1.
            weight_version: Number of optimizer steps of the policy so far.
        """
        calls, self._calls, self._num_files = self._calls, [], 0
        if self.is_on:
            line = {"step": step, "weight_version": weight_version, "calls": calls}
            self._put(0, lambda: self._append(line))

    def resume_at(self, step: int) -> None:
        """Remove what was recorded of later steps, which will be repeated."""
        self.flush()
        self._calls, self._num_files = [], 0
        if not self.folder.is_dir():
            return
        steps = self.folder / STEPS
        if steps.is_file():
            kept = [r for r in read_records(steps) if _step_of(r) <= step]
            write_bytes_durably(steps, b"".join(map(json_line, kept)))
        for path in self.folder.iterdir():
            match = _FILE.fullmatch(path.name)
            if match is not None and int(match.group(1)) > step:
                path.unlink()

    def flush(self) -> None:
        """Wait until everything is written.

        Before a checkpoint: a run that resumes from it has recorded all its steps.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_idle, _DEADLINE_S):
                self._give_up(f"no write ended within {_DEADLINE_S:g} s")

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_DEADLINE_S)

    def _is_idle(self) -> bool:
        return not self._jobs and not self._is_writing

    def _put(self, num_bytes: int, job: Callable[[], None]) -> None:
        with self._changed:
            room = _MAX_WAITING_BYTES - num_bytes
            if not self._changed.wait_for(
                lambda: self._waiting_bytes <= max(room, 0), _DEADLINE_S
            ):
                self._give_up(f"no write ended within {_DEADLINE_S:g} s")
            if not self.is_on:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_jobs, name="recording", daemon=True
                )
                self._thread.start()
            self._waiting_bytes += num_bytes
            self._jobs.append((num_bytes, job))
            self._changed.notify_all()

    # In the writer's thread -------------------------------------------------------

    def _write_jobs(self) -> None:
        while True:
            with self._changed:
                # Without a deadline: `close` always ends it, and the run outlasts it.
                while not self._jobs and not self._is_closed:
                    self._changed.wait(_DEADLINE_S)
                if not self._jobs:
                    return
                num_bytes, job = self._jobs.popleft()
                self._is_writing = True
            try:
                create_private_folder(self.folder)
                job()
            except Exception as error:
                with self._changed:
                    self._give_up(str(error))
            finally:
                with self._changed:
                    self._is_writing = False
                    self._waiting_bytes -= num_bytes
                    self._changed.notify_all()

    def _append(self, record: Mapping[str, Any]) -> None:
        with open(self.folder / STEPS, "ab", opener=private_opener) as file:
            file.write(json_line(record))

    def _give_up(self, reason: str) -> None:
        """End the recording; the caller holds the lock."""
        if self.is_on:
            _logger.warning(
                "the recording of training rows ends here, because %s cannot be "
                "written: %s",
                self.folder,
                reason,
            )
        self.is_on = False
        self._waiting_bytes -= sum(num_bytes for num_bytes, _ in self._jobs)
        self._jobs.clear()
        self._changed.notify_all()


def output_values(output: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return loss, gradient norm and learning rate of each optimizer step of a call."""
    return {
        name: torch.as_tensor(output[name]).flatten().double().tolist()
        for name in ("loss", "grad_norm", "lr")
        if name in output
    }


def _step_of(record: Mapping[str, Any]) -> int:
    start = record.get("start")
    return int(record.get("step", 0) if start is None else start["step"])
