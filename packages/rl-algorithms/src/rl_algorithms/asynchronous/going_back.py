"""Going back to a saved state while answers are in flight.

```
held groups ─> answers of versions that still exist ─> kept, in flight or finished
          └──> answers of versions that are gone ────> given up, sampled again
saved groups that are not held (trained on since) ───> restored
```
After the loss of a trainer at step n, its checkpoint has the weights after v <= n
steps. Versions up to v are those of both, so their answers are as good as before.
Versions above v will be published again, with other weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algorithms.asynchronous.actions import Cancel, Discard
from rl_algorithms.asynchronous.checkpoint_state import restore, saved_rows
from rl_algorithms.asynchronous.drops import release_group
from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.state import RunState

__all__ = ["go_back"]


def go_back(state: RunState, saved: Mapping[str, Any]) -> None:
    """Return to a saved state; keep what its weights and older ones have sampled.

    Args:
        state: The state after the loss of the trainer, without groups in training.
        saved: State of the checkpoint that the trainer has restored.
    """
    version = saved["step"]
    entries = {entry["prompt"]: entry for entry in saved["groups"]}
    held = {group.number: group for group in state.buffer}
    tasks = {id(task.answer): number for number, task in state.tasks.items()}
    for number, group in held.items():
        for answer in group.answers:
            task = tasks.get(id(answer))
            begun = _attempts(entries.get(number), answer.sample)
            if not _still_counts(state, answer, task, version, begun[0]):
                _give_up(state, answer, task)
                answer.seed_attempt = begun[0]
            # Attempts since the checkpoint are repeated, so they do not count.
            answer.failures = begun[1]
    state.buffer.clear()
    restore(state, saved, held)
    _keep_later(state, held)
    for group in held.values():
        release_group(state, group)
    # Answers of the checkpoint that a group in flight has again, from another attempt.
    for rows in saved_rows(saved):
        if rows not in state.kept:
            state.actions.append(Discard(rows))


def _attempts(entry: Mapping[str, Any] | None, sample: int) -> tuple[int, int]:
    """Return the seed attempt and the failures of an answer in a saved state."""
    if entry is None:
        return 0, 0
    return entry["seed_attempts"][sample], entry["failures"][sample]


def _still_counts(
    state: RunState, answer: Answer, task: int | None, version: int, seed_attempt: int
) -> bool:
    """Return whether weights that still exist have sampled, or sample, an answer."""
    # An answer with another seed replaces one that could not be scored since: the
    # repeated steps begin with the first seed again.
    if answer.phase is AnswerPhase.UNSENT or answer.seed_attempt != seed_attempt:
        return False
    if answer.phase is AnswerPhase.SAMPLING:
        assert task is not None
        last = state.versions.last_of(state.tasks[task].worker)
        # Its newest token may have any version up to the generator's last one.
        return last is not None and last <= version
    assert answer.newest_version is not None
    return answer.newest_version <= version


def _give_up(state: RunState, answer: Answer, task: int | None) -> None:
    """Have an answer sampled again."""
    if task is not None:
        worker = state.tasks[task].worker
        incarnation = state.workers[worker].incarnation
        state.actions.append(Cancel(worker, incarnation, task))
        state.drop_task(task)
    if answer.rows is not None:
        state.kept.discard(answer.rows)
        state.actions.append(Discard(answer.rows))
    answer.begin_again()


def _keep_later(state: RunState, held: dict[int, Group]) -> None:
    """Admit held groups that were drawn after the checkpoint, in the order of data.

    Only as far as no prompt is left out: the rest is drawn again, and their answers are
    sampled again.
    """
    limit = state.settings.group_limit
    while len(state.buffer) < limit:
        group = held.get(state.order.position)
        if group is None or group.oldest_version is None:
            return
        if not state.buffer.may_admit(state.step, group.oldest_version):
            return
        state.order.draw()
        state.admit(held.pop(group.number))
