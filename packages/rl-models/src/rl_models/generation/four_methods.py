"""Adapter that makes a generation backend of four methods a whole one.

```
columns of tokens -> prompts (texts or ids) -> generate -> answers -> columns of tokens
verified tensors  -> state_dict             -> update_weights
```
Versions, stop tokens, stop strings and length limits are handled on this side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.logs.logging import get_logger
from rl_models.backend_forms import generation_form, with_defaults
from rl_models.checkpoint.model_folder import folder_context_length
from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface.stopping import StopStrings
from rl_models.generation.noise import derive_seeds
from rl_models.generation.rows import check_rows, stop_strings_of
from rl_models.generation.sampling import check_sampling_params
from rl_models.generation.traits import GenerationTraits
from rl_models.registry import get_generation_backend
from rl_models.tokens.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)

__all__ = ["FourMethodBackend", "PromptSampling", "build_generation_backend"]

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSampling(SamplingParams):
    """Settings with which a backend of four methods samples the prompts of a call."""

    greedy: bool = False
    """Take the most probable token; the other settings do not matter then."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer; anything after the first is cut off."""
    stop_strings: tuple[tuple[str, ...], ...] = ()
    """Texts that end an answer, by prompt; anything after the first is cut off."""
    seeds: tuple[int, ...] = ()
    """A seed per prompt: equal seeds give equal answers."""


class _Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float] | None
    is_cut: bool


def build_generation_backend(name: str) -> Any:
    """Make a generation backend by name, completing one of four methods.

    Raises:
        RegistryError: The name is unknown, or the class has neither form.
    """
    backend = get_generation_backend(name)
    if generation_form(name, backend) == "whole":
        return backend()
    return FourMethodBackend(name, backend)


class FourMethodBackend:
    """A `GenerationBackend` made from a class with four methods.

    The class is made without arguments. Prompts are texts; a class attribute
    `prompts = "token_ids"` asks for lists of token ids. An answer is a text, a list of
    token ids, or a mapping with `text` or `token_ids`, and beside token ids `logprobs`.

    Args:
        name: The name that the class is registered under.
        backend: The class.
    """

    def __init__(self, name: str, backend: type[Any]) -> None:
        self._title = f"generation backend {name!r} ({backend.__qualname__})"
        self._backend = backend()
        self._takes_ids = _takes_token_ids(backend, self._title)
        self._has_weights = True
        self._num_calls = 0
        self._has_told = False
        self.weight_version = 0
        self.pad_token_id = 0

    def setup(
        self,
        config: Mapping[str, Any],
        *,
        model_name: str,
        tokenizer_name: str | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        replica: int = 0,
        **context: Any,
    ) -> None:
        """Set up the object; its config also names the model.

        Args:
            config: `GenerationConfig.to_dict()`.
            model_name: Folder or hub name of the model.
            tokenizer_name: The same for the tokenizer; None takes the model's.
            load_weights: False refuses to generate before the first weight update.
            hf_config_overrides: Fields of the model's `config.json` to replace.
            replica: Number of this replica, for messages.
            context: What other backends need.
        """
        self.config = GenerationConfig.from_dict(
            dict(config), source="policy.generation"
        )
        self._replica = f"generation replica {replica}"
        self.tokenizer = load_tokenizer(tokenizer_name or model_name)
        self.pad_token_id = pad_token_id(self.tokenizer)
        stops = self.config.stop_token_ids
        self._stops = stop_token_ids(self.tokenizer, None) if stops is None else stops
        self._stop_strings = StopStrings(self.tokenizer)
        longest = self.config.max_context_length
        self._context = longest or folder_context_length(model_name)
        self._has_weights = load_weights
        self._backend.setup(
            {
                **config,
                "model_name": model_name,
                "tokenizer_name": tokenizer_name or model_name,
                "hf_config_overrides": dict(hf_config_overrides or {}),
            }
        )

    def generate(
        self,
        data: GenerationInput,
        *,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Continue every row; see `GenerationBackend.generate`.

        The result has `logprobs` where the backend gives any.
        """
        if not self._has_weights:
            raise GenerationError(
                f"{self._replica} was started without weights, or its last update "
                "failed. Call WeightSynchronizer.sync_weights() before generate()."
            )
        params = sampling or self.config.sampling_params()
        check_sampling_params(params)
        ids, lengths = data["input_ids"].cpu(), data["input_lengths"].cpu()
        limit = params.max_new_tokens or self.config.max_new_tokens
        check_rows(ids, lengths.numpy().astype(np.int64), limit, self._context)
        rows = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
        request = self._request(data, params, limit, greedy)
        self._num_calls += 1
        given = self._backend.generate(self._prompts(rows), request)
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
            raise self._wrong("must return a list of answers", type(given).__name__)
        if len(given) != len(rows):
            raise self._wrong(
                "must return one answer per prompt",
                f"{len(given)} for {len(rows)} prompts",
            )
        answers = [
            self._shortened(index, self._read(index, answer), request)
            for index, answer in enumerate(given)
        ]
        return self._columns(rows, self._without_doubt(rows, answers))

    def _without_doubt(
        self, rows: list[list[int]], answers: list[_Answer]
    ) -> list[_Answer]:
        """Drop log-probs that belong to other tokens than the rows'.

        A text may be encoded as other tokens than those it was decoded from.
        """
        if self._takes_ids or all(answer.logprobs is None for answer in answers):
            return answers
        read = self.tokenizer(self._prompts(rows), add_special_tokens=False)
        if read["input_ids"] == rows:
            return answers
        if not self._has_told:
            _logger.warning(
                "the log-probs of %s are left out where a prompt's text is read as "
                "other tokens than the prompt has; give the class "
                'prompts = "token_ids"',
                self._title,
            )
            self._has_told = True
        return [answer._replace(logprobs=None) for answer in answers]

    def _request(
        self,
        data: GenerationInput,
        params: SamplingParams,
        limit: int,
        greedy: bool,
    ) -> PromptSampling:
        seeds = data.get("seeds")
        if seeds is None:
            count = len(data["input_lengths"])
            seeds = derive_seeds(self.config.seed, self._num_calls, count)
        return PromptSampling(
            params.temperature,
            params.top_p,
            params.top_k,
            limit,
            greedy,
            tuple(self._stops),
            tuple(map(tuple, stop_strings_of(data, self.config.stop_strings))),
            tuple(int(seed) for seed in seeds),
        )

    def _prompts(self, rows: list[list[int]]) -> list[Any]:
        if self._takes_ids:
            return rows
        texts: list[str] = self.tokenizer.batch_decode(rows, skip_special_tokens=False)
        return texts

    def _read(self, index: int, answer: Any) -> _Answer:
        """Return the backend's answer to one prompt as tokens."""
        given: Any = answer
        logprobs = None
        if isinstance(answer, Mapping):
            given = answer.get("token_ids", answer.get("text"))
            logprobs = answer.get("logprobs")
        if isinstance(given, str):
            if logprobs is not None:
                raise self._wrong(
                    f"must give log-probs beside token_ids: answer {index} has a text",
                    sorted(answer),
                )
            return _Answer(self._encoded(given), None, False)
        tokens = given.tolist() if hasattr(given, "tolist") else given
        if not (isinstance(tokens, list | tuple) and tokens and _are_ids(tokens)):
            raise self._wrong(
                f"must answer with a text or a list of token ids (answer {index})",
                repr(answer),
            )
        if logprobs is not None:
            logprobs = [float(value) for value in logprobs]
            if len(logprobs) != len(tokens):
                raise self._wrong(
                    f"must give one log-prob per token (answer {index})",
                    f"{len(logprobs)} for {len(tokens)} tokens",
                )
        return _Answer(list(tokens), logprobs, False)

    def _encoded(self, text: str) -> list[int]:
        """Return the tokens of a text, with the one that ends it."""
        # A text has lost its end token, without which the model would not learn to
        # stop.
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if self._stops and not set(tokens) & set(self._stops):
            tokens.append(self._stops[0])
        if not tokens:
            raise self._wrong(
                "must not answer with an empty text where no token ends an answer",
                repr(text),
            )
        return tokens

    def _shortened(
        self, index: int, answer: _Answer, request: PromptSampling
    ) -> _Answer:
        """Return an answer up to its end, or up to the limit."""
        # The backend need not stop by itself: a token after the end must not be
        # trained.
        limit = request.max_new_tokens
        tokens = answer.tokens[:limit]
        end, has_ended = self._end(tokens, request.stop_strings[index])
        is_cut = not has_ended and end == limit
        logprobs = None if answer.logprobs is None else answer.logprobs[:end]
        return _Answer(tokens[:end], logprobs, is_cut)

    def _end(self, tokens: list[int], strings: Sequence[str]) -> tuple[int, bool]:
        """Return the number of tokens up to a stop, and whether there is one."""
        for count, token in enumerate(tokens, start=1):
            if token in self._stops:
                return count, True
            if strings and self._stop_strings.found(tokens[:count], strings):
                return count, True
        return len(tokens), False

    def _columns(
        self, rows: list[list[int]], answers: list[_Answer]
    ) -> GenerationOutput:
        """Return the columns of `GenerationOutputSpec`."""
        given = [answer.logprobs is not None for answer in answers]
        if any(given) and not all(given):
            raise self._wrong(
                "must give log-probs for all answers or for none",
                f"none for answer {given.index(False)}",
            )
        totals = [len(r) + len(a.tokens) for r, a in zip(rows, answers, strict=True)]
        shape = (len(rows), max(totals))
        output_ids = torch.full(shape, self.pad_token_id)
        logprobs = torch.zeros(shape)
        versions = torch.full(shape, -1)
        for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            start, end = len(row), totals[index]
            output_ids[index, :end] = torch.tensor([*row, *answer.tokens])
            versions[index, start:end] = self.weight_version
            if answer.logprobs is not None:
                logprobs[index, start:end] = torch.tensor(answer.logprobs)
        columns: dict[str, Any] = {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor([len(a.tokens) for a in answers]),
            "unpadded_sequence_lengths": torch.tensor(totals),
            "truncated": torch.tensor([answer.is_cut for answer in answers]),
            "weight_version": torch.full((len(rows),), self.weight_version),
            "token_versions": versions,
        }
        if all(given):
            columns["logprobs"] = logprobs
        return BatchedDataDict(columns)

    def _wrong(self, rule: str, got: Any) -> GenerationError:
        return GenerationError(
            f"generate of {self._title} {rule}: got {got}; an answer is a text, a list "
            'of token ids, or {"token_ids": [...], "logprobs": [...]}'
        )

    def load_weights(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> int:
        """Pass verified weights to the backend, and serve them as `version`."""
        self._has_weights = False
        # Copies, because the stream's memory is reused and a backend may keep tensors.
        state_dict = {name: tensor.clone() for name, tensor in tensors}
        self._backend.update_weights(state_dict)
        self._has_weights = True
        self.weight_version = version
        return version

    def shutdown(self) -> None:
        """Shut the object down."""
        self._backend.shutdown()


def _takes_token_ids(backend: type[Any], title: str) -> bool:
    kind = with_defaults(backend, GenerationTraits).prompts
    if kind not in ("text", "token_ids"):
        raise GenerationError(
            f'the attribute prompts of {title} must be "text" or "token_ids": got '
            f"{kind!r}"
        )
    return kind == "token_ids"


def _are_ids(tokens: Sequence[Any]) -> bool:
    return all(
        isinstance(t, int | np.integer) and not isinstance(t, bool) and t >= 0
        for t in tokens
    )
