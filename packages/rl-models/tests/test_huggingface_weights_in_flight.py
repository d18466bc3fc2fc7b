"""Weights that the backend `huggingface` replaces while it samples."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import DeadlineExceededError
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.generation.huggingface.decoders import OwnCacheDecoder
from rl_models.generation.huggingface.weight_turns import WeightTurns
from rl_models.lora_config import LoRAConfig
from rl_models.testing import build_tiny_model
from rl_models.weights.adapters import adapted_layer, file_name, with_adapter

DEADLINE_S = 120.0
LIMIT = 12
LORA = LoRAConfig(r=2, alpha=3.0, sync="adapter")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("other"), seed=9)


def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def weights_of(folder):
    return list(model_of(folder).named_parameters())


def backend_of(folder, decoder="fused", **options):
    adapter = options.pop("adapter", None)
    made = HuggingFaceGenerationBackend()
    config = GenerationConfig(
        max_new_tokens=LIMIT,
        stop_token_ids=[],
        backend_options={"fused": decoder == "fused"},
        **options,
    )
    made.setup(config.to_dict(), model_name=str(folder), adapter=adapter)
    if decoder == "own":
        made.model.set_attn_implementation("sdpa")
        made._sampler.decoder = OwnCacheDecoder(made.model)
    return made


def prompts(lengths=(3, 7, 7, 5)):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(lengths)
    ids = torch.randint(3, 16, (len(lengths), int(lengths.max())), generator=generator)
    ids[torch.arange(ids.shape[1]) >= lengths[:, None]] = 0
    return BatchedDataDict(
        input_ids=ids, input_lengths=lengths, seeds=torch.arange(len(lengths))
    )


class Updates:
    """Begins weight updates during a call, at the end of its n-th step."""

    def __init__(self, backend, at):
        self.backend, self.at, self.num_steps = backend, at, 0
        self.pool = ThreadPoolExecutor(1)
        self.results = []

    def __call__(self, rows, tokens, logprobs):
        self.num_steps += 1
        tensors, version = self.at.get(self.num_steps, (None, 0))
        if tensors is None:
            return
        load = self.backend.load_weights
        self.results.append(self.pool.submit(load, iter(tensors), version))
        # It waits for this step: the next one must wait for it.
        until(lambda: self.backend._turns._num_updates or self.results[-1].done())


def until(holds):
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def recomputed(models, ids, length, num_old):
    """Log-probs of a row's sampled tokens; keys and values of old weights stay.

    The prompt and the first tokens go through the old model; from the last token that
    it sampled on, which the new one is fed, tokens go through the new model.
    """
    old, new = models
    first, found = length, []
    cache = None
    position = 0
    with torch.no_grad():
        for model, end in ((old, first + max(num_old - 1, 0)), (new, len(ids) - 1)):
            if model is old and not num_old:
                continue
            for stop in range(max(position + 1, first), end + 1):
                output = model(
                    input_ids=ids[None, position:stop],
                    past_key_values=cache,
                    use_cache=True,
                )
                cache, position = output.past_key_values, stop
                logits = output.logits[0, -1].log_softmax(-1)
                found.append(logits[ids[stop]])
    return torch.stack(found)


def check_rows(output, lengths, models, versions, tolerance=1e-4):
    """Check each row's log-probs by its versions; return the number of mixed rows."""
    num_mixed = 0
    for row, length in enumerate(lengths):
        end = int(output["unpadded_sequence_lengths"][row])
        told = output["token_versions"][row, length:end].tolist()
        assert told == sorted(told)
        assert set(told) <= set(versions)
        assert (output["token_versions"][row, :length] == -1).all()
        assert output["weight_version"][row] == told[0]
        num_mixed += len(set(told)) > 1
        expected = recomputed(
            models, output["output_ids"][row, :end], length, told.count(versions[0])
        )
        torch.testing.assert_close(
            output["logprobs"][row, length:end], expected, atol=tolerance, rtol=0
        )
    return num_mixed


@pytest.mark.parametrize("decoder", ["fused", "module", "own"])
def test_tokens_say_which_weights_sampled_them(tiny_folder, other_folder, decoder):
    backend = backend_of(tiny_folder, decoder)
    lengths = [5, 5] if decoder == "own" else [3, 7, 7, 5]
    updates = Updates(backend, {5: (weights_of(other_folder), 4)})
    output = backend.generate(prompts(lengths), on_step=updates)
    assert updates.results[0].result(DEADLINE_S) == 4
    assert backend.weight_version == 4
    models = model_of(tiny_folder), model_of(other_folder)
    assert check_rows(output, lengths, models, [0, 4]) == len(lengths)
    for row, length in enumerate(lengths):
        versions = output["token_versions"][row, length : length + LIMIT]
        assert versions.tolist() == [0] * 5 + [4] * (LIMIT - 5)
    # Other rows have nothing of the old weights.
    later = backend.generate(prompts(lengths))
    assert check_rows(later, lengths, models, [0, 4]) == 0
    assert (later["weight_version"] == 4).all()


def test_rows_that_join_after_an_update_are_all_of_the_new_weights(
    tiny_folder, other_folder
):
    lengths = [7] * 6
    backend = backend_of(tiny_folder, max_batch_size=2)
    updates = Updates(backend, {LIMIT + 4: (weights_of(other_folder), 1)})
    output = backend.generate(prompts(lengths), on_step=updates)
    models = model_of(tiny_folder), model_of(other_folder)
    assert check_rows(output, lengths, models, [0, 1]) == 2
    assert sorted(output["weight_version"].tolist()) == [0, 0, 0, 0, 1, 1]


def test_several_updates_of_one_call(tiny_folder, other_folder):
    backend = backend_of(tiny_folder)
    old, new = weights_of(tiny_folder), weights_of(other_folder)
    updates = Updates(backend, {2: (new, 1), 6: (old, 2), 7: (new, 3)})
    output = backend.generate(prompts([4]), on_step=updates)
    told = output["token_versions"][0, 4:].tolist()
    assert told == [0] * 2 + [1] * 4 + [2] + [3] * (LIMIT - 7)


def adapter_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        file_name(f"{path}.lora_{part}.weight"): 0.3
        * torch.randn(shape, generator=generator)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in path
        for part, shape in {
            "A": (LORA.r, module.in_features),
            "B": (module.out_features, LORA.r),
        }.items()
    }


def test_an_adapter_is_exchanged_between_two_tokens(tiny_folder):
    backend = backend_of(tiny_folder, adapter=LORA)
    models = []
    for seed in (1, 2):
        merged = model_of(tiny_folder)
        adapter = adapter_of(merged, seed)
        for name, a in adapter.items():
            path, part = adapted_layer(name)
            if part == "A":
                b = adapter[file_name(f"{path}.lora_B.weight")]
                weight = merged.get_submodule(path).weight
                weight.data = with_adapter(weight.data, a, b, LORA.scale)
        models.append((merged, adapter))
    base = dict(weights_of(tiny_folder))
    backend.load_weights(iter([*base.items(), *models[0][1].items()]), 1)
    updates = Updates(backend, {3: (list(models[1][1].items()), 2)})
    output = backend.generate(prompts(), on_step=updates)
    updates.results[0].result(DEADLINE_S)
    merged = [model for model, _ in models]
    assert check_rows(output, [3, 7, 7, 5], merged, [1, 2]) == 4


def test_a_stream_that_breaks_off_changes_no_row(tiny_folder):
    def broken():
        yield from weights_of(tiny_folder)[:2]
        raise WeightSyncError("the stream is damaged")

    backend = backend_of(tiny_folder)
    updates = Updates(backend, {3: (broken(), 1)})
    output = backend.generate(prompts(), on_step=updates)
    with pytest.raises(WeightSyncError, match="is damaged"):
        updates.results[0].result(DEADLINE_S)
    assert (output["token_versions"] <= 0).all()
    expected = backend_of(tiny_folder).generate(prompts())
    assert torch.equal(output["output_ids"], expected["output_ids"])


def test_rows_end_if_the_model_holds_old_and_new_weights(tiny_folder, other_folder):
    backend = backend_of(tiny_folder)
    updates = Updates(backend, {3: (weights_of(other_folder)[:4], 1)})
    with pytest.raises(GenerationError, match="a weight update that came meanwhile"):
        backend.generate(prompts(), on_step=updates)
    with pytest.raises(WeightSyncError, match="is missing"):
        updates.results[0].result(DEADLINE_S)
    with pytest.raises(GenerationError, match="its last update failed"):
        backend.generate(prompts())
    backend.load_weights(iter(weights_of(other_folder)), 2)
    assert (backend.generate(prompts())["weight_version"] == 2).all()


def test_calls_of_several_threads_come_one_after_the_other(tiny_folder):
    backend, order = backend_of(tiny_folder), []
    begun = threading.Event()

    def watch(name):
        def on_step(rows, tokens, logprobs):
            order.append(name)
            begun.set()

        return on_step

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(backend.generate, prompts(), on_step=watch("first"))]
        assert begun.wait(DEADLINE_S)
        calls.append(pool.submit(backend.generate, prompts(), on_step=watch("second")))
        first, second = (call.result(DEADLINE_S) for call in calls)
    assert order == ["first"] * LIMIT + ["second"] * LIMIT
    assert torch.equal(first["output_ids"], second["output_ids"])


class TestTurns:
    def test_who_waits_too_long_says_for_what(self):
        turns = WeightTurns(call_deadline_s=0.01, update_deadline_s=0.01)
        with turns.call("replica"):
            with (
                pytest.raises(DeadlineExceededError, match="waited for an earlier one"),
                turns.call("replica"),
            ):
                pass
            with (
                turns.step() as version,
                pytest.raises(DeadlineExceededError, match="end of a decoding step"),
                turns.update(1),
            ):
                pass
        assert version == turns.version == 0
        with (
            turns.update(1),
            pytest.raises(DeadlineExceededError, match="waited for a weight update"),
            turns.step(),
        ):
            pass
        assert turns.version == 1

    def test_an_update_that_was_given_up_holds_up_nobody(self):
        turns = WeightTurns(update_deadline_s=0.01)
        with turns.call("replica"):
            with turns.step(), pytest.raises(DeadlineExceededError), turns.update(1):
                pass
            with turns.step() as version:
                assert version == 0
