"""Tiny models, and the contracts that every backend of rl-models keeps.

`check_generation_backend` and `check_training_backend` run any backend, ours or a
user's, through what an algorithm relies on, and raise `ContractError` with the rule
that was broken; `check_adapter_loading` does so with one that takes adapters apart
from their base, and `check_weights_in_flight` with one that loads weights while it
samples. They need no Ray and no GPU, and take seconds on a tiny model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.build.model import ModelBuildConfig, TokenizerBuildConfig, build_model
from rl_models.errors import ModelsError
from rl_models.interfaces import GenerationBackend, TrainingBackend
from rl_models.lora_config import LoRAConfig
from rl_models.types import (
    GenerationInput,
    LossInputType,
    LossType,
    TrainingRows,
)
from rl_models.weights.adapters import adapted_layer, file_name

__all__ = [
    "ContractError",
    "TokenCrossEntropy",
    "build_tiny_model",
    "check_adapter_loading",
    "check_generation_backend",
    "check_training_backend",
    "check_weights_in_flight",
    "reference_logprobs",
]


# Calls in which an update may come too early or too late to meet an answer.
_MOST_CALLS = 20
_CALL_S = 300.0


class ContractError(ModelsError, AssertionError):
    """A backend does not do what its protocol says."""


def build_tiny_model(folder: str | Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a Qwen2 of a few thousand parameters with a tokenizer of 16 tokens.

    Args:
        folder: Where to write.
        seed: Seed of the weights, which are large enough to tell tokens apart.
        settings: Fields of `ModelBuildConfig` to replace.
    """
    defaults: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tokenizer": TokenizerBuildConfig(characters="0123456789 >="),
    }
    return build_model(ModelBuildConfig(**{**defaults, **settings}), folder, seed)


def reference_logprobs(
    folder: str | Path, input_ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """[B, S] float64 log-probs of each token by plain transformers, row by row.

    Padding at the right does not matter to the tokens before it.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    return _logprobs_of(model, input_ids, temperature)


def _logprobs_of(
    model: Any, input_ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """[B, S] float64 log-probs of each token by a float64 model."""
    model.eval()
    logprobs = torch.zeros(input_ids.shape, dtype=torch.float64)
    with torch.no_grad():
        for row, ids in enumerate(input_ids):
            logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
            chosen = logits.log_softmax(-1).gather(1, ids[1:, None])
            logprobs[row, 1:] = chosen[:, 0]
    return logprobs


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ContractError(rule)


def _prompt_batch(seed: int = 0) -> GenerationInput:
    """Three prompts of different lengths, two of them twice."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 3, 7, 5, 5])
    prompts = torch.randint(3, 12, (3, 7), generator=generator)
    ids = prompts[torch.tensor([0, 0, 1, 2, 2])]
    ids[torch.arange(7) >= lengths[:, None]] = 0
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "seeds": torch.tensor([11, 12, 13, 14, 15]),
        }
    )


def check_generation_backend(
    make_backend: Callable[[], GenerationBackend], folder: str | Path
) -> None:
    """Run a generation backend through its contract.

    Args:
        make_backend: Gives a backend that is set up, in float32 and at temperature 1,
            for the model in `folder` (as `build_tiny_model` writes it), with
            `max_new_tokens` of at most 32.
        folder: The model.

    Raises:
        ContractError: The rule that is broken.
    """
    backend = make_backend()
    data = _prompt_batch()
    output = backend.generate(data)
    _check_output(data, output)
    truth = reference_logprobs(folder, output["output_ids"])
    error = _error_of_sampled(data, output, truth)
    _require(error < 1e-5, f"log-probs must be those of the model: off by {error:.2g}")
    again = backend.generate(data)
    _require(
        torch.equal(again["output_ids"], output["output_ids"]),
        "equal seeds must give equal tokens",
    )
    alone = backend.generate(data.slice(2, 3))
    length = int(output["unpadded_sequence_lengths"][2])
    _require(
        alone["output_ids"][0, :length].tolist()
        == output["output_ids"][2, :length].tolist(),
        "a row's tokens must not depend on the other rows of its batch",
    )
    greedy = [backend.generate(data, greedy=True)["output_ids"] for _ in range(2)]
    _require(torch.equal(*greedy), "greedy generation must not depend on chance")
    _check_weight_update(backend, folder, data)
    backend.shutdown()


def _sampled(data: Mapping[str, Any], output: Mapping[str, Any]) -> torch.Tensor:
    """[B, S] whether a token was sampled: by the lengths, as a log-prob may be 0."""
    position = torch.arange(output["output_ids"].shape[1])
    totals = output["unpadded_sequence_lengths"][:, None]
    sampled: torch.Tensor = (position >= data["input_lengths"][:, None]) & (
        position < totals
    )
    return sampled


def _error_of_sampled(
    data: Mapping[str, Any], output: Mapping[str, Any], truth: torch.Tensor
) -> float:
    """Largest difference of the log-probs of sampled tokens from the exact ones."""
    difference = output["logprobs"].double() - truth
    return float(difference[_sampled(data, output)].abs().max())


def _check_output(data: Mapping[str, Any], output: Mapping[str, Any]) -> None:
    ids, logprobs = output["output_ids"], output["logprobs"]
    totals, new = output["unpadded_sequence_lengths"], output["generation_lengths"]
    lengths = data["input_lengths"]
    _require(ids.dtype == torch.int64, "output_ids must be int64")
    _require(logprobs.shape == ids.shape, "logprobs must have the shape of output_ids")
    _require(torch.equal(totals, lengths + new), "lengths must add up")
    _require(bool((new >= 1).all()), "every row must get at least one token")
    _require(output["truncated"].dtype == torch.bool, "truncated must be bool")
    _require(bool((output["weight_version"] == 0).all()), "version must start at 0")
    is_new = _sampled(data, output)
    _require(
        bool((logprobs[~is_new] == 0).all()), "logprobs must be 0 where nothing is new"
    )
    _require(
        torch.equal(output["token_versions"], torch.where(is_new, 0, -1)),
        "token_versions must be the version where a token is new, -1 elsewhere",
    )
    for row, length in enumerate(lengths.tolist()):
        _require(
            torch.equal(ids[row, :length], data["input_ids"][row, :length]),
            "rows must begin with their input",
        )


def _check_weight_update(
    backend: GenerationBackend,
    folder: str | Path,
    data: GenerationInput,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    zeros = [
        (name, torch.zeros_like(value)) for name, value in model.named_parameters()
    ]
    _require(
        backend.load_weights(iter(zeros), 3) == 3,
        "load_weights must give back the version that is served",
    )
    output = backend.generate(data)
    _require(
        bool((output["weight_version"] == 3).all()), "rows must carry their version"
    )
    sampled = output["logprobs"][_sampled(data, output)]
    uniform = -torch.log(torch.tensor(float(model.config.vocab_size)))
    _require(
        torch.allclose(sampled, uniform, atol=1e-5),
        "loaded weights must be used: with zeros, every token is equally likely",
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, value in model.named_parameters():
            value += 0.02 * torch.randn(value.shape, generator=generator)
    backend.load_weights(iter(list(model.named_parameters())), 4)
    output = backend.generate(data)
    model.set_attn_implementation("eager")
    truth = _logprobs_of(model.double(), output["output_ids"])
    # Far less than a mix-up makes, and more than rounding does in any architecture.
    error = _error_of_sampled(data, output, truth)
    _require(
        error < 1e-4,
        f"each loaded weight must take the place of its name: off by {error:.2g}",
    )


def check_adapter_loading(
    make_backend: Callable[[LoRAConfig], GenerationBackend], folder: str | Path
) -> None:
    """Run a generation backend that takes adapters through that part of its contract.

    Args:
        make_backend: As that of `check_generation_backend`, with the `adapter` that it
            is given.
        folder: The model.

    Raises:
        ContractError: The rule that is broken.
    """
    lora = LoRAConfig(r=2, alpha=3.0, sync="adapter")
    backend, data = make_backend(lora), _prompt_batch()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    base = dict(model.named_parameters())
    for version, with_base in ((1, True), (2, False), (3, True)):
        adapter = _random_adapter(model, lora.r, seed=version)
        sent = {**(base if with_base else {}), **adapter}
        served = backend.load_weights(iter(list(sent.items())), version)
        _require(
            served == version, "load_weights must give back the version that is served"
        )
        output = backend.generate(data)
        merged = _merged(model, adapter, lora.scale)
        error = _error_of_sampled(
            data, output, _logprobs_of(merged, output["output_ids"])
        )
        what = "with" if with_base else "without"
        _require(
            error < 1e-4,
            f"an adapter that comes {what} its base must be added to the base, in "
            f"place of the adapter before: off by {error:.2g}",
        )
    backend.shutdown()


def check_weights_in_flight(
    make_backend: Callable[[], GenerationBackend], folder: str | Path
) -> None:
    """Run a backend that loads weights while it samples through that contract.

    Args:
        make_backend: As that of `check_generation_backend`.
        folder: The model.

    Raises:
        ContractError: The rule that is broken.
    """
    backend, data = make_backend(), _prompt_batch()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    models = [model, copy.deepcopy(model)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in models[1].parameters():
            value += 0.1 * torch.randn(value.shape, generator=generator)
    sent = [list(copy.deepcopy(each).named_parameters()) for each in models]
    version = num_calls = 0
    is_mixed = False
    with ThreadPoolExecutor(1) as pool:
        while not is_mixed:
            _require(
                num_calls < _MOST_CALLS, "an update must not wait for the end of a call"
            )
            num_calls += 1
            call = pool.submit(backend.generate, data)
            while not call.done():
                version += 1
                # Even versions are the weights of the folder, as version 0 is.
                served = backend.load_weights(iter(sent[version % 2]), version)
                _require(
                    served == version,
                    "load_weights must give back the version that is served",
                )
            is_mixed = _check_mixed(data, call.result(_CALL_S), version, models)
    backend.shutdown()


def _check_mixed(
    data: GenerationInput, output: Mapping[str, Any], newest: int, models: list[Any]
) -> bool:
    """Check rows of several versions; return whether there are any."""
    sampled = _sampled(data, output)
    versions: torch.Tensor = output["token_versions"]
    first = versions.gather(1, data["input_lengths"][:, None])
    falls = (versions.diff(dim=1) < 0) & sampled[:, 1:] & sampled[:, :-1]
    _require(
        not bool(falls.any()) and int(versions.max()) <= newest,
        "token_versions must not fall within a row, and be versions that were loaded",
    )
    _require(
        torch.equal(output["weight_version"], first[:, 0]),
        "weight_version must be that of a row's oldest token",
    )
    for parity, model in enumerate(models):
        # Behind an update it is up to the backend what becomes of keys and values.
        known = sampled & (versions == first) & (first % 2 == parity)
        truth = _logprobs_of(copy.deepcopy(model).double(), output["output_ids"])
        apart = (output["logprobs"].double() - truth)[known].abs()
        error = float(apart.max()) if len(apart) else 0.0
        _require(
            error < 1e-4,
            "log-probs must be those of the weights that token_versions names: off by "
            f"{error:.2g}",
        )
    return bool((sampled & (versions != first)).any())


def _random_adapter(model: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return an adapter of each linear layer of the decoder, as it is sent."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in path:
            shapes = {
                "A": (rank, module.in_features),
                "B": (module.out_features, rank),
            }
            for part, shape in shapes.items():
                value = 0.1 * torch.randn(shape, generator=generator)
                adapter[file_name(f"{path}.lora_{part}.weight")] = value
    return adapter


def _merged(model: Any, adapter: Mapping[str, torch.Tensor], scale: float) -> Any:
    """Return a float64 copy of a model, with an adapter added to its weights."""
    merged = copy.deepcopy(model).double()
    for name, a in adapter.items():
        path, part = adapted_layer(name)
        if part == "A":
            b = adapter[file_name(f"{path}.lora_B.weight")]
            weight = merged.get_submodule(path).weight
            weight.data.add_(b.double() @ a.double(), alpha=scale)
    return merged


class TokenCrossEntropy:
    """Mean negative log-likelihood of the trained tokens: the plainest loss."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        **inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the share of a micro-batch in the mean over the global batch."""
        logprobs = inputs["next_token_logprobs"]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(logprobs * mask).sum() / global_valid_toks
        return loss, {"nll": loss.item()}


def check_training_backend(
    make_backend: Callable[[], TrainingBackend],
    folder: str | Path,
    checkpoint_folder: str | Path,
) -> None:
    """Run a training backend, as the only rank, through its contract.

    Args:
        make_backend: Gives a backend that is set up, in float32 and at temperature 1,
            for the model in `folder`, with a learning rate above 0.
        folder: The model.
        checkpoint_folder: An empty folder to write to.

    Raises:
        ContractError: The rule that is broken.
    """
    backend = make_backend()
    prompts = _prompt_batch()
    rows = prompts.size
    columns = torch.arange(prompts["input_ids"].shape[1])
    mask = columns < prompts["input_lengths"][:, None]
    mask[:, 0] = False
    data: TrainingRows = BatchedDataDict(
        {**prompts, "token_mask": mask, "sample_mask": torch.ones(rows)}
    )
    real = data["token_mask"]
    before = backend.get_logprobs(data, micro_batch_size=2)
    truth = reference_logprobs(folder, data["input_ids"])
    error = (before.double() - truth)[real].abs().max().item()
    _require(error < 1e-5, f"log-probs must be those of the model: off by {error:.2g}")
    _require(bool((before[:, 0] == 0).all()), "log-probs must be 0 at position 0")
    loss_fn = TokenCrossEntropy()
    result = backend.train_step(
        data, loss_fn, global_batch_size=rows, micro_batch_size=2
    )
    expected = -truth[real].mean().item()
    _require(
        abs(float(result["loss"][0]) - expected) < 1e-5,
        "micro-batch losses must sum to the loss of the global batch",
    )
    after = backend.get_logprobs(data, micro_batch_size=rows)
    _require(
        after[real].mean().item() > before[real].mean().item(),
        "a step on a likelihood loss must raise the likelihood",
    )
    evaluated = backend.train_step(
        data, loss_fn, eval_mode=True, global_batch_size=rows, micro_batch_size=rows
    )
    _require(
        abs(float(evaluated["loss"][0]) + after[real].mean().item()) < 1e-5
        and torch.equal(backend.get_logprobs(data, micro_batch_size=rows), after),
        "eval mode must give the loss and leave the weights alone",
    )
    _check_exports(backend, Path(checkpoint_folder), data, after)
    backend.shutdown()


def _check_exports(
    backend: TrainingBackend,
    folder: Path,
    data: Mapping[str, Any],
    logprobs: torch.Tensor,
) -> None:
    weights = dict(backend.export_weights("float32"))
    specs = backend.weight_specs()
    _require(
        [(n, v.shape, v.dtype) for n, v in specs.items()]
        == [(n, v.shape, v.dtype) for n, v in weights.items()],
        "weight_specs must name what export_weights gives, in its order",
    )
    target = folder / "weights"
    backend.save_checkpoint(str(target))
    saved = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, value in saved.named_parameters():
        _require(
            name in weights and torch.equal(weights[name].float(), value),
            f"exported and saved weights must be the same: {name}",
        )
    real = data["token_mask"]
    error = (reference_logprobs(target, data["input_ids"]) - logprobs.double())[real]
    _require(
        error.abs().max().item() < 1e-5,
        "a saved model must give the log-probs of the trained one",
    )
