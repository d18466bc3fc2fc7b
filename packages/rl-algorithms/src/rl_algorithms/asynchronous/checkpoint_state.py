"""The state of a schedule in a checkpoint: plain JSON values.

It describes the run after the completed steps. Scored answers are kept, also those of
unfinished groups; the driver writes their rows beside the state. Of other answers only
the names are kept, so that they are sampled again with the same seeds. Each prompt is
exactly one of: in this state, trained on, dropped, or still to be drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.errors import ScheduleError

__all__ = ["restore", "saved_rows", "to_dict", "without_rows"]

_FORMAT = 2
# Format 1 has answers of finished groups only.
_READABLE = (1, _FORMAT)
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
    if group.has(AnswerPhase.SCORED):
        saved["answers"] = [_answer_to_dict(answer) for answer in group.answers]
    return saved


def _answer_to_dict(answer: Answer) -> dict[str, Any] | None:
    """Return a scored answer; None for one that is sampled again."""
    if answer.phase is not AnswerPhase.SCORED:
        return None
    return {
        "rows": answer.rows,
        "oldest_version": answer.oldest_version,
        "newest_version": answer.newest_version,
        "num_tokens": answer.num_tokens,
        "reward": answer.reward,
    }


def saved_rows(saved: Mapping[str, Any]) -> list[int]:
    """Return the tasks that sampled the answers in a saved state."""
    return [
        answer["rows"]
        for group in saved["groups"]
        for answer in group.get("answers", ())
        if answer is not None
    ]


def without_rows(saved: Mapping[str, Any], rows: Collection[int]) -> dict[str, Any]:
    """Return a saved state in which some answers are still to be sampled.

    Args:
        saved: Return value of `to_dict`.
        rows: Tasks that sampled these answers.
    """
    groups = []
    for group in saved["groups"]:
        left = [
            None if answer is None or answer["rows"] in rows else answer
            for answer in group.get("answers", ())
        ]
        group = {name: value for name, value in group.items() if name != "answers"}
        groups.append({**group, "answers": left} if any(left) else group)
    return {**saved, "groups": groups}


def restore(
    state: RunState,
    saved: Mapping[str, Any],
    held: MutableMapping[int, Group] | None = None,
) -> None:
    """Restore a state that `to_dict` returned.

    Args:
        state: A state without groups.
        saved: State of a checkpoint. `max_staleness`, batch size and limits may have
            changed since.
        held: Groups in flight by prompt, which take the place of saved ones; those
            that do are removed.

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
        mine = None if held is None else held.pop(entry["prompt"], None)
        state.admit(_group_of(state, entry) if mine is None else mine)


def _group_of(state: RunState, entry: Mapping[str, Any]) -> Group:
    prompt = state.order.prompt(entry["prompt"])
    answers = []
    for sample, attempt in enumerate(entry["seed_attempts"]):
        answer = Answer(sample, seed_attempt=attempt)
        answer.failures = entry["failures"][sample]
        values = entry["answers"][sample] if "answers" in entry else None
        if values is not None:
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
    if saved["format"] not in _READABLE:
        raise ScheduleError(
            f"the state of a schedule must have format {_FORMAT} or an older one: got "
            f"{saved['format']!r}; resume with the release that saved it"
        )
    for key in _SAME:
        mine = getattr(state.settings, key)
        if saved[key] != mine:
            raise ScheduleError(
                f"cannot resume: {key} was {saved[key]} when the state was saved and "
                f"is {mine} now; use the same data and settings, or start a new run"
            )
