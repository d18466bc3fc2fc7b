"""Ranks of `megatron` in its environment, against plain transformers in one process.

One pair of processes measures all cells; each test looks at one of them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from matrix_cells import cells
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models import (
    GenerationConfig,
    GenerationPolicy,
    MegatronPolicy,
    PolicyConfig,
    WeightSynchronizer,
    get_generation_backend,
    get_training_backend,
)
from rl_models.environments import MEGATRON
from rl_models.errors import GenerationError, UnsupportedModelError
from rl_models.generation.choice import for_this_process
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.policy.preflight import check_policy
from rl_models.testing import build_tiny_model, reference_logprobs
from rl_models.training.dtensor import DTensorTrainingBackend

SCRIPT = Path(__file__).parent / "rl_models_sample_megatron.py"
VOCABULARY = 29
FAMILIES = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "mistral": (MistralConfig, {"tie_word_embeddings": False}),
    # Its first layer has no experts.
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
}
TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
ALONE = {
    "qwen3": {"model": "qwen3", "parallelism": {}},
    "llama-recompute": {"model": "llama", "parallelism": {}, "recompute": True},
    "qwen3_moe": {"model": "qwen3_moe", "parallelism": {}},
}
INTERLEAVED = {"model": "llama", "parallelism": {"pipeline": 2}, "virtual_stages": 2}
EXPERT = {"model": "qwen3_moe", "parallelism": {"expert": 2}}
PAIRS = {
    "mistral-dp2": {"model": "mistral", "parallelism": {}},
    "qwen2-tp2": {"model": "qwen2", "parallelism": TENSOR, "resume": "tp2"},
    "qwen3-tp2": {"model": "qwen3", "parallelism": TENSOR},
    "qwen3-tp2-sp": {"model": "qwen3", "parallelism": SEQUENCE},
    "qwen2-pp2": {"model": "qwen2", "parallelism": {"pipeline": 2}, "resume": "pp2"},
    "llama-pp2": {"model": "llama", "parallelism": {"pipeline": 2}},
    "llama-pp2-interleaved": {**INTERLEAVED, "resume": "interleaved"},
    "qwen2-dp2-shared": {
        "model": "qwen2",
        "parallelism": {},
        "shared": True,
        "resume": "shared",
    },
    "qwen3_moe-ep2": {**EXPERT, "resume": "ep2", "recompute": True},
    "qwen3_moe-ep2-shared": {**EXPERT, "shared": True},
    "qwen3_moe-tp2-sp": {"model": "qwen3_moe", "parallelism": SEQUENCE},
    "qwen3_moe-pp2": {"model": "qwen3_moe", "parallelism": {"pipeline": 2}},
}
BFLOAT16 = {"model": "qwen3", "parallelism": {}, "precision": "bfloat16"}
HALVES = {
    "qwen3-bfloat16": BFLOAT16,
    "qwen3-bfloat16-shared": {**BFLOAT16, "shared": True},
    "qwen3_moe-bfloat16-ep2": {**EXPERT, "precision": "bfloat16", "shared": True},
}
HEADS_ALONE = {"qwen2-reward": {"model": "qwen2", "head": "reward", "parallelism": {}}}
HEADS = {
    "qwen2-reward-tp2": {"model": "qwen2", "head": "reward", "parallelism": TENSOR},
    "qwen3-value-tp2-sp": {"model": "qwen3", "head": "value", "parallelism": SEQUENCE},
    "llama-value-pp2": {
        "model": "llama",
        "head": "value",
        "parallelism": {"pipeline": 2},
    },
    "mistral-value-dp2": {"model": "mistral", "head": "value", "parallelism": {}},
}
FOURS = {
    "qwen3-tp2-sp-pp2": {"model": "qwen3", "parallelism": {**SEQUENCE, "pipeline": 2}},
    "qwen2-dp2-tp2": {"model": "qwen2", "parallelism": TENSOR, "shared": True},
    "qwen3_moe-ep2-pp2": {
        "model": "qwen3_moe",
        "parallelism": {"expert": 2, "pipeline": 2},
        "recompute": True,
    },
    "qwen3_moe-ep2-pp2-shared": {
        "model": "qwen3_moe",
        "parallelism": {"expert": 2, "pipeline": 2},
        "shared": True,
        "resume": "ep2-pp2",
    },
    "qwen3_moe-ep2-tp2-sp": {
        "model": "qwen3_moe",
        "parallelism": {**SEQUENCE, "expert": 2},
        "shared": True,
    },
}
EIGHTS = {
    "qwen3_moe-ep2-tp2-sp-pp2": {
        "model": "qwen3_moe",
        "parallelism": {**SEQUENCE, "expert": 2, "pipeline": 2},
    },
}


def _batch(make_batch):
    data = make_batch(8)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(data["input_ids"].shape, generator=generator)
    data["old_logprobs"] = noise * 0.3 - 3.4
    data["weights"] = torch.randn(8, generator=generator)
    return data


def _model(name, folder):
    """Write a tiny model whose norms and biases differ from their initial values."""
    config_class, changes = FAMILIES[name]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    config = config_class(**{**shape, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def _logprobs(model, data):
    ids = data["input_ids"]
    logits = model(ids).logits[:, :-1]
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found * data["token_mask"][:, 1:]


def _losses(model, data):
    logprobs, mask = _logprobs(model, data), data["token_mask"][:, 1:]
    ratio = (logprobs - data["old_logprobs"][:, 1:]).exp()
    weight = data["weights"][:, None]
    gain = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
    return {
        "sft": -(logprobs * mask).sum() / mask.sum(),
        "grpo": -(gain * mask).sum() / mask.sum(),
    }


def _weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _expected(model, data):
    """Return the results of plain transformers in one process."""
    expected = {"weights": _weights(model)}
    with torch.no_grad():
        logprobs = _logprobs(model, data)
    expected["logprobs"] = torch.nn.functional.pad(logprobs, (1, 0))
    for kind in ("sft", "grpo"):
        loss = _losses(model, data)[kind]
        model.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.get_total_norm(grads.values())
        expected[kind] = {
            "loss": loss.item(),
            "norm": norm.item(),
            "gradients": grads,
        }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        _losses(model, data)["sft"].backward()
        optimizer.step()
    expected["after"] = _weights(model)
    return expected


def _expected_of_head(folder, head, data):
    """Return the results of plain transformers in one process with a scalar head."""
    model = load_scalar_model(folder, head)
    mask = torch.nn.functional.pad(data["token_mask"][:, 1:], (0, 1))

    def values():
        hidden = model.base_model(data["input_ids"]).last_hidden_state
        return model.score(hidden)[..., 0] * mask

    def loss():
        return ((values() - data["old_logprobs"]) * mask).square().sum() / mask.sum()

    expected = {"values": values().detach()}
    value = loss()
    value.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm(grads.values())
    expected |= {"loss": value.item(), "norm": norm.item(), "gradients": grads}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return {**expected, "after": _weights(model)}


def _run(python, folder, group, num_ranks):
    """Run ranks to completion; return the results of each."""
    (folder / "cells.json").write_text(json.dumps(group))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        place = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        variables = {k: str(v) for k, v in place.items()}
        with (folder / f"log-{rank}").open("w") as log:
            process = subprocess.Popen(
                [str(python), str(SCRIPT), str(folder)],
                env={
                    **os.environ,
                    **variables,
                    "MASTER_ADDR": "127.0.0.1",
                    "PYTHONPATH": "",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ranks.append(process)
    try:
        codes = [process.wait(timeout=400) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = [(folder / f"log-{rank}").read_text()[-4000:] for rank in range(num_ranks)]
    assert codes == [0] * num_ranks, "\n".join(logs)
    found = [folder / f"found-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(file.read_text()) for file in found]


class Measured:
    """Results of each rank by cell; cells with equal numbers of ranks run together.

    Args:
        run: Returns the results of each rank for some cells.
        groups: By number of ranks their cells.
    """

    def __init__(self, run, groups):
        self._run, self._groups = run, groups
        self._found = {}

    def __getitem__(self, cell):
        if cell not in self._found:
            (num_ranks,) = [n for n, group in self._groups.items() if cell in group]
            group = self._groups[num_ranks]
            by_rank = self._run(group, num_ranks)
            self._found |= {name: [rank[name] for rank in by_rank] for name in group}
        return self._found[cell]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, make_batch):
    """The folder, and each rank's measurements by cell."""
    folder = tmp_path_factory.mktemp("megatron")
    build_tiny_model(folder / "tokenizer")
    data = _batch(make_batch)
    torch.save(dict(data), folder / "batch.pt")
    for name in FAMILIES:
        model = _model(name, folder / name)
        torch.save(_expected(model, data), folder / name / "expected.pt")
    prepared = MEGATRON.resolve().prepare().runtime_env
    (python,) = shlex.split(prepared["py_executable"])
    heads = {(c["model"], c["head"]) for c in (HEADS | HEADS_ALONE).values()}
    for name, head in heads:
        expected = _expected_of_head(folder / name, head, data)
        torch.save(expected, folder / name / f"{head}.pt")
    alone, pairs = ALONE | HEADS_ALONE, PAIRS | HEADS | HALVES
    for group in (alone, pairs):
        group |= {name: {**cell, "name": name} for name, cell in group.items()}
    groups = {1: alone, 2: pairs, 4: FOURS, 8: EIGHTS}
    return folder, Measured(functools.partial(_run, python, folder), groups)


@pytest.mark.parametrize(
    "cell", cells([*ALONE, *PAIRS, *FOURS, *EIGHTS], [*ALONE, *PAIRS])
)
def test_each_layout_computes_what_one_process_computes(measured, cell):
    for found in measured[1][cell]:
        assert found["same_weights"], "export after import must be bitwise"
        assert found["specs"]
        assert found["logprobs"] < 1e-5
        for kind in ("sft", "grpo", "logit"):
            assert found[kind]["loss"] < 1e-6
            assert found[kind]["norm"] < 1e-5
            assert found[kind]["gradients"] < 1e-5
        assert found["weights"] < 1e-6
        assert found["reference"] < 1e-5
        assert found["eval"]
        assert found["compiled"] == 0, "nothing is compiled for a CPU"
        assert cell in ALONE or found["deadline_s"] == 77.0


@pytest.mark.parametrize(
    "cell",
    cells([*ALONE, *PAIRS, *HALVES, *FOURS], [*ALONE, *PAIRS, *HALVES]),
)
def test_each_tensor_is_collected_on_one_rank(measured, cell):
    ranks = [found["collected"] for found in measured[1][cell]]
    assert sorted(name for found in ranks for name in found["names"]) == ranks[0]["all"]
    for found in ranks:
        assert found["same"], "bitwise what every rank gathers"
        assert found["dtypes"]
        assert found["names"], "every rank sends some"


@pytest.mark.parametrize("cell", HALVES)
def test_weights_in_bfloat16_are_trained_by_masters_in_float32(measured, cell):
    for found in measured[1][cell]:
        assert found["same_weights"], "the masters are the weights of the folder"
        assert found["dtypes"] == ["torch.bfloat16"]
        assert found["sent"], "a generator gets what the trainer computes with"
        assert found["logprobs"] < 0.1
        # Products in bfloat16 are off by a few percent.
        assert found["moved"] < 0.06, "steps below the resolution of bfloat16 count"
        assert found["resumed"]
        assert found["reference"], "it is the model before its steps"


SAMPLED = [
    n for n, c in (ALONE | PAIRS | FOURS).items() if "expert" not in c["parallelism"]
]


@pytest.mark.parametrize("cell", cells(SAMPLED, {*SAMPLED} - {*FOURS}))
def test_each_layout_samples_with_the_weights_that_it_trains(measured, cell):
    ranks = [found["sampled"] for found in measured[1][cell]]
    for found in ranks:
        for kind in ("drawn", "greedy"):
            assert found[kind]["same"], "the tokens of the backend huggingface"
            assert found[kind]["logprobs"] < 1e-5
            assert found[kind]["version"] == [3]
            assert found[kind]["tokens"] == ranks[0][kind]["tokens"]
        assert found["batches"] == [9, 9, 9], "prompts of all lengths in one batch"
        assert found["trainer"] < 1e-5


@pytest.mark.parametrize("cell", [*HEADS_ALONE, *HEADS])
def test_scalar_heads_are_trained_as_in_one_process(measured, cell):
    for found in measured[1][cell]:
        assert found["values"] < 1e-5
        assert found["loss"] < 1e-6
        assert found["norm"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["weights"] < 1e-6
        assert found["resumed"], "from its folder, and from its training state"


RESUMED = [name for name, c in (PAIRS | FOURS).items() if "resume" in c]


@pytest.mark.parametrize("cell", cells(RESUMED, [n for n in RESUMED if n in PAIRS]))
def test_a_resumed_run_goes_on_as_the_one_that_was_not_stopped(measured, cell):
    for found in measured[1][cell]:
        assert all(found["resume"].values()), found["resume"]


@pytest.mark.parametrize(
    ("saved", "model"),
    [
        ("tp2", "qwen2"),
        ("pp2", "qwen2"),
        ("shared", "qwen2"),
        ("interleaved", "llama"),
        ("ep2", "qwen3_moe"),
    ],
)
def test_dtensor_resumes_what_megatron_wrote(
    measured, make_batch, saved, model, nll_loss
):
    folder, _ = measured
    config = PolicyConfig(
        model_name=str(folder / model),
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}},
        max_grad_norm=None,
    )
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict(), optimizer_path=folder / f"{saved}-state")
    written = AutoModelForCausalLM.from_pretrained(folder / f"{saved}-weights")
    for name, value in written.named_parameters():
        assert torch.equal(backend.model.parameters[name], value)
    data = _batch(make_batch)
    backend.train_step(data, nll_loss, global_batch_size=data.size, micro_batch_size=4)
    after = torch.load(folder / f"{saved}-after.pt")
    for name, value in backend.export_weights("float32"):
        # Adam amplifies differences of gradients that are nearly zero.
        assert (value - after[name]).abs().mean() < 1e-4, name


def test_the_driver_needs_no_megatron(tiny_model):
    assert importlib.util.find_spec("megatron") is None
    backend = get_training_backend("megatron")
    config = PolicyConfig(model_name=str(tiny_model), backend="megatron")
    check_policy(config, num_ranks=2)
    with pytest.raises(ConfigError, match=r"install rl-models\[megatron\]"):
        backend().setup(config.to_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "sequence_packing": {"train_mb_tokens": 64},
                "parallelism": {"pipeline": 2},
                "megatron": {"virtual_stages": 2},
            },
            "virtual_stages above 1, whose micro-batches have one shape",
        ),
        ({"parallelism": {"context": 2}}, "context must be 1"),
        ({"parallelism": {"expert": 2}}, "expert must be 1"),
        ({"megatron": {"virtual_stages": 2}}, "must be 1 without pipeline stages"),
        (
            {"parallelism": {"pipeline": 2}, "megatron": {"virtual_stages": 3}},
            "must divide the 2 layers",
        ),
        (
            {
                "optimizer": {"name": "torch.optim.LBFGS", "kwargs": {"lr": 1.0}},
                "megatron": {"distributed_optimizer": True},
            },
            "elementwise optimizer of torch.optim",
        ),
        ({"optimizer": {"kwargs": {"lr": 1.0, "speed": 1}}}, "has speed"),
    ],
)
def test_what_it_does_not_have_is_refused_before_a_worker_starts(
    tiny_model, settings, message
):
    config = PolicyConfig(model_name=str(tiny_model), backend="megatron", **settings)
    with pytest.raises(ConfigError, match=message):
        check_policy(config, num_ranks=4)


def test_sampling_with_the_trainers_weights_needs_that_trainer(tiny_model):
    generation = {"backend": "megatron", "max_new_tokens": 4}
    config = PolicyConfig(model_name=str(tiny_model), generation=generation)
    with pytest.raises(ConfigError, match=r"set policy\.backend=megatron, or another"):
        check_policy(config, num_ranks=1)
    with pytest.raises(ConfigError, match="cannot be started by itself"):
        GenerationPolicy(
            RayVirtualCluster([1], use_gpus=False),
            GenerationConfig(**generation),
            model_name=str(tiny_model),
        )
    backend = get_generation_backend("megatron")()
    with pytest.raises(GenerationError, match="got none"):
        backend.setup(generation, model_name=str(tiny_model))
    with pytest.raises(GenerationError, match="takes no others: got lm_head"):
        backend.load_weights(iter([("lm_head", torch.zeros(1))]), 1)
    assert for_this_process(GenerationConfig(**generation)).backend == "huggingface"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope type 'linear'",
        ),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(
    tiny_model, overrides, message
):
    config = PolicyConfig(
        model_name=str(tiny_model), backend="megatron", hf_config_overrides=overrides
    )
    with pytest.raises(UnsupportedModelError, match=message):
        check_policy(config, num_ranks=1)


def test_an_unknown_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = PolicyConfig(model_name=str(tmp_path), backend="megatron")
    with pytest.raises(UnsupportedModelError, match="has llama, mistral, qwen2, qwen3"):
        check_policy(config, num_ranks=1)


def test_a_policy_trains_in_workers_that_have_megatron(
    ray_cluster, tiny_folder, make_batch, nll_loss, tmp_path
):
    """Two tensor ranks train, and a generator gets their weights."""
    data = make_batch(4, 12)
    data["input_ids"] = data["input_ids"] % 16
    mask = data["token_mask"].bool()
    settings = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}}
    sampling = GenerationConfig(max_new_tokens=4, stop_token_ids=[])
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = MegatronPolicy(
            tiny_folder, cluster, parallelism={"tensor": 2}, **settings
        )
        generator = GenerationPolicy(cluster, sampling, model_name=tiny_folder)
        try:
            before = policy.get_logprobs(data)["logprobs"]
            truth = reference_logprobs(tiny_folder, data["input_ids"])
            assert (before - truth)[mask].abs().max() < 1e-5
            result = policy.train(data, nll_loss, micro_batch_size=2)
            assert abs(result["loss"].item() + before[mask].mean().item()) < 1e-5
            assert result["all_mb_metrics"]["rows"] == [2.0, 2.0]
            after = policy.get_logprobs(data)["logprobs"]
            assert after[mask].mean() > before[mask].mean()
            policy.save_checkpoint(tmp_path / "weights")
            sync = WeightSynchronizer(policy, generator)
            sync.sync_weights()
            output = generator.generate(
                BatchedDataDict(
                    input_ids=torch.tensor([[3, 4, 5]]), input_lengths=torch.tensor([3])
                )
            )
            sync.close()
        finally:
            assert generator.shutdown()
            assert policy.shutdown()
    trained = tmp_path / "weights"
    truth = reference_logprobs(trained, data["input_ids"])
    assert (after - truth)[mask].abs().max() < 1e-5
    truth = reference_logprobs(trained, output["output_ids"])
    assert (output["logprobs"] - truth)[:, 3:].abs().max() < 1e-5


def test_rows_are_packed_up_to_a_number_of_tokens(
    ray_cluster, tiny_folder, make_batch, nll_loss
):
    data = make_batch(8)
    data["input_ids"] = data["input_ids"] % 16
    mask = data["token_mask"] != 0
    # Without padding they take fewer tokens, so it is the budget that splits them.
    assert data["input_lengths"].sum() > 2 * 40
    settings = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}}
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = MegatronPolicy(
            tiny_folder,
            cluster,
            sequence_packing={"train_mb_tokens": 40},
            **settings,
        )
        try:
            before = policy.get_logprobs(data)["logprobs"]
            result = policy.train(data, nll_loss)
            after = policy.get_logprobs(data)["logprobs"]
        finally:
            assert policy.shutdown()
    truth = reference_logprobs(tiny_folder, data["input_ids"])
    assert (before - truth)[mask].abs().max() < 1e-5
    assert abs(result["loss"].item() + truth[mask].mean().item()) < 1e-5
    rows = result["all_mb_metrics"]["rows"]
    assert sum(rows) == 8
    assert 2 < len(rows) < 8
    assert after[mask].mean() > before[mask].mean()


@pytest.mark.matrix
def test_rows_reach_the_ranks_of_stages_that_share_experts(
    ray_cluster, measured, make_batch, nll_loss
):
    """Their ranks are numbered in a different order than those of other layouts."""
    folder, _ = measured
    model, data = str(folder / "qwen3_moe"), _batch(make_batch)
    mask = data["token_mask"] != 0
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        policy = MegatronPolicy(
            model,
            cluster,
            tokenizer={"name": str(folder / "tokenizer")},
            parallelism={"expert": 2, "pipeline": 2},
            optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
        )
        try:
            before = policy.get_logprobs(data)["logprobs"]
            result = policy.train(data, nll_loss, micro_batch_size=2)
            after = policy.get_logprobs(data)["logprobs"]
        finally:
            assert policy.shutdown()
    truth = torch.load(folder / "qwen3_moe" / "expected.pt")["logprobs"]
    assert (before - truth)[mask].abs().max() < 1e-5
    assert abs(result["loss"].item() + truth[mask].mean().item()) < 1e-5
    assert sum(result["all_mb_metrics"]["rows"]) == 8
    assert after[mask].mean() > before[mask].mean()
