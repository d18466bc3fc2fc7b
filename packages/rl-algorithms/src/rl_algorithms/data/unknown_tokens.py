"""Find prompts that consist of unknown tokens, so that the model sees none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rl_algorithms.data.types import Tokenizer

__all__ = ["unknown_prompts"]

_MOST = 1000  # rows that are looked at


def unknown_prompts(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, name: str
) -> str | None:
    """Return a warning about prompts of unknown tokens only, or None.

    Args:
        rows: Processed rows.
        tokenizer: The tokenizer of the rows.
        name: Name of the dataset.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    # A tokenizer may use EOS or BOS as its unknown token, which then says nothing.
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return None
    others = set(getattr(tokenizer, "all_special_ids", ())) - {unknown}
    looked_at = list(islice(rows, _MOST))
    found = [row["idx"] for row in looked_at if _is_unknown(row, unknown, others)]
    if not found:
        return None
    num, total = len(found), len(looked_at)
    first = "first " if total < len(rows) else ""
    share = f"all {first}{total}" if num == total else f"{num} of the {first}{total}"
    text = getattr(tokenizer, "unk_token", "<unk>")
    return (
        f"{share} prompts of dataset {name} are unknown tokens ({text}) only, which "
        f"the model cannot tell apart (row {found[0]} is the first): name a tokenizer "
        "that knows their characters (policy.tokenizer.name), or write them otherwise"
    )


def _is_unknown(row: Mapping[str, Any], unknown: int, others: set[int]) -> bool:
    # Both answers of a pair follow the same prompt.
    end = "" if "token_ids" in row else "_chosen"
    ids, mask = row[f"token_ids{end}"], row.get(f"token_mask{end}")
    if mask is not None:
        ids = ids[mask[: len(ids)] == 0]  # what is learned is no prompt
    if not bool((ids == unknown).any()):
        return False
    return all(token == unknown or token in others for token in ids.tolist())
