"""The environment `multi_reward`: parts, their names, turns and errors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rl_distributed.errors import ConfigError, RegistryError
from rl_envs import GroupRewardWrapper, RewardError
from rl_envs.errors import EnvironmentContractError, EnvsError, MessageLogError
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn, total_reward
from rl_envs.outcomes import ConversationOutcome, outcome_of
from rl_envs.registry import create_env, env_registry
from rl_envs.testing import assert_passed, check_environment, examine_environment
from rl_envs.testing.findings import Examination
from rl_envs.tools.environment import ToolEnvironment
from rl_envs.worlds.arithmetic import ArithmeticEnvironment, ArithmeticTasks
from rl_envs.worlds.length import LengthConfig, LengthEnvironment
from rl_envs.worlds.multi_reward import (
    MultiRewardConfig,
    MultiRewardEnvironment,
    RewardPart,
)
from rl_envs.worlds.sliding_puzzle import SlidingPuzzleEnvironment, SlidingPuzzleTasks

SETTINGS = {
    "parts": [
        {"name": "right", "env": "arithmetic", "columns": {"answer": "sum"}},
        {
            "name": "short",
            "env": "length",
            "settings": {"unit": "characters", "max_length": 3},
            "weight": 0.5,
        },
    ]
}


def log_of(*responses: str) -> list[dict[str, Any]]:
    log = [{"role": "user", "content": "12+34="}]
    for response in responses:
        log += [{"role": "assistant", "content": response}]
    return log


def floats(column: Any) -> list[float]:
    return [float(value) for value in column]


def of_parts(**parts: Any) -> MultiRewardEnvironment:
    """Build an environment of objects, each alone or with its weight."""
    pairs = {n: p if isinstance(p, tuple) else (p, 1.0) for n, p in parts.items()}
    return MultiRewardEnvironment(
        parts=[RewardPart(name, env, weight) for name, (env, weight) in pairs.items()]
    )


def test_each_part_is_a_reward_of_its_name() -> None:
    env = create_env("multi_reward", SETTINGS)
    logs = [log_of("46"), log_of("12+34=46"), log_of("45"), log_of("it is 46, I say")]
    found = env.step(logs, [{"sum": 46, "answer": "not this"}] * 4)
    assert isinstance(found.rewards, dict)
    assert floats(found.rewards["reward/right"]) == [1.0, 1.0, 0.0, 0.0]
    assert floats(found.rewards["reward/short"]) == [0.5, 0.0, 0.5, 0.0]
    assert floats(total_reward(found.rewards)) == [1.5, 1.0, 0.5, 0.0]
    said: Any = found.observations
    assert said[1]["content"] == (
        "right: correct\nshort: incorrect: 8 characters, not 0 to 3"
    )
    assert found.terminateds.all()
    assert found.answers == ["46", "46", "45", "it is 46, I say"]
    batch = {
        "rewards": total_reward(found.rewards),
        "metadata": found.metadata,
        "group_index": np.array([0, 0, 1, 1]),
    }
    metrics = env.global_post_process_and_metrics(batch)[1]
    assert metrics["reward_mean"] == 0.75
    assert metrics["right/accuracy"] == 0.5
    assert metrics["short/accuracy"] == 0.5
    assert metrics["short/reward_max"] == 1.0  # before weighting


def test_gold_answers_earn_all_rewards() -> None:
    parts = [
        {"name": "arithmetic"},
        {"name": "length", "settings": {"max_length": 1}, "weight": 0.25},
    ]
    env = MultiRewardEnvironment({"parts": parts})
    rows = ArithmeticTasks(min_digits=2).train(16)
    assert_passed(examine_environment(env, rows, Examination(full_reward=1.25)))


def test_functions_are_parts_too() -> None:
    env = of_parts(
        arithmetic=ArithmeticEnvironment(),
        brief=(lambda prompt, response: -len(response) / 10, 2.0),
    )
    found = env.step([log_of("46")], [{"answer": 46}])
    assert isinstance(found.rewards, dict)
    assert floats(found.rewards["reward/brief"]) == pytest.approx([-0.4])
    with pytest.raises(RewardError):
        of_parts(wrong=3)


def test_the_first_part_leads_and_the_others_judge_the_end() -> None:
    row = SlidingPuzzleTasks(max_distance=2, seed=1).train(1)[0]
    env = of_parts(
        puzzle=SlidingPuzzleEnvironment(),
        words=LengthEnvironment(LengthConfig(min_length=1)),
        turns=(lambda prompt, response: len(response), 0.1),
    )
    alone = SlidingPuzzleEnvironment()
    log = [{"role": "user", "content": row["prompt"]}]
    metadata: Any = dict(row)
    alone_metadata: Any = dict(row)
    total = 0.0
    for move in row["answer"].split():
        log = [*log, {"role": "assistant", "content": f"<move>{move}</move>"}]
        found = env.step([log], [metadata])
        expected = alone.step([log], [alone_metadata])
        metadata, alone_metadata = found.metadata[0], expected.metadata[0]
        assert bool(found.terminateds[0]) == bool(expected.terminateds[0])
        assert isinstance(found.rewards, dict)
        assert floats(found.rewards["reward/puzzle"]) == floats(expected.rewards)
        total += floats(expected.rewards)[0]
        if not found.terminateds[0]:
            assert found.observations == expected.observations
            assert floats(found.rewards["reward/words"]) == [0.0]
            assert "words" not in metadata["reward_parts"]
        log = [*log, {"role": "user", "content": "go on"}]
    assert found.terminateds[0]
    assert isinstance(found.rewards, dict)
    assert floats(found.rewards["reward/words"]) == [1.0]
    assert floats(found.rewards["reward/turns"])[0] > 0
    assert outcome_of(metadata) is ConversationOutcome.SOLVED
    assert metadata["reward_parts"]["puzzle"]["score"] == pytest.approx(total)
    batch = {"rewards": found.rewards["reward/puzzle"], "metadata": [metadata]}
    metrics = env.global_post_process_and_metrics(batch)[1]
    assert metrics["puzzle/outcome/solved"] == 1.0
    assert metrics["words/accuracy"] == 1.0


def test_only_the_first_part_may_have_many_turns() -> None:
    with pytest.raises(ConfigError, match=r"part 'puzzle' .* has many turns.*first"):
        of_parts(a=ArithmeticEnvironment(), puzzle=SlidingPuzzleEnvironment())

    class GoesOn(EnvironmentInterface[Any]):
        def step(
            self, message_log_batch: Sequence[Any], metadata: Sequence[Any]
        ) -> EnvironmentReturn[Any]:
            size = len(metadata)
            return EnvironmentReturn(
                [{"role": "user", "content": "go on"}] * size,
                list(metadata),
                [None] * size,
                [0.0] * size,
                [False] * size,
                None,
            )

    with pytest.raises(EnvironmentContractError, match=r"part 'late' .* must end each"):
        of_parts(a=ArithmeticEnvironment(), late=GoesOn()).step(
            [log_of("46")], [{"answer": 46}]
        )


def test_a_part_that_does_not_apply_leaves_the_others() -> None:
    def unsure(prompt: str, response: str) -> float | None:
        return None if response == "45" else 1.0

    env = of_parts(a=ArithmeticEnvironment(), unsure=unsure)
    found = env.step([log_of("46"), log_of("45")], [{"answer": 46}] * 2)
    assert isinstance(found.rewards, dict)
    assert math.isnan(floats(found.rewards["reward/unsure"])[1])
    assert floats(total_reward(found.rewards)) == [2.0, 0.0]


def test_parts_that_judge_groups() -> None:
    def rank(prompts: Any, responses: list[str]) -> list[float]:
        order = sorted(responses, key=len)
        return [float(order.index(text)) for text in responses]

    env = of_parts(a=ArithmeticEnvironment(), rank=(GroupRewardWrapper(rank), 0.5))
    logs, rows = [log_of("46"), log_of("046")], [{"answer": 46}] * 2
    found = env.step(logs, rows)
    scores = env.score_groups([logs], [found.metadata])
    assert scores is not None
    assert isinstance(scores[0], dict)
    assert floats(scores[0]["reward/rank"]) == [0.0, 0.5]
    assert list(scores[0]) == ["reward/rank"]
    assert of_parts(a=ArithmeticEnvironment()).score_groups([logs], [rows]) is None


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ([], ConfigError, "at least one"),
        ([{"name": "length"}, {"name": "length"}], ConfigError, "'length' twice"),
        ([{"name": "length", "weight": math.nan}], ConfigError, "finite"),
        ([{"name": "length", "weight": math.inf}], ConfigError, "finite"),
        ([{"name": "a/b", "env": "length"}], ConfigError, "name of a part.*'a/b'"),
        ([{"name": "", "env": "length"}], ConfigError, "name of a part"),
        ([{"name": "lenght"}], RegistryError, "part 'lenght'.*did you mean 'length'"),
        (
            [{"name": "a", "env": "length", "settings": {"min_lenght": 1}}],
            ConfigError,
            "part 'a' of environment 'multi_reward'.*min_lenght",
        ),
    ],
)
def test_wrong_parts_are_refused(
    parts: list[Mapping[str, Any]], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        MultiRewardEnvironment({"parts": parts})


def test_what_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="either settings with parts, or parts"):
        MultiRewardEnvironment()
    length = LengthEnvironment()
    for weight in (math.inf, True, "1"):
        with pytest.raises(ConfigError, match="weight of part 'a'"):
            of_parts(a=(length, weight))
    twice = [RewardPart("a", length), RewardPart("a", length)]
    with pytest.raises(ConfigError, match="'a' twice"):
        MultiRewardEnvironment(parts=twice)


def test_errors_name_the_part() -> None:
    env = MultiRewardEnvironment(SETTINGS)
    with pytest.raises(MessageLogError, match=r"part 'right' .*: metadata\[0\] must"):
        env.step([log_of("46")], [{}])
    assert env.unusable_rows([{"sum": 1}, {"answer": 1}]) == {
        1: "part 'right': metadata[1] must have the column 'answer', a whole number: "
        "got None"
    }

    def broken(prompt: str, response: str) -> float:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(RewardError, match=r"part 'broken' .*on purpose"):
        of_parts(broken=broken).step([log_of("46")], [{}])

    class Breaks(ArithmeticEnvironment):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            raise KeyError("gone")

    with pytest.raises(EnvsError, match=r"part 'b' .*: KeyError: 'gone'"):
        of_parts(b=Breaks()).step([log_of("46")], [{"answer": 46}])


def test_all_parts_are_shut_down_whatever_one_does() -> None:
    ended: list[str] = []

    class Ends(ArithmeticEnvironment):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def shutdown(self) -> None:
            ended.append(self.name)
            if self.name == "b":
                raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        of_parts(a=Ends("a"), b=Ends("b"), c=Ends("c")).shutdown()
    assert sorted(ended) == ["a", "b", "c"]


def test_it_fulfils_the_contract_and_crosses_processes() -> None:
    assert env_registry.get("multi_reward") is MultiRewardEnvironment
    env = MultiRewardEnvironment(MultiRewardConfig.from_dict(SETTINGS))
    logs, rows = [log_of("46"), log_of("1"), log_of("")], [{"sum": 46}] * 3
    copy = pickle.loads(pickle.dumps(env))
    first, second = env.step(logs, rows), copy.step(logs, rows)
    assert floats(total_reward(first.rewards)) == floats(total_reward(second.rewards))
    check_environment(env, logs, rows)


class Opened(EnvironmentInterface[Any]):
    """Opens and closes conversations; ends each after `turns`, rewarding its seed."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns
        self.open: list[int] = []

    def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> Sequence[Any]:
        self.open += seeds
        return [
            {**row, "opened": seed} for row, seed in zip(metadata, seeds, strict=True)
        ]

    def step(
        self, message_log_batch: Sequence[Any], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        counts = [row.get("count", 0) + 1 for row in metadata]
        ends = [count >= self.turns for count in counts]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "."} for _ in metadata],
            metadata=[
                {**row, "count": count}
                for row, count in zip(metadata, counts, strict=True)
            ],
            next_stop_strings=[None] * len(metadata),
            rewards=np.array(
                [row["opened"] * end for row, end in zip(metadata, ends, strict=True)],
                np.float32,
            ),
            terminateds=np.array(ends, bool),
            answers=None,
        )

    def close(self, metadata: Sequence[Any]) -> None:
        for row in metadata:
            if row["opened"] in self.open:
                self.open.remove(row["opened"])


def test_parts_begin_and_end_conversations() -> None:
    """Each gets its conversation's own seed, including those that score at the end."""
    lead, other, plain = Opened(turns=2), Opened(), ArithmeticEnvironment()
    environment = of_parts(lead=lead, other=(other, 0.5), plain=plain)
    given = [{"answer": "46"}, {"answer": "46"}]
    rows = environment.reset(given, [3, 5])
    assert given == [{"answer": "46"}] * 2
    assert (lead.open, other.open) == ([3, 5], [3, 5])
    first = environment.step([log_of("46")] * 2, rows)
    assert floats(total_reward(first.rewards)) == [0.0, 0.0]
    batch = {"rewards": np.zeros(2), "metadata": first.metadata}
    metrics = environment.global_post_process_and_metrics(batch)[1]
    assert not any(name.startswith("other/") for name in metrics)
    # One hits a limit of the rollout and is closed before it was scored.
    environment.close(first.metadata[:1])
    assert (lead.open, other.open) == ([5], [5])
    second = environment.step([log_of("46")], first.metadata[1:])
    assert {name: floats(part) for name, part in second.rewards.items()} == {
        "reward/lead": [5.0], "reward/other": [2.5], "reward/plain": [1.0],
    }  # fmt: skip
    for _ in range(2):
        environment.close(second.metadata)
        assert (lead.open, other.open) == ([], [])


def test_a_judge_of_tools_begins_and_ends_conversations() -> None:
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    judge = Opened()
    environment = ToolEnvironment([double], judge)
    [row] = environment.reset([{"answer": "4"}], [7])
    called = environment.step(
        [
            log_of(
                '<tool_call>{"name": "double", "arguments": {"number": 2}}</tool_call>'
            )
        ],
        [row],
    )
    assert not called.terminateds.any()
    ended = environment.step([log_of("4")], called.metadata)
    assert floats(ended.rewards) == [7.0]
    assert judge.open == [7]
    environment.close(ended.metadata)
    assert judge.open == []
    none = ToolEnvironment([double], ArithmeticEnvironment())
    assert none.reset([{"answer": "4"}], [7]) == [{"answer": "4"}]
    none.close([{"answer": "4"}])
