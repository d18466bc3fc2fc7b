"""A training policy samples with its own weights, in its own workers."""

from __future__ import annotations

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError
from rl_models.config import PolicyConfig
from rl_models.errors import ContextLengthError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.testing import reference_logprobs
from rl_models.training.worker import TrainingWorker
from rl_models.training.worker_sampler import sampling_config
from rl_models.types import SamplingParams

GENERATION = {"max_new_tokens": 12, "temperature": 0.8, "stop_token_ids": []}
SETTINGS = {
    "generation": GENERATION,
    "optimizer": {"kwargs": {"lr": 0.05}},
    "scheduler": None,
}


def make_prompts(num_rows=7, **columns):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (num_rows,), generator=generator)
    ids = torch.randint(3, 16, (num_rows, 9), generator=generator)
    ids[torch.arange(9) >= lengths[:, None]] = 0
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, **columns},
    )


def as_rows(output):
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


@pytest.fixture(scope="module")
def two_ranks(ray_cluster, tiny_folder):
    # As for a large model on GPUs; other tests use the default for small ones.
    sharding = {"shard_layers": True, "reshard_after_forward": True}
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = HuggingFacePolicy(tiny_folder, cluster, dtensor=sharding, **SETTINGS)
        yield policy
        assert policy.shutdown()


def assert_own(policy, output, version):
    """Check that the rows match the current weights, and report their version."""
    assert output["weight_version"].unique().tolist() == [version]
    rows = as_rows(output)
    sampled = rows["token_mask"] != 0
    assert output["token_versions"][sampled].unique().tolist() == [version]
    logprobs = policy.get_logprobs(rows)["logprobs"]
    torch.testing.assert_close(output["logprobs"], logprobs, atol=1e-5, rtol=0)
    return rows


def test_sharded_ranks_sample_as_one_and_follow_training(
    two_ranks, tiny_folder, nll_loss, tmp_path
):
    prompts = make_prompts(seeds=torch.arange(7))
    one = HuggingFaceGenerationBackend()
    one.setup(GenerationConfig(**GENERATION).to_dict(), model_name=str(tiny_folder))
    expected = one.generate(prompts)
    output = two_ranks.generate(prompts)
    for name in ("output_ids", "generation_lengths", "token_versions", "truncated"):
        assert torch.equal(output[name], expected[name]), name
    rows = assert_own(two_ranks, output, 0)
    reference = reference_logprobs(tiny_folder, output["output_ids"], 0.8).float()
    sampled = rows["token_mask"] != 0
    torch.testing.assert_close(
        output["logprobs"][sampled], reference[sampled], atol=1e-5, rtol=0
    )
    two_ranks.save_checkpoint(tmp_path / "w", tmp_path / "o")

    two_ranks.train(rows, nll_loss, eval_mode=True)
    assert two_ranks.weight_version == 0
    for step in range(2):  # the first call had nothing to refill
        two_ranks.train(rows, nll_loss)
        trained = two_ranks.generate(prompts)
        assert_own(two_ranks, trained, step + 1)
    assert not torch.equal(trained["output_ids"], output["output_ids"])
    # Fewer rows than ranks: the rank without rows still gathers.
    two_ranks.load_checkpoint(None, tmp_path / "o")
    (alone,) = two_ranks.generate(prompts.slice(2, 3))["output_ids"].tolist()
    length = int(output["unpadded_sequence_lengths"][2])
    assert alone == output["output_ids"][2, :length].tolist()
    assert_own(two_ranks, two_ranks.generate(prompts), 3)


def test_settings_of_a_call(two_ranks):
    prompts = make_prompts(4)
    first, second = (two_ranks.generate(prompts)["output_ids"] for _ in range(2))
    assert not torch.equal(first, second)  # separate noise for each call
    best, again = (two_ranks.generate(prompts, greedy=True) for _ in range(2))
    assert torch.equal(best["output_ids"], again["output_ids"])
    short = two_ranks.generate(prompts, sampling=SamplingParams(max_new_tokens=2))
    assert short["generation_lengths"].tolist() == [2] * 4


def test_wrong_rows_are_named_by_the_driver(two_ranks):
    with pytest.raises(BatchError, match=r"lacks input_lengths; it has input_ids"):
        two_ranks.generate(BatchedDataDict(input_ids=make_prompts(2)["input_ids"]))
    with pytest.raises(BatchError, match="no rows"):
        two_ranks.generate(make_prompts(2).slice(0, 0))
    with pytest.raises(ConfigError, match=r"temperature must be > 0.*greedy=True"):
        two_ranks.generate(make_prompts(2), sampling=SamplingParams(temperature=0.0))


def test_defaults_fit_the_model_and_another_model_takes_over(tiny_folder, nll_loss):
    config = PolicyConfig(model_name=str(tiny_folder))
    assert sampling_config(config).max_new_tokens == 128
    worker = TrainingWorker(config.to_dict())
    worker.setup()
    data = make_prompts(2, seeds=torch.arange(2))
    limits = SamplingParams(max_new_tokens=4)
    before, _ = worker.generate(data, 0, sampling=limits)
    assert worker.generate(None, 0)[0] is None
    with pytest.raises(ContextLengthError, match="max_new_tokens=128"):
        worker.generate(data, 0)  # if the policy sets no limit
    rows = as_rows(before)
    worker.train(rows, nll_loss, False, 2, 2)
    after, _ = worker.generate(data, 1, sampling=limits)
    assert not torch.equal(before["logprobs"], after["logprobs"])
    worker.setup(config.to_dict())
    again, _ = worker.generate(data, 0, sampling=limits)
    assert torch.equal(before["logprobs"], again["logprobs"])
    worker.shutdown()


def test_own_engine_whatever_the_backend():
    section = GenerationConfig(
        backend="vllm", max_new_tokens=3, backend_options={"swap_space": 0}
    )
    config = PolicyConfig(
        model_name="missing", generation=section, precision="bfloat16"
    )
    own = sampling_config(config)
    assert (own.backend, own.precision, own.max_new_tokens) == (
        "huggingface",
        "bfloat16",
        3,
    )
    assert own.backend_options == {}
    # In a worker: a class registered by driver code is not known there.
    section = GenerationConfig(backend="of_the_driver", max_new_tokens=3)
    config = PolicyConfig(model_name="missing", generation=section)
    assert sampling_config(config).backend == "huggingface"


def test_scalar_head_does_not_sample(ray_cluster, tiny_folder):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        policy = HuggingFacePolicy(tiny_folder, cluster, head="value")
        with pytest.raises(ConfigError, match=r"generate needs policy.head lm"):
            policy.generate(make_prompts(1))
        assert policy.shutdown()
