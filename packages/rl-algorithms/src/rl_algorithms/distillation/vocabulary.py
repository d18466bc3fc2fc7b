"""Check that two tokenizers have the same vocabulary."""

from __future__ import annotations

from rl_algorithms.data.types import Tokenizer
from rl_distributed.errors import ConfigError

__all__ = ["check_same_vocabulary"]


def check_same_vocabulary(student: Tokenizer, teacher: Tokenizer) -> None:
    """Check that two tokenizers have the same vocabulary.

    The divergence is computed token by token, so token i must be the same text in both.

    Args:
        student: The student's tokenizer.
        teacher: The teacher's tokenizer.

    Raises:
        ConfigError: They differ; the message names a token.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    # By number, so that the message names the first token that differs.
    odd = sorted(ours.items() ^ theirs.items(), key=lambda item: item[1])
    token, number = odd[0]
    raise ConfigError(
        "teacher and policy must have the same vocabulary: they have "
        f"{len(theirs)} and {len(ours)} tokens and differ in {len(odd)} entries, the "
        f"first being token {number} ({token!r}); use a teacher of the same model "
        "family"
    )
