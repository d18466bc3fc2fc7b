from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    RegistryError,
    WorkerDiedError,
    WorkerMethodError,
    WorkerStartError,
)
from rl_envs import (
    EnvironmentContractError,
    EnvironmentReturn,
    FunctionalRewardWrapper,
    GroupRewardWrapper,
    RemoteEnvironment,
    RewardCallError,
    SortingConfig,
    SortingEnvironment,
    SortingTasks,
    ToolEnvironment,
    check_environment,
    observation_messages,
)
from rl_envs.environment_host import EnvironmentHost
from rl_envs.remote import join_returns

pytestmark = pytest.mark.usefixtures("ray_cluster")


def batch_of(responses: Sequence[str], **column: list[Any]) -> tuple[Any, Any]:
    logs = [
        [
            {"role": "user", "content": "q", "token_ids": torch.arange(3)},
            {"role": "assistant", "content": response},
        ]
        for response in responses
    ]
    metadata = [
        {name: values[row] for name, values in column.items()}
        for row in range(len(responses))
    ]
    return logs, metadata


def scripted_environment() -> type[SortingEnvironment]:
    """A class that no other process can import: it travels by value."""

    class Scripted(SortingEnvironment):
        def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
            word = message_log_batch[0][-1]["content"] if message_log_batch else ""
            if word == "die":
                os._exit(3)
            if word == "hang":
                time.sleep(300)
            if word == "raise":
                raise FileNotFoundError("verifier.bin")
            return super().step(message_log_batch, metadata)

        def shutdown(self) -> None:
            path = os.environ.get("SHUTDOWN_FILE")
            if path:
                Path(path).write_text("done")

    return Scripted


def test_two_workers_answer_as_one_process_does() -> None:
    rows = SortingTasks(num_digits=5).train(7)
    responses = [row["answer"] if i % 2 else "x" for i, row in enumerate(rows)]
    logs, metadata = batch_of(responses, answer=[row["answer"] for row in rows])
    local = SortingEnvironment().step(logs, metadata)
    with RemoteEnvironment("sorting", {"credit": "exact"}, num_workers=2) as remote:
        result = remote.step(logs, metadata)
        assert isinstance(result.rewards, torch.Tensor)
        assert isinstance(local.rewards, torch.Tensor)
        assert torch.equal(result.rewards, local.rewards)
        assert result.answers == local.answers
        assert result.metadata == local.metadata
        batch: dict[str, Any] = {"rewards": result.rewards}
        _, metrics = remote.global_post_process_and_metrics(batch)
        assert metrics["accuracy"] == pytest.approx(3 / 7)
        check_environment(remote)
    with pytest.raises(WorkerDiedError, match="was shut down"):
        remote.step(logs, metadata)


def test_a_lambda_scores_in_another_process() -> None:
    with RemoteEnvironment(lambda response: float(os.getpid())) as remote:
        rewards = remote.step(*batch_of(["a"])).rewards
        assert isinstance(rewards, torch.Tensor)
        assert rewards.item() != os.getpid()
        assert remote.name == "<lambda>"


def test_a_reward_error_arrives_as_itself() -> None:
    wrapper = FunctionalRewardWrapper(lambda response: 1 / len(response), "inverse")
    with RemoteEnvironment(wrapper) as remote:
        with pytest.raises(
            RewardCallError, match="'inverse' raised ZeroDivision"
        ) as caught:
            remote.step(*batch_of(["a", ""]))
        assert any("worker 0" in note for note in caught.value.__notes__)
        assert remote.step(*batch_of(["a"])).terminateds.tolist() == [True]


def test_failures_of_a_worker(tmp_path: Path) -> None:
    done = tmp_path / "done"
    remote = RemoteEnvironment(
        scripted_environment(),
        num_workers=2,
        deadline_s=60.0,
        env_vars={"SHUTDOWN_FILE": str(done)},
        max_restarts=1,
    )
    good = batch_of(["1", "1"], answer=["1", "1"])
    with remote:
        with pytest.raises(WorkerMethodError) as caught:
            remote.step(*batch_of(["raise"], answer=["1"]))
        message = str(caught.value)
        assert "worker 0 of 2: step raised FileNotFoundError: verifier.bin" in message
        assert "Traceback" in message
        with pytest.raises(WorkerDiedError, match="worker 1 of 2: the process ended"):
            remote.step(*batch_of(["1", "die"], answer=["1", "1"]))
        rewards = remote.step(*good).rewards  # started anew
        assert isinstance(rewards, torch.Tensor)
        assert rewards.tolist() == [1.0, 1.0]
        with pytest.raises(WorkerDiedError):
            remote.step(*batch_of(["die"], answer=["1"]))
        with pytest.raises(WorkerDiedError, match="started anew too often"):
            remote.step(*good)
    assert done.read_text() == "done"


def test_a_worker_that_hangs_is_named_and_ended() -> None:
    with RemoteEnvironment(scripted_environment(), deadline_s=0.3) as remote:
        with pytest.raises(
            DeadlineExceededError, match=r"worker 0 of 1: no answer to step"
        ):
            remote.step(*batch_of(["hang"], answer=["1"]))
        assert remote._workers == [None]


class CannotStart(SortingEnvironment):
    def __init__(self, config: SortingConfig | None = None) -> None:
        raise ModuleNotFoundError("No module named 'verifier'")


def test_what_cannot_start_is_named() -> None:
    with pytest.raises(WorkerStartError, match="No module named 'verifier'"):
        RemoteEnvironment(CannotStart)
    with pytest.raises(RegistryError, match="unknown environment 'sortin'"):
        RemoteEnvironment("sortin")
    with pytest.raises(ConfigError, match="credit"):
        RemoteEnvironment("sorting", {"credit": 3})
    with pytest.raises(ConfigError, match="num_workers must be at least 1"):
        RemoteEnvironment("sorting", num_workers=0)
    with pytest.raises(ConfigError, match="deadline_s must be positive"):
        RemoteEnvironment("sorting", deadline_s=0)
    with pytest.raises(ConfigError, match="exists already"):
        RemoteEnvironment(SortingEnvironment(), {"credit": "exact"})
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent"):
        RemoteEnvironment(lambda response: lock.locked())


def part(rewards: Any, answers: Any = None) -> EnvironmentReturn[Any]:
    return EnvironmentReturn(
        [{"role": "environment", "content": ""}],
        [None],
        [None],
        rewards,
        torch.ones(1, dtype=torch.bool),
        answers,
    )


def test_chunks_join() -> None:
    nan = torch.tensor([float("nan")])
    joined = join_returns(
        [part({"reward/a": torch.ones(1)}), part(nan, ["x"])],
    )
    assert isinstance(joined.rewards, dict)
    assert joined.rewards["reward/a"][0] == 1
    assert torch.isnan(joined.rewards["reward/a"][1])
    assert joined.answers == [None, "x"]
    with pytest.raises(
        EnvironmentContractError, match="the same rewards for every row"
    ):
        join_returns([part({"reward/a": torch.ones(1)}), part(torch.ones(1))])


def test_the_host_runs_without_ray() -> None:
    host = EnvironmentHost("worker 0")
    assert isinstance(host.call("step", [], []).error, WorkerStartError)
    assert isinstance(host.load(b"garbage").error, WorkerStartError)


def test_tools_and_groups_in_another_process() -> None:
    def longest(responses: list[str]) -> list[dict[str, float]]:
        most = max(map(len, responses))
        return [{"longest": float(len(response) == most)} for response in responses]

    def known(response: str) -> dict[str, float]:
        return {"known": 1.0}

    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    environment = ToolEnvironment([double], GroupRewardWrapper(longest, known))
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text in (
            '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>',
            "a",
            "bc",
        )
    ]
    with RemoteEnvironment(environment, num_workers=2) as remote:
        assert remote.tool_schemas() == environment.tool_schemas()
        result = remote.step(logs, [{}] * 3)
        assert observation_messages(result.observations[0])[0]["content"] == "8"
        # The worker of the first row knows no name: that row only goes on.
        assert result.rewards["reward/known"].tolist() == [0.0, 1.0, 1.0]
        scores = remote.score_groups([logs[1:], logs[2:]], [[{}] * 2, [{}]])
    assert [part["reward/longest"].tolist() for part in scores] == [[0.0, 1.0], [1.0]]
    with RemoteEnvironment(ToolEnvironment([double], known)) as remote:
        assert remote.score_groups([logs[1:]], [[{}] * 2]) is None
