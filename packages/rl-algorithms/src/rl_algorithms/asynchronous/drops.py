"""Dropping groups: everything held for them is released, and each one is reported."""

from __future__ import annotations

from rl_algorithms.asynchronous.actions import Cancel, Discard, DropGroup, Fail
from rl_algorithms.asynchronous.groups import AnswerPhase, Group
from rl_algorithms.asynchronous.state import RunState

__all__ = ["drop_group", "drop_too_old", "release_group", "stop_tasks"]


def drop_group(state: RunState, group: Group, reason: str) -> None:
    """Drop a group and report it.

    Args:
        state: State shared by the parts of the schedule.
        group: A group of the buffer.
        reason: Why it is not trained on.
    """
    stop_tasks(state, group)
    # The report reads the answers, so it comes before they are discarded.
    state.actions.append(_report(state, group, reason))
    _discard_rows(state, group)
    state.buffer.remove(group)
    state.drops_in_row += 1
    # A long series of drops means that something is broken, and would use up the data
    # in vain.
    if state.drops_in_row > state.settings.max_drops_in_row:
        state.finish(
            Fail(
                f"{state.drops_in_row} groups in a row were dropped, more than "
                f"max_drops_in_row={state.settings.max_drops_in_row}; the last one, "
                f"prompt {group.number}, because: {reason}"
            )
        )


def drop_too_old(state: RunState) -> None:
    """Drop the groups that no later step can train on within the staleness limit."""
    for group in state.buffer.too_old(state.step):
        drop_group(
            state,
            group,
            f"its oldest token has version {group.oldest_version}, and no step "
            f"from {state.step} on has a place for it within "
            f"max_staleness={state.settings.max_staleness}",
        )


def release_group(state: RunState, group: Group) -> None:
    """Forget a group that is not in the buffer: its prompt is drawn again."""
    stop_tasks(state, group)
    _discard_rows(state, group)


def stop_tasks(state: RunState, group: Group | None = None) -> None:
    """Cancel all tasks of a group, or of every group if None is given."""
    # A copy: ending a task removes it from the dictionary.
    for number, task in list(state.tasks.items()):
        if group is not None and task.group is not group:
            continue
        state.drop_task(number)
        incarnation = state.workers[task.worker].incarnation
        state.actions.append(Cancel(task.worker, incarnation, number))


def _discard_rows(state: RunState, group: Group) -> None:
    for rows in group.rows:
        state.kept.discard(rows)
        state.actions.append(Discard(rows))


def _report(state: RunState, group: Group, reason: str) -> DropGroup:
    scored = [a.reward for a in group.answers if a.phase is AnswerPhase.SCORED]
    oldest = group.oldest_version
    return DropGroup(
        prompt=group.prompt,
        reason=reason,
        attempts=max(answer.failures for answer in group.answers),
        age=0 if oldest is None else state.next_step - oldest,
        num_tokens=sum(answer.num_tokens for answer in group.answers),
        mean_reward=sum(scored) / len(scored) if scored else None,
    )
