"""The state of a schedule in a checkpoint: plain JSON values.

It describes the run after the completed steps. Finished groups keep their answers,
whose rows the driver writes beside the state. Groups that are being sampled keep only
the names of their answers, so that they are sampled again with the same seeds. Each
prompt is exactly one of: in this state, trained on, dropped, or still to be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.errors import ScheduleError

__all__ = ["restore", "to_dict"]

_FORMAT = 1
# A group's shape and a prompt's number depend on these two, so a saved state means
# something else when they change.
_SAME = ("num_generations_per_prompt", "prompts_per_epoch")
_KEYS = {"format", "step", "position", "num_tasks", "groups", *_SAME}


def to_dict(state: RunState) -> dict[str, Any]:
    """Return the state after the completed steps."""
    # A group in training belongs to a step that is not done: it must be in the state,
    # or a resume would never train on it.
    groups = sorted((*state.in_training, *state.buffer), key=lambda group: group.number)
    return {
        "format": _FORMAT,
        "step": state.step,
        "position": state.order.position,
        "num_tasks": state.num_tasks,
        "num_generations_per_prompt": state.settings.num_generations_per_prompt,
        "prompts_per_epoch": state.settings.prompts_per_epoch,
        "groups": [_group_to_dict(group) for group in groups],
    }


def _group_to_dict(group: Group) -> dict[str, Any]:
    saved: dict[str, Any] = {
        "prompt": group.number,
        "seed_attempts": [answer.seed_attempt for answer in group.answers],
        # Kept, or a prompt that always fails could be tried without end across resumes.
        "failures": [answer.failures for answer in group.answers],
    }
    # An unfinished group is sampled again, so its rows need not be kept.
    if group.is_finished:
        saved["answers"] = [
            {
                "rows": answer.rows,
                "oldest_version": answer.oldest_version,
                "newest_version": answer.newest_version,
                "num_tokens": answer.num_tokens,
                "reward": answer.reward,
            }
            for answer in group.answers
        ]
    return saved


def restore(state: RunState, saved: Mapping[str, Any]) -> None:
    """Restore a state that `to_dict` returned.

    Args:
        state: A state without groups.
        saved: State of a checkpoint. `max_staleness`, batch size and limits may have
            changed since.

    Raises:
        ScheduleError: The state belongs to a run with other data or group sizes.
    """
    _check(state, saved)
    state.step = state.saved_step = saved["step"]
    # A trainer that goes back must not make repeated steps count as progress.
    state.furthest_step = max(state.furthest_step, state.step)
    state.order.position = saved["position"]
    # Task numbers in use by this driver must never be handed out twice.
    state.num_tasks = max(state.num_tasks, saved["num_tasks"])
    state.kept.clear()
    for entry in saved["groups"]:
        group = _group_of(state, entry)
        state.buffer.add(group)
        state.kept.update(group.rows)


def _group_of(state: RunState, entry: Mapping[str, Any]) -> Group:
    prompt = state.order.prompt(entry["prompt"])
    answers = []
    for sample, attempt in enumerate(entry["seed_attempts"]):
        answer = Answer(sample, seed_attempt=attempt)
        answer.failures = entry["failures"][sample]
        if "answers" in entry:
            values = entry["answers"][sample]
            for name, value in values.items():
                setattr(answer, name, value)
            answer.phase = AnswerPhase.SCORED
        answers.append(answer)
    return Group(prompt, answers)


def _check(state: RunState, saved: Mapping[str, Any]) -> None:
    if missing := sorted(_KEYS - set(saved)):
        raise ScheduleError(
            f"the state of a schedule lacks {', '.join(missing)}: it was not saved by "
            "Schedule.state_dict()"
        )
    if saved["format"] != _FORMAT:
        raise ScheduleError(
            f"the state of a schedule must have format {_FORMAT}: got "
            f"{saved['format']!r}; resume with the release that saved it"
        )
    for key in _SAME:
        mine = getattr(state.settings, key)
        if saved[key] != mine:
            raise ScheduleError(
                f"cannot resume: {key} was {saved[key]} when the state was saved and "
                f"is {mine} now; use the same data and settings, or start a new run"
            )
