"""Measuring a model on a server with the tasks of an environment.

```
tasks x samples -> conversations --ask--> replies --step--> rewards, observations
                        ^                                        |
                        +------------- those that continue -------+
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_algorithms.evaluation import DatasetEvaluation, EvalConfig
from rl_cli.chat_server import ChatServer, Reply
from rl_cli.environment_choice import GivenTasks
from rl_distributed.batch.arrays import as_array, to_numpy
from rl_envs.interfaces import (
    EnvironmentInterface,
    as_columns,
    has_own,
    observation_messages,
    total_reward,
)

__all__ = [
    "MeasuredConversation",
    "begin_conversations",
    "evaluation_of",
    "measure_address",
]


@dataclass(slots=True)
class MeasuredConversation:
    """A conversation of a task, as far as it has come."""

    idx: int
    """Number of its task."""
    seed: int
    log: list[dict[str, Any]]
    columns: Any
    num_prompt_messages: int
    stop: Sequence[str] | None = None
    reward: float = 0.0
    answer: str | None = None
    is_truncated: bool = False
    num_tokens: int = 0
    num_chars: int = 0
    time_s: float = 0.0
    problem: str = ""
    is_open: bool = True
    is_begun: bool = False
    """Whether the environment has begun it."""
    counts_tokens: bool = field(default=True)
    """True if the server reported the number of tokens of each reply."""

    def hear(self, reply: Reply) -> None:
        """Append a reply; without one the conversation ends and is not scored."""
        self.time_s += reply.time_s
        if reply.text is None:
            self.is_open, self.reward, self.problem = False, math.nan, reply.problem
            return
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.is_truncated:
            message["truncated"] = True
        self.log.append(message)
        self.is_truncated = reply.is_truncated
        self.num_chars += len(reply.text)
        self.num_tokens += reply.num_tokens or 0
        self.counts_tokens &= reply.num_tokens is not None


def measure_address(
    server: ChatServer,
    env: EnvironmentInterface[Any],
    tasks: GivenTasks,
    config: EvalConfig,
) -> DatasetEvaluation:
    """Have a server answer tasks, and score its answers.

    Args:
        server: The server.
        env: The environment.
        tasks: Tasks.
        config: Settings, of which `num_generations`, `seed`, `max_rollout_turns`, `ks`
            and `pass_threshold` are used.

    Returns:
        Metrics as in `rl eval`, and samples with additional `messages`, `num_chars`,
        `time_s` and `problem` (the reason for a missing answer). Without
        `mean_response_tokens` if the server does not report tokens.

    Raises:
        ConfigError: The server refuses a request.
        GenerationError: No request got a reply.
    """
    rounds = begin_conversations(tasks, config)
    for _ in range(config.max_rollout_turns):
        playing = [each for each in rounds if each.is_open]
        if not playing:
            break
        replies = server.ask(
            [each.log for each in playing],
            [each.stop for each in playing],
            [each.seed for each in playing],
        )
        for each, reply in zip(playing, replies, strict=True):
            each.hear(reply)
        _step(env, [each for each in playing if each.is_open])
    if has_own(env, "close"):
        env.close([each.columns for each in rounds if each.is_begun])
    _add_rewards_of_groups(env, rounds)
    return evaluation_of(rounds, config, _own(env, rounds))


def evaluation_of(
    rounds: Sequence[MeasuredConversation],
    config: EvalConfig,
    own: Mapping[str, float],
) -> DatasetEvaluation:
    """Return metrics and samples of conversations that have ended.

    Args:
        rounds: The conversations, those of a task one after the other.
        config: See `measure_address`.
        own: Metrics of the environment.
    """
    samples = [_sample(each, config.pass_threshold) for each in rounds]
    if all(sample["answer"] is None for sample in samples):
        # The environment extracts no answers, so whole responses vote.
        samples = [{**s, "answer": s["response"].strip()} for s in samples]
    found = DatasetEvaluation.of(
        "tasks", samples, config.num_generations, config.all_ks(), dict(own)
    )
    if not all(each.counts_tokens for each in rounds):
        # A mean over the replies with a count would describe a part of the answers
        # only.
        found.metrics.pop("mean_response_tokens")
    return found


def begin_conversations(
    tasks: GivenTasks, config: EvalConfig
) -> list[MeasuredConversation]:
    """Return the conversations to have, those of a task one after the other."""
    found = []
    for idx, (row, prompt) in enumerate(zip(tasks.rows, tasks.prompts, strict=True)):
        for number in range(config.num_generations):
            log = [dict(message) for message in prompt]
            # Distinct for every answer, and the same in the next run.
            seed = config.seed + idx * config.num_generations + number
            found.append(MeasuredConversation(idx, seed, log, dict(row), len(log)))
    return found


def _step(
    env: EnvironmentInterface[Any], playing: Sequence[MeasuredConversation]
) -> None:
    if not playing:
        return
    new = [each for each in playing if not each.is_begun]
    if new and has_own(env, "reset"):
        # Those of a prompt have the same start, as in training.
        begun = env.reset([each.columns for each in new], [each.idx for each in new])
        for each, columns in zip(new, begun, strict=True):
            each.columns = columns
    for each in new:
        each.is_begun = True
    result = as_columns(
        env.step([each.log for each in playing], [each.columns for each in playing])
    )
    rewards = to_numpy(total_reward(result.rewards)).tolist()
    ends = to_numpy(result.terminateds).tolist()
    for place, each in enumerate(playing):
        each.reward += rewards[place]
        each.columns = result.metadata[place]
        each.answer = None if result.answers is None else result.answers[place]
        each.is_open = not ends[place]
        # None keeps those of the turn before.
        each.stop = result.next_stop_strings[place] or each.stop
        if each.is_open:
            each.log += observation_messages(result.observations[place])


def _add_rewards_of_groups(
    env: EnvironmentInterface[Any], rounds: Sequence[MeasuredConversation]
) -> None:
    groups: dict[int, list[MeasuredConversation]] = {}
    for each in rounds:
        # Without a reply there is nothing to compare with the others of its group.
        if not each.problem:
            groups.setdefault(each.idx, []).append(each)
    found = env.score_groups(
        [[each.log for each in group] for group in groups.values()],
        [[each.columns for each in group] for group in groups.values()],
    )
    for group, rewards in zip(groups.values(), found or (), strict=False):
        own = to_numpy(total_reward(rewards)).tolist()
        for each, reward in zip(group, own, strict=True):
            each.reward += reward


def _sample(each: MeasuredConversation, pass_threshold: float) -> dict[str, Any]:
    """Return a conversation as a JSON value."""
    said = each.log[each.num_prompt_messages :]
    last = [m["content"] for m in said if m["role"] == "assistant"][-1:]
    reward = None if math.isnan(each.reward) else each.reward
    return {
        "dataset": "tasks",
        "idx": each.idx,
        "prompt": "\n".join(m["content"] for m in each.log[: each.num_prompt_messages]),
        "response": "".join(last),
        "answer": each.answer,
        "reward": reward,
        "correct": reward is not None and reward >= pass_threshold,
        "truncated": each.is_truncated,
        "num_tokens": each.num_tokens,
        "num_chars": each.num_chars,
        "time_s": each.time_s,
        "problem": each.problem,
        "messages": each.log,
    }


def _own(
    env: EnvironmentInterface[Any], rounds: Sequence[MeasuredConversation]
) -> dict[str, float]:
    """Return the environment's own metrics."""
    heard = [each for each in rounds if not each.problem]
    batch: dict[str, Any] = {
        "rewards": as_array([each.reward for each in heard], "float32"),
        "metadata": [each.columns for each in heard],
        "group_index": np.asarray([each.idx for each in heard]),
        "truncated": np.asarray([each.is_truncated for each in heard]),
    }
    _, metrics = env.global_post_process_and_metrics(batch)
    return {f"env/{name}": float(value) for name, value in metrics.items()}
