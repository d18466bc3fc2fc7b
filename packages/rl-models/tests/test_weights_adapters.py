"""Adapters sent alone: what is sent, how replicas use it, what fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import ConfigError
from rl_distributed.transfer import Manifest
from rl_distributed.transfer.manifest import TensorEntry, digest_of
from rl_models.config import PolicyConfig
from rl_models.errors import WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.lora_config import LoRAConfig
from rl_models.policy.preflight import check_policy
from rl_models.testing import (
    ContractError,
    TokenCrossEntropy,
    check_adapter_loading,
)
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.weight_request import WeightRequest
from rl_models.weights.adapters import MergedAdapter, adapted_layer, with_adapter
from rl_models.weights.receiving import WeightReceiver

LORA = {"r": 2, "sync": "adapter"}
PREFIX = "base_model.model."


def rows(num_rows=6, width=12, seed=0):
    """Return rows of one length, trained on except for their first token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(num_rows, width)
    mask[:, 0] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(3, 16, (num_rows, width), generator=generator),
            "input_lengths": torch.full((num_rows,), width),
            "token_mask": mask,
            "sample_mask": torch.ones(num_rows),
        }
    )


def prompts():
    data = rows(width=9)
    return BatchedDataDict(
        {
            "input_ids": data["input_ids"],
            "input_lengths": data["input_lengths"],
            "seeds": torch.arange(6),
        }
    )


@pytest.fixture(scope="module")
def backend(tiny_folder):
    """A trainer whose adapters are no longer zero."""
    made = DTensorTrainingBackend()
    config = PolicyConfig(
        model_name=str(tiny_folder),
        max_total_sequence_length=64,
        lora=LORA,
        optimizer={"kwargs": {"lr": 3e-2}},
    )
    made.setup(config.to_dict())
    train(made)
    return made


def train(backend):
    backend.train_step(
        rows(), TokenCrossEntropy(), global_batch_size=6, micro_batch_size=6
    )


def sampler(folder, precision="float32", lora=None, **options):
    made = HuggingFaceGenerationBackend()
    made.setup(
        GenerationConfig(
            max_new_tokens=8,
            stop_token_ids=[],
            precision=precision,
            backend_options=options,
        ).to_dict(),
        model_name=str(folder),
        load_weights=False,
        adapter=lora or LoRAConfig(**LORA),
    )
    return made


def exported(backend, precision="float32", **options):
    dtype = getattr(torch, precision)
    tensors = backend.export_adapters(precision, **options)
    return {name: value.to(dtype).clone() for name, value in tensors}


@pytest.mark.parametrize("with_base", [True, False])
def test_what_is_announced_is_what_is_exported(backend, with_base):
    specs = backend.adapter_specs(with_base=with_base)
    sent = exported(backend, with_base=with_base)
    assert list(specs) == list(sent)
    assert all(specs[name].shape == value.shape for name, value in sent.items())
    adapters = {name for name in sent if name.startswith(PREFIX)}
    layers = {adapted_layer(name) for name in adapters}
    # Two layers with seven matrices each.
    assert len(layers) == len(adapters) == 2 * 7 * 2
    base = sent.keys() - adapters
    assert base == (backend.weight_specs().keys() if with_base else set())


FUSED = pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["fused", "own"])


@FUSED
def test_it_keeps_the_contract_of_adapters(tiny_folder, options):
    def make(lora):
        return sampler(tiny_folder, lora=lora, **options)

    check_adapter_loading(make, tiny_folder)


def test_the_contract_finds_an_adapter_that_is_added_to_the_one_before(tiny_folder):
    class Piling(MergedAdapter):
        """Adds each adapter to the model's weights."""

        def _add(self, adapter):
            super()._add(adapter)
            self._base = {}

    def make(lora):
        made = sampler(tiny_folder, lora=lora)
        made._adapter = Piling(made.model, lora.scale, "replica 3")
        return made

    with pytest.raises(ContractError, match=r"without its base .* off by"):
        check_adapter_loading(make, tiny_folder)


@FUSED
def test_a_replica_has_the_merged_weights_to_the_bit(backend, tiny_folder, options):
    replica = sampler(tiny_folder, **options)
    with pytest.raises(Exception, match="started without weights"):
        replica.generate(prompts())
    replica.load_weights(iter(exported(backend, with_base=True).items()), 1)
    for version in (2, 3):
        # Errors do not accumulate: the sum starts from the base, not the last version.
        train(backend)
        sent = exported(backend, with_base=False)
        assert replica.load_weights(iter(sent.items()), version) == version
        merged = dict(backend.export_weights("float32"))
        held = dict(replica.model.named_parameters())
        assert all(torch.equal(held[name], value) for name, value in merged.items())
    output = replica.generate(prompts())
    data = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
        }
    )
    logprobs = backend.get_logprobs(data, micro_batch_size=6)
    apart = (logprobs - output["logprobs"])[:, 9:].abs()
    assert apart.max() < 1e-5


def test_bfloat16_is_rounded_once(backend, tiny_folder):
    replica = sampler(tiny_folder, "bfloat16")
    sent = exported(backend, "bfloat16", with_base=True)
    replica.load_weights(iter(sent.items()), 1)
    held = dict(replica.model.named_parameters())
    scale = LoRAConfig(**LORA).scale
    name = "model.layers.1.mlp.down_proj"
    a, b = (sent[f"{PREFIX}{name}.lora_{part}.weight"].double() for part in "AB")
    wanted = sent[f"{name}.weight"].double() + scale * b @ a
    found = held[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    # Half the spacing of eight-bit numbers.
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8).all()


def test_what_a_replica_holds_is_compared_with_what_was_sent(backend, tiny_folder):
    replica = sampler(tiny_folder)
    sent = exported(backend, with_base=True)
    replica.load_weights(iter(sent.items()), 1)
    manifest = manifest_of(sent)
    assert replica.changed_weights(manifest) == []
    weight = "model.layers.0.self_attn.q_proj.weight"
    a = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    assert replica.changed_weights(manifest_of({**sent, a: sent[a] + 1})) == [a]
    other = {**sent, weight: sent[weight] + 1}
    assert replica.changed_weights(manifest_of(other)) == [weight]


def manifest_of(tensors):
    return Manifest(
        tuple(
            TensorEntry(
                name,
                "float32",
                tuple(value.shape),
                digest_of(value.contiguous().view(-1).view(torch.uint8)),
            )
            for name, value in tensors.items()
        )
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: {"x.lora_A.weight": a}, "of x.weight is of a layer that is unk"),
        (lambda a, b: {"0.lora_A.weight": a}, r"of 0.weight has no B"),
        (lambda a, b: {"0.lora_B.weight": b}, r"of 0.weight has no A"),
        (
            lambda a, b: {"0.lora_A.weight": a, "0.lora_B.weight": b[:2]},
            r"has shapes \[2, 2\] and \[2, 4\], whose product must be \[3, 4\]",
        ),
        (lambda a, b: {"0.lora_magnitude": a}, r"must end in \.lora_A\.weight or"),
    ],
)
def test_adapters_that_do_not_fit_are_named(change, message):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    adapter = MergedAdapter(model, 0.5, "replica 3")
    tensors = change(torch.ones(2, 4), torch.ones(3, 2))
    with pytest.raises(WeightSyncError, match=message):
        adapter.load(iter([(PREFIX + name, value) for name, value in tensors.items()]))


def test_another_base_takes_the_place_of_the_first():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    adapter = MergedAdapter(model, 0.5, "replica 3")
    a, b = torch.ones(2, 4), torch.ones(3, 2)
    parts = {f"{PREFIX}0.lora_A.weight": a, f"{PREFIX}0.lora_B.weight": b}
    for number in (1.0, 2.0):
        weight = torch.full((3, 4), number)
        adapter.load(iter([("0.weight", weight), *parts.items()]))
        assert torch.equal(model[0].weight, weight + 1)
        adapter.load(iter(parts.items()))
        assert torch.equal(model[0].weight, weight + 1)
        assert torch.equal(dict(adapter.held())["0.weight"], weight)


def test_the_sum_is_that_of_peft():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5))
    base = model[0].weight.detach().clone()
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=3, target_modules=["0"]), model)
    layer = model[0]
    torch.nn.init.normal_(layer.lora_B.default.weight)
    found = with_adapter(
        base, layer.lora_A.default.weight, layer.lora_B.default.weight, 1.5
    )
    wanted = base + layer.get_delta_weight("default")
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_an_adapter_alone_needs_its_base():
    receiver = WeightReceiver("replica 3")
    alone = WeightRequest(1, kind="adapter")
    with pytest.raises(WeightSyncError, match=r"replica 3 was sent .* no base"):
        receiver.weights([], alone)
    base, old, new = (TensorEntry(n, "float32", (2,), d) for n, d in ENTRIES)
    receiver.accept(Manifest((base, old)), "apart")
    receiver.weights([], alone)
    receiver.accept(Manifest((new,)), "adapter")
    assert receiver.manifest.entries == (base, new)
    other = replace(new, name=PREFIX + "b.lora_A.weight")
    with pytest.raises(WeightSyncError, match=r"consist of: .*b\.lora_A"):
        receiver.accept(Manifest((new, other)), "adapter")
    # An update that has started and was never accepted.
    receiver.weights([], alone)
    with pytest.raises(WeightSyncError, match="has no base"):
        receiver.weights([], alone)


A_NAME = f"{PREFIX}a.lora_A.weight"
ENTRIES = [("a", "1"), (A_NAME, "2"), (A_NAME, "3")]


def test_a_generator_that_takes_no_adapters_is_refused_before_a_start(tiny_folder):
    generation = {"max_new_tokens": 4, "backend": "openai"}
    config = PolicyConfig(model_name=str(tiny_folder), lora=LORA, generation=generation)
    with pytest.raises(
        ConfigError, match=r"lora\.sync must be 'merged' with .*'openai', which takes"
    ):
        check_policy(config, 1)
    merged = config.replace(lora={"r": 2})
    check_policy(merged, 1)
    assert merged.sent_adapter is None
