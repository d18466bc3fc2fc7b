import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteSWAConfig,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
)

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError, ConfigError
from rl_models.errors import (
    ContextLengthError,
    GenerationError,
    UnsupportedModelError,
    WeightSyncError,
)
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.generation.huggingface.decoders import ModuleDecoder, OwnCacheDecoder
from rl_models.generation.huggingface.fused_decoder import FusedDecoder
from rl_models.generation.huggingface.kv_cache import KVBuffers
from rl_models.testing import (
    build_tiny_model,
    check_generation_backend,
    reference_logprobs,
)
from rl_models.tokens.tokenizer import load_tokenizer
from rl_models.types import SamplingParams
from rl_models.weights.loading import loaded_tensors

NEVER = 10**6  # A token id that no model has: rows end at the limit.


def make_backend(folder, *, context=None, **config):
    settings = {"max_new_tokens": 16, **config}
    backend = HuggingFaceGenerationBackend()
    full = GenerationConfig(**settings).to_dict()
    backend.setup(full, model_name=str(folder), **(context or {}))
    return backend


def use_own_cache(backend):
    """Make the backend treat its model as unsupported by our cache."""
    backend.model.set_attn_implementation("sdpa")
    backend._sampler.decoder = OwnCacheDecoder(backend.model)
    return backend


def make_data(lengths, *, groups=1, seed=0, **columns):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths).repeat_interleave(groups)
    prompts = torch.randint(3, 16, (len(lengths) // groups, int(lengths.max())))
    prompts = torch.randint(3, 16, prompts.shape, generator=generator)
    ids = prompts.repeat_interleave(groups, 0)
    ids[torch.arange(ids.shape[1]) >= lengths[:, None]] = 0
    seeds = torch.arange(100 * seed, 100 * seed + len(lengths))
    data = {"input_ids": ids, "input_lengths": lengths, "seeds": seeds, **columns}
    return BatchedDataDict(data)


def tokens_of(output, row):
    length = int(output["unpadded_sequence_lengths"][row])
    return output["output_ids"][row, :length].tolist()


def sampled_tokens(output):
    """Return [B, S] whether a token was sampled: by length, as a log-prob may be 0."""
    totals = output["unpadded_sequence_lengths"][:, None]
    position = torch.arange(output["output_ids"].shape[1])
    first = totals - output["generation_lengths"][:, None]
    return (position >= first) & (position < totals)


def largest_error(folder, output, temperature=1.0):
    truth = reference_logprobs(folder, output["output_ids"], temperature)
    sampled = sampled_tokens(output)
    assert sampled.sum() > 0
    return (output["logprobs"].double() - truth)[sampled].abs().max().item()


@pytest.fixture(scope="module")
def backend(tiny_folder):
    return make_backend(tiny_folder)


@pytest.mark.parametrize(
    ("architecture", "num_key_value_heads"),
    # With as many key heads as query heads, their weights have the same shape.
    [("qwen2", 2), ("qwen3", 2), ("llama", 2), ("qwen3", 4)],
)
@pytest.mark.parametrize("decoder", ["fused", "module", "own"])
def test_contract(tmp_path, architecture, num_key_value_heads, decoder):
    folder = build_tiny_model(
        tmp_path, architecture=architecture, num_key_value_heads=num_key_value_heads
    )

    def make():
        options = {"fused": decoder == "fused"}
        made = make_backend(folder, backend_options=options)
        if decoder == "own":
            return use_own_cache(made)
        expected = FusedDecoder if decoder == "fused" else ModuleDecoder
        assert isinstance(made._sampler.decoder, expected)
        return made

    check_generation_backend(make, folder)


COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "mistral": (MistralConfig, {**COMMON, "sliding_window": None}, FusedDecoder),
    "windows": (MistralConfig, {**COMMON, "sliding_window": 5}, ModuleDecoder),
    "learned positions": (
        GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        ModuleDecoder,
    ),
    "capped scores": (Gemma2Config, {**COMMON, "head_dim": 8}, OwnCacheDecoder),
    "sinks": (GraniteSWAConfig, COMMON, OwnCacheDecoder),
    "convolutions": (
        Lfm2Config,
        {**COMMON, "layer_types": ["conv", "full_attention"]},
        OwnCacheDecoder,
    ),
}


def save_model(folder, tiny_folder, config_class, settings):
    tokenizer = load_tokenizer(tiny_folder)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = config_class(vocab_size=len(tokenizer), **ids, **settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_contract_of_other_architectures(tmp_path, tiny_folder, name):
    config_class, settings, decoder = ARCHITECTURES[name]
    folder = save_model(tmp_path, tiny_folder, config_class, settings)

    def make():
        made = make_backend(folder)
        assert isinstance(made._sampler.decoder, decoder)
        return made

    check_generation_backend(make, folder)


def test_models_without_a_common_cache_are_refused(tmp_path, tiny_folder):
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    folder = save_model(tmp_path, tiny_folder, MambaConfig, settings)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM returns no past"):
        make_backend(folder).generate(make_data([4]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_exact_for_mixed_lengths_groups_and_early_stops(
    tiny_folder, fused, temperature
):
    backend = make_backend(
        tiny_folder,
        max_new_tokens=40,
        temperature=temperature,
        stop_token_ids=[5, 9],
        backend_options={"fused": fused},
    )
    output = backend.generate(make_data([1, 40, 7, 7, 23, 2, 12], groups=6))
    assert output["truncated"].sum() > 0 or output["generation_lengths"].max() < 40
    assert output["generation_lengths"].unique().numel() > 5
    assert largest_error(tiny_folder, output, temperature) < 1e-5


def test_fused_and_module_decoders_agree(tiny_folder):
    data = make_data([3, 30, 8], groups=8)
    outputs = [
        make_backend(tiny_folder, backend_options={"fused": fused}).generate(data)
        for fused in (True, False)
    ]
    assert torch.equal(outputs[0]["output_ids"], outputs[1]["output_ids"])


@pytest.mark.parametrize("length", [4, 20])
def test_greedy_equals_transformers(tiny_folder, length):
    backend = make_backend(tiny_folder, max_new_tokens=24, stop_token_ids=[NEVER])
    data = make_data([length] * 6)
    output = backend.generate(data, greedy=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    expected = model.generate(
        data["input_ids"],
        attention_mask=torch.ones_like(data["input_ids"]),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=NEVER,
    )
    assert torch.equal(output["output_ids"], expected)


def test_samples_follow_the_exact_distribution(backend, tiny_folder):
    count = 6000
    data = make_data([5], groups=count)
    output = backend.generate(data, sampling=SamplingParams(max_new_tokens=2))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    prompt = data["input_ids"][:1]
    with torch.no_grad():
        first = model(prompt).logits[0, -1].softmax(-1)
        pairs = torch.cat([prompt.expand(16, -1), torch.arange(16)[:, None]], 1)
        second = model(pairs).logits[:, -1].softmax(-1)
    drawn = output["output_ids"][:, 5:]
    counts = torch.bincount(drawn[:, 0], minlength=16).double()
    cells = count * first
    assert (((counts - cells) ** 2 / cells)[cells > 5]).sum() < 45
    ended = drawn[:, 0] == 1
    joint = torch.zeros(16, 16).double()
    joint.index_put_(
        (drawn[~ended, 0], drawn[~ended, 1]), torch.tensor(1.0).double(), True
    )
    cells = (first[:, None] * second * count)[torch.arange(16) != 1]
    seen = joint[torch.arange(16) != 1]
    usable = cells > 5
    chi2 = ((seen - cells) ** 2 / cells)[usable].sum()
    assert chi2 < usable.sum() + 5 * (2 * usable.sum()) ** 0.5


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_rows_do_not_depend_on_their_batch(tiny_folder, lengths, seed):
    backend = _shared_backend(tiny_folder)
    data = make_data(lengths, groups=2, seed=seed)
    together = backend.generate(data)
    order = np.random.default_rng(seed).permutation(len(data["seeds"]))
    shuffled = backend.generate(data.select_indices(order))
    for place, row in enumerate(order):
        assert tokens_of(shuffled, place) == tokens_of(together, row)
        torch.testing.assert_close(
            shuffled["logprobs"][place].sum(),
            together["logprobs"][row].sum(),
            atol=1e-4,
            rtol=0,
        )
    row = int(order[0])
    alone = backend.generate(data.slice(row, row + 1))
    assert tokens_of(alone, 0) == tokens_of(together, row)


_BACKENDS = {}


def _shared_backend(folder, **config):
    key = folder, *config.items()
    if key not in _BACKENDS:
        _BACKENDS[key] = make_backend(folder, stop_token_ids=[4], **config)
    return _BACKENDS[key]


@pytest.mark.parametrize("size", [1, 5, 64])
def test_batches_are_cut_at_max_batch_size(tiny_folder, backend, size):
    data = make_data([3, 9, 6], groups=5)
    expected = backend.generate(data)
    cut = make_backend(tiny_folder, max_batch_size=size).generate(data)
    assert torch.equal(cut["output_ids"], expected["output_ids"])


@pytest.mark.parametrize("fused", [True, False])
def test_waiting_rows_take_the_places_of_finished_ones(tiny_folder, fused, monkeypatch):
    options = {
        "max_new_tokens": 70,
        "stop_token_ids": [5, 9],
        "backend_options": {"fused": fused},
    }
    data = make_data([2, 40, 7, 1, 23, 2, 12, 31], groups=5)
    together = make_backend(tiny_folder, **options).generate(data)
    lengths = together["generation_lengths"]
    assert lengths.max() > 3 * lengths.float().mean()
    steps, moves = [], []
    begin_step, move_left = KVBuffers.begin_step, KVBuffers._move_left

    def count_step(buffers):
        steps.append(buffers.num_rows)
        begin_step(buffers)

    def count_move(buffers):
        moves.append(buffers.num_rows)
        move_left(buffers)

    monkeypatch.setattr(KVBuffers, "begin_step", count_step)
    monkeypatch.setattr(KVBuffers, "_move_left", count_move)
    size = 4
    output = make_backend(tiny_folder, max_batch_size=size, **options).generate(data)
    assert torch.equal(output["output_ids"], together["output_ids"])
    assert torch.equal(output["truncated"], together["truncated"])
    assert largest_error(tiny_folder, output) < 1e-5
    assert max(steps) == size
    # In batches of equal prompt lengths, each would take as long as its longest.
    order = np.argsort(-data["input_lengths"].numpy(), kind="stable")
    cut = lengths.numpy()[order].reshape(-1, size).max(1).sum()
    assert len(steps) < 0.8 * cut
    # Columns are reused, and not often.
    assert 0 < len(moves) <= len(steps) / 70


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12),
    st.integers(1, 6),
    st.integers(0, 5),
)
@settings(max_examples=15, deadline=None)
def test_rows_do_not_depend_on_when_they_join(tiny_folder, lengths, size, seed):
    data = make_data(lengths, groups=2, seed=seed)
    together = _shared_backend(tiny_folder).generate(data)
    joined = _shared_backend(tiny_folder, max_batch_size=size).generate(data)
    assert torch.equal(joined["output_ids"], together["output_ids"])
    torch.testing.assert_close(
        joined["logprobs"], together["logprobs"], atol=1e-5, rtol=0
    )


def test_top_k_and_top_p_bound_what_is_drawn(tiny_folder, backend):
    params = SamplingParams(temperature=0.9, top_k=4, top_p=0.8, max_new_tokens=1)
    data = make_data([6], groups=2000)
    output = backend.generate(data, sampling=params)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(data["input_ids"][:1]).logits[0, -1] / 0.9
    best = logits.topk(4)
    probs = best.values.softmax(-1)
    kept = (probs.cumsum(-1) - probs) < 0.8
    probs = probs[kept] / probs[kept].sum()
    drawn = output["output_ids"][:, 6]
    assert set(drawn.tolist()) == set(best.indices[kept].tolist())
    for token, prob in zip(best.indices[kept], probs, strict=True):
        rows = drawn == token
        torch.testing.assert_close(
            output["logprobs"][rows, 6].double(),
            prob.log().expand(int(rows.sum())),
            atol=1e-5,
            rtol=0,
        )
        assert abs(rows.double().mean() - prob) < 0.05


def test_stop_tokens_end_rows_and_are_kept(tiny_folder):
    backend = make_backend(tiny_folder, stop_token_ids=[7, 8], max_new_tokens=30)
    output = backend.generate(make_data([4, 9], groups=30))
    for row in range(60):
        start = int(output["unpadded_sequence_lengths"][row])
        new = tokens_of(output, row)[start - int(output["generation_lengths"][row]) :]
        stops = [token in (7, 8) for token in new]
        assert not any(stops[:-1])
        assert stops[-1] != bool(output["truncated"][row])
        assert stops[-1] or len(new) == 30
        assert (output["output_ids"][row, start:] == 0).all()


def test_stop_strings_end_the_rows_that_have_them(tiny_folder):
    backend = make_backend(
        tiny_folder, stop_strings=["=="], stop_token_ids=[NEVER], max_new_tokens=60
    )
    strings = [None, ["12", "3"], []] * 20
    output = backend.generate(make_data([3], groups=60, stop_strings=strings))
    ended = 0
    for row, own in enumerate(strings):
        text = backend.tokenizer.decode(tokens_of(output, row)[3:])
        stops = ["==", *(own or [])]
        assert not any(stop in text[:-1] for stop in stops)
        found = any(stop in text for stop in stops)
        assert found != bool(output["truncated"][row])
        ended += found
    assert ended >= 20


def test_stop_strings_see_characters_of_several_tokens(tmp_path):
    tokenizer = {"kind": "byte_bpe", "training_texts": ["x"], "vocab_size": 260}
    folder = build_tiny_model(tmp_path, tokenizer=tokenizer)
    backend = make_backend(folder)
    tokens = backend.tokenizer("aß b")["input_ids"]
    stops = backend._sampler._stop_strings
    table = stops.table([["ß"], ["ß "], None])
    rows = np.array([0, 1, 2])
    ends = []
    for step in range(1, len(tokens) + 1):
        history = np.array(tokens[:step])[:, None].repeat(3, 1)
        lengths = np.full(3, step)
        ends.append(table.ends(rows, history[-1], history, lengths).tolist())
    assert [any(column) for column in zip(*ends, strict=True)] == [True, True, False]
    assert ends[2][0]
    assert not ends[1][0]
    assert ends[3][1]


def test_seeds_decide_and_missing_seeds_change_from_call_to_call(tiny_folder):
    data = make_data([5], groups=20)
    del data["seeds"]
    one, two = make_backend(tiny_folder), make_backend(tiny_folder)
    first = one.generate(data)["output_ids"]
    assert torch.equal(first, two.generate(data)["output_ids"])
    assert first.shape != one.generate(data)["output_ids"].shape or not torch.equal(
        first, two.generate(data)["output_ids"]
    )


def test_context_is_checked_before_anything_runs(tiny_folder):
    backend = make_backend(tiny_folder, max_new_tokens=100)
    message = r"Row 1 has a prompt of 29 tokens.*context of 128 .*room for 28"
    with pytest.raises(ContextLengthError, match=message):
        backend.generate(make_data([28, 29]))
    backend.generate(make_data([28]))


@pytest.mark.parametrize(("length", "rule"), [(0, "got 0"), (9, "between 1 and the 4")])
def test_impossible_lengths_are_refused(backend, length, rule):
    data = make_data([4, 4])
    data["input_lengths"][1] = length
    with pytest.raises(BatchError, match=rf"input_lengths\[1\].*{rule}"):
        backend.generate(data)


@pytest.mark.parametrize("strings", ["END", [""], [3]])
def test_stop_strings_must_be_lists_of_texts(backend, strings):
    data = make_data([4, 4], stop_strings=[None, strings])
    with pytest.raises(BatchError, match=r"stop_strings\[1\] must be a list of texts"):
        backend.generate(data)


def test_settings_of_a_call_are_checked(backend):
    with pytest.raises(ConfigError, match="top_p"):
        backend.generate(make_data([4]), sampling=SamplingParams(top_p=2.0))


def test_weights_are_replaced_verified_and_counted(tmp_path, tiny_folder):
    other = build_tiny_model(tmp_path, seed=9)
    model = AutoModelForCausalLM.from_pretrained(other)
    weights = dict(model.named_parameters())
    data = make_data([4, 8], groups=4)
    for fused in (True, False):
        backend = make_backend(tiny_folder, backend_options={"fused": fused})
        assert backend.load_weights(iter(weights.items()), 5) == 5
        output = backend.generate(data)
        assert output["weight_version"].tolist() == [5] * 8
        assert largest_error(other, output) < 1e-5
        assert largest_error(tiny_folder, output) > 1e-2
        held = dict(loaded_tensors(backend.model))
        assert torch.equal(held["lm_head.weight"], weights["model.embed_tokens.weight"])
        some = [pair for pair in weights.items() if "embed_tokens" not in pair[0]]
        with pytest.raises(WeightSyncError, match=r"embed_tokens\.weight is missing"):
            backend.load_weights(iter(some), 6)
        with pytest.raises(GenerationError, match="last update failed"):
            backend.generate(data)


def test_no_row_is_sampled_before_the_first_weights(tiny_folder):
    backend = make_backend(tiny_folder, context={"load_weights": False})
    with pytest.raises(GenerationError, match="started without weights"):
        backend.generate(make_data([4]))


def test_weights_that_are_not_numbers_are_reported(tiny_folder):
    backend = make_backend(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    bad = [(n, torch.full_like(p, torch.nan)) for n, p in model.named_parameters()]
    backend.load_weights(iter(bad), 1)
    with pytest.raises(GenerationError, match="not finite numbers"):
        backend.generate(make_data([4]))


def test_prompts_go_through_in_chunks(tiny_folder, backend, monkeypatch):
    data = make_data([3, 9, 6, 12], groups=3)
    expected = backend.generate(data)
    monkeypatch.setattr("rl_models.generation.huggingface.engine._PREFILL_TOKENS", 10)
    assert torch.equal(backend.generate(data)["output_ids"], expected["output_ids"])


def test_bfloat16_and_sliding_windows(tmp_path):
    folder = build_tiny_model(tmp_path, architecture="llama")
    backend = make_backend(folder, precision="bfloat16")
    assert isinstance(backend._sampler.decoder, ModuleDecoder)
    assert largest_error(folder, backend.generate(make_data([4, 9]))) < 0.2
    overrides = {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    folder = build_tiny_model(tmp_path / "qwen2")
    backend = make_backend(folder, context={"hf_config_overrides": overrides})
    assert isinstance(backend._sampler.decoder, ModuleDecoder)
    data = make_data([4, 19, 8], groups=2)
    output = backend.generate(data)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **overrides
    )
    for row, ids in enumerate(output["output_ids"]):
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        truth = logprobs.gather(1, ids[1:, None])[:, 0]
        sampled = sampled_tokens(output)[row, 1:]
        error = (output["logprobs"][row, 1:] - truth)[sampled].abs().max()
        assert error < 1e-5
