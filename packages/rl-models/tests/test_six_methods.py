from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError, RegistryError
from rl_models import (
    GenerationConfig,
    PolicyConfig,
    TrainingBackend,
    TrainingPolicy,
    registry as backends,
)
from rl_models.errors import UnsupportedModelError
from rl_models.policy.preflight import check_policy
from rl_models.registry import register_training_backend
from rl_models.testing import TokenCrossEntropy
from rl_models.training.six_methods import SixMethodBackend, build_training_backend
from rl_models.types import LossInputType


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    registry = backends._TRAINING
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


class Plain(TrainingBackend):
    """A Hugging Face model and SGD, with the six methods."""

    def setup(self, config):
        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"])
        rate = config["optimizer"]["kwargs"]["lr"]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    def get_logprobs(self, batch):
        ids = batch["input_ids"]
        logprobs = self.model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        return torch.nn.functional.pad(
            logprobs.gather(-1, ids[:, 1:, None])[..., 0], (1, 0)
        )

    def train_step(self, batch, loss_fn):
        self.optimizer.zero_grad()
        total = 0.0
        for start in range(0, batch.size, 2):  # micro-batches of its own
            part = batch.slice(start, start + 2)
            loss = loss_fn(part, self.get_logprobs(part))
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return {"loss": total, "lr": self.optimizer.param_groups[0]["lr"], "mine": 2.0}

    def save_checkpoint(self, path):
        self.model.save_pretrained(path)

    def load_checkpoint(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path)

    def shutdown(self):
        del self.model


class Exporting(Plain):
    def save_checkpoint(self, path):
        torch.save(self.model.state_dict(), f"{path}/state.pt")

    def state_dict(self):
        return self.model.state_dict()


class Secretive(Plain):
    def save_checkpoint(self, path):
        torch.save(self.model.state_dict(), f"{path}/state.pt")


def config_of(folder, **settings):
    settings = {"optimizer": {"kwargs": {"lr": 0.1}}, "backend": "plain", **settings}
    return PolicyConfig.from_dict({"model_name": str(folder), **settings})


@pytest.fixture
def made(tiny_model):
    """A ready backend, and one of the full protocol for the same model."""

    def make(cls=Plain, **arguments):
        backend = SixMethodBackend("plain", cls)
        backend.setup(config_of(tiny_model).to_dict(), **arguments)
        return backend

    return make


def dtensor_of(folder):
    backend = build_training_backend("dtensor")
    settings = {"backend": "dtensor", "max_grad_norm": None}
    sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}
    backend.setup(config_of(folder, optimizer=sgd, **settings).to_dict())
    return backend


def test_it_computes_what_the_whole_protocol_computes(made, make_batch, tiny_model):
    plain, whole = made(), dtensor_of(tiny_model)
    batch, loss_fn = make_batch(num_rows=12), TokenCrossEntropy()
    evaluated = [
        b.train_step(
            batch, loss_fn, eval_mode=True, global_batch_size=12, micro_batch_size=4
        )["loss"]
        for b in (plain, whole)
    ]
    assert evaluated[0].item() == pytest.approx(evaluated[1].item(), abs=1e-6)
    steps = [
        b.train_step(batch, loss_fn, global_batch_size=6, micro_batch_size=3)
        for b in (plain, whole)
    ]
    assert steps[0]["loss"].tolist() == pytest.approx(steps[1]["loss"].tolist(), 1e-5)
    assert steps[0]["lr"].tolist() == [0.1, 0.1]
    assert steps[0]["grad_norm"].numel() == 0  # it is not reported
    assert steps[0]["all_mb_metrics"]["mine"] == [2.0, 2.0]
    totals = [sum(step["all_mb_metrics"]["nll"]) for step in steps]
    assert totals[0] == pytest.approx(totals[1], 1e-5)
    found = [b.get_logprobs(batch, micro_batch_size=4) for b in (plain, whole)]
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_the_reference_model_stays_what_it_was(made, make_batch):
    backend = made(init_reference_model=True)
    batch = make_batch(num_rows=4)
    before = backend.get_logprobs(batch, micro_batch_size=4)
    backend.train_step(
        batch, TokenCrossEntropy(), global_batch_size=4, micro_batch_size=4
    )
    assert torch.equal(
        backend.get_logprobs(batch, micro_batch_size=4, reference=True), before
    )
    assert not torch.equal(backend.get_logprobs(batch, micro_batch_size=4), before)
    with pytest.raises(BatchError, match="init_reference_model=True"):
        made().get_logprobs(batch, micro_batch_size=4, reference=True)


@pytest.mark.parametrize("cls", [Plain, Exporting])
def test_weights_come_from_a_state_dict_or_a_saved_folder(made, cls, tiny_model):
    backend, whole = made(cls), dtensor_of(tiny_model)
    weights = dict(backend.export_weights("float32"))
    expected = dict(whole.export_weights("float32"))
    assert {k: v.shape for k, v in backend.weight_specs().items()} == {
        k: v.shape for k, v in weights.items()
    }
    assert set(weights) == set(expected)  # tied ones once
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_a_backend_that_hands_out_no_weights_is_not_sampled_from(made):
    with pytest.raises(UnsupportedModelError, match=r"give its class a method state_d"):
        dict(made(Secretive).export_weights("float32"))


def test_metrics_of_a_loss_that_it_never_calls(made, make_batch, caplog):
    class Unasked(Plain):
        def train_step(self, batch, loss_fn):
            (-self.get_logprobs(batch).mean()).backward()
            self.optimizer.step()
            return {"loss": 7.0}

    backend, batch = made(Unasked), make_batch(num_rows=8)
    output = backend.train_step(
        batch, TokenCrossEntropy(), global_batch_size=4, micro_batch_size=4
    )
    assert output["loss"].tolist() == [7.0, 7.0]
    last = batch.slice(4, 8)
    after = backend.train_step(
        last,
        TokenCrossEntropy(),
        eval_mode=True,
        global_batch_size=4,
        micro_batch_size=4,
    )
    nll = output["all_mb_metrics"]["nll"]
    assert len(nll) == 2
    assert nll[1] == pytest.approx(after["all_mb_metrics"]["nll"][0], rel=1e-6)

    class OfValues(TokenCrossEntropy):
        input_type = LossInputType.VALUE

    class Own(Plain):
        def train_step(self, batch, loss_fn):
            return {"loss": 7.0}

    own = made(Own)
    for _ in range(2):
        output = own.train_step(
            batch, OfValues(), global_batch_size=8, micro_batch_size=4
        )
        assert output["all_mb_metrics"] == {}
    assert caplog.text.count("OfValues cannot be computed from get_logprobs") == 1
    with pytest.raises(UnsupportedModelError, match="loss of held-out rows from"):
        own.train_step(
            batch, OfValues(), eval_mode=True, global_batch_size=8, micro_batch_size=4
        )


def test_what_it_does_not_have_is_told(made, make_batch):
    with pytest.raises(UnsupportedModelError, match=r"'plain'.*has no get_values"):
        made().get_values(make_batch(), micro_batch_size=4)

    class WithValues(Plain):
        def get_values(self, data, *, micro_batch_size):
            return torch.ones(data["input_ids"].shape)

    assert made(WithValues).get_values(make_batch(), micro_batch_size=4).min() == 1.0


@pytest.mark.parametrize(
    ("method", "gives", "message"),
    [
        ("train_step", None, 'must return a mapping with "loss": got None'),
        ("train_step", {"loss": "low"}, "must return numbers: got"),
        (
            "get_logprobs",
            torch.zeros(2, 3),
            r"must return \[B, S\] = \[4, 20\].*\[2, 3",
        ),
    ],
)
def test_what_it_returns_is_checked(made, make_batch, method, gives, message):
    cls = type("Odd", (Plain,), {method: lambda self, *arguments: gives})
    backend, batch = made(cls), make_batch(num_rows=4)
    calls = {
        "train_step": lambda: backend.train_step(
            batch, TokenCrossEntropy(), global_batch_size=4, micro_batch_size=4
        ),
        "get_logprobs": lambda: backend.get_logprobs(batch, micro_batch_size=4),
    }
    with pytest.raises(BatchError, match=message):
        calls[method]()


def test_outputs_of_another_shape_are_refused(made, make_batch):
    class Short(Plain):
        def train_step(self, batch, loss_fn):
            return {"loss": loss_fn(batch, self.get_logprobs(batch)[:, 1:])}

    with pytest.raises(BatchError, match=r"\[B, S\] log-probs.*\[4, 20\]: got \(4, 19"):
        made(Short).train_step(
            make_batch(num_rows=4),
            TokenCrossEntropy(),
            global_batch_size=4,
            micro_batch_size=4,
        )


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({}, 2, "got 2 ranks; use a cluster of one worker"),
        ({"head": "value"}, 1, "needs get_values"),
        (
            {"dynamic_batching": {"train_mb_tokens": 9999}},
            1,
            "policy.dynamic_batching must be null",
        ),
    ],
)
def test_what_it_cannot_do_is_found_before_a_start(
    tiny_model, settings, ranks, message
):
    register_training_backend("plain")(Plain)
    with pytest.raises(ConfigError, match=message):
        check_policy(config_of(tiny_model, **settings), ranks)


def test_a_policy_on_it_trains_saves_and_loads(
    ray_cluster, make_batch, tiny_folder, tmp_path
):
    @register_training_backend("plain")
    class Local(Plain):
        """Known only to this process."""

    config = config_of(tiny_folder, generation=GenerationConfig(max_new_tokens=4))
    batch = make_batch(num_rows=4, width=8)
    batch["input_ids"] %= 12
    cluster = RayVirtualCluster([1], use_gpus=False)
    policy = TrainingPolicy(cluster, config)
    try:
        before = policy.get_logprobs(batch)["logprobs"]
        output = policy.train(batch, TokenCrossEntropy(), global_batch_size=2)
        assert output["loss"].shape == (2,)
        after = policy.get_logprobs(batch)["logprobs"]
        weights, state = tmp_path / "a" / "weights", tmp_path / "a" / "optimizer"
        policy.save_checkpoint(weights, state)
        policy.train(batch, TokenCrossEntropy())
        policy.load_checkpoint(None, state)
        assert torch.equal(policy.get_logprobs(batch)["logprobs"], after)
        assert not torch.equal(before, after)
        assert (weights / "tokenizer.json").is_file()
        policy.reload(config, weights_path=weights)
        assert torch.equal(policy.get_logprobs(batch)["logprobs"], after)
    finally:
        policy.shutdown()
        cluster.shutdown()


def test_a_backend_that_cannot_be_sent_is_told_before_a_start(tiny_model):
    @register_training_backend("plain")
    class Local(Plain):
        lock = threading.Lock()

    with pytest.raises(RegistryError, match=r"'plain'.*cannot be sent to workers"):
        backends.training_registrations("plain")
