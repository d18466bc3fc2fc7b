"""Adapters against peft itself, in one process and on two ranks."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from matrix_cells import cells
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import CheckpointError, ConfigError
from rl_distributed.transfer import receive_tensors
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError
from rl_models.policy.preflight import check_policy
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.types import LossInputType
from rl_models.weight_request import WeightRequest
from rl_models.weights.receiving import MessageReceiver

LORA = {"r": 4, "alpha": 12.0}
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}

PACKED = {"sequence_packing": {"train_mb_tokens": 64}}


def _config(model, lora=LORA, **settings):
    settings.setdefault("optimizer", SGD)
    return PolicyConfig(
        model_name=str(model),
        max_total_sequence_length=64,
        max_grad_norm=None,
        lora=lora,
        **settings,
    )


def _backend(model, lora=LORA, setup=None, **settings):
    backend = DTensorTrainingBackend()
    backend.setup(_config(model, lora, **settings).to_dict(), **(setup or {}))
    return backend


def _plain_logprobs(model, data):
    ids = data["input_ids"]
    found = torch.log_softmax(model(ids).logits[:, :-1].float(), -1)
    return found.gather(-1, ids[:, 1:, None])[..., 0]


def _loss(logprobs, data):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return -(logprobs * mask).sum() / mask.sum()


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    """An adapter created and trained by peft, and its model."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    config = LoraConfig(
        r=4,
        lora_alpha=12.0,
        target_modules=[*linear, "down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(3)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder, model


def test_loss_and_gradients_are_those_of_peft(
    tiny_model, adapter, make_batch, nll_loss
):
    folder, model = adapter
    data = make_batch()
    backend = _backend(tiny_model, {**LORA, "adapter_path": str(folder)})
    taken = {}
    update = backend._update

    def keep():
        taken.update({n: p.grad.clone() for n, p in backend.model.trained.items()})
        return update()

    backend._update = keep
    result = backend.train_step(
        data, nll_loss, global_batch_size=12, micro_batch_size=4
    )
    expected = _loss(_plain_logprobs(model, data), data)
    expected.backward()
    assert result["loss"].item() == pytest.approx(expected.item(), abs=1e-6)
    wanted = {
        n.removeprefix("base_model.model."): p.grad
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad()
    assert taken.keys() == wanted.keys()
    assert len(taken) == 2 * 7 * 2, "two layers, seven linear ones each, A and B"
    for name, gradient in wanted.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert (taken[name] - gradient).abs().max() / scale < 1e-5, name
    # The base has neither gradients nor optimizer state, and stays as it is.
    assert all(p.grad is None for p in backend.model.parameters.values())
    assert len(backend._steps.optimizer.param_groups[0]["params"]) == len(taken)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    parts = dict(backend.model.full_parts())
    name = "model.layers.0.mlp.up_proj"
    whole = base.get_submodule(name).weight
    assert torch.equal(parts[f"{name}.base_layer.weight"], whole)


def test_exported_weights_are_merged_and_the_model_is_left_as_it_is(
    tiny_model, adapter, make_batch
):
    folder, model = adapter
    data = make_batch()
    backend = _backend(tiny_model, {**LORA, "adapter_path": str(folder)})
    before = backend.get_logprobs(data, micro_batch_size=4)
    weights = {n: v.clone() for n, v in backend.export_weights("float32")}
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    names = dict(plain.named_parameters())
    assert weights.keys() == names.keys() == backend.weight_specs().keys()
    for name, spec in backend.weight_specs().items():
        assert spec.shape == weights[name].shape
    plain.load_state_dict(weights, strict=False)
    mask = data["token_mask"][:, 1:].bool()
    with torch.no_grad():
        merged = _plain_logprobs(plain, data)[mask]
        adapted = _plain_logprobs(model, data)[mask]
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=0)
    torch.testing.assert_close(before[:, 1:][mask], adapted, atol=1e-5, rtol=0)
    assert torch.equal(backend.get_logprobs(data, micro_batch_size=4), before)


def test_the_reference_is_the_base_without_a_second_model(
    tiny_model, make_batch, nll_loss
):
    data = make_batch()
    base = DTensorTrainingBackend()
    base.setup(_config(tiny_model, None).to_dict())
    expected = base.get_logprobs(data, micro_batch_size=4)
    backend = _backend(tiny_model, setup={"init_reference_model": True})
    assert torch.equal(backend.get_logprobs(data, micro_batch_size=4), expected), (
        "B begins at 0"
    )
    for _ in range(3):
        backend.train_step(data, nll_loss, global_batch_size=12, micro_batch_size=4)
    assert backend._reference is None
    reference = backend.get_logprobs(data, micro_batch_size=4, reference=True)
    assert torch.equal(reference, expected)
    changed = backend.get_logprobs(data, micro_batch_size=4)
    assert (changed - expected).abs().max() > 1e-3


def test_the_reference_stays_where_adapters_have_another_base(
    tiny_model, make_batch, nll_loss, tmp_path
):
    data, size = make_batch(), {"micro_batch_size": 4}
    reference = {"init_reference_model": True}
    first = _backend(tiny_model, setup=reference)
    expected = first.get_logprobs(data, reference=True, **size)
    first.train_step(data, nll_loss, global_batch_size=12, **size)
    weights = {"weights_path": tmp_path / "w"}
    first.save_checkpoint(tmp_path / "w", tmp_path / "o")
    # As trainers resume: only the state without a base counts.
    state = {"optimizer_path": tmp_path / "o"}
    again = _backend(tiny_model, setup={**reference, **weights, **state})
    assert again._reference is None

    other = _backend(tiny_model, setup={**reference, **weights})
    other.train_step(data, nll_loss, global_batch_size=12, **size)
    other.save_checkpoint(tmp_path / "w2", tmp_path / "o2")
    moved = other.get_logprobs(data, **size)
    assert (moved - expected).abs().max() > 1e-3
    # This state contains the base, which is not the reference.
    state = {"optimizer_path": tmp_path / "o2"}
    resumed = _backend(tiny_model, setup={**reference, **state})
    assert torch.equal(resumed.get_logprobs(data, **size), moved)
    first.load_checkpoint(None, tmp_path / "o2")
    assert torch.equal(first.get_logprobs(data, **size), moved)
    again.load_checkpoint(tmp_path / "w2")
    for backend in (other, resumed, first, again):
        found = backend.get_logprobs(data, reference=True, **size)
        assert torch.equal(found, expected)


def test_folders_are_read_by_transformers_and_by_peft(
    tiny_folder, make_batch, nll_loss, tmp_path
):
    data = make_batch()
    data["input_ids"] %= 16
    backend = _backend(tiny_folder)
    for _ in range(2):
        backend.train_step(data, nll_loss, global_batch_size=12, micro_batch_size=4)
    backend.save_checkpoint(tmp_path / "w", tmp_path / "o")
    mask = data["token_mask"][:, 1:].bool()
    wanted = backend.get_logprobs(data, micro_batch_size=4)[:, 1:][mask]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "w" / "adapter")
    for model in (merged, adapted):
        with torch.no_grad():
            found = _plain_logprobs(model.eval(), data)[mask]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)

    # The state contains what is trained, not the base; it resumes bitwise.
    size = sum(f.stat().st_size for f in (tmp_path / "o").glob("*.safetensors"))
    assert size < sum(f.stat().st_size for f in (tmp_path / "w").glob("*.safetensors"))
    resumed = _backend(tiny_folder, setup={"optimizer_path": tmp_path / "o"})
    expected = backend.train_step(
        data, nll_loss, global_batch_size=12, micro_batch_size=4
    )
    result = resumed.train_step(
        data, nll_loss, global_batch_size=12, micro_batch_size=4
    )
    assert torch.equal(result["loss"], expected["loss"])
    assert torch.equal(result["grad_norm"], expected["grad_norm"])
    with pytest.raises(CheckpointError, match=r"policy\.lora"):
        _backend(tiny_folder, None, setup={"optimizer_path": tmp_path / "o"})

    # Weights of another folder become the base, and the state then contains them too.
    other = _backend(tiny_folder, setup={"weights_path": tmp_path / "w"})
    found = other.get_logprobs(data, micro_batch_size=4)[:, 1:][mask]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    other.save_checkpoint(tmp_path / "w2", tmp_path / "o2")
    again = _backend(tiny_folder, setup={"optimizer_path": tmp_path / "o2"})
    assert torch.equal(again.get_logprobs(data, micro_batch_size=4)[:, 1:][mask], found)


def test_modules_are_trained_whole_as_peft_does(
    tiny_model, make_batch, nll_loss, tmp_path
):
    # The embedding is also the head, and both follow the trained weight.
    data = make_batch()
    lora = {**LORA, "modules_to_save": ["embed_tokens", "norm"]}
    backend = _backend(tiny_model, lora, setup={"init_reference_model": True})
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert base.config.tie_word_embeddings
    with torch.no_grad():
        untrained = _plain_logprobs(base, data)
    begun = backend.get_logprobs(data, micro_batch_size=4, reference=True)
    model = get_peft_model(
        base,
        LoraConfig(
            r=4,
            lora_alpha=12.0,
            target_modules="all-linear",
            modules_to_save=["embed_tokens", "model.norm"],
            ensure_weight_tying=True,
            task_type="CAUSAL_LM",
        ),
    )
    for name, value in backend.model.full_parts(trained=True):
        if ".lora_A." in name:
            model.get_parameter(f"base_model.model.{name}").data.copy_(value)
    optimizer = torch.optim.SGD(
        (p for p in model.parameters() if p.requires_grad), lr=0.1
    )
    for _ in range(2):
        found = backend.train_step(
            data, nll_loss, global_batch_size=12, micro_batch_size=4
        )
        expected = _loss(_plain_logprobs(model, data), data)
        assert found["loss"].item() == pytest.approx(expected.item(), abs=1e-6)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    mask = data["token_mask"][:, 1:].bool()
    with torch.no_grad():
        wanted = _plain_logprobs(model, data)[mask]
    trained = backend.get_logprobs(data, micro_batch_size=4)
    assert (trained[:, 1:][mask] - untrained[mask]).abs().max() > 1e-2
    torch.testing.assert_close(trained[:, 1:][mask], wanted, atol=1e-5, rtol=0)
    # The reference has neither the adapters nor the other trained weights.
    reference = backend.get_logprobs(data, micro_batch_size=4, reference=True)
    torch.testing.assert_close(
        reference[:, 1:][mask], untrained[mask], atol=1e-5, rtol=0
    )
    assert torch.equal(reference, begun)
    assert torch.equal(backend.get_logprobs(data, micro_batch_size=4), trained)

    backend.save_checkpoint(tmp_path / "w", tmp_path / "o")
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "w" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype=torch.float32)
    for other in (adapted.eval(), merged):
        with torch.no_grad():
            found = _plain_logprobs(other, data)[mask]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    # Others start where it stopped: from the state, from the adapter's folder, and from
    # one written by peft.
    model.save_pretrained(tmp_path / "peft")
    folders = (tmp_path / "w" / "adapter", tmp_path / "peft")
    starts = [({}, {"optimizer_path": tmp_path / "o"})]
    starts += [({"adapter_path": str(folder)}, {}) for folder in folders]
    for settings, setup in starts:
        again = _backend(
            tiny_model,
            {**lora, **settings},
            setup={**setup, "init_reference_model": True},
        )
        found = again.get_logprobs(data, micro_batch_size=4)
        torch.testing.assert_close(found, trained, atol=1e-5, rtol=0)
        found = again.get_logprobs(data, micro_batch_size=4, reference=True)
        assert torch.equal(found, reference)


@pytest.mark.parametrize(
    ("lora", "error", "message"),
    [
        ({"r": 0}, ConfigError, r"lora\.r"),
        ({"modules_to_save": []}, ConfigError, "at least one module"),
        (
            {"modules_to_save": ["norm"], "sync": "adapter"},
            ConfigError,
            "sync must be merged with modules_to_save",
        ),
        (
            {"modules_to_save": ["embed_token"]},
            ConfigError,
            r"'embed_token', and no module .* did you mean 'embed_tokens'",
        ),
        (
            {"modules_to_save": ["mlp"]},
            ConfigError,
            r"no module that has layers with an adapter: got 'mlp'",
        ),
        ({"target_modules": []}, ConfigError, "at least one linear layer"),
        (
            {"target_modules": ["q_porj"]},
            ConfigError,
            r"'q_porj', and no linear layer .* did you mean 'q_proj'.*down_proj",
        ),
        ({"adapter_path": "adapter"}, ModelLoadError, "its r is 4.* mean 16"),
        (
            {"adapter_path": "adapter", **LORA, "target_modules": ["q_proj"]},
            ModelLoadError,
            "modules_to_save: .*down_proj.* is only in one of the two",
        ),
    ],
)
def test_adapters_that_cannot_be(tiny_model, adapter, lora, error, message):
    if "adapter_path" in lora:
        lora = {**lora, "adapter_path": str(adapter[0])}
    with pytest.raises(error, match=message):
        _backend(tiny_model, lora)


def test_adapters_are_refused_before_a_worker_starts(tiny_model, monkeypatch):
    with pytest.raises(ConfigError, match="there is none at 'nowhere'"):
        check_policy(_config(tiny_model, {"adapter_path": "nowhere"}), 1)
    other = _config(tiny_model, backend="megatron")
    with pytest.raises(ConfigError, match="'megatron', which trains no adapters"):
        check_policy(other, 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install rl-models\[lora\]"):
        check_policy(_config(tiny_model), 1)


def test_dropout_is_drawn_for_training_alone(tiny_model, make_batch, nll_loss):
    data = make_batch()
    lora = {**LORA, "dropout": 0.5}
    plain = _backend(tiny_model, {**LORA, "dropout": 0.0})
    backend = _backend(tiny_model, lora)
    again = _backend(tiny_model, lora, dtensor={"activation_checkpointing": True})
    for _ in range(2):
        expected = plain.train_step(
            data, nll_loss, global_batch_size=12, micro_batch_size=4
        )
        torch.manual_seed(5)
        found = backend.train_step(
            data, nll_loss, global_batch_size=12, micro_batch_size=4
        )
        torch.manual_seed(5)
        # Recomputed activations get the same dropout.
        repeated = again.train_step(
            data, nll_loss, global_batch_size=12, micro_batch_size=4
        )
        assert torch.equal(repeated["loss"], found["loss"])
        torch.testing.assert_close(
            repeated["grad_norm"], found["grad_norm"], atol=0, rtol=1e-5
        )
        assert not torch.equal(found["grad_norm"], expected["grad_norm"])
    logprobs = backend.get_logprobs(data, micro_batch_size=4)
    assert torch.equal(backend.get_logprobs(data, micro_batch_size=4), logprobs)
    quiet = backend.train_step(
        data, nll_loss, eval_mode=True, global_batch_size=12, micro_batch_size=4
    )
    once_more = backend.train_step(
        data, nll_loss, eval_mode=True, global_batch_size=12, micro_batch_size=4
    )
    assert torch.equal(quiet["loss"], once_more["loss"])


def test_adapters_are_kept_in_float32_and_computed_in_bfloat16(
    tiny_model, make_batch, nll_loss
):
    data = make_batch()
    exact = _backend(tiny_model)
    backend = _backend(tiny_model, precision="bfloat16")
    for _ in range(3):
        expected = exact.train_step(
            data, nll_loss, global_batch_size=12, micro_batch_size=4
        )
        found = backend.train_step(
            data, nll_loss, global_batch_size=12, micro_batch_size=4
        )
        torch.testing.assert_close(found["loss"], expected["loss"], atol=0, rtol=2e-2)
        torch.testing.assert_close(
            found["grad_norm"], expected["grad_norm"], atol=0, rtol=5e-2
        )
    assert all(p.dtype == torch.float32 for p in backend.model.trained.values())
    # The merged weight is rounded once, after the sum.
    merged = {n: v.clone() for n, v in backend.model.full_tensors()}
    for name, value in backend.export_weights("float32"):
        assert torch.equal(value, merged[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("head", ["value", "reward"])
def test_new_heads_are_trained_whole_and_come_back(
    head, tiny_folder, make_batch, tmp_path
):
    data = make_batch()
    data["input_ids"] %= 16
    backend = _backend(tiny_folder, head=head)
    assert len(backend.model.trained) > 2 * 7 * 2
    weight = backend.model.trained["score.weight"]
    before = weight.detach().clone()
    for _ in range(2):
        backend.train_step(
            data, _SquaredValues(), global_batch_size=12, micro_batch_size=4
        )
    assert not torch.equal(weight, before)
    values = backend.get_values(data, micro_batch_size=4)
    backend.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed = _backend(tiny_folder, head=head, setup={"optimizer_path": tmp_path / "o"})
    assert torch.equal(resumed.get_values(data, micro_batch_size=4), values)
    merged = _backend(tmp_path / "w", None, head=head)
    torch.testing.assert_close(
        merged.get_values(data, micro_batch_size=4), values, atol=1e-5, rtol=0
    )


class _SquaredValues:
    """Pulls values to 1 wherever a token is trained on."""

    input_type = LossInputType.VALUE

    def __call__(self, data, global_valid_seqs, global_valid_toks, values):
        mask = data["token_mask"] * data["sample_mask"][:, None]
        return ((values - 1.0).square() * mask).sum() / global_valid_toks, {}


@pytest.fixture(scope="module")
def two_ranks(ray_cluster, tiny_model):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = TrainingPolicy(cluster, _config(tiny_model))
        yield policy
        assert policy.shutdown()


RECOMPUTED = {"shard_layers": True, "activation_checkpointing": True}
LAYOUTS = {
    "data": {"dtensor": RECOMPUTED},
    "tensor": {"parallelism": {"tensor": 2}},
    "sequence": {"parallelism": {"tensor": 2, "sequence": True}, "dtensor": RECOMPUTED},
    "context": {"parallelism": {"context": 2}},
    "tensor-packed": {"parallelism": {"tensor": 2}, **PACKED},
    "packed": PACKED,
}


@pytest.mark.parametrize("layout", cells(LAYOUTS, ["sequence", "context"]))
def test_two_ranks_equal_one(
    layout, two_ranks, tiny_model, make_batch, nll_loss, tmp_path
):
    settings = LAYOUTS[layout]
    kwargs = {"lr": 0.1, "momentum": 0.9}
    momentum = {"optimizer": {"name": "torch.optim.SGD", "kwargs": kwargs}}
    config = _config(tiny_model, **settings, **momentum)
    check_policy(config, 2)
    two_ranks.reload(config, init_reference_model=True)
    one = _backend(tiny_model, setup={"init_reference_model": True}, **momentum)
    for step in range(3):
        data = make_batch(16, seed=step)
        wanted = one.train_step(
            data, nll_loss, global_batch_size=16, micro_batch_size=4
        )
        found = two_ranks.train(data, nll_loss)
        for key in ("loss", "grad_norm"):
            torch.testing.assert_close(found[key], wanted[key], atol=1e-6, rtol=1e-5)
    export = two_ranks.start_weight_export(WeightRequest(1, bucket_bytes=8192))
    weights = receive_tensors(MessageReceiver(export.messages)).read()
    export.wait(60.0)
    for name, value in one.export_weights("float32"):
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0)
    data = make_batch(15)
    got = two_ranks.get_reference_policy_logprobs(data)["reference_logprobs"]
    expected = one.get_logprobs(data, micro_batch_size=4, reference=True)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)

    # On one rank the state is the same adapter, which continues as on two ranks.
    two_ranks.save_checkpoint(tmp_path / "w", tmp_path / "o")
    state = {"optimizer_path": tmp_path / "o"}
    resumed = _backend(tiny_model, setup=state, **momentum)
    saved = load_file(tmp_path / "w" / "adapter" / "adapter_model.safetensors")
    for name, parameter in resumed.model.trained.items():
        key = "base_model.model." + name.replace(".default", "")
        assert torch.equal(parameter, saved[key]), name
        # The gradients of three steps, accumulated by the optimizer.
        gradients = resumed._steps.optimizer.state[parameter]["momentum_buffer"]
        wanted = one._steps.optimizer.state[one.model.trained[name]]["momentum_buffer"]
        scale = wanted.abs().max().clamp(min=1e-3)
        assert (gradients - wanted).abs().max() / scale < 1e-5, name
    for name, value in resumed.export_weights("float32"):
        assert torch.equal(weights[name], value), name
    data = make_batch(16, seed=9)
    wanted = two_ranks.train(data, nll_loss)
    found = resumed.train_step(data, nll_loss, global_batch_size=16, micro_batch_size=4)
    torch.testing.assert_close(found["loss"], wanted["loss"], atol=1e-6, rtol=1e-5)
    two_ranks.load_checkpoint(None, tmp_path / "o")
    again = two_ranks.train(data, nll_loss)
    assert torch.equal(again["loss"], wanted["loss"])
    assert torch.equal(again["grad_norm"], wanted["grad_norm"])
