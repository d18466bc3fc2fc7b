from __future__ import annotations

import pytest
import torch

from rl_distributed import BatchedDataDict, RayVirtualCluster
from rl_models import GenerationConfig, GenerationPolicy, registry as backends
from rl_models.errors import GenerationError
from rl_models.generation.four_methods import (
    FourMethodBackend,
    build_generation_backend,
)
from rl_models.registry import register_generation_backend
from rl_models.types import SamplingParams
from rl_models.weights.probe import Probe


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    registry = backends._GENERATION
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


class Saying:
    """Returns what it was told to, and records its inputs."""

    answers = ("12", "3=")
    prompts = "text"

    def setup(self, config):
        self.config = config
        self.asked = []
        self.state = None

    def generate(self, prompts, sampling_params):
        self.asked.append((prompts, sampling_params))
        return list(self.answers)[: len(prompts)]

    def update_weights(self, state_dict):
        self.state = state_dict

    def shutdown(self):
        self.state = None


@pytest.fixture
def make(tiny_folder):
    def made(answers=Saying.answers, prompts="text", load_weights=True, **settings):
        cls = type("Mine", (Saying,), {"answers": answers, "prompts": prompts})
        backend = FourMethodBackend("mine", cls)
        config = GenerationConfig(**{"max_new_tokens": 4, "seed": 7, **settings})
        backend.setup(
            config.to_dict(), model_name=str(tiny_folder), load_weights=load_weights
        )
        return backend

    return made


def rows_of(backend, texts=("1+", "23"), **columns):
    ids = [backend.tokenizer.encode(text.replace("+", ">")) for text in texts]
    width = max(map(len, ids))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    return BatchedDataDict(
        {
            "input_ids": padded,
            "input_lengths": torch.tensor([len(row) for row in ids]),
            **columns,
        }
    )


def asked(backend):
    return backend._backend.asked[-1]


def test_prompts_are_texts_and_answers_become_tokens(make):
    backend = make()
    rows = rows_of(backend, seeds=torch.tensor([5, 6]))
    output = backend.generate(rows, sampling=SamplingParams(0.5, 0.9, 3))
    prompts, request = asked(backend)
    assert prompts == ["1>", "23"]
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 3)
    assert request.max_new_tokens == 4
    assert request.seeds == (5, 6)
    assert not request.greedy
    eos = backend.tokenizer.eos_token_id
    assert request.stop_token_ids == (eos,)
    first = [*backend.tokenizer.encode("12"), eos]
    assert output["output_ids"][0, 2:5].tolist() == first
    assert output["generation_lengths"].tolist() == [3, 3]
    assert output["unpadded_sequence_lengths"].tolist() == [5, 5]
    assert output["truncated"].tolist() == [False, False]
    assert output["token_versions"][0].tolist() == [-1, -1, 0, 0, 0]
    assert "logprobs" not in output


def test_setup_names_the_model(make, tiny_folder):
    config = make(temperature=0.3)._backend.config
    assert config["model_name"] == config["tokenizer_name"] == str(tiny_folder)
    assert config["temperature"] == 0.3


def test_token_ids_and_logprobs_come_back_as_they_are(make):
    answers = (
        {"token_ids": [5, 6], "logprobs": [-0.5, -0.25]},
        {"token_ids": torch.tensor([7]), "logprobs": torch.tensor([-1.5])},
    )
    backend = make(answers, prompts="token_ids")
    rows = rows_of(backend)
    output = backend.generate(rows, greedy=True)
    prompts, request = asked(backend)
    assert prompts == rows["input_ids"].tolist()
    assert request.greedy
    assert output["output_ids"].tolist()[0][2:] == [5, 6]
    assert output["logprobs"].tolist() == [[0, 0, -0.5, -0.25], [0, 0, -1.5, 0]]


def test_answers_end_at_stops_and_at_the_limit(make):
    eos = make().tokenizer.eos_token_id
    backend = make(([5, eos, 6, 7], [5, 6, 7, 8, 9, 5]), prompts="token_ids")
    output = backend.generate(rows_of(backend))
    assert output["generation_lengths"].tolist() == [2, 4]
    assert output["truncated"].tolist() == [False, True]
    strings = rows_of(backend, stop_strings=[None, None])
    nine = backend.tokenizer.decode([6])
    strings["stop_strings"] = [None, [nine]]
    output = backend.generate(strings)
    assert asked(backend)[1].stop_strings == ((), (nine,))
    assert output["generation_lengths"].tolist() == [2, 2]
    assert output["truncated"].tolist() == [False, False]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("12", "must return a list of answers: got str"),
        (("12",), "one answer per prompt: got 1 for 2 prompts"),
        (("12", 3), r"a text or a list of token ids \(answer 1\): got 3"),
        (([], "1"), r"a text or a list of token ids \(answer 0\)"),
        (([1.5], "1"), r"a list of token ids \(answer 0\): got \[1.5\]"),
        (({"token_ids": [1, 2], "logprobs": [-1]}, [3]), "got 1 for 2 tokens"),
        (({"text": "1", "logprobs": [-1]}, [3]), "log-probs beside token_ids"),
        (({"token_ids": [1], "logprobs": [-1]}, [3]), "for all answers or for none"),
    ],
)
def test_answers_of_another_form_are_refused(make, answers, message, monkeypatch):
    backend = make(prompts="token_ids")
    monkeypatch.setattr(backend._backend, "generate", lambda prompts, params: answers)
    with pytest.raises(GenerationError, match=message):
        backend.generate(rows_of(backend))


def test_prompts_that_are_no_kind_are_refused():
    cls = type("Mine", (Saying,), {"prompts": "tokens"})
    with pytest.raises(GenerationError, match='must be "text" or "token_ids": got \'t'):
        FourMethodBackend("mine", cls)


def test_nothing_is_sampled_before_weights_have_come(make):
    backend = make(load_weights=False)
    with pytest.raises(GenerationError, match="without weights"):
        backend.generate(rows_of(backend))
    source = torch.ones(3)

    def tensors():
        yield "a", source
        source.zero_()  # memory that is overwritten
        yield "b", torch.ones(2)

    assert backend.load_weights(tensors(), 4) == 4
    assert backend._backend.state["a"].tolist() == [1.0, 1.0, 1.0]
    output = backend.generate(rows_of(backend))
    assert output["weight_version"].tolist() == [4, 4]

    def broken():
        yield "a", source
        raise GenerationError("the stream ends")

    with pytest.raises(GenerationError, match="stream ends"):
        backend.load_weights(broken(), 5)
    with pytest.raises(GenerationError, match="its last update failed"):
        backend.generate(rows_of(backend))


def test_logprobs_of_other_tokens_are_left_out(make, monkeypatch):
    answers = ({"token_ids": [5], "logprobs": [-1.0]},) * 2
    backend = make(answers)
    assert "logprobs" in backend.generate(rows_of(backend))
    # Another tokenization of the same texts, as piece vocabularies have for odd tokens.
    read = {"input_ids": [[1], [2]]}
    tokenizer = backend.tokenizer
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, texts, **settings: read
    )
    assert "logprobs" not in backend.generate(rows_of(backend))


def test_the_probe_takes_answers_without_logprobs(caplog):
    class Policy:
        config = type("Config", (), {"logprob_temperature": 1.0})

        def get_logprobs(self, rows):
            raise AssertionError("there is nothing to compare with")

    class Sampler:
        config = GenerationConfig(max_new_tokens=2)

        def generate_on_each(self, rows, sampling):
            return {0: {"output_ids": torch.zeros(4, 2)}}

        def refuse(self, reason):
            raise AssertionError(reason)

        def changed_weights(self, replica):
            raise AssertionError(replica)

    probe = Probe(Sampler.config.weight_sync.probe, Policy(), Sampler())
    probe._rows = object()
    probe.check(1)
    probe.check(2)
    assert caplog.text.count("gives no log-probs") == 1


def test_a_policy_samples_from_a_backend_of_this_program(ray_cluster, tiny_folder):
    @register_generation_backend("mine")
    class Local(Saying):
        answers = ("12",) * 8

    assert build_generation_backend("huggingface").__class__.__name__ != "Local"
    cluster = RayVirtualCluster([1], use_gpus=False)
    config = GenerationConfig(max_new_tokens=4, backend="mine")
    policy = GenerationPolicy(cluster, config, model_name=tiny_folder)
    try:
        backend = FourMethodBackend("mine", Local)
        backend.setup(config.to_dict(), model_name=str(tiny_folder))
        rows = rows_of(backend)
        assert policy.generate(rows)["generation_lengths"].tolist() == [3, 3]

        @register_generation_backend("other")
        class Other(Saying):
            answers = ("123",) * 8

        policy.reload(config.replace(backend="other"), model_name=tiny_folder)
        assert policy.generate(rows)["generation_lengths"].tolist() == [4, 4]
    finally:
        policy.shutdown()
        cluster.shutdown()
