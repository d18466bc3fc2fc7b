"""`GroupBuffer`: the groups between admission and the step that trains on them."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.staleness import StalenessRule

__all__ = ["GroupBuffer"]


class GroupBuffer:
    """Groups being sampled or waiting for their step, in the order of the data.

    Args:
        rule: Limit on how long a group may wait.
    """

    def __init__(self, rule: StalenessRule) -> None:
        self._rule = rule
        self._groups: dict[int, Group] = {}
        # Groups with answers in a phase are indexed as the answers change. Searching
        # for them at each event would make a step quadratic in its number of answers.
        self._unsent: set[int] = set()
        self._unscored: set[int] = set()
        self._finished: set[int] = set()
        self._aged_at: int | None = None
        """Step for which the last search found no group too old."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def add(self, group: Group) -> None:
        """Admit a group."""
        self._groups[group.number] = group
        group.watch(self._note)
        self._note(group)

    def _note(self, group: Group) -> None:
        """Update the indexes after a change in a group's answers."""
        for numbers, belongs in (
            (self._unsent, group.has(AnswerPhase.UNSENT)),
            (self._unscored, group.has(AnswerPhase.SAMPLED)),
            (self._finished, group.is_finished),
        ):
            if belongs:
                numbers.add(group.number)
            else:
                numbers.discard(group.number)

    def remove(self, group: Group) -> None:
        """Remove a group."""
        del self._groups[group.number]
        group.settle()
        for numbers in (self._unsent, self._unscored, self._finished):
            numbers.discard(group.number)

    def clear(self) -> None:
        """Remove all groups."""
        # A list, as `remove` changes the dictionary.
        for group in list(self):
            self.remove(group)
        self._aged_at = None

    def may_admit(self, next_step: int, newest_version: int) -> bool:
        """Return whether one more group can be trained on before it is too old.

        Args:
            next_step: The step that can take the first group.
            newest_version: Version that would sample the new group, and every group of
                which nothing is sampled yet.
        """
        versions = [newest_version]
        for group in self:
            oldest = group.oldest_version
            versions.append(newest_version if oldest is None else oldest)
        return self._rule.fits(versions, next_step) and self._rule.has_steps_for(
            len(versions), next_step
        )

    def first_unsent(
        self, next_step: int, newest_version: int
    ) -> tuple[Group, Answer] | None:
        """Return the first answer still to be sampled, in the order of the data.

        A group that was begun always continues. A group that was not begun, such as one
        restored from a checkpoint, waits until some step can take it in time.

        Args:
            next_step: The step that can take the first group.
            newest_version: Version that would sample it.
        """
        # A set has no order, but answers are requested in that of the data.
        for number in sorted(self._unsent):
            group = self._groups[number]
            if group.oldest_version is None:
                begun = [*self._begun_versions(self), newest_version]
                if not self._rule.fits(begun, next_step):
                    # Keep looking: a later group may be begun, and those always
                    # continue.
                    continue
            return group, _first(group, AnswerPhase.UNSENT)
        return None

    def first_unscored(self) -> tuple[Group, Answer] | None:
        """Return the first answer waiting for an environment."""
        if not self._unscored:
            return None
        group = self._groups[min(self._unscored)]
        return group, _first(group, AnswerPhase.SAMPLED)

    def too_old(self, next_step: int) -> list[Group]:
        """Return the groups that no step can train on in time, in whatever order.

        Admission and `take` never produce such groups. A run that was resumed with a
        lower `max_staleness`, or with fewer prompts per step, can have some.

        Args:
            next_step: The step that can take the first group.
        """
        if self._aged_at == next_step:
            # Everything admitted or resampled since then was checked to fit.
            return []
        found: list[Group] = []
        per_step = self._rule.num_prompts_per_step
        kept = 0
        for group in self._by_age():
            version = group.oldest_version
            # Sorted last: from here on nothing is sampled, so nothing can be too old.
            if version is None:
                break
            if self._rule.is_too_old(version, next_step + kept // per_step):
                found.append(group)
            else:
                kept += 1
        if not found:
            self._aged_at = next_step
        return found

    def take(self, step: int, *, is_last: bool) -> list[Group] | None:
        """Remove and return the groups of a step, or return None if it has to wait.

        The groups that can wait least go first. If an unfinished group would become too
        old by missing this step, the step waits for that group.

        Args:
            step: The step.
            is_last: Whether no further group will be admitted; a partial step may then
                begin once all groups are finished.
        """
        finished, per_step = len(self._finished), self._rule.num_prompts_per_step
        is_rest = is_last and finished == len(self)
        if not finished or (finished < per_step and not is_rest):
            return None
        chosen = [group for group in self._by_age() if group.is_finished][:per_step]
        numbers = {group.number for group in chosen}
        rest = (group for group in self if group.number not in numbers)
        if not self._rule.fits(self._begun_versions(rest), step + 1):
            return None
        for group in chosen:
            self.remove(group)
        # Chosen by age, trained in data order: a step then does not depend on which
        # answers happened to finish first.
        return sorted(chosen, key=lambda group: group.number)

    def _by_age(self) -> list[Group]:
        """Return the groups by oldest version; those without tokens come last."""

        def age(group: Group) -> tuple[bool, int, int]:
            oldest = group.oldest_version
            return oldest is None, oldest or 0, group.number

        return sorted(self, key=age)

    def _begun_versions(self, groups: Iterator[Group] | GroupBuffer) -> Iterator[int]:
        for group in groups:
            oldest = group.oldest_version
            if oldest is not None:
                yield oldest


def _first(group: Group, phase: AnswerPhase) -> Answer:
    return next(answer for answer in group.answers if answer.phase is phase)
