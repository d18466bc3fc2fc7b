"""Documented programs about policies, worker groups and backends by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from rl_distributed import BatchedDataDict
from rl_distributed.errors import (
    ConfigError,
    RegistryError,
    ResourceInsufficientError,
)
from rl_models import HuggingFacePolicy, get_generation_backend, get_training_backend

Run = Callable[..., dict[str, Any]]


def test_worker_group_of_a_class(run_program: Run) -> None:
    names = run_program("worker_group")
    with names["cluster"], names["worker_group"] as group:
        ((rank, pid),) = ray.get(group.run_all_workers_single_data("rank"))
    assert rank == 0
    assert pid != os.getpid()
    large = names["large_cluster"]
    assert (large.node_count(), large.world_size()) == (2, 16)
    with pytest.raises(ResourceInsufficientError, match="8"):
        large.get_placement_groups()


def test_backends_by_name(run_program: Run) -> None:
    names = run_program("named_backends")
    assert names["training"].__name__ == "DTensorTrainingBackend"
    assert callable(names["training"].train_step)
    assert names["generation"].__name__ == "VllmGenerationBackend"
    assert callable(names["generation"].generate)
    with pytest.raises(RegistryError, match=r"'dtensr'.*dtensor"):
        get_training_backend("dtensr")
    with pytest.raises(RegistryError, match=r"'vlm'.*vllm"):
        get_generation_backend("vlm")


def test_policy_without_a_cluster_samples(run_program: Run, model: str) -> None:
    names = run_program("one_interface", model)
    policy, sampler = names["policy"], names["policy_hf"]
    try:
        assert sampler.group.worker_pids != policy.group.worker_pids
        assert sampler.num_ranks == 1
        rows = names["generations"]
        starts = names["batch"]["input_lengths"]
        for row, start in enumerate(starts.tolist()):
            prompt = names["batch"]["input_ids"][row, :start]
            assert torch.equal(rows["output_ids"][row, :start], prompt)
        assert (rows["generation_lengths"] >= 1).all()
        assert rows["weight_version"].tolist() == [0, 0]
        # The same weights assign the tokens the same log-probs in another process.
        logprobs = policy.get_logprobs(as_rows(rows))["logprobs"]
        torch.testing.assert_close(rows["logprobs"], logprobs, atol=1e-5, rtol=0)
    finally:
        assert policy.shutdown()
        assert sampler.shutdown()
    assert ray.is_initialized()  # it was up before, and does not belong to them


def test_megatron_implements_the_same_interface(run_program: Run, model: str) -> None:
    names = run_program("megatron_policy", model)
    policy, cluster = names["policy"], names["cluster"]
    try:
        assert names["backend"].__name__ == "MegatronTrainingBackend"
        assert "megatron" not in sys.modules, "only its workers have Megatron-core"
        rows = names["generations"]
        assert rows["weight_version"].tolist() == [0, 0]
        trained = as_rows(rows)
        logprobs = policy.get_logprobs(trained)["logprobs"]
        mask = trained["token_mask"] != 0
        torch.testing.assert_close(
            rows["logprobs"][mask], logprobs[mask], atol=1e-5, rtol=0
        )
        policy.train(rows, torch.tensor([1.0, 0.0]))
        assert policy.generate(names["batch"])["weight_version"].tolist() == [1, 1]
    finally:
        assert policy.shutdown()
        cluster.shutdown()


def as_rows(output: Any) -> BatchedDataDict[Any]:
    """Return sampled rows as a policy takes them; the sampled tokens are trained on."""
    totals = output["unpadded_sequence_lengths"]
    starts = totals - output["generation_lengths"]
    columns = torch.arange(output["output_ids"].shape[1])
    mask = (columns >= starts[:, None]) & (columns < totals[:, None])
    return BatchedDataDict(
        input_ids=output["output_ids"],
        input_lengths=totals,
        token_mask=mask.long(),
        sample_mask=torch.ones(len(totals)),
    )


SCRIPT = """
import sys
import psutil, ray
from rl_models import HuggingFacePolicy, ModelLoadError

def end(policy):
    assert policy.shutdown()
    return ray.is_initialized()

try:
    HuggingFacePolicy(sys.argv[1] + "-missing")
except ModelLoadError:
    assert not ray.is_initialized()
first, second = HuggingFacePolicy(sys.argv[1]), HuggingFacePolicy(sys.argv[1])
assert end(first)  # the other one still uses Ray
assert not end(second)
left = HuggingFacePolicy(sys.argv[1])
print(*(child.pid for child in psutil.Process().children(recursive=True)))
"""


def test_policy_ends_the_ray_that_it_started(model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) > 2
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [process.name() for process in alive] == []


def test_wrong_cluster_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster must be .* got 4; make one"):
        HuggingFacePolicy(model, 4)  # type: ignore[arg-type]
