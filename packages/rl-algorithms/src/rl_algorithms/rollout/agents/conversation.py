"""`AgentConversation`: a task that an agent works on, as a row of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_algorithms.data.types import LLMMessageLogType, PromptSpec
from rl_algorithms.rollout.agents.recording import Answer
from rl_algorithms.rollout.agents.session import AgentSession
from rl_algorithms.rollout.branches import Branch
from rl_algorithms.rollout.judge import outcome_of
from rl_algorithms.rollout.result import Outcome
from rl_algorithms.rollout.row_names import RowNames
from rl_algorithms.rollout.trajectories import PlayedRow, Trajectories, TrajectoryNotes
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.agents.tasks import AgentResult, AgentReward
from rl_envs.errors import AgentError
from rl_envs.outcomes import ConversationOutcome
from rl_envs.task_limits import TaskLimits, limits_of

__all__ = ["AgentConversation"]


@dataclass(frozen=True)
class _Verdict:
    """Outcome of a row."""

    outcome: Outcome
    reward: AgentReward
    error: Exception | None = None
    ending: ConversationOutcome = ConversationOutcome.ERROR


class AgentConversation:
    """A task, and how it ended.

    It has the interface of an `OpenConversation` that players need, but no turns,
    because the agent requests answers by itself.

    Args:
        batch: Prompts as columns of `rl_collate_fn`.
        names: One row.
        place: Run's seed, step, and index of the batch's first prompt in the step, from
            which the seeds of answers are derived.
        limit_reward: Reward of a task that met a limit; None: it is an error.
        limits: Limits of a task whose row declares none.
    """

    needs_verdict = False
    """False, because the agent returns the reward."""
    goes_on = False
    """False, because nothing follows after the end of the agent."""

    def __init__(
        self,
        batch: BatchedDataDict[PromptSpec],
        names: RowNames,
        place: tuple[int, int, int],
        limit_reward: float | None,
        limits: TaskLimits | None = None,
    ) -> None:
        self._names, self._limit_reward = names, limit_reward
        self._place = place
        prompt = int(names.prompt[0])
        length = int(batch["input_lengths"][prompt])
        # A clone, because a view would keep the whole batch alive.
        self._prompt_ids = batch["input_ids"][prompt, :length].to(torch.int64).clone()
        self.log: LLMMessageLogType = [
            {"role": m["role"], "content": m["content"]}
            for m in batch["message_log"][prompt]
        ]
        """The prompt."""
        infos = batch.get("extra_env_info")
        self.metadata: dict[str, Any] = dict(infos[prompt]) if infos else {}
        """Columns of the row in the dataset."""
        self.limits = limits_of(self.metadata, limits)
        """Limits of the task."""
        weights = batch.get("loss_multiplier")
        self._weight = 1.0 if weights is None else float(weights[prompt])
        self.session: AgentSession | None = None
        """Session of the agent's requests, once it has begun."""
        self._ending: AgentResult | Exception | None = None

    def seed_of(self, number: int) -> int:
        """Return the seed of an answer by its number in the task."""
        return int(self._names.seeds(*self._place, number)[0])

    def end(self, ending: AgentResult | Exception) -> None:
        """Record how the task ended, or why it was lost."""
        self._ending = ending

    @property
    def error(self) -> Exception | None:
        """Reason to exclude the task from training, or None."""
        return self._verdict().error

    @property
    def is_lost(self) -> bool:
        """Whether a worker or the generator failed, and not the agent."""
        return self._verdict().outcome is Outcome.INFRASTRUCTURE_ERROR

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(answer.tokens) for answer in self._answers)

    @property
    def _answers(self) -> list[Answer]:
        return [] if self.session is None else self.session.recording.answers

    def _verdict(self) -> _Verdict:
        ending, session = self._ending, self.session
        none = AgentReward(0.0)
        if not isinstance(ending, AgentResult) or session is None:
            error = ending if isinstance(ending, Exception) else AgentError("not run")
            return _Verdict(outcome_of(error), none, error)
        if ending.ending == "done" and ending.reward is not None:
            if self._answers:
                # The last answer decides, as in other rollouts.
                is_cut = self._answers[-1].is_cut
                if is_cut:
                    tokens = ConversationOutcome.OUT_OF_TOKENS
                    return _Verdict(Outcome.TRUNCATED, ending.reward, ending=tokens)
                done = ConversationOutcome.FINISHED
                return _Verdict(Outcome.OK, ending.reward, ending=done)
            error = AgentError(
                "the agent ended without an answer of the policy: it made no request, "
                "or went on before it was answered"
            )
            return _Verdict(Outcome.ENVIRONMENT_ERROR, none, error)
        # The agent raised because it was not answered: the cause counts, not its
        # exception.
        if ending.ending == "error" and session.failure is not None:
            return _Verdict(outcome_of(session.failure), none, session.failure)
        limit = ending.error if ending.ending == "limit" else session.met_limit
        if limit and self._limit_reward is not None and self._answers:
            by = ConversationOutcome.OUT_OF_TIME
            if ending.ending != "limit" and session.limited_by is not None:
                by = session.limited_by
            reward = AgentReward(self._limit_reward)
            return _Verdict(Outcome.TRUNCATED, reward, ending=by)
        said = (
            ending.error
            if ending.ending != "error" or not limit
            else (f"{ending.error}\n(before that, {limit})")
        )
        return _Verdict(Outcome.ENVIRONMENT_ERROR, none, AgentError(said))

    def played(self) -> PlayedRow:
        """Return the main row of the task, with its other rows as branches."""
        verdict = self._verdict()
        own = verdict.reward.conversations
        answers = self._answers
        recording = None if self.session is None else self.session.recording
        ends = [] if recording is None else recording.ends(own)
        parts = list(recording.rows(ends)) if recording is not None and ends else []
        # A task without an answer still needs a row; it has nothing to train on.
        parts = parts or [_prompt_only(self._prompt_ids)]
        branches = tuple(
            replace(part, reward=own.get(end.conversation), name=end.conversation)
            for part, end in zip(parts[:-1], ends[:-1], strict=True)
        )
        main, end = parts[-1], ends[-1] if ends else None
        reward = verdict.reward.reward
        if end is not None:
            reward = own.get(end.conversation, reward)
        return PlayedRow(
            _trajectories(
                main, end, answers, branches, reward, verdict, self._names, self
            )
        )

    def notes(self, end: Answer | None, error: Exception | None) -> TrajectoryNotes:
        """Return the metadata of the row besides its columns.

        Args:
            end: The last answer of the main row, or None.
            error: Reason of a failure.
        """
        path = [] if end is None else end.path()
        first = len(path[0].prompt) if path else len(self._prompt_ids)
        added = sum(len(answer.prompt) for answer in path[1:])
        return TrajectoryNotes(
            is_active=torch.tensor([False]),
            cut_answers=torch.tensor([sum(a.is_cut for a in self._answers)]),
            turn_limit_reached=torch.tensor([False]),
            prompt_lengths=torch.tensor([first]),
            env_tokens=torch.tensor([added]),
            errors=[error],
            message_logs=[list(self.log if end is None else end.log)],
            num_prompt_messages=[len(self.log) if end is None else end.num_questions],
            answers=[None],
            extra_env_info=[self.metadata],
        )

    @property
    def weight(self) -> float:
        """Weight of the row in the loss."""
        return self._weight


def _prompt_only(tokens: torch.Tensor) -> Branch:
    zeros = torch.zeros(len(tokens))
    none = torch.full((len(tokens),), -1)
    return Branch(tokens, zeros, zeros.clone(), none)


def _trajectories(
    main: Branch,
    end: Answer | None,
    answers: list[Answer],
    branches: tuple[Branch, ...],
    reward: float,
    verdict: _Verdict,
    names: RowNames,
    of: AgentConversation,
) -> Trajectories:
    versions = [version for answer in answers for version in answer.versions]
    decoded = [answer.log[-1]["content"] for answer in answers]
    has_logprobs = all(answer.logprobs is not None for answer in answers)
    parts = {
        f"reward/{name}": torch.tensor([float(value)])
        for name, value in verdict.reward.parts.items()
    }
    return Trajectories(
        input_ids=main.input_ids[None],
        input_lengths=torch.tensor([len(main.input_ids)]),
        token_mask=main.token_mask[None],
        sample_mask=torch.tensor([of.weight]),
        generation_logprobs=main.generation_logprobs[None] if has_logprobs else None,
        token_versions=main.token_versions[None],
        rewards=torch.tensor([reward], dtype=torch.float32),
        named_rewards=parts,
        # A copy, because retries replace entries of the result in place.
        group_index=torch.from_numpy(names.prompt.copy()),
        truncated=torch.tensor([end is not None and end.is_cut]),
        generation_lengths=torch.tensor([sum(len(a.tokens) for a in answers)]),
        num_turns=torch.tensor([len(answers)]),
        weight_version=torch.tensor([min(versions, default=0)]),
        outcome=torch.tensor([int(verdict.outcome)], dtype=torch.int8),
        branches=[branches],
        texts=["".join(decoded)],
        metadata=[of.metadata],
        ending=[verdict.ending],
        notes=of.notes(end, verdict.error),
    )
