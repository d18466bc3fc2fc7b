"""Which rows are decoded together, with a model whose answers are fixed."""

import numpy as np
import pytest
import torch

from rl_models.generation.huggingface.engine import SamplingRequest, sample_batch
from rl_models.generation.huggingface.stopping import StopStrings, StopTokens
from rl_models.types import SamplingParams

STOP, OTHER, FIRST_ROW = 0, 1, 2
LIMIT = 20


class Scripted:
    """Ends each row after its planned number of tokens; records the rows of each step.

    The prompt of a row is one token: its number.
    """

    mixes_lengths = True

    def __init__(self, planned):
        self.planned = planned
        self.rows = []
        self.counts = np.zeros(0, dtype=np.int64)
        self.steps = []

    def begin(self, lengths_B, max_new_tokens, *, more_follow=False):
        assert more_follow == (len(lengths_B) < len(self.planned))
        return self

    def admit(self, lengths_N):
        return len(self.rows)

    def prefill(self, tokens_T, lengths_P, first_row, prompt_B):
        assert first_row == len(self.rows)
        new = (tokens_T.numpy() - FIRST_ROW)[prompt_B].tolist()
        self.rows += new
        self.counts = np.concatenate([self.counts, np.ones(len(new), dtype=np.int64)])
        return self._logits(tokens_T.numpy() - FIRST_ROW, np.ones(len(tokens_T)))

    def step(self, tokens_B, positions_B):
        # A prompt has one token, and the newest token is the one at `counts`.
        assert positions_B.tolist() == self.counts.tolist()
        assert self.counts.max() < LIMIT, "a row has had all steps that it may have"
        self.steps.append(list(self.rows))
        self.counts += 1
        return self._logits(self.rows, self.counts)

    def keep(self, alive_B):
        source = np.flatnonzero(alive_B)
        self.rows = [self.rows[place] for place in source]
        self.counts = self.counts[source]
        return source

    def _logits(self, rows, counts):
        logits = torch.zeros(len(rows), FIRST_ROW)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            logits[place, STOP if count == self.planned[row] else OTHER] = 1.0
        return logits


def sampled(planned, max_rows):
    count = len(planned)
    request = SamplingRequest(
        torch.arange(count)[:, None] + FIRST_ROW,
        np.ones(count, dtype=np.int64),
        torch.arange(count),
        [None] * count,
        SamplingParams(),
        LIMIT,
        greedy=True,
    )
    decoder, cpu = Scripted(planned), torch.device("cpu")
    stops = StopTokens([STOP], cpu)
    found = sample_batch(decoder, request, stops, StopStrings(None), cpu, max_rows)
    return decoder, found


@pytest.mark.parametrize("max_rows", [1, 3, 32, None])
def test_each_row_gets_its_tokens(max_rows):
    planned = np.random.default_rng(0).integers(1, 2 * LIMIT, 100)
    decoder, found = sampled(planned, max_rows)
    assert found.lengths.tolist() == np.minimum(planned, LIMIT).tolist()
    assert found.truncated.tolist() == (planned > LIMIT).tolist()
    for row, length in enumerate(found.lengths):
        tokens = found.tokens_T_B[:length, row].tolist()
        last = OTHER if found.truncated[row] else STOP
        assert tokens == [OTHER] * (length - 1) + [last]
    assert max(map(len, decoder.steps)) <= (max_rows or 100)


def test_a_row_leaves_when_its_room_ends_though_it_is_the_only_one():
    # Four end at once, and a fifth with three of the four that took their places. The
    # last of these ends alone, long before the steps of the others.
    planned = [1] * 4 + [3] + [10] * 27 + [2, 2, 2, 18] + [LIMIT] * 31
    decoder, found = sampled(planned, 32)
    assert found.lengths.tolist() == planned
    held = [step for step in decoder.steps if 35 in step]
    assert len(held) == LIMIT - 1
