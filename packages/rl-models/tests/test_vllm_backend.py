from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError, ConfigError
from rl_models.errors import ContextLengthError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.generation.vllm import VllmGenerationBackend
from rl_models.testing import (
    build_tiny_model,
    check_generation_backend,
    reference_logprobs,
)
from rl_models.tokens.tokenizer import load_tokenizer
from rl_models.types import SamplingParams

pytestmark = pytest.mark.slow


def make_rows(num_rows=6, width=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 13, (num_rows, width), generator=generator)
    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator)
    ids[torch.arange(width) >= lengths[:, None]] = 0
    seeds = torch.arange(num_rows) - 2
    return BatchedDataDict(input_ids=ids, input_lengths=lengths, seeds=seeds)


def weights_of(folder, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return [(name, value.detach()) for name, value in model.named_parameters()]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "other"
    return build_tiny_model(folder, seed=5, max_position_embeddings=512)


@pytest.fixture
def engine(vllm_engine, vllm_folder):
    """The engine with the weights of its folder, called version 0."""

    def load(backend, weights):
        backend.load_weights(iter(weights), 0)

    vllm_engine(load, weights_of(vllm_folder))
    return vllm_engine


@pytest.fixture
def generate(engine):
    def run(data, **arguments):
        def work(backend, data, arguments):
            return backend.generate(data, **arguments)

        return engine(work, data, arguments)

    return run


@pytest.fixture
def load(engine):
    def run(weights, version):
        def work(backend, weights, version):
            try:
                return backend.load_weights(iter(weights), version)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        return engine(work, weights, version)

    return run


def sampled(output):
    columns = torch.arange(output["output_ids"].shape[1])
    starts = output["unpadded_sequence_lengths"] - output["generation_lengths"]
    ends = output["unpadded_sequence_lengths"]
    return (columns >= starts[:, None]) & (columns < ends[:, None])


def error_of(output, folder, temperature=1.0):
    truth = reference_logprobs(folder, output["output_ids"], temperature)
    return (output["logprobs"].double() - truth)[sampled(output)].abs()


def test_it_keeps_the_contract_of_generation_backends(engine, vllm_folder):
    def work(backend, folder):
        class Kept:  # the contract ends with a shutdown; all tests share the engine
            generate = staticmethod(backend.generate)
            load_weights = staticmethod(backend.load_weights)

            def shutdown(self):
                self.is_shut_down = True

        check_generation_backend(Kept, folder)

    engine(work, str(vllm_folder))


def test_logprobs_before_and_after_updates(generate, load, vllm_folder, other_folder):
    data = make_rows()
    before = generate(data)
    assert error_of(before, vllm_folder).max() < 1e-5
    assert load(weights_of(other_folder), 7) == 7
    after = generate(data)
    assert error_of(after, other_folder).max() < 1e-5
    assert error_of(after, vllm_folder).max() > 0.05
    mask = sampled(after)
    assert after["token_versions"][mask].unique().tolist() == [7]
    assert after["token_versions"][~mask].unique().tolist() == [-1]
    assert after["weight_version"].tolist() == [7] * 6


def test_long_prompts_do_not_see_the_cache_of_older_weights(
    generate, load, other_folder
):
    ids = torch.randint(3, 13, (1, 300), generator=torch.Generator().manual_seed(3))
    data = BatchedDataDict(
        input_ids=ids.repeat(3, 1),
        input_lengths=torch.full((3,), 300),
        seeds=torch.arange(3),
    )
    for _ in range(2):
        generate(data)
    assert load(weights_of(other_folder), 2) == 2
    assert error_of(generate(data), other_folder).max() < 1e-5


def test_sampling_settings_mean_what_they_do_elsewhere(generate, vllm_folder):
    backend = HuggingFaceGenerationBackend()
    backend.setup(
        GenerationConfig(max_new_tokens=24).to_dict(), model_name=str(vllm_folder)
    )
    data = make_rows(16)
    data["stop_strings"] = [["12"], None, ["=", "90"], None] * 4
    greedy = generate(data, greedy=True)
    expected = backend.generate(data, greedy=True)
    assert torch.equal(greedy["output_ids"], expected["output_ids"])
    assert torch.equal(greedy["truncated"], expected["truncated"])
    torch.testing.assert_close(
        greedy["logprobs"], expected["logprobs"], atol=1e-5, rtol=0
    )
    params = SamplingParams(temperature=0.7, max_new_tokens=5)
    output = generate(data, sampling=params)
    assert output["generation_lengths"].max() <= 5
    assert error_of(output, vllm_folder, 0.7).max() < 1e-5
    best = generate(data, sampling=SamplingParams(top_k=1))
    assert best["logprobs"].abs().max() < 1e-6
    nucleus = generate(data, sampling=SamplingParams(top_p=0.5))
    mask = sampled(nucleus)
    raised = nucleus["logprobs"] - reference_logprobs(
        vllm_folder, nucleus["output_ids"]
    )
    assert raised[mask].min() > -1e-5
    # Tokens outside the nucleus weigh half, so everything inside is likelier.
    assert raised[mask].max() < 0.7


def test_rows_end_where_their_strings_end(generate, vllm_folder):
    data = make_rows(32)
    data["stop_strings"] = [["3"], ["44", "5"]] * 16
    output = generate(data, sampling=SamplingParams(temperature=1.5))
    tokenizer = load_tokenizer(vllm_folder)
    stopped = 0
    for row, count in enumerate(output["generation_lengths"].tolist()):
        start = int(data["input_lengths"][row])
        ids = output["output_ids"][row, start : start + count].tolist()
        strings = data["stop_strings"][row]
        assert not any(s in tokenizer.decode(ids[:-1]) for s in strings)
        by_string = any(tokenizer.decode(ids).endswith(s) for s in strings)
        by_token = ids[-1] == tokenizer.eos_token_id
        assert bool(output["truncated"][row]) != (by_string or by_token)
        stopped += by_string
    assert stopped > 8


def test_a_row_depends_on_its_seed_and_its_tokens(generate):
    data = make_rows(12)
    together = generate(data)
    for start, end in ((0, 1), (3, 7), (11, 12)):
        part = generate(data.slice(start, end))
        for row in range(end - start):
            length = int(part["unpadded_sequence_lengths"][row])
            assert (
                part["output_ids"][row, :length].tolist()
                == together["output_ids"][start + row, :length].tolist()
            )
    del data["seeds"]
    assert not torch.equal(*(generate(data)["output_ids"][:, :10] for _ in "ab"))


def test_bad_rows_are_refused(generate):
    data = make_rows()
    with pytest.raises(ContextLengthError, match="context of 512 tokens leaves room"):
        generate(data, sampling=SamplingParams(max_new_tokens=510))
    data["input_lengths"][2] = 99
    with pytest.raises(BatchError, match=r"input_lengths\[2\] must lie between 1"):
        generate(data)
    with pytest.raises(ConfigError, match=r"temperature must be > 0"):
        generate(make_rows(), sampling=SamplingParams(temperature=0.0))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_a_missing_tensor_is_named_and_stops_the_replica(
    load, generate, vllm_folder, name
):
    weights = [pair for pair in weights_of(vllm_folder) if pair[0] != name]
    problem = load(weights, 4)
    assert problem.startswith("WeightSyncError: 1 tensors of the model were not")
    assert name in problem
    with pytest.raises(Exception, match="has no weights"):
        generate(make_rows())
    assert load(weights_of(vllm_folder), 5) == 5
    assert generate(make_rows())["weight_version"].tolist() == [5] * 6


def test_wrong_tensors_are_named(load, vllm_folder):
    weights = dict(weights_of(vllm_folder))
    odd = {**weights, "model.norm.weight": torch.zeros(7)}
    assert "vLLM cannot load model.norm.weight" in load(list(odd.items()), 4)
    more = {**weights, "model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}
    assert "model.layers.9" in load(list(more.items()), 4)


def test_bfloat16_agrees_within_its_precision(vllm_engine, vllm_folder, tmp_path):
    # Rounding errors grow with the logits: weights are half as large as the others',
    # still five times a model's initial ones.
    first, second = (
        build_tiny_model(
            tmp_path / str(seed),
            seed=seed,
            initializer_range=0.1,
            max_position_embeddings=512,
        )
        for seed in (1, 2)
    )

    def work(backend, data, folder, weights, folder_of_all):
        def begin(folder, **changes):
            backend.shutdown()
            config = backend.config.model_copy(update=changes)
            backend.setup(config.to_dict(), model_name=folder)

        begin(folder, precision="bfloat16")
        try:
            before = backend.generate(data)
            backend.load_weights(iter(weights), 1)
            return before, backend.generate(data)
        finally:
            begin(folder_of_all, precision="float32")

    weights = weights_of(second, torch.bfloat16)
    outputs = vllm_engine(work, make_rows(24), str(first), weights, str(vllm_folder))
    for output, folder in zip(outputs, (first, second), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            logits = model(output["output_ids"]).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(2, output["output_ids"][:, 1:, None])
        apart = (output["logprobs"][:, 1:] - chosen[..., 0])[sampled(output)[:, 1:]]
        assert apart.abs().max() < 5e-2
        assert apart.abs().mean() < 1e-2


def test_a_cache_without_room_for_one_row_is_a_clear_error(vllm_engine, vllm_folder):
    def work(backend, folder):
        small = backend.config.vllm.model_copy(update={"kv_cache_gib": 1e-4})
        config = backend.config.model_copy(update={"vllm": small})
        try:
            VllmGenerationBackend().setup(config.to_dict(), model_name=folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    problem = vllm_engine(work, str(vllm_folder))
    assert problem.startswith("ConfigError: vLLM refuses")
    assert "generation.vllm.kv_cache_gib" in problem


def test_more_rows_than_the_cache_holds_wait_their_turn(generate, vllm_folder):
    output = generate(make_rows(200, seed=4))
    assert error_of(output, vllm_folder).max() < 1e-5
