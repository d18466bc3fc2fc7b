"""`Conversations`: everything known about N rows while they are played.

Shapes: P prompts, G generations each, N = P x G rows; M of them are active.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_algorithms.data.types import LLMMessageLogType, Tokenizer
from rl_algorithms.rollout.decoding import decode_answers
from rl_algorithms.rollout.judge import Verdict
from rl_algorithms.rollout.observations import ObservationEncoder
from rl_algorithms.rollout.result import Outcome
from rl_algorithms.rollout.token_rows import TokenRows
from rl_algorithms.seeds import row_seeds
from rl_distributed.batched_data_dict import BatchedDataDict

__all__ = ["Conversations"]


class Conversations:
    """The state of a rollout.

    Args:
        batch: P prompts as columns of `rl_collate_fn`.
        num_generations: Rows per prompt.
        tokenizer: The policy's tokenizer.
        first_prompt_index: Index of the first prompt in the step, for the seeds.
    """

    def __init__(
        self,
        batch: BatchedDataDict[Any],
        num_generations: int,
        tokenizer: Tokenizer,
        first_prompt_index: int,
    ) -> None:
        num_prompts = len(batch["input_lengths"])
        self.num_rows = num_prompts * num_generations
        self._tokenizer = tokenizer
        self._prompt_of = np.repeat(np.arange(num_prompts), num_generations)
        self._sample_of = np.tile(np.arange(num_generations), num_prompts)
        self._first_prompt_index = first_prompt_index
        repeat = torch.from_numpy(self._prompt_of)
        pad = tokenizer.pad_token_id
        self.tokens = TokenRows(
            batch["input_ids"][repeat],
            batch["input_lengths"].to(torch.int64)[repeat],
            pad if pad is not None else 0,
        )
        self._loss_multiplier = (
            batch["loss_multiplier"][repeat].to(torch.float32)
            if "loss_multiplier" in batch
            else torch.ones(self.num_rows)
        )
        self._start_messages(batch, num_prompts)
        self._active: Tensor | None = None
        """[M] indices of the rows that go on; none: all."""
        self._rewards = torch.zeros(self.num_rows)
        self._named_rewards: dict[str, Tensor] = {}
        self._outcome = torch.zeros(self.num_rows, dtype=torch.int8)
        self._truncated = torch.zeros(self.num_rows, dtype=torch.bool)
        self._generation_lengths = torch.zeros(self.num_rows, dtype=torch.int64)
        self._weight_version = torch.zeros(self.num_rows, dtype=torch.int64)
        self.num_turns = torch.zeros(self.num_rows, dtype=torch.int64)
        self.unfinished = torch.ones(self.num_rows, dtype=torch.bool)
        """[N] rows that neither the environment nor a length limit has ended."""

    def _start_messages(self, batch: BatchedDataDict[Any], num_prompts: int) -> None:
        """Fan the prompts' texts and columns out to rows; tokens stay behind."""
        logs = [
            [{"role": m["role"], "content": m["content"]} for m in log]
            for log in batch["message_log"]
        ]
        infos = batch.get("extra_env_info") or [{} for _ in range(num_prompts)]
        stops = batch.get("stop_strings")
        order = self._prompt_of.tolist()
        self.message_logs: list[LLMMessageLogType] = [list(logs[p]) for p in order]
        self.num_prompt_messages = [len(logs[p]) for p in order]
        self.extra_env_info: list[dict[str, Any]] = [infos[p] for p in order]
        self.answers: list[str | None] = [None] * self.num_rows
        self.texts: list[str] = [""] * self.num_rows
        self._metadata: list[Any] = list(self.extra_env_info)
        self._stop_strings: list[list[str] | None] | None = (
            None if stops is None else [stops[p] for p in order]
        )

    def _active_list(self) -> list[int] | range:
        return range(self.num_rows) if self._active is None else self._active.tolist()

    def _active_rows(self) -> Tensor:
        return torch.arange(self.num_rows) if self._active is None else self._active

    def generation_input(self, seed: int, step: int, turn: int) -> BatchedDataDict[Any]:
        """Return the columns that `generate` takes, for the active rows."""
        seeds = row_seeds(
            seed,
            step,
            self._prompt_of + self._first_prompt_index,
            self._sample_of,
            turn,
        )
        if self._active is None:
            ids, lengths = self.tokens.input_ids, self.tokens.lengths
        else:
            ids, lengths = self.tokens.select(self._active)
            seeds = seeds[self._active.numpy()]
        columns: dict[str, Any] = {
            "input_ids": ids,
            "input_lengths": lengths,
            "seeds": torch.from_numpy(seeds),
        }
        if self._stop_strings is not None:
            columns["stop_strings"] = [
                self._stop_strings[row] for row in self._active_list()
            ]
        return BatchedDataDict(columns)

    def add_answers(self, output: BatchedDataDict[Any]) -> None:
        """Take over what was sampled for the active rows."""
        rows = self._active_rows()
        lengths = output["unpadded_sequence_lengths"].to(torch.int64)
        sampled = output["generation_lengths"].to(torch.int64)
        self.tokens.add_sampled(
            self._active, output["output_ids"], lengths, output["logprobs"]
        )
        self._truncated[rows] = output["truncated"].bool()
        self._generation_lengths[rows] += sampled
        version = output["weight_version"].to(torch.int64)
        oldest = torch.minimum(self._weight_version[rows], version)
        first = self.num_turns[rows] == 0
        self._weight_version[rows] = torch.where(first, version, oldest)
        self.num_turns[rows] += 1
        ends = lengths.tolist()
        starts = (lengths - sampled).tolist()
        tokens = output["output_ids"].tolist()
        texts = decode_answers(
            self._tokenizer,
            [row[a:b] for row, a, b in zip(tokens, starts, ends, strict=True)],
        )
        for row, text in zip(self._active_list(), texts, strict=True):
            self.message_logs[row].append({"role": "assistant", "content": text})
            self.texts[row] += text

    def active_logs(self) -> list[LLMMessageLogType]:
        """Return the conversations of the active rows."""
        if self._active is None:
            return self.message_logs
        return [self.message_logs[row] for row in self._active_list()]

    def active_metadata(self) -> list[Any]:
        """Return what the environment wants to know of the active rows."""
        if self._active is None:
            return self._metadata
        return [self._metadata[row] for row in self._active_list()]

    def add_verdict(self, verdict: Verdict) -> None:
        """Add the rewards of a turn, and end the rows that it ended."""
        rows = self._active_rows()
        self._rewards[rows] += verdict.rewards
        for name, value in verdict.named_rewards.items():
            total = self._named_rewards.setdefault(name, torch.zeros(self.num_rows))
            total[rows] += value
        self._outcome[rows] = verdict.outcome
        self.unfinished[rows] = ~(verdict.terminateds | self._truncated[rows])
        judged = zip(
            self._active_list(), verdict.answers, verdict.metadata, strict=True
        )
        for row, answer, metadata in judged:
            self.answers[row] = answer
            self._metadata[row] = metadata

    def go_on(
        self,
        verdict: Verdict,
        observations: ObservationEncoder,
        max_length: int | None,
    ) -> bool:
        """Append the observations to the rows that go on.

        Rows that this leaves no room for another answer end as truncated.

        Returns:
            Whether any row goes on.
        """
        before = self._active_list()
        rows = self._active_rows()
        going = self.unfinished[rows].tolist()
        places = [i for i, goes in enumerate(going) if goes]
        for i in places:
            row = before[i]
            self.message_logs[row].append(dict(verdict.observations[i]))
            self._set_stop_strings(row, verdict.next_stop_strings[i])
        active = rows[torch.tensor(places, dtype=torch.int64)]
        last = self.tokens.input_ids[active, self.tokens.lengths[active] - 1].tolist()
        self.tokens.append(
            active,
            observations.encode([verdict.observations[i] for i in places], last),
        )
        if max_length is not None:
            full = self.tokens.lengths[active] >= max_length
            self._truncated[active[full]] = True
            self.unfinished[active[full]] = False
            active = active[~full]
        self._active = active
        return len(active) > 0

    def _set_stop_strings(self, row: int, stops: list[str] | None) -> None:
        if stops is None:
            return
        if self._stop_strings is None:
            self._stop_strings = [None] * self.num_rows
        self._stop_strings[row] = stops

    def finish(self, max_length: int | None) -> BatchedDataDict[Any]:
        """Return the columns of `RolloutResult.rows`."""
        tokens = self.tokens
        if max_length is not None:
            self._truncated |= tokens.cut(max_length)
        healthy = self._outcome == Outcome.OK
        self._outcome[healthy & self._truncated] = int(Outcome.TRUNCATED)
        columns: dict[str, Any] = {
            "input_ids": tokens.input_ids,
            "input_lengths": tokens.lengths,
            "token_mask": tokens.token_mask,
            "sample_mask": self._loss_multiplier * healthy,
            "generation_logprobs": tokens.logprobs,
            "rewards": self._rewards * healthy,
            "group_index": torch.from_numpy(self._prompt_of.copy()),
            "truncated": self._truncated,
            "generation_lengths": self._generation_lengths,
            "weight_version": self._weight_version,
            "outcome": self._outcome,
            "texts": self.texts,
            "metadata": self._metadata,
        }
        for name, value in self._named_rewards.items():
            columns[name] = value * healthy
        return BatchedDataDict(columns)
