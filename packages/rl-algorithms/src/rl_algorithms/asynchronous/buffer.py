"""`GroupBuffer`: the groups between their admission and their step."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algorithms.asynchronous.groups import Answer, AnswerPhase, Group
from rl_algorithms.asynchronous.staleness import StalenessRule

__all__ = ["GroupBuffer"]


class GroupBuffer:
    """Groups that are sampled, or wait for their step, in the order of the data.

    Args:
        rule: How long they can wait.
    """

    def __init__(self, rule: StalenessRule) -> None:
        self._rule = rule
        self._groups: dict[int, Group] = {}
        # Numbers of the groups with answers in a phase, kept as answers change: looking
        # for them at each event would cost a step the square of its answers.
        self._unsent: set[int] = set()
        self._unscored: set[int] = set()
        self._finished: set[int] = set()
        self._aged_at: int | None = None
        """Step for which no group was found too old."""

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
        """Keep account of a group whose answers have changed."""
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
        """Hold a group no longer."""
        del self._groups[group.number]
        group.settle()
        for numbers in (self._unsent, self._unscored, self._finished):
            numbers.discard(group.number)

    def clear(self) -> None:
        """Hold nothing."""
        for group in list(self):
            self.remove(group)
        self._aged_at = None

    def may_admit(self, next_step: int, newest_version: int) -> bool:
        """Return whether one more group can be trained on before it is too old.

        Args:
            next_step: The step that can take the first group.
            newest_version: Version that the new group would be sampled with, as would
                be those of which nothing is sampled yet.
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
        """Return the first answer that is to be sampled, in the order of the data.

        A group that was begun goes on in any case. One that was not, as after a resume,
        waits until there is a place for it in time.

        Args:
            next_step: The step that can take the first group.
            newest_version: Version that it would be sampled with.
        """
        for number in sorted(self._unsent):
            group = self._groups[number]
            if group.oldest_version is None:
                begun = [*self._begun_versions(self), newest_version]
                if not self._rule.fits(begun, next_step):
                    # Others that are not begun would be as new.
                    continue
            return group, _first(group, AnswerPhase.UNSENT)
        return None

    def first_unscored(self) -> tuple[Group, Answer] | None:
        """Return the first answer that waits for an environment."""
        if not self._unscored:
            return None
        group = self._groups[min(self._unscored)]
        return group, _first(group, AnswerPhase.SAMPLED)

    def too_old(self, next_step: int) -> list[Group]:
        """Return the groups that no step can train on in time, however it is waited.

        Admission and `take` leave none. A run that is resumed with a lower
        `max_staleness`, or with fewer prompts per step, can have some.

        Args:
            next_step: The step that can take the first group.
        """
        if self._aged_at == next_step:
            # What was admitted or sampled again since then was found to fit.
            return []
        found: list[Group] = []
        per_step = self._rule.num_prompts_per_step
        kept = 0
        for group in self._by_age():
            version = group.oldest_version
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
        """Take the groups of a step out, or None while there is something to wait for.

        Those that can wait least go first. Where a group that is not finished would be
        too old without this step, the step waits for it.

        Args:
            step: The step.
            is_last: Whether no group will be admitted any more; then a step that is
                not full may begin, once all groups are finished.
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
        return sorted(chosen, key=lambda group: group.number)

    def _by_age(self) -> list[Group]:
        """Return the groups, oldest weights first; those without any come last."""

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
