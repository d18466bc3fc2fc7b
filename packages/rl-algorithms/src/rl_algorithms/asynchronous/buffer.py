"""`GroupBuffer`: the groups between admission and the step that trains on them."""

from __future__ import annotations

import heapq
from collections import Counter
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
        self._unsent_heap: list[int] = []
        """Those and some that are no longer unsent, with the first one at the top."""
        self._unscored: set[int] = set()
        self._by_phase: dict[AnswerPhase | None, set[int]] = {
            AnswerPhase.UNSENT: self._unsent,
            AnswerPhase.SAMPLED: self._unscored,
        }
        self._finished: set[int] = set()
        self._versions: Counter[int | None] = Counter()
        """Number of groups by oldest version, except for changes of `_recount`."""
        self._counted: dict[int, int | None] = {}
        """Version under which each group is counted."""
        self._recount: set[int] = set()
        """Groups whose version may have changed."""
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
        self._recount.add(group.number)
        for phase in (AnswerPhase.UNSENT, AnswerPhase.SAMPLED, AnswerPhase.SCORED):
            if group.has(phase):
                self._note(group, None, phase)

    def _note(
        self, group: Group, left: AnswerPhase | None, entered: AnswerPhase | None
    ) -> None:
        """Update the indexes after a change in a group's answers.

        Args:
            group: The group.
            left: Phase that an answer has left.
            entered: Phase that it has entered; None: the oldest version may have
                changed.
        """
        # Only the indexes of these phases: this runs several times per answer.
        number = group.number
        if entered is None:
            self._recount.add(number)
            return
        numbers = self._by_phase.get(entered)
        if numbers is not None and number not in numbers:
            numbers.add(number)
            if entered is AnswerPhase.UNSENT:
                heapq.heappush(self._unsent_heap, number)
        numbers = self._by_phase.get(left)
        if left is not None and numbers is not None and not group.has(left):
            numbers.discard(number)
        if entered is AnswerPhase.SCORED and group.is_finished:
            self._finished.add(number)
        elif left is AnswerPhase.SCORED:
            self._finished.discard(number)

    def remove(self, group: Group) -> None:
        """Remove a group."""
        del self._groups[group.number]
        group.settle()
        for numbers in (self._unsent, self._unscored, self._finished, self._recount):
            numbers.discard(group.number)
        if group.number in self._counted:
            self._versions[self._counted.pop(group.number)] -= 1

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
        versions = self._begun_counts()
        versions[newest_version] += len(self) - versions.total() + 1
        return self._rule.fits(versions, next_step) and self._rule.has_steps_for(
            len(self) + 1, next_step
        )

    def first_unsent(self, next_step: int, newest_version: int) -> Group | None:
        """Return the first group with an answer to sample, in the order of the data.

        A group that was begun always continues. A group that was not begun, such as one
        restored from a checkpoint, waits until some step can take it in time.

        Args:
            next_step: The step that can take the first group.
            newest_version: Version that would sample it.
        """
        for number in self._unsent_in_order():
            group = self._groups[number]
            if group.oldest_version is None:
                begun = self._begun_counts()
                begun[newest_version] += 1
                if not self._rule.fits(begun, next_step):
                    # Keep looking: a later group may be begun, and those always
                    # continue.
                    continue
            return group
        return None

    @property
    def has_unsent(self) -> bool:
        """Whether an answer is still to be sampled."""
        return bool(self._unsent)

    @property
    def has_unscored(self) -> bool:
        """Whether an answer is waiting for an environment."""
        return bool(self._unscored)

    def first_unscored(self) -> tuple[Group, Answer]:
        """Return the first answer waiting for an environment, of one or more."""
        group = self._groups[min(self._unscored)]
        return group, group.answers_in(AnswerPhase.SAMPLED)[0]

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
        rest = self._begun_counts()
        rest.subtract(g.oldest_version for g in chosen if g.oldest_version is not None)
        if not self._rule.fits(rest, step + 1):
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

    def _unsent_in_order(self) -> Iterator[int]:
        """Yield the groups with answers to be sampled, in the order of the data."""
        heap = self._unsent_heap
        while heap and heap[0] not in self._unsent:
            heapq.heappop(heap)
        if heap:
            # Nearly always the one that is taken, so that the others need no order.
            first = heap[0]
            yield first
            yield from sorted(self._unsent - {first})

    def _begun_counts(self) -> Counter[int]:
        """Return the number of groups by oldest version, of those with any sample."""
        # Counted as versions change: counting all groups for each that is admitted
        # would make a step quadratic in their number.
        for number in self._recount:
            version = self._groups[number].oldest_version
            if number in self._counted:
                self._versions[self._counted[number]] -= 1
            self._counted[number] = version
            self._versions[version] += 1
        self._recount.clear()
        # Without versions that no group has any more.
        self._versions = +self._versions
        return Counter({v: n for v, n in self._versions.items() if v is not None})
