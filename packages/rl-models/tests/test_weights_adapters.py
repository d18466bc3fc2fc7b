"""Adapters that travel alone: what is sent, what replicas do with it, what fails."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.tensor_buffers import decode
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_distributed.transfer import Manifest
from rl_distributed.transfer.manifest import TensorEntry, digest_of
from rl_models.config import PolicyConfig
from rl_models.errors import WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.lora_config import LoRAConfig
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.huggingface_policy import HuggingFacePolicy
from rl_models.policy.preflight import check_policy
from rl_models.testing import TokenCrossEntropy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.weight_request import WeightRequest
from rl_models.weights.adapters import MergedAdapter, adapted_layer, with_adapter
from rl_models.weights.base_weights import BaseWeights
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.receiving import WeightReceiver
from rl_models.weights.sync import WeightSynchronizer

LORA = {"r": 2, "sync": "adapter"}
PREFIX = "base_model.model."


def rows(num_rows=6, width=12, seed=0):
    """Rows of one length, trained on but for their first token."""
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


# --- one process ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend(tiny_folder):
    """A trainer whose adapters have left zero."""
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


def sampler(folder, precision="float32", **options):
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
        adapter=LoRAConfig(**LORA),
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


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["fused", "own"])
def test_a_replica_has_the_merged_weights_to_the_bit(backend, tiny_folder, options):
    replica = sampler(tiny_folder, **options)
    with pytest.raises(Exception, match="started without weights"):
        replica.generate(prompts())
    replica.load_weights(iter(exported(backend, with_base=True).items()), 1)
    for version in (2, 3):
        # Errors do not pile up: the sum is that of the base, not of the last version.
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
    # Half the distance of neighbouring numbers of eight bits.
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
    # An update that has begun, and was never accepted.
    receiver.weights([], alone)
    with pytest.raises(WeightSyncError, match="has no base"):
        receiver.weights([], alone)


A_NAME = f"{PREFIX}a.lora_A.weight"
ENTRIES = [("a", "1"), (A_NAME, "2"), (A_NAME, "3")]


class Sides:
    """A policy and a generator, as far as `BaseWeights` looks at them."""

    def __init__(self, lora=None, taken=None):
        self.sent_adapter = lora and LoRAConfig(**lora)
        self.taken_adapter = taken and LoRAConfig(**taken)
        self.base_version = self.weight_version = 0
        self.processes = [(0, 0)]

    def live_processes(self):
        return list(self.processes)


def test_the_base_is_sent_where_it_is_missing():
    sides = Sides(LORA, LORA)
    base = BaseWeights(sides, sides)

    def sync(is_loaded=True):
        kind = base.next_kind()
        base.settle(is_loaded=is_loaded)
        sides.weight_version += is_loaded
        return kind

    assert [sync() for _ in range(3)] == ["apart", "adapter", "adapter"]
    sides.processes = [(0, 1)]  # it was started again
    assert [sync() for _ in range(2)] == ["apart", "adapter"]
    sides.processes.append((1, 0))  # another one has joined
    assert [sync(), sync(is_loaded=False), sync(), sync()] == [
        "apart",
        "adapter",
        "apart",
        "adapter",
    ]
    sides.base_version += 1
    assert [sync(), sync()] == ["apart", "adapter"]
    sides.weight_version = 0  # the generator has loaded its model again
    assert sync() == "apart"
    # Whoever does not say which processes it has gets the base each time.
    silent = SimpleNamespace(taken_adapter=sides.taken_adapter, weight_version=1)
    base = BaseWeights(sides, silent)
    assert [sync(), sync()] == ["apart", "apart"]


def test_without_adapters_weights_are_merged():
    sides = Sides()
    base = BaseWeights(sides, sides)
    assert base.next_kind() == "merged"
    assert BaseWeights(object(), object()).next_kind() == "merged"


@pytest.mark.parametrize(
    ("sent", "taken", "message"),
    [
        (LORA, None, "got a generator that has no adapter apart"),
        (None, LORA, "got a policy that has no adapter apart"),
        (LORA, {**LORA, "r": 4}, "r 2 and scale 2 against r 4 and scale 2"),
        (LORA, {**LORA, "alpha": 1.0}, "scale 2 against r 2 and scale 0.5"),
    ],
)
def test_sides_that_do_not_fit_are_refused(sent, taken, message):
    sides = Sides(sent, taken)
    with pytest.raises(ConfigError, match=message):
        BaseWeights(sides, sides)


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


# --- workers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=4) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(cluster, tiny_folder):
    """Two ranks that share the model."""
    made = HuggingFacePolicy(
        tiny_folder,
        cluster,
        max_total_sequence_length=64,
        lora=LORA,
        optimizer={"kwargs": {"lr": 1e-2}},
    )
    yield made
    assert made.shutdown()


@pytest.fixture(scope="module")
def generation(cluster, tiny_folder, trainer):
    config = GenerationConfig(
        max_new_tokens=8,
        stop_token_ids=[],
        max_restarts=10,
        start_deadline_s=120,
        call_deadline_s=60,
    )
    made = GenerationPolicy(
        cluster,
        config,
        model_name=tiny_folder,
        load_weights=False,
        adapter=trainer.config.sent_adapter,
    )
    yield made
    assert made.shutdown()


class Counting:
    """A trainer that counts the bytes that its messages have."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.sent = []

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def start_weight_export(self, request, link=None):
        export = self.trainer.start_weight_export(request, link)
        parts = ray.get(list(export.messages), timeout=60) if link is None else []
        blocks = [block for part in parts for _, block in part if block is not None]
        num_bytes = sum(decode(block).nbytes for block in blocks)
        self.sent.append((request.kind, num_bytes))
        return export


def disagreement(trainer, generation):
    """Largest difference of the log-probs of what the replicas sample."""
    output = generation.generate(prompts())
    data = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
        }
    )
    logprobs = trainer.get_logprobs(data)["logprobs"]
    return (logprobs - output["logprobs"])[:, 9:].abs().max().item()


def synchronizer(trainer, generation, **settings):
    settings = {"bucket_bytes": 8192, "deadline_s": 60.0, **settings}
    return WeightSynchronizer(trainer, generation, WeightSyncConfig(**settings))


@pytest.mark.parametrize("transport", ["object_store", "shared_memory"])
def test_replicas_are_sent_the_base_once(trainer, generation, transport):
    source = Counting(trainer)
    sync = synchronizer(source, generation, transport=transport)
    for seed in range(3):
        trainer.train(rows(seed=seed), TokenCrossEntropy())
        version = sync.sync_weights()
        assert version == generation.weight_version
        assert disagreement(trainer, generation) < 1e-5
    assert [kind for kind, _ in source.sent] == ["apart", "adapter", "adapter"]
    trainer.train(rows(seed=3), TokenCrossEntropy())
    assert disagreement(trainer, generation) > 1e-3
    sync.close()
    if transport == "object_store":
        sizes = [size for _, size in source.sent]
        wanted = adapter_bytes(trainer)
        assert sizes[1] == sizes[2]
        # Tensors begin at round addresses of a block.
        assert wanted <= sizes[1] < 1.2 * wanted
        assert sizes[1] < sizes[0] / 3


def adapter_bytes(trainer):
    """Bytes of the adapter in float32: r (in + out) numbers per matrix."""
    config = trainer.config
    model = AutoModelForCausalLM.from_pretrained(config.model_name)
    return 4 * sum(
        config.lora.r * (module.in_features + module.out_features)
        for module in model.model.modules()
        if isinstance(module, torch.nn.Linear)
    )


def test_a_replica_that_was_started_again_gets_base_and_adapter(trainer, generation):
    source = Counting(trainer)
    sync = synchronizer(source, generation)
    trainer.train(rows(seed=4), TokenCrossEntropy())
    sync.sync_weights()
    sync.sync_weights()
    for number in generation.group.worker_pids:
        os.kill(number, signal.SIGKILL)
    # All are lost: whoever comes back is brought what was served.
    assert disagreement(trainer, generation) < 1e-5
    trainer.train(rows(seed=5), TokenCrossEntropy())
    sync.sync_weights()
    assert disagreement(trainer, generation) < 1e-5
    kinds = [kind for kind, _ in source.sent]
    assert kinds[:3] == ["apart", "adapter", "apart"]
    assert kinds[-1] == "adapter"
    sync.close()


def test_weights_of_a_checkpoint_are_another_base(trainer, generation, tmp_path):
    source = Counting(trainer)
    # A policy that starts over has left the link of a synchronizer.
    sync = synchronizer(source, generation, transport="object_store")
    trainer.train(rows(seed=6), TokenCrossEntropy())
    sync.sync_weights()
    trainer.save_checkpoint(tmp_path / "w", tmp_path / "o")
    before = generation.generate(prompts())
    # Merged weights as the base, beneath adapters that are zero again.
    trainer.load_checkpoint(tmp_path / "w")
    sync.sync_weights()
    merged = generation.generate(prompts())
    trainer.reload(trainer.config, optimizer_path=tmp_path / "o")
    sync.sync_weights()
    after = generation.generate(prompts())
    assert [kind for kind, _ in source.sent] == ["apart"] * 3
    for output in (merged, after):
        assert torch.equal(output["output_ids"], before["output_ids"])
        torch.testing.assert_close(
            output["logprobs"], before["logprobs"], atol=1e-5, rtol=0
        )
    assert disagreement(trainer, generation) < 1e-5
    sync.close()


def test_a_generator_without_adapters_is_refused(trainer, generation):
    plain = SimpleNamespace(weight_version=0, start_weight_update=None)
    with pytest.raises(ConfigError, match="got a generator that has no adapter"):
        WeightSynchronizer(trainer, plain)
    merging = SimpleNamespace(start_weight_export=None)
    with pytest.raises(ConfigError, match="got a policy that has no adapter"):
        WeightSynchronizer(merging, generation)
