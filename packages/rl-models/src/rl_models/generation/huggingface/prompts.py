"""Equal prompts of a batch, and the order in which its rows are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PromptPlan", "plan_prompts"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Distinct prompts, longest first, and the rows that begin with each.

    B rows, P distinct prompts. The order of decoding sorts the rows by their prompt.
    """

    row_of_prompt_P: IntArray
    """A row that holds the prompt, in the caller's order of rows."""
    lengths_P: IntArray
    """Lengths, falling."""
    order_B: IntArray
    """For each place in the order of decoding, the caller's row."""
    prompt_B: IntArray
    """For each place in the order of decoding, its prompt; rising."""

    def chunks(
        self, max_tokens: int, first_row: int, last_row: int
    ) -> Iterator[tuple[slice, slice]]:
        """Yield prompts within a number of tokens, at least one, with their rows.

        Args:
            max_tokens: Tokens of the prompts together.
            first_row: The first row that is asked for, in the order of decoding.
            last_row: The row after the last one.
        """
        totals = np.cumsum(self.lengths_P)
        first, end = (int(self.prompt_B[row]) for row in (first_row, last_row - 1))
        while first <= end:
            before = int(totals[first - 1]) if first else 0
            last = int(np.searchsorted(totals, before + max_tokens, side="right"))
            last = min(max(last, first + 1), end + 1)
            rows = np.searchsorted(self.prompt_B, [first, last])
            rows = np.clip(rows, first_row, last_row)
            yield slice(first, last), slice(int(rows[0]), int(rows[1]))
            first = last


def plan_prompts(
    input_ids_B_S: npt.NDArray[np.int64], lengths_B: IntArray
) -> PromptPlan:
    """Find equal prompts and sort rows so that longer prompts come first.

    Rows of a group are usually adjacent, so neighbours are compared at once, and only
    the first row of each run is looked up.
    """
    num_rows, width = input_ids_B_S.shape
    real = np.arange(width) < lengths_B[:, None]
    tokens = np.where(real, input_ids_B_S, 0)
    begins = np.ones(num_rows, dtype=bool)
    begins[1:] = (lengths_B[1:] != lengths_B[:-1]) | (tokens[1:] != tokens[:-1]).any(1)
    heads = np.flatnonzero(begins)
    known: dict[tuple[int, bytes], int] = {}
    prompt_of_head = np.empty(len(heads), dtype=np.int64)
    rows: list[int] = []
    for index, row in enumerate(heads.tolist()):
        key = (int(lengths_B[row]), tokens[row].tobytes())
        prompt = known.setdefault(key, len(rows))
        if prompt == len(rows):
            rows.append(row)
        prompt_of_head[index] = prompt
    row_of_prompt = np.array(rows, dtype=np.int64)
    by_length = np.argsort(-lengths_B[row_of_prompt], kind="stable")
    rank = np.empty_like(by_length)
    rank[by_length] = np.arange(len(by_length))
    prompt_of_row = rank[prompt_of_head[np.cumsum(begins) - 1]]
    order = np.argsort(prompt_of_row, kind="stable")
    row_of_prompt = row_of_prompt[by_length]
    return PromptPlan(
        row_of_prompt, lengths_B[row_of_prompt], order, prompt_of_row[order]
    )
