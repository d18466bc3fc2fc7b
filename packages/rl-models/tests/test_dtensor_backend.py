from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import CheckpointError, ConfigError
from rl_models.checkpoint.sharded import Box
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError, NonFiniteGradientError
from rl_models.testing import build_tiny_model
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.types import LossInputType, LossType


def _backend(model, setup=None, **settings):
    settings.setdefault("max_total_sequence_length", 64)
    config = PolicyConfig(model_name=str(model), **settings)
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict(), **(setup or {}))
    return backend


def _gradients(backend, data, loss_fn, micro_batch_size):
    """Return loss and gradients of one global batch, without the optimizer step."""
    taken = {}

    def keep():
        for name, p in backend.model.parameters.items():
            taken[name] = p.grad.clone()
            p.grad = None
        return 0.0, {}

    backend._update = keep
    result = backend.train_step(
        data, loss_fn, global_batch_size=data.size, micro_batch_size=micro_batch_size
    )
    return result["loss"].item(), taken


def test_logprobs_agree_with_float64(tiny_model, make_batch):
    data = make_batch()
    backend = _backend(tiny_model)
    exact = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float64, attn_implementation="eager"
    )
    ids = data["input_ids"]
    with torch.no_grad():
        logits = exact(ids).logits
    expected = torch.log_softmax(logits[:, :-1], -1)
    expected = expected.gather(-1, ids[:, 1:, None])[..., 0]
    got = backend.get_logprobs(data, micro_batch_size=5)
    assert got.shape == ids.shape
    assert not got[:, 0].any()
    mask = data["token_mask"][:, 1:].bool()
    difference = (got[:, 1:].double() - expected)[mask].abs().max().item()
    assert difference < 1e-5
    assert not got[:, 1:][~mask].any()
    del data["token_mask"]
    everything = backend.get_logprobs(data, micro_batch_size=12)[:, 1:]
    within = torch.arange(1, ids.shape[1]) < data["input_lengths"][:, None]
    assert (everything.double() - expected)[within].abs().max().item() < 1e-5
    assert not everything[~within].any()


def test_padded_dynamic_and_packed_give_the_same_gradients(
    tiny_model, make_batch, nll_loss
):
    data = make_batch(16)
    reference = None
    columns = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    budget = {**columns, "max_tokens_per_microbatch": 40}
    dynamic = {**budget, "sequence_length_round": 4}
    packing = {
        **budget,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    ways = [
        ({}, 16),
        ({}, 3),
        ({"dynamic_batching_args": dynamic}, 1),
        ({"sequence_packing_args": packing}, 1),
    ]
    backend = _backend(tiny_model)
    rectangle = _backend(tiny_model)
    rectangle.model.can_pack = False
    for used, (arguments, micro_batch_size) in [
        *((backend, w) for w in ways),
        (rectangle, ways[1]),
    ]:
        shards = data.shard_by_batch_size(1, 16, **arguments)
        shard = shards[0][0] if arguments else shards[0]
        loss, gradients = _gradients(used, shard, nll_loss, micro_batch_size)
        if reference is None:
            reference = (loss, gradients)
        assert loss == pytest.approx(reference[0], abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, reference[1][name], atol=1e-6, rtol=1e-4
            )


def test_gradients_agree_with_plain_transformers(tiny_model, make_batch, nll_loss):
    data = make_batch()
    loss, gradients = _gradients(_backend(tiny_model), data, nll_loss, 4)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    logits = model(data["input_ids"]).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1)
    logprobs = logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    mask = data["token_mask"][:, 1:]
    expected = -(logprobs * mask).sum() / mask.sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, atol=1e-6, rtol=1e-4
        )


def test_the_first_token_of_a_row_is_never_trained_on(tiny_model, make_batch, nll_loss):
    data = make_batch()
    backend = _backend(tiny_model)
    wanted = _gradients(backend, data, nll_loss, 4)
    data["token_mask"][:, 0] = 1
    found = _gradients(backend, data, nll_loss, 4)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


@pytest.mark.parametrize("needs_gradients", [True, False])
def test_rows_of_one_token_have_no_logprobs(tiny_model, nll_loss, needs_gradients):
    backend = _backend(tiny_model)
    data = BatchedDataDict(
        input_ids=torch.tensor([[3], [3], [5]]),
        input_lengths=torch.ones(3, dtype=torch.int64),
        token_mask=torch.ones(3, 1),
        sample_mask=torch.ones(3),
    )
    assert backend.get_logprobs(data, micro_batch_size=2).tolist() == [[0.0]] * 3
    topk = backend.get_topk_logits(data, k=2, micro_batch_size=3)
    assert topk["topk_logits"].shape == (3, 1, 2)

    class NoTokens(type(nll_loss)):
        def __call__(self, data, rows, tokens, next_token_logprobs):
            return super().__call__(
                data, rows, tokens.clamp(min=1), next_token_logprobs
            )

    result = backend.train_step(
        data,
        NoTokens(),
        eval_mode=not needs_gradients,
        global_batch_size=3,
        micro_batch_size=3,
    )
    assert result["loss"].tolist() == result["grad_norm"].tolist() == [0.0]


def test_eval_mode_changes_nothing(tiny_model, make_batch, nll_loss):
    data = make_batch()
    schedule = {"name": "linear", "kwargs": {"total_steps": 4}}
    backend = _backend(tiny_model, scheduler=schedule)
    before = [p.detach().clone() for p in backend.model.parameters.values()]
    result = backend.train_step(
        data, nll_loss, eval_mode=True, global_batch_size=12, micro_batch_size=4
    )
    assert result["grad_norm"].item() == 0.0
    assert sum(result["all_mb_metrics"]["rows"]) == 12
    after = backend.model.parameters.values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    again = backend.train_step(
        data, nll_loss, eval_mode=True, global_batch_size=12, micro_batch_size=4
    )
    assert again["lr"].item() == result["lr"].item(), "the schedule stands still"


def test_several_global_batches_step_the_schedule_each(
    tiny_model, make_batch, nll_loss
):
    backend = _backend(
        tiny_model,
        optimizer={"kwargs": {"lr": 1e-3}},
        scheduler={"name": "linear", "kwargs": {"total_steps": 4}},
    )
    result = backend.train_step(
        make_batch(), nll_loss, global_batch_size=4, micro_batch_size=2
    )
    assert result["lr"].tolist() == pytest.approx([1e-3, 7.5e-4, 5e-4])
    assert result["loss"].shape == (3,)


def test_logits_loss_gets_all_logits(tiny_model, make_batch):
    class FromLogits:
        loss_type = LossType.SEQUENCE_LEVEL
        input_type = LossInputType.LOGIT

        def __call__(self, data, seqs, toks, logits):
            assert logits.shape[:2] == data["input_ids"].shape
            assert seqs.item() == 12
            return logits.square().mean() / seqs, {}

    result = _backend(tiny_model).train_step(
        make_batch(), FromLogits(), global_batch_size=12, micro_batch_size=12
    )
    assert math.isfinite(result["grad_norm"].item())


def test_a_step_with_nan_is_skipped_then_an_error(tiny_model, make_batch, nll_loss):
    class Nan:
        loss_type = LossType.TOKEN_LEVEL
        input_type = LossInputType.LOGPROB

        def __call__(self, data, seqs, toks, next_token_logprobs):
            return next_token_logprobs.sum() * math.nan, {}

    data = make_batch()
    backend = _backend(tiny_model, max_skipped_steps=1)
    before = [p.detach().clone() for p in backend.model.parameters.values()]
    result = backend.train_step(data, Nan(), global_batch_size=12, micro_batch_size=12)
    assert result["all_mb_metrics"]["skipped_steps"] == [1.0]
    after = backend.model.parameters.values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(NonFiniteGradientError, match=r"policy\.max_skipped_steps"):
        backend.train_step(data, Nan(), global_batch_size=12, micro_batch_size=12)
    fine = backend.train_step(data, nll_loss, global_batch_size=12, micro_batch_size=12)
    assert fine["all_mb_metrics"]["skipped_steps"] == [0.0]


def test_activation_checkpointing_and_bfloat16(tiny_model, make_batch, nll_loss):
    data = make_batch()
    plain = _gradients(_backend(tiny_model), data, nll_loss, 12)
    settings = {"dtensor": {"activation_checkpointing": True}}
    again = _gradients(_backend(tiny_model, **settings), data, nll_loss, 12)
    assert again[0] == plain[0]
    name = next(iter(plain[1]))
    torch.testing.assert_close(again[1][name], plain[1][name], atol=1e-6, rtol=1e-5)
    low = _backend(tiny_model, precision="bfloat16")
    result = low.train_step(data, nll_loss, global_batch_size=12, micro_batch_size=12)
    assert result["loss"].item() == pytest.approx(plain[0], rel=0.02)
    assert {p.dtype for p in low.model.parameters.values()} == {torch.float32}
    # The dtype of computation, even for a more precise sampler.
    for name, value in low.export_weights("float32"):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, low.model.parameters[name].bfloat16())
    for _, value in low.export_weights("bfloat16"):
        assert value.dtype == torch.float32


def test_temperature_of_the_sampler_divides_the_logits(tiny_model, make_batch):
    data = make_batch()
    warm = _backend(
        tiny_model, generation={"max_new_tokens": 4, "temperature": 2.0}
    ).get_logprobs(data, micro_batch_size=12)
    logits = AutoModelForCausalLM.from_pretrained(tiny_model)(data["input_ids"]).logits
    expected = torch.log_softmax(logits[:, :-1] / 2.0, -1)
    expected = expected.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    mask = data["token_mask"][:, 1:].bool()
    torch.testing.assert_close(warm[:, 1:][mask], expected[mask].detach())


def test_resume_is_bitwise(tiny_model, make_batch, nll_loss, tmp_path):
    settings = {
        "optimizer": {"kwargs": {"lr": 1e-2}},
        "scheduler": {
            "name": "cosine",
            "kwargs": {"total_steps": 9},
            "warmup_steps": 2,
        },
    }
    data = make_batch()
    first = _backend(tiny_model, {"init_reference_model": True}, **settings)
    initial = first.get_logprobs(data, micro_batch_size=4)
    first.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    first.save_checkpoint(tmp_path / "w", tmp_path / "o")
    random_numbers = torch.rand(3)
    first.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    again = _backend(
        tiny_model,
        {"init_reference_model": True, "optimizer_path": tmp_path / "o"},
        **settings,
    )
    assert torch.equal(torch.rand(3), random_numbers)
    again.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    for name, parameter in first.model.parameters.items():
        assert torch.equal(parameter, again.model.parameters[name])
    assert torch.equal(
        again.get_logprobs(data, micro_batch_size=4, reference=True), initial
    )


@pytest.mark.parametrize("name", ["ASGD", "Adafactor", "NAdam", "RMSprop"])
@pytest.mark.parametrize("is_older", [False, True])
def test_resume_is_bitwise_with_other_optimizers(
    tiny_model, make_batch, nll_loss, tmp_path, name, is_older
):
    optimizer = {"name": f"torch.optim.{name}", "kwargs": {"lr": 1e-2}}
    data = make_batch()
    first = _backend(tiny_model, optimizer=optimizer)
    first.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    first.save_checkpoint(tmp_path / "w", tmp_path / "o")
    first.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    if is_older:
        # Before a state said which of its numbers are tensors.
        file = tmp_path / "o" / "state.json"
        record = json.loads(file.read_text(encoding="utf-8"))
        del record["state"]["tensor_scalars"]
        file.write_text(json.dumps(record), encoding="utf-8")
    again = _backend(
        tiny_model, {"optimizer_path": tmp_path / "o"}, optimizer=optimizer
    )
    again.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    for key, parameter in first.model.parameters.items():
        assert torch.equal(parameter, again.model.parameters[key]), key


def test_optimizer_state_of_another_shape_is_not_written_in_parts(
    tiny_model, make_batch, nll_loss, tmp_path, monkeypatch
):
    optimizer = {"name": "torch.optim.Adafactor", "kwargs": {"lr": 1e-2}}
    backend = _backend(tiny_model, optimizer=optimizer)
    backend.train_step(make_batch(), nll_loss, global_batch_size=12, micro_batch_size=4)
    box = backend.model.box

    def half(name):
        whole = box(name)
        rows, *others = whole.global_shape
        return Box((2 * rows, *others), whole.starts, whole.sizes)

    monkeypatch.setattr(backend.model, "box", half)
    with pytest.raises(CheckpointError, match=r"row_var of shape.*use AdamW or SGD"):
        backend.save_checkpoint(tmp_path / "w", tmp_path / "o")


def test_dropout_goes_on_bitwise_after_a_resume(
    tiny_model, make_batch, nll_loss, tmp_path
):
    settings = {
        "hf_config_overrides": {"attention_dropout": 0.3},
        "optimizer": {"kwargs": {"lr": 1e-2}},
    }
    data = make_batch()
    first = _backend(tiny_model, **settings)
    first.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    first.save_checkpoint(tmp_path / "w", tmp_path / "o")
    left = torch.get_rng_state()
    expected = first.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    again = _backend(tiny_model, {"optimizer_path": tmp_path / "o"}, **settings)
    assert torch.equal(torch.get_rng_state(), left)
    found = again.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    assert torch.equal(found["loss"], expected["loss"])
    for name, parameter in first.model.parameters.items():
        assert torch.equal(parameter, again.model.parameters[name])
    # Dropout was active: with another random state the step differs.
    other = _backend(tiny_model, {"optimizer_path": tmp_path / "o"}, **settings)
    torch.manual_seed(1)
    unlike = other.train_step(data, nll_loss, global_batch_size=4, micro_batch_size=2)
    assert not torch.equal(unlike["loss"], expected["loss"])


def test_model_folder_loads_in_plain_transformers(tiny_model, make_batch, tmp_path):
    backend = _backend(tiny_model)
    with torch.no_grad():
        for parameter in backend.model.parameters.values():
            parameter.add_(0.01)
    backend.save_checkpoint(tmp_path / "w")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "w")
    assert plain.config._attn_implementation == "sdpa"
    assert plain.dtype == torch.float32
    ids = make_batch()["input_ids"]
    backend.model.module.eval()
    with torch.no_grad():
        expected = backend.model.module(ids).logits
        torch.testing.assert_close(plain(ids).logits, expected, atol=0, rtol=0)
    other = _backend(tiny_model, {"weights_path": tmp_path / "w"})
    for name, parameter in backend.model.parameters.items():
        assert torch.equal(parameter, other.model.parameters[name])


@pytest.mark.parametrize("num_key_value_heads", [2, 4])
def test_export_keeps_each_weight_under_its_name(tmp_path, num_key_value_heads):
    """Also if the weights of queries and keys have the same shape."""
    folder = build_tiny_model(
        tmp_path, num_key_value_heads=num_key_value_heads, architecture="qwen3"
    )
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    exported = dict(_backend(folder).export_weights("float32"))
    assert list(exported) == list(expected)
    for name, value in expected.items():
        assert torch.equal(exported[name], value), name


def test_export_holds_each_tied_weight_once(tiny_model):
    backend = _backend(tiny_model)
    tensors = dict(backend.export_weights("float32"))
    assert list(tensors) == list(backend.weight_specs())
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    for name, parameter in backend.model.parameters.items():
        assert torch.equal(tensors[name], parameter)


def test_bad_models_are_user_errors(tiny_model, tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        _backend(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        _backend(tmp_path / "empty")
    with pytest.raises(ConfigError, match="with a context of 64; use at most 64"):
        _backend(tiny_model, max_total_sequence_length=65)
