"""Ends of rows: stop tokens for all rows, stop strings per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["StopStrings", "StopTokens"]

BoolArray = npt.NDArray[np.bool_]

# Shown by a tokenizer in place of bytes that are no complete character yet.
_REPLACEMENT = "\ufffd"


class StopTokens:
    """Finds tokens that end a row."""

    def __init__(self, token_ids: Sequence[int], device: torch.device) -> None:
        self._ids = torch.tensor(list(token_ids), dtype=torch.int64, device=device)
        self._only = int(token_ids[0]) if len(token_ids) == 1 else None

    def ends(self, tokens_B: torch.Tensor) -> BoolArray:
        """Return [B] whether the token is a stop token."""
        # The usual case of a single id: a comparison is faster than `isin`.
        if self._only is not None:
            return (tokens_B == self._only).cpu().numpy()
        if not len(self._ids):
            return np.zeros(len(tokens_B), dtype=bool)
        return torch.isin(tokens_B, self._ids).cpu().numpy()


class StopStrings:
    """Finds stop strings in generated rows.

    Text is decoded only if the newest token could end one of the row's strings, that
    is, if its text contains the string's last character. Then the tail of the row is
    decoded, which is exact also for tokens that decode differently in context.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str] | None = None
        self._enders: dict[str, BoolArray] = {}

    def _can_end(self, text: str) -> BoolArray:
        """Return [V] whether a token can be the last of `text`."""
        last = text[-1]
        if last not in self._enders:
            if self._pieces is None:
                ids = [[index] for index in range(len(self._tokenizer))]
                self._pieces = self._tokenizer.batch_decode(
                    ids, skip_special_tokens=False
                )
            # Tokenizers may add or drop spaces between tokens, so any token may end a
            # text in white space; incomplete characters may become any character.
            self._enders[last] = np.array(
                [
                    last in piece or _REPLACEMENT in piece or last.isspace()
                    for piece in self._pieces
                ]
            )
        return self._enders[last]

    def table(self, strings_B: Sequence[Sequence[str] | None]) -> _StopTable | None:
        """Return the strings of each row of a batch; None if no row has any."""
        rows = [tuple(dict.fromkeys(strings or ())) for strings in strings_B]
        if not any(rows):
            return None
        return _StopTable(self, rows)

    def found(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Return whether one of the strings is in the text of the newest tokens."""
        # A token stands for at least one byte, so this tail contains every match that
        # ends in its last token. A few more tokens, because the first ones may decode
        # differently without those before them.
        longest = max(len(text.encode()) for text in strings)
        tail = list(tokens[-(longest + 4) :])
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(string in text for string in strings)


class _StopTable:
    """Stop strings of the rows of one batch."""

    def __init__(self, stops: StopStrings, rows: list[tuple[str, ...]]) -> None:
        self._stops = stops
        self._rows = rows
        kinds = list(dict.fromkeys(rows))
        # [kinds, V] whether a token can end one of the strings of that kind of row.
        size = len(stops._tokenizer)
        self._can_end = np.zeros((len(kinds), size), dtype=bool)
        for index, strings in enumerate(kinds):
            for text in strings:
                self._can_end[index] |= stops._can_end(text)
        numbers = {strings: index for index, strings in enumerate(kinds)}
        self._kind_B = np.array([numbers[strings] for strings in rows])

    def ends(
        self,
        rows: npt.NDArray[np.int64],
        newest: npt.NDArray[np.int64],
        history_T_B: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> BoolArray:
        """Return which rows end with their newest token.

        Args:
            rows: Numbers of the rows to check.
            newest: Their newest tokens.
            history_T_B: All tokens generated so far, a column per row of the batch.
            lengths: How many each of `rows` has, the newest included.
        """
        # A model may have more logits than its tokenizer has tokens.
        known = np.minimum(newest, self._can_end.shape[1] - 1)
        ended: BoolArray = self._can_end[self._kind_B[rows], known]
        for place in np.flatnonzero(ended):
            row = int(rows[place])
            tokens = history_T_B[: lengths[place], row].tolist()
            ended[place] = self._stops.found(tokens, self._rows[row])
        return ended
