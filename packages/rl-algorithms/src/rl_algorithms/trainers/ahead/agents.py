"""`AheadAgents`: runs agents on prompts that are sampled ahead."""

from __future__ import annotations

from collections.abc import Callable

from rl_algorithms.rollout.agents.conversation import AgentConversation
from rl_algorithms.rollout.agents.player import AgentPlayer, Ask
from rl_algorithms.trainers.ahead.jobs import Job

__all__ = ["AheadAgents"]


class AheadAgents:
    """Plays jobs whose conversations are led by agents.

    Args:
        player: Player that runs agents.
        on_failure: Called with an error that a retry cannot fix.
    """

    def __init__(
        self, player: AgentPlayer, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._player = player
        player.tell_failures(on_failure)

    def begin(
        self,
        job: Job,
        ask: Ask,
        on_end: Callable[[Job, Exception | None], None],
    ) -> None:
        """Run an agent on a job.

        Args:
            job: The job.
            ask: Function that passes the rows of its requests to the generator.
            on_end: Called at its end, with the loss if the agent was not at fault.
        """
        row = job.conversation
        assert isinstance(row, AgentConversation)

        def end() -> None:
            if job.is_cancelled:
                return
            if job.oldest_version is None:
                # An agent without any request must also be reported to the schedule.
                job.note_version(job.asked.version)
            on_end(job, row.error if row.is_lost else None)

        self._player.begin(row, None, ask, end, job.note_version)

    def cancel(self, job: Job) -> None:
        """Cancel the agent of a job."""
        if isinstance(job.conversation, AgentConversation):
            self._player.cancel(job.conversation)
