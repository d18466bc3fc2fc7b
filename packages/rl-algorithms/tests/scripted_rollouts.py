"""A rule-based token generator, and environments made of functions."""

from __future__ import annotations

import torch

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

EOS = 1


def ambiguous_tokenizer(template=None, special=()):
    """Return a tokenizer with overlapping tokens: text does not determine tokens."""
    return build_tokenizer(
        TokenizerBuildConfig(
            kind="vocabulary",
            vocabulary=[*"abcdefghstu01<>/|: \n", "ab", "abc", "bc", "aa", "a0", "00"],
            chat_template=template,
            special_tokens=list(special),
        )
    )


class TokenGenerator:
    """`sample(call, row, seed)` returns the token ids of an answer, or raises.

    `versions(call)` returns the weight versions of its tokens: one number, or a list as
    long as the longest answer.
    """

    def __init__(self, sample, versions=lambda call: 0):
        self.sample, self.versions = sample, versions
        self.calls, self.sampled = [], []
        self.weight_version = 0

    def generate(self, data, greedy=False, *, sampling=None):
        call = len(self.calls)
        self.calls.append(data)
        seeds = data["seeds"].tolist()
        tails = [self.sample(call, row, seed) for row, seed in enumerate(seeds)]
        self.sampled.append(tails)
        lengths = data["input_lengths"]
        counts = torch.tensor([len(tail) for tail in tails])
        total = lengths + counts
        out = torch.zeros((len(tails), int(total.max())), dtype=torch.int64)
        logprobs = torch.zeros(out.shape)
        versions = torch.full(out.shape, -1)
        spoken = self.versions(call)
        for row, tail in enumerate(tails):
            start, end = int(lengths[row]), int(total[row])
            out[row, :start] = data["input_ids"][row, :start]
            out[row, start:end] = torch.tensor(tail, dtype=torch.int64)
            logprobs[row, start:end] = -(out[row, start:end] + 1.0) / 64
            versions[row, start:end] = torch.as_tensor(
                spoken[: end - start] if isinstance(spoken, list) else spoken
            )
        oldest = versions.masked_fill(versions < 0, 10**9).min(1).values
        return BatchedDataDict(
            {
                "output_ids": out,
                "generation_lengths": counts,
                "unpadded_sequence_lengths": total,
                "logprobs": logprobs,
                "truncated": torch.tensor([tail[-1] != EOS for tail in tails]),
                "weight_version": oldest,
                "token_versions": versions,
            }
        )


def texts_of(tokenizer, say):
    """Turn a function that returns text into a `sample`; `$` ends the turn."""

    def sample(call, row, seed):
        text = say(call, row)
        ids = tokenizer(text.rstrip("$"), add_special_tokens=False)["input_ids"]
        return ids + [EOS] * text.endswith("$")

    return sample


class Judge(EnvironmentInterface):
    """Calls `judge(log, metadata)` -> (reward, done, observation) for each row."""

    def __init__(self, judge):
        self.judge, self.num_calls, self.batches = judge, 0, []

    def step(self, message_log_batch, metadata):
        self.num_calls += 1
        verdicts = [
            self.judge(log, info)
            for log, info in zip(message_log_batch, metadata, strict=True)
        ]
        rewards, done, said = zip(*verdicts, strict=True)
        if isinstance(rewards[0], dict):
            rewards = {
                name: torch.tensor([reward[name] for reward in rewards])
                for name in rewards[0]
            }
        else:
            rewards = torch.tensor(rewards)
        return EnvironmentReturn(
            [
                {"role": "user", "content": text} if isinstance(text, str) else text
                for text in said
            ],
            list(metadata),
            [None] * len(verdicts),
            rewards,
            torch.tensor(done),
            None,
        )


def make_batch(tokenizer, prompts, **columns):
    rows = [
        {"prompt": prompt, **{name: values[i] for name, values in columns.items()}}
        for i, prompt in enumerate(prompts)
    ]
    return rl_collate_fn(
        process_prompts(rows, tokenizer)[:], pad_token_id=tokenizer.pad_token_id
    )


def row_texts(tokenizer, rows, name="input_ids"):
    """Return all tokens of each row as text."""
    return [
        tokenizer.decode(ids[:length].tolist())
        for ids, length in zip(rows[name], rows["input_lengths"].tolist(), strict=True)
    ]
